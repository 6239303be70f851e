// The live map of pages: one cell a page, one group of cells a frame. All frames in use are equally wide, so the width
// of a cell is its page's share of memory; unused frames are drawn narrow.

export const STATES = [
  { letter: "o", name: "open", help: "being written by one sequence" },
  { letter: "a", name: "active", help: "sealed, read by one sequence" },
  { letter: "s", name: "shared", help: "sealed, read by several sequences" },
  { letter: "c", name: "cached", help: "sealed, kept for the next hit" },
  { letter: "f", name: "free", help: "room in the arena" },
];
const NAMES = Object.fromEntries(STATES.map((state) => [state.letter, state.name]));
const FLASH_MS = 700;
const MAX_HEIGHT = 260;

export function colours() {
  const style = getComputedStyle(document.documentElement);
  const named = (name) => style.getPropertyValue(name).trim();
  const palette = Object.fromEntries(STATES.map(({ letter, name }) => [letter, named(`--page-${name}`)]));
  return { ...palette, behind: named("--sheet") };
}

// Shapes tell the states apart without their colours.
export function drawCell(context, letter, x, y, width, height, colour, behind) {
  const unit = Math.min(width, height);
  context.fillStyle = context.strokeStyle = colour;
  context.lineWidth = Math.max(1, unit / 8);
  const inset = context.lineWidth / 2;
  if (letter === "f") {
    context.strokeRect(x + inset, y + inset, width - 2 * inset, height - 2 * inset);
  } else if (letter === "o") {
    context.strokeRect(x + inset, y + inset, width - 2 * inset, height - 2 * inset);
    context.beginPath();
    context.moveTo(x, y + height);
    context.lineTo(x + width, y + height);
    context.lineTo(x, y);
    context.fill();
  } else if (letter === "c") {
    context.fillRect(x, y, width, height);
    context.fillStyle = behind;
    const bar = Math.max(1, Math.round(unit / 6));
    context.fillRect(x + bar, y + (height - bar) / 2, width - 2 * bar, bar);
  } else {
    context.fillRect(x, y, width, height);
    if (letter === "s") {
      context.fillStyle = behind;
      context.beginPath();
      context.arc(x + width / 2, y + height / 2, unit / 4.5, 0, 2 * Math.PI);
      context.fill();
    }
  }
}

export class PageMap {
  constructor(canvas, detail) {
    this.canvas = canvas;
    this.detail = detail;
    this.resting = detail.textContent;
    this.frames = []; // {kind: a page class of the feed, or null; slots: "ccaf"}
    this.changedAt = new Map(); // "frame:slot" -> time
    this.drawn = null; // the layout on the screen
    this.width = 4; // sealed pages in a frame
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => { detail.textContent = this.resting; });
  }

  // `short` is the feed's list: a number is a run of unused frames; a string names its class by its first letter.
  show(short, classes) {
    const frames = [];
    for (const item of short) {
      if (typeof item === "number") {
        for (let i = 0; i < item; i++) frames.push({ kind: null, slots: "" });
      } else {
        frames.push({ kind: classes[item.charCodeAt(0) - 65], slots: item.slice(1) });
      }
    }
    const now = performance.now();
    const known = this.frames.length === frames.length;
    frames.forEach((frame, index) => {
      if (frame.kind !== null && !frame.kind.is_open) this.width = Math.max(1, frame.slots.length);
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

  // Where each frame lies, with the largest cells that keep the map in bounds.
  layout(width) {
    const sizes = [14, 12, 10, 8, 7, 6, 5, 4, 3];
    for (const size of sizes) {
      const gap = size > 6 ? 2 : 1;
      const between = size > 6 ? 5 : 3;
      const wide = Math.min(width, this.width * (size + gap) - gap);
      const narrow = Math.max(3, Math.round(size / 2));
      const boxes = [];
      let x = 0;
      let y = 0;
      for (const frame of this.frames) {
        const own = frame.kind === null ? narrow : wide;
        if (x + own > width) {
          x = 0;
          y += size + between;
        }
        boxes.push({ x, y, width: own });
        x += own + (frame.kind === null ? gap + 1 : between);
      }
      const height = y + size;
      if ((height <= MAX_HEIGHT && this.width * (size + gap) - gap <= width) || size === sizes.at(-1)) {
        return { size, gap, boxes, height };
      }
    }
    return null;
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    if (!width || !this.frames.length) return;
    const layout = this.layout(width);
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
    const now = performance.now();
    let moving = false;
    this.drawn = layout;
    this.frames.forEach((frame, index) => {
      const box = layout.boxes[index];
      if (frame.kind === null) {
        context.strokeStyle = palette.f;
        context.lineWidth = 1;
        context.setLineDash([1, 2]);
        context.strokeRect(box.x + 0.5, box.y + 0.5, box.width - 1, layout.size - 1);
        context.setLineDash([]);
        return;
      }
      const step = (box.width + layout.gap) / frame.slots.length;
      for (let slot = 0; slot < frame.slots.length; slot++) {
        const letter = frame.slots[slot];
        const x = box.x + slot * step;
        const cell = Math.max(1, step - layout.gap);
        drawCell(context, letter, x, box.y, cell, layout.size, palette[letter], palette.behind);
        const key = `${index}:${slot}`;
        const changed = this.changedAt.get(key);
        if (changed === undefined) continue;
        const age = (now - changed) / FLASH_MS;
        if (age >= 1 || this.still.matches) {
          this.changedAt.delete(key);
          continue;
        }
        moving = true;
        const grow = 1.5 + 2 * age;
        context.globalAlpha = (1 - age) * 0.8;
        context.strokeStyle = palette[letter];
        context.lineWidth = 1.5;
        context.strokeRect(x - grow, box.y - grow, cell + 2 * grow, layout.size + 2 * grow);
        context.globalAlpha = 1;
      }
    });
    if (moving) requestAnimationFrame(() => this.draw());
  }

  point(event) {
    const origin = this.canvas.getBoundingClientRect();
    const x = event.clientX - origin.left;
    const y = event.clientY - origin.top;
    const index = this.drawn
      ? this.drawn.boxes.findIndex((b) => x >= b.x && x < b.x + b.width && y >= b.y && y < b.y + this.drawn.size)
      : -1;
    if (index < 0) {
      this.detail.textContent = this.resting;
      return;
    }
    const frame = this.frames[index];
    if (frame.kind === null) {
      this.detail.textContent = `Frame ${index + 1}: unused`;
      return;
    }
    const box = this.drawn.boxes[index];
    const slot = Math.min(frame.slots.length - 1, Math.floor(((x - box.x) / box.width) * frame.slots.length));
    const { group, form } = frame.kind;
    this.detail.textContent = `Frame ${index + 1} (${form} pages, ${group} attention), page ${slot + 1}: ${NAMES[frame.slots[slot]]}`;
  }
}
