// Requests and blocks as squares on a canvas.

import { ink, isDark, whenRepainted } from "./words.js";

const GOLDEN = 137.508; // degrees between the hues of one request and the next
const palette = [];

/** The colour of a request, by its number: neighbours differ. */
export function hue(at) {
  const [light, chroma] = [[0.64, 0.1], [0.72, 0.1], [0.79, 0.09]][at % 3];
  return (palette[at] ??= `oklch(${isDark() ? light - 0.07 : light} ${chroma} ${((at * GOLDEN) % 360).toFixed(1)})`);
}
whenRepainted(() => palette.splice(0));

export class Squares {
  /** `picked(key)` is called with the key of a square that is clicked. */
  constructor(picked, label) {
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", label);
    this.items = [];
    this.canvas.addEventListener("click", (event) => {
      const key = this.items[this.under(event)]?.key;
      if (key !== undefined && key !== null) picked(key);
    });
  }

  /** Room for `count` squares of at most `largest` pixels, at most `tallest` pixels high. */
  fit(count, largest, smallest, tallest) {
    const ratio = devicePixelRatio || 1;
    const width = Math.max(this.canvas.parentElement.clientWidth, 60);
    let pitch = largest;
    const rows = () => Math.max(1, Math.ceil(count / Math.floor(width / pitch)));
    while (pitch > smallest && rows() * pitch > tallest) pitch -= 0.5;
    this.pitch = Math.max(2, Math.floor(pitch * ratio));
    this.gap = Math.max(1, Math.round(this.pitch * 0.14));
    this.columns = Math.max(1, Math.floor((width * ratio + this.gap) / this.pitch));
    const shown = Math.min(Math.ceil(count / this.columns) || 1, Math.max(1, Math.floor((tallest * ratio) / this.pitch)));
    this.room = shown * this.columns;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = shown * this.pitch - this.gap;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.canvas.height / ratio}px`;
  }

  /** Draw squares: `{ key, colour, share, faint, ring }`, filled from below. */
  draw(items) {
    const pen = this.canvas.getContext("2d");
    const side = this.pitch - this.gap;
    this.items = items;
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    for (let at = 0; at < Math.min(items.length, this.room); at++) {
      const { colour, share = 1, faint, ring } = items[at];
      const x = (at % this.columns) * this.pitch;
      const y = Math.floor(at / this.columns) * this.pitch;
      const full = colour === null ? 0 : Math.max(1, Math.round(side * share));
      if (full < side) {
        pen.fillStyle = ink("--free");
        pen.fillRect(x, y, side, side);
      }
      pen.globalAlpha = faint ? 0.18 : 1;
      pen.fillStyle = colour;
      if (full) pen.fillRect(x, y + side - full, side, full);
      pen.globalAlpha = 1;
      if (!ring) continue;
      pen.strokeStyle = ink(ring);
      pen.lineWidth = Math.max(1.5, this.gap);
      pen.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
    }
  }

  under({ clientX, clientY }) {
    const box = this.canvas.getBoundingClientRect();
    const scale = this.canvas.width / box.width;
    const [column, row] = [clientX - box.left, clientY - box.top].map((way) => Math.floor((way * scale) / this.pitch));
    return column < this.columns ? row * this.columns + column : -1;
  }
}

/** Which cells each request holds: a request keeps its cells while it grows. */
export class Cells {
  constructor(count) {
    this.owner = new Int32Array(count).fill(-1);
    this.held = new Map();
  }

  /** Give each of `wanted`, a map from keys to counts, so many cells, as far as there are any. */
  hold(wanted) {
    const { owner, held } = this;
    for (const [key, cells] of held) {
      const count = wanted.get(key) ?? 0;
      for (const cell of cells.splice(count)) owner[cell] = -1;
      if (!count) held.delete(key);
    }
    let free = 0;
    for (const [key, count] of wanted) {
      const cells = held.get(key) ?? [];
      held.set(key, cells);
      while (cells.length < count) {
        while (free < owner.length && owner[free] !== -1) free++;
        if (free === owner.length) return;
        owner[free] = key;
        cells.push(free);
      }
    }
  }
}
