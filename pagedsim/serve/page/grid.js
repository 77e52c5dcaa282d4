// The KV blocks on a canvas, a cell for each, or for several where there are very many.

import { choice } from "./choice.js";
import { colourOf, papers } from "./colour.js";
import { brief, count, whole } from "./words.js";

const FREE = -1;
const CACHED = -2;
const LARGEST = 20; // CSS pixels from cell to cell
const SMALLEST = 4;
const TALLEST = 280;
const TALL_AND_NARROW = 380; // where it is hardly wider than high

export class Grid {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.tip = tip;
    this.cursor = null;
    this.now = null;
    this.owner = new Int16Array(0);
    new ResizeObserver(() => this.resize()).observe(canvas);
    choice.listen(() => this.draw());
    canvas.addEventListener("pointermove", (event) => this.point(this.under(event)));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("blur", () => this.point(null));
    canvas.addEventListener("click", (event) => {
      this.point(this.under(event));
      this.pin();
    });
    canvas.addEventListener("keydown", (event) => this.press(event));
  }

  // -- what is shown -----------------------------------------------------------------------------

  show(now) {
    const { blocks } = now;
    const cells = Math.ceil(blocks.total / blocks.cell);
    const resized = cells !== this.owner.length;
    if (resized) {
      this.owner = new Int16Array(cells);
      this.used = new Uint16Array(cells);
      this.shared = new Uint8Array(cells);
    }
    let at = 0;
    for (let run = 0; run < blocks.cells.length; run += 4) {
      const [owner, used, shared, length] = blocks.cells.slice(run, run + 4);
      this.owner.fill(owner, at, at + length);
      this.used.fill(used, at, at + length);
      this.shared.fill(shared, at, at + length);
      at += length;
    }
    this.now = now;
    if (resized) this.resize();
    else this.draw();
    if (this.cursor !== null) this.point(this.cursor);
  }

  resize() {
    const width = this.canvas.clientWidth;
    const cells = this.owner.length;
    if (!width || !cells) return;
    const ratio = window.devicePixelRatio || 1;
    const rows = (pitch) => Math.ceil(cells / Math.floor(width / pitch));
    const tallest = width < 600 ? TALL_AND_NARROW : TALLEST;
    let pitch = LARGEST;
    while (pitch > SMALLEST && rows(pitch) * pitch > tallest) pitch -= 0.5;
    this.pitch = Math.max(2, Math.floor(pitch * ratio)); // whole device pixels, so that edges are sharp
    this.gap = Math.max(1, Math.round(this.pitch * 0.14));
    this.columns = Math.floor((width * ratio + this.gap) / this.pitch);
    const height = Math.ceil(cells / this.columns) * this.pitch - this.gap;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = height;
    this.canvas.style.height = `${height / ratio}px`;
    this.hatch = this.hatched(ratio);
    this.draw();
  }

  hatched(ratio) {
    const size = Math.round(4 * ratio);
    const tile = Object.assign(document.createElement("canvas"), { width: size, height: size });
    const pen = tile.getContext("2d");
    pen.strokeStyle = papers().hatch;
    pen.lineWidth = 1.4 * ratio;
    for (const shift of [-size, 0, size]) {
      pen.beginPath();
      pen.moveTo(shift, size);
      pen.lineTo(shift + size, 0);
      pen.stroke();
    }
    return this.context.createPattern(tile, "repeat");
  }

  draw() {
    if (!this.now || !this.pitch) return;
    const { context: pen, pitch, owner, used, shared } = this;
    const { cell: size, owners } = this.now.blocks;
    const { free, cached, ink } = papers();
    const side = pitch - this.gap;
    const exact = new Map(this.now.watched.map((one) => [one.id, new Set(one.cells)]));
    const mine = exact.get(choice.mine);
    const looked = choice.looked;
    const chosen = looked === null ? null : exact.get(looked);
    const index = owners.indexOf(looked);
    const colours = owners.map(colourOf);
    const dimmed = looked !== null && (chosen !== undefined || index >= 0);
    let busy = 0;
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    for (let at = 0; at < owner.length; at++) {
      const x = (at % this.columns) * pitch;
      const y = Math.floor(at / this.columns) * pitch;
      const whose = owner[at];
      const full = whose >= 0 ? Math.max(1, Math.round((side * used[at]) / size)) : 0;
      if (full < side) {
        pen.fillStyle = whose === CACHED ? cached : free;
        pen.fillRect(x, y, side, side);
      }
      if (whose < 0) continue;
      busy++;
      const own = mine?.has(at);
      const one = chosen?.has(at) || (index >= 0 && whose === index);
      pen.globalAlpha = dimmed && !one && !own ? 0.2 : 1;
      pen.fillStyle = own ? ink : colours[whose];
      pen.fillRect(x, y + side - full, side, full);
      if (shared[at]) {
        pen.fillStyle = this.hatch;
        pen.fillRect(x, y + side - full, side, full);
      }
      pen.globalAlpha = 1;
    }
    this.outline(pen, side);
    Object.assign(this.canvas.dataset, {
      step: this.now.step, busy, mine: mine ? mine.size : 0, cells: owner.length,
    });
  }

  outline(pen, side) {
    if (this.cursor === null) return;
    pen.strokeStyle = papers().ink;
    pen.lineWidth = 2;
    const x = (this.cursor % this.columns) * this.pitch;
    const y = Math.floor(this.cursor / this.columns) * this.pitch;
    pen.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
  }

  // -- whose a cell is ---------------------------------------------------------------------------

  under(event) {
    const box = this.canvas.getBoundingClientRect();
    const scale = this.canvas.width / box.width;
    const column = Math.floor(((event.clientX - box.left) * scale) / this.pitch);
    const row = Math.floor(((event.clientY - box.top) * scale) / this.pitch);
    const at = row * this.columns + column;
    return column >= 0 && column < this.columns && at >= 0 && at < this.owner.length ? at : null;
  }

  /** The request of a cell, or null. */
  holder(at) {
    return at === null ? null : (this.now.blocks.owners[this.owner[at]] ?? null);
  }

  point(at) {
    const moved = at !== this.cursor;
    this.cursor = at;
    const id = this.holder(at);
    if (id !== choice.hovered) choice.hover(id);
    else if (moved) this.draw();
    this.tip.hidden = at === null;
    if (at === null) return;
    const [name, ...lines] = this.told(at);
    this.tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: name }), lines.join("\n"));
    const box = this.canvas.getBoundingClientRect();
    const scale = box.width / this.canvas.width;
    const x = box.left + ((at % this.columns) + 1) * this.pitch * scale;
    const y = box.top + (Math.floor(at / this.columns) + 1) * this.pitch * scale;
    const left = Math.min(x + 8, innerWidth - this.tip.offsetWidth - 8);
    const above = y + 8 + this.tip.offsetHeight > innerHeight;
    this.tip.style.left = `${Math.max(left, 8)}px`;
    this.tip.style.top = `${above ? y - this.tip.offsetHeight - this.pitch * scale - 8 : y + 8}px`;
  }

  told(at) {
    const { cell: size, total, owners } = this.now.blocks;
    const first = at * size;
    const last = Math.min(first + size, total) - 1;
    const where = size === 1 ? `block ${whole(first)}` : `blocks ${whole(first)} to ${whole(last)}`;
    const whose = this.owner[at];
    if (whose === FREE) return ["free", where];
    if (whose === CACHED) return ["free, but cached", where];
    const row = this.now.running.first.find((one) => one.id === owners[whose]);
    const lines = [size === 1 ? where : `${where}, ${this.used[at]} of ${size} in use`];
    if (this.shared[at]) lines.push("shared with others");
    if (row?.client) lines.push(`client ${row.client}`);
    if (row) lines.push(`${whole(row.prompt)} prompt + ${count(row.output, "output token")}, ${count(row.blocks, "block")}`);
    return [brief(owners[whose]), ...lines];
  }

  pin() {
    choice.pin(this.holder(this.cursor));
  }

  press(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns }[event.key];
    if (step) {
      const next = this.cursor === null ? 0 : this.cursor + step;
      if (next >= 0 && next < this.owner.length) this.point(next);
    } else if (event.key === "Enter" || event.key === " ") {
      this.pin();
    } else {
      return;
    }
    event.preventDefault();
  }
}
