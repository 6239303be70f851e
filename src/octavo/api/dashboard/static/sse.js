// Requests to the server, with the key if there is one, and event streams read from their responses.

const KEY = "octavo-key";

export class ApiError extends Error {
  constructor(status, body) {
    const told = body && body.error ? body.error : {};
    super(told.message || `the server answered with status ${status}`);
    this.status = status;
    this.code = told.code || null;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export async function request(path, { body, signal } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers["Authorization"] = `Bearer ${key}`;
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    options.method = "POST";
    options.body = JSON.stringify(body);
  }
  const response = await fetch(path, options);
  if (!response.ok) {
    let told = null;
    try {
      told = await response.json();
    } catch {
      // not the API's own answer, such as a proxy's page: the status says enough
    }
    throw new ApiError(response.status, told);
  }
  return response;
}

// Yields {data} for events and {comment} for comment lines.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        else if (line.startsWith(":")) yield { comment: line.slice(1).trim() };
        else if (line === "" && data.length) {
          yield { data: data.join("\n") };
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
