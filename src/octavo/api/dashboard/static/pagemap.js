// The live map of pages: one cell a page, one group of cells a frame.

export const STATES = [
  { letter: "o", name: "open", help: "being written by one sequence" },
  { letter: "a", name: "active", help: "sealed, read by one sequence" },
  { letter: "s", name: "shared", help: "sealed, read by several sequences" },
  { letter: "c", name: "cached", help: "sealed, kept for the next hit" },
  { letter: "f", name: "free", help: "room in the arena" },
];
const NAMES = Object.fromEntries(STATES.map((state) => [state.letter, state.name]));
const FLASH_MS = 700;

function colours() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(
    STATES.map(({ letter, name }) => [letter, style.getPropertyValue(`--page-${name}`).trim()]),
  );
}

// Shapes tell the states apart without their colours.
export function drawCell(context, letter, x, y, size, colour, behind) {
  context.fillStyle = context.strokeStyle = colour;
  context.lineWidth = Math.max(1, size / 8);
  const inset = context.lineWidth / 2;
  if (letter === "f") {
    context.strokeRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
  } else if (letter === "o") {
    context.strokeRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
    context.beginPath();
    context.moveTo(x, y + size);
    context.lineTo(x + size, y + size);
    context.lineTo(x, y);
    context.fill();
  } else if (letter === "c") {
    context.fillRect(x, y, size, size);
    context.fillStyle = behind;
    const bar = Math.max(1, Math.round(size / 6));
    context.fillRect(x + bar, y + size / 2 - bar / 2, size - 2 * bar, bar);
  } else {
    context.fillRect(x, y, size, size);
    if (letter === "s") {
      context.fillStyle = behind;
      context.beginPath();
      context.arc(x + size / 2, y + size / 2, size / 4.5, 0, 2 * Math.PI);
      context.fill();
    }
  }
}

export class PageMap {
  constructor(canvas, detail) {
    this.canvas = canvas;
    this.detail = detail;
    this.resting = detail.textContent;
    this.frames = []; // {kind: "S" | "O" | null, slots: "ccaf"}
    this.changedAt = new Map(); // "frame:slot" -> time
    this.cells = []; // {x, y, frame, slot} as drawn
    this.width = 4;
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => { detail.textContent = this.resting; });
  }

  // `short` is the feed's list: a number is a run of unused frames.
  show(short) {
    const frames = [];
    for (const item of short) {
      if (typeof item === "number") {
        for (let i = 0; i < item; i++) frames.push({ kind: null, slots: "" });
      } else {
        frames.push({ kind: item[0], slots: item.slice(1) });
      }
    }
    const now = performance.now();
    const known = this.frames.length === frames.length;
    frames.forEach((frame, index) => {
      if (frame.kind === "S") this.width = Math.max(1, frame.slots.length);
      if (!known || this.frames[index].slots === frame.slots) return;
      for (let slot = 0; slot < frame.slots.length; slot++) {
        if (this.frames[index].slots[slot] !== frame.slots[slot]) this.changedAt.set(`${index}:${slot}`, now);
      }
    });
    this.frames = frames;
    this.draw();
    return this.count();
  }

  // Slots of unused frames are free pages of no class yet; they are counted as frames.
  count() {
    const counts = { o: 0, a: 0, s: 0, c: 0, f: 0, frames: 0 };
    for (const frame of this.frames) {
      if (frame.kind === null) counts.frames++;
      for (const letter of frame.slots) counts[letter]++;
    }
    return counts;
  }

  layout(width) {
    const total = this.frames.length;
    if (!total) return null;
    const widest = Math.max(this.width, 1);
    for (const size of [14, 12, 10, 8, 6, 5, 4, 3]) {
      const gap = size > 6 ? 2 : 1;
      const between = size > 6 ? 5 : 3;
      const frameWidth = widest * (size + gap) - gap;
      const perRow = Math.max(1, Math.floor((width + between) / (frameWidth + between)));
      const rows = Math.ceil(total / perRow);
      const height = rows * (size + between) - between;
      if ((frameWidth <= width && height <= 340) || size === 3) {
        return { size, gap, between, frameWidth, perRow, height };
      }
    }
    return null;
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    const layout = width ? this.layout(width) : null;
    if (!layout) return;
    const ratio = window.devicePixelRatio || 1;
    const context = this.canvas.getContext("2d");
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(layout.height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(layout.height * ratio);
      this.canvas.style.height = `${layout.height}px`;
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, layout.height);
    const palette = colours();
    const behind = getComputedStyle(document.documentElement).getPropertyValue("--sheet").trim();
    const now = performance.now();
    let moving = false;
    this.cells = [];
    this.frames.forEach((frame, index) => {
      const left = (index % layout.perRow) * (layout.frameWidth + layout.between);
      const top = Math.floor(index / layout.perRow) * (layout.size + layout.between);
      this.cells.push({ x: left, y: top, width: layout.frameWidth, height: layout.size, index });
      if (frame.kind === null) {
        context.globalAlpha = 0.5;
        context.strokeStyle = palette.f;
        context.lineWidth = 1;
        context.setLineDash([2, 3]);
        context.strokeRect(left + 0.5, top + 0.5, layout.frameWidth - 1, layout.size - 1);
        context.setLineDash([]);
        context.globalAlpha = 1;
        return;
      }
      const n = frame.slots.length;
      const step = (layout.frameWidth + layout.gap) / n;
      for (let slot = 0; slot < n; slot++) {
        const letter = frame.slots[slot];
        const size = n === this.width ? layout.size : Math.min(layout.size, step - layout.gap);
        const x = left + (n === this.width ? slot * (layout.size + layout.gap) : slot * step);
        drawCell(context, letter, x, top, size, palette[letter], behind);
        const key = `${index}:${slot}`;
        const changed = this.changedAt.get(key);
        if (changed === undefined) continue;
        const age = (now - changed) / FLASH_MS;
        if (age >= 1 || this.still.matches) {
          this.changedAt.delete(key);
        } else {
          moving = true;
          context.globalAlpha = (1 - age) * 0.8;
          context.strokeStyle = palette[letter];
          context.lineWidth = 1.5;
          const grow = 1.5 + 2 * age;
          context.strokeRect(x - grow, top - grow, size + 2 * grow, size + 2 * grow);
          context.globalAlpha = 1;
        }
      }
    });
    this.frameLayout = layout;
    if (moving) requestAnimationFrame(() => this.draw());
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    const found = this.cells.find((c) => x >= c.x && x < c.x + c.width && y >= c.y && y < c.y + c.height);
    if (!found) {
      this.detail.textContent = this.resting;
      return;
    }
    const frame = this.frames[found.index];
    if (frame.kind === null) {
      this.detail.textContent = `Frame ${found.index + 1}: unused`;
      return;
    }
    const slot = Math.min(frame.slots.length - 1, Math.floor(((x - found.x) / found.width) * frame.slots.length));
    const kind = frame.kind === "O" ? "open pages" : "sealed pages";
    this.detail.textContent = `Frame ${found.index + 1} (${kind}), page ${slot + 1}: ${NAMES[frame.slots[slot]]}`;
  }
}
