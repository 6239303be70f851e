// The conversation: what was said, how an answer streams in, and what it cost.

import { events, request } from "./sse.js";

const byId = (id) => document.getElementById(id);

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export class Chat {
  // `settings()` gives {model, system, temperature, maxTokens}; `onAnswer(figures)` hears of each answer that ended.
  constructor({ settings, onAnswer, onBusy, onKey }) {
    this.handlers = { settings, onAnswer, onBusy, onKey };
    this.turns = [];
    this.abort = null;
    this.log = byId("log");
    this.scroller = byId("scroller");
  }

  get busy() {
    return this.abort !== null;
  }

  clear() {
    this.stop();
    this.turns = [];
    this.log.replaceChildren();
    byId("empty").hidden = false;
  }

  stop() {
    if (this.abort) this.abort.abort();
  }

  async send(text) {
    if (this.busy) return;
    this.turns.push({ role: "user", content: text });
    this.add("user", text);
    await this.answer();
  }

  // The same prompt once more, in place of the last answer: its pages are there already.
  async again() {
    if (this.busy || this.turns.at(-1)?.role !== "assistant") return;
    this.turns.pop();
    this.log.lastElementChild.remove();
    await this.answer();
  }

  add(role, text) {
    byId("empty").hidden = true;
    for (const button of this.log.querySelectorAll(".again")) button.remove();
    const item = element("li", `message ${role}`);
    item.append(element("span", "hidden", role === "user" ? "You: " : "Answer: "));
    const body = element("div", "text", text);
    body.dir = "auto";
    item.append(body);
    this.log.append(item);
    this.scroller.scrollTop = this.scroller.scrollHeight;
    return { item, body };
  }

  async answer() {
    const { item, body } = this.add("assistant", "");
    const note = element("div", "note");
    item.append(note);
    item.setAttribute("aria-busy", "true");
    this.abort = new AbortController();
    const mine = this.abort;
    this.handlers.onBusy(true);
    const state = { text: "", began: performance.now(), first: null, last: null, usage: null, stopped: false, error: null };
    try {
      await this.stream(state, body, note, mine.signal);
    } catch (error) {
      if (error.name === "AbortError") state.stopped = true;
      else state.error = error;
    }
    if (this.abort === mine) this.abort = null;
    item.removeAttribute("aria-busy");
    this.handlers.onBusy(this.busy);
    if (!item.isConnected) return; // a new chat has begun
    this.finish(state, item, note);
  }

  async stream(state, body, note, signal) {
    const { model, system, temperature, maxTokens } = this.handlers.settings();
    const messages = system ? [{ role: "system", content: system }, ...this.turns] : this.turns;
    const response = await request("/v1/chat/completions", {
      signal,
      body: {
        model,
        messages,
        temperature,
        max_tokens: maxTokens,
        stream: true,
        stream_options: { include_usage: true, include_progress: true },
      },
    });
    for await (const event of events(response)) {
      if (event.comment !== undefined) {
        this.progress(event.comment, note);
        continue;
      }
      if (event.data === "[DONE]") return;
      const chunk = JSON.parse(event.data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) state.usage = chunk.usage;
      const piece = chunk.choices[0]?.delta?.content;
      if (!piece) continue;
      state.last = performance.now();
      if (state.first === null) {
        state.first = state.last;
        note.replaceChildren();
      }
      state.text += piece;
      const follow = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < 60;
      body.append(piece); // a text node: nothing the model writes is markup
      if (follow) this.scroller.scrollTop = this.scroller.scrollHeight;
    }
    throw new Error("the answer broke off");
  }

  progress(comment, note) {
    const match = /^prefill (\d+)\/(\d+)$/.exec(comment);
    if (!match || Number(match[1]) >= Number(match[2])) return;
    let bar = note.querySelector("progress");
    if (!bar) {
      bar = element("progress");
      bar.setAttribute("aria-label", "Reading the prompt");
      note.replaceChildren(bar, element("span"));
    }
    bar.max = Number(match[2]);
    bar.value = Number(match[1]);
    note.lastChild.textContent = `reading ${match[1]} of ${match[2]} tokens`;
  }

  finish(state, item, note) {
    note.replaceChildren();
    if (state.error) {
      // Nothing was said: the question stays in the log, but not in what is sent next time.
      if (state.text) this.turns.push({ role: "assistant", content: state.text });
      else this.turns.pop();
      const told = element("p", "error", state.error.message);
      told.setAttribute("role", "alert");
      item.append(told);
      if (state.error.status === 401) this.handlers.onKey(state.error.message);
      return;
    }
    this.turns.push({ role: "assistant", content: state.text });
    if (state.stopped) note.append(element("span", "", "stopped"));
    if (state.usage) this.figures(state, note);
    const again = element("button", "again", "Ask again");
    again.type = "button";
    again.addEventListener("click", () => this.again());
    note.append(again);
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  figures(state, note) {
    const prompt = state.usage.prompt_tokens;
    const cached = state.usage.prompt_tokens_details.cached_tokens;
    const tokens = state.usage.completion_tokens;
    const ttft = state.first === null ? null : (state.first - state.began) / 1000;
    const seconds = state.first === null ? 0 : (state.last - state.first) / 1000;
    const rate = tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null;
    const split = element("span", "split");
    split.setAttribute("aria-hidden", "true");
    const share = element("span");
    share.style.width = `${(100 * cached) / Math.max(prompt, 1)}%`;
    share.hidden = cached === 0;
    split.append(share);
    const parts = [
      `${cached.toLocaleString()} of ${prompt.toLocaleString()} prompt tokens from the cache`,
      `${(prompt - cached).toLocaleString()} computed`,
    ];
    if (ttft !== null) parts.push(`first token ${ttft.toFixed(2)} s`);
    if (rate !== null) parts.push(`${rate.toFixed(1)} tokens/s`);
    note.append(split, ...parts.map((part) => element("span", "", part)));
    this.handlers.onAnswer({ cached, computed: prompt - cached, ttft, rate });
  }
}
