// The panel beside the chat: follows /octavo/cache/events and survives a server that restarts.

import { events, request } from "./sse.js";
import { PageMap, STATES, colours, drawCell } from "./pagemap.js";

const byId = (id) => document.getElementById(id);
const RETRY_MS = [500, 1000, 2000, 4000];
// With a tenant's key there is no view of the cache, unless a new policy gives one.
const NO_VIEW_MS = 30_000;

export function formatBytes(n) {
  for (const [unit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (n >= unit) return `${(n / unit).toFixed(n < 10 * unit ? 1 : 0)} ${name}`;
  }
  return `${n} B`;
}

export class CachePanel {
  // `onModel(snapshot)` hears of the model, `onTrouble(text or null)` of the connection, `onKey()` asks for a key.
  constructor({ onModel, onTrouble, onKey }) {
    this.handlers = { onModel, onTrouble, onKey };
    this.map = new PageMap(byId("map"), byId("map-detail"));
    this.counts = {};
    for (const state of STATES) {
      const item = document.createElement("li");
      const swatch = document.createElement("canvas");
      swatch.setAttribute("aria-hidden", "true");
      const name = document.createElement("span");
      name.textContent = state.name;
      item.title = state.help;
      const count = document.createElement("span");
      count.className = "count";
      count.textContent = "0";
      item.append(swatch, name, count);
      byId("legend").append(item);
      this.counts[state.letter] = count;
      state.swatch = swatch;
    }
    const unused = document.createElement("li");
    unused.title = "frames of memory that hold no page yet";
    const frame = document.createElement("span");
    frame.className = "frame";
    const label = document.createElement("span");
    label.textContent = "unused frames";
    this.unused = document.createElement("span");
    this.unused.className = "count";
    this.unused.textContent = "0";
    unused.append(frame, label, this.unused);
    byId("legend").append(unused);
    this.strip = [...STATES.map((state) => state.letter), "room"].map((name) => {
      const part = document.createElement("span");
      part.className = name;
      byId("strip").append(part);
      return part;
    });
    this.drawLegend();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.drawLegend());
  }

  drawLegend() {
    const palette = colours();
    const ratio = window.devicePixelRatio || 1;
    for (const { letter, swatch } of STATES) {
      swatch.width = swatch.height = 14 * ratio;
      const context = swatch.getContext("2d");
      context.scale(ratio, ratio);
      drawCell(context, letter, 1, 1, 12, 12, palette[letter], palette.behind);
    }
  }

  async follow() {
    for (let failures = 0; ; ) {
      try {
        const response = await this.open();
        if (response === null) {
          await new Promise((resolve) => setTimeout(resolve, NO_VIEW_MS));
          continue;
        }
        for await (const event of events(response)) {
          if (!event.data) continue;
          const snapshot = JSON.parse(event.data);
          if (snapshot.error) throw new Error(snapshot.error.message);
          if (failures !== 0 || !this.connected) this.handlers.onTrouble(null);
          failures = 0;
          this.connected = true;
          this.show(snapshot);
        }
        throw new Error("the server has closed the connection");
      } catch (error) {
        this.connected = false;
        if (error.status === 401) {
          this.handlers.onTrouble(null);
          await this.handlers.onKey(error.message);
          continue;
        }
        const told = error.status || error.message.includes("engine") ? error.message : "The server cannot be reached";
        this.handlers.onTrouble(`${told}; trying again …`);
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]));
      }
    }
  }

  // The stream of events; null where the key is a tenant's: the view shows all tenants' pages and is for admins. The
  // chat goes on.
  async open() {
    try {
      return await request("/octavo/cache/events");
    } catch (error) {
      if (error.status !== 404) throw error;
      const [model] = (await (await request("/v1/models")).json()).data;
      this.handlers.onTrouble(null);
      this.handlers.onModel({ model: model.id, info: model });
      byId("map-detail").textContent = "With this key there is no view of the cache; it is for admin keys.";
      return null;
    }
  }

  show(snapshot) {
    const { stats, info } = snapshot;
    this.handlers.onModel(snapshot);
    const counts = this.map.show(snapshot.frames, snapshot.info.page_classes);
    for (const state of STATES) this.counts[state.letter].textContent = counts[state.letter].toLocaleString();
    this.unused.textContent = counts.frames.toLocaleString();
    // Unused frames weigh as much as the pages that they could hold.
    const weights = [...STATES.map((state) => counts[state.letter]), counts.frames * this.map.width];
    this.strip.forEach((part, i) => { part.style.flexGrow = weights[i]; });
    const share = stats.kv_total_bytes ? stats.kv_used_bytes / stats.kv_total_bytes : 0;
    byId("kv-used").textContent = formatBytes(stats.kv_used_bytes);
    byId("kv-total").textContent = `of ${formatBytes(stats.kv_total_bytes)}`;
    byId("kv-bar").style.width = `${(100 * share).toFixed(1)}%`;
    byId("map").setAttribute(
      "aria-label",
      `Map of the pages: ${STATES.map((s) => `${counts[s.letter]} ${s.name}`).join(", ")}, ` +
        `${counts.frames} of ${this.map.frames.length} frames unused`,
    );
    byId("running").textContent = stats.requests_running.toLocaleString();
    byId("waiting").textContent = stats.requests_waiting.toLocaleString();
    byId("hit-rate").textContent = stats.query_tokens
      ? `${((100 * stats.hit_tokens) / stats.query_tokens).toFixed(0)} %`
      : "–";
    byId("evicted").textContent = stats.evicted_pages.toLocaleString();
    const codecs = info.key_codec === info.value_codec ? info.key_codec : `${info.key_codec} keys, ${info.value_codec} values`;
    byId("codec").textContent =
      `${info.page_size} tokens a page, ${codecs}, ${formatBytes(Math.round(info.bytes_per_token))} a token` +
      (info.prefix_cache ? "" : "; nothing is kept between requests");
    byId("cache-button").textContent = `Cache ${(100 * share).toFixed(0)} %`;
  }

  lastAnswer({ cached, computed, ttft, rate }) {
    byId("last-cached").textContent = cached.toLocaleString();
    byId("last-computed").textContent = computed.toLocaleString();
    byId("last-ttft").textContent = ttft === null ? "–" : `${ttft.toFixed(2)} s`;
    byId("last-rate").textContent = rate === null ? "–" : rate.toFixed(1);
  }
}
