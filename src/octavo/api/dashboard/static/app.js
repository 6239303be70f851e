// Wires the page together.

import { CachePanel } from "./cache.js";
import { Chat } from "./chat.js";
import { setKey } from "./sse.js";

const byId = (id) => document.getElementById(id);

const PASSAGE =
  "Before a book was bound it was a stack of large sheets, and the size of the book depended on how often each sheet " +
  "was folded. Folded once, a sheet gave two leaves and the book was a folio, a thing for lecterns and church desks. " +
  "Folded twice it gave four leaves, and the book was a quarto. Folded three times it gave eight, and the book was an " +
  "octavo, which a traveller could hold in one hand. Around 1501 a printer in Venice saw what that meant. He set the " +
  "Roman poets in a narrow slanted type, left out the commentary that had surrounded them, and sold them as octavos to " +
  "people who had never owned a book that they could carry. The words were the same as in the folios; only the page " +
  "was smaller, and because it was smaller a house could hold more of them, a saddlebag could hold some, and a reader " +
  "could open one at the right place without rising from the chair. Paper was the costly part of a book then, and a " +
  "shop that wasted half a sheet in every gathering did not last. So printers learned to plan: which pages share a " +
  "sheet, which sheets can be printed once and used in two editions, which may be thrown away when the shelf is full.";

const STARTERS = [
  ["What is a page in a book?", "What is a page in a book?"],
  ["Read a passage and sum it up", `Sum this up in one sentence:\n\n${PASSAGE}`],
  ["Write a limerick about memory", "Write a limerick about memory."],
];

let model = null;
let limit = null;

const input = byId("input");
const key = { dialog: byId("key-dialog"), waiting: null };

function askForKey(message) {
  byId("key-error").textContent = message.startsWith("unknown") ? "That key is not known here." : "";
  if (!key.waiting) {
    key.waiting = new Promise((resolve) => {
      key.dialog.addEventListener("close", () => {
        key.waiting = null;
        setKey(byId("key").value.trim());
        byId("key").value = "";
        resolve();
      }, { once: true });
    });
    key.dialog.showModal();
  }
  return key.waiting;
}

// Escape must not close the dialog: without a key there is nothing to go on with.
key.dialog.addEventListener("cancel", (event) => event.preventDefault());

const panel = new CachePanel({
  onModel(snapshot) {
    model = snapshot.model;
    limit = snapshot.info.max_model_len;
    byId("model").textContent = model;
    byId("max-tokens").max = limit;
    update();
  },
  onTrouble(text) {
    byId("banner").hidden = text === null;
    byId("banner").textContent = text || "";
  },
  onKey: askForKey,
});

const chat = new Chat({
  settings() {
    return {
      model,
      system: byId("system").value.trim(),
      temperature: number("temperature", 0.7),
      // At least half of a short context is left to the conversation.
      maxTokens: Math.max(1, Math.min(Math.round(number("max-tokens", 512)), Math.floor(limit / 2))),
    };
  },
  onAnswer(figures) {
    panel.lastAnswer(figures);
    byId("announcer").textContent =
      `Answer complete. ${figures.cached} prompt tokens from the cache, ${figures.computed} computed.`;
  },
  onBusy(busy) {
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    if (!busy && matchMedia("(hover: hover)").matches) input.focus();
  },
  onKey: askForKey,
});

function number(id, fallback) {
  const field = byId(id);
  return field.value !== "" && field.checkValidity() ? field.valueAsNumber : fallback;
}

function update() {
  byId("send").disabled = model === null || input.value.trim() === "";
  for (const button of byId("starters").children) button.disabled = model === null;
}

function send(text) {
  showCache(false);
  chat.send(text);
}

function grow() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = input.value.trim();
  if (!text || model === null || chat.busy) return;
  input.value = "";
  grow();
  update();
  send(text);
});

input.addEventListener("input", () => {
  grow();
  update();
});

input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.busy) chat.stop();
});

byId("stop").addEventListener("click", () => chat.stop());
byId("new-chat").addEventListener("click", () => {
  chat.clear();
  input.focus();
});

byId("settings").addEventListener("submit", (event) => event.preventDefault());
byId("settings-button").addEventListener("click", () => toggle(byId("settings-button"), byId("settings")));

function toggle(button, panelElement) {
  panelElement.hidden = !panelElement.hidden;
  button.setAttribute("aria-expanded", String(!panelElement.hidden));
}

function showCache(shown) {
  byId("cache").classList.toggle("shown", shown);
  byId("cache-button").setAttribute("aria-expanded", String(shown));
}

byId("cache-button").addEventListener("click", () => showCache(!byId("cache").classList.contains("shown")));

for (const [title, text] of STARTERS) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = title;
  button.addEventListener("click", () => {
    if (model !== null && !chat.busy) send(text);
  });
  byId("starters").append(button);
}

update();
panel.follow();
