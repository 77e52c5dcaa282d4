// The lists of running, waiting and swapped requests.

import { choice } from "./choice.js";
import { colourOf } from "./colour.js";
import { brief, make, say, whole } from "./words.js";

const COLUMNS = [
  ["#", "Place in this list"],
  ["request", "Its id; the colour is that of its blocks"],
  ["client", "Whose request it is"],
  ["prio", "Priority: a smaller number is more urgent"],
  ["prompt", "Prompt tokens; the bar shows how many are computed"],
  ["output", "Tokens of its answer; the bar shows how far it is from the most that its client allows"],
  ["blocks", "Blocks that it holds"],
];

const KINDS = {
  running: ["Running", "the batch, in its order", "no request runs"],
  waiting: ["Waiting", "the next one first", "no request waits"],
  swapped: ["Swapped", "their blocks are on the CPU", ""],
};

class Row {
  constructor(id) {
    this.id = id;
    this.element = make("tr");
    this.element.tabIndex = 0;
    this.element.style.setProperty("--hue", colourOf(id));
    this.cells = COLUMNS.map(() => make("td"));
    this.name = document.createTextNode(brief(id));
    this.cells[1].append(make("i"), this.name);
    this.cells[1].title = id;
    this.element.append(...this.cells);
    this.element.addEventListener("pointerenter", () => choice.hover(id));
    this.element.addEventListener("pointerleave", () => choice.hover(null));
    this.element.addEventListener("focus", () => choice.hover(id));
    this.element.addEventListener("blur", () => choice.hover(null));
    this.element.addEventListener("click", () => choice.pin(id));
    this.element.addEventListener("keydown", (event) => this.press(event));
  }

  press(event) {
    const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (next) this.element[next]?.focus();
    else if (event.key === "Enter" || event.key === " ") choice.pin(this.id);
    else return;
    event.preventDefault();
  }

  show(place, one) {
    const words = [place, null, one.client, one.priority, whole(one.prompt), whole(one.output), whole(one.blocks)];
    words.forEach((word, at) => word !== null && say(this.cells[at], String(word)));
    this.bar(this.cells[4], one.computed > 0 && one.computed < one.prompt ? one.computed / one.prompt : null);
    this.bar(this.cells[5], one.most && one.output ? one.output / one.most : null);
  }

  /** How much of a number is done; null: no bar. */
  bar(cell, share) {
    const done = share === null ? "" : Math.min(share, 1).toFixed(2);
    if (cell.dataset.done === done) return;
    cell.dataset.done = done;
    cell.classList.toggle("bar", share !== null);
    cell.style.setProperty("--done", done);
  }

  mark() {
    const { classList } = this.element;
    classList.toggle("looked", choice.hovered === this.id);
    classList.toggle("pinned", choice.pinned === this.id);
    classList.toggle("mine", choice.mine === this.id);
    const colour = choice.mine === this.id ? "var(--ink)" : colourOf(this.id);
    this.element.style.setProperty("--hue", colour);
  }
}

class Queue {
  constructor(kind) {
    [this.label, this.what, this.empty] = KINDS[kind];
    this.kind = kind;
    this.rows = new Map();
    this.element = make("div", `queue ${kind}`);
    this.title = make("h2");
    this.note = make("p", "figures");
    const head = make("div", "head");
    head.append(this.title, this.note);
    const table = make("table");
    table.createTHead().insertRow().append(...COLUMNS.map(([name, title]) =>
      Object.assign(make("th", "", name), { title, scope: "col" })));
    table.setAttribute("aria-label", this.label);
    this.body = table.createTBody();
    this.scroll = make("div", "scroll");
    this.scroll.append(table);
    this.more = make("p", "more");
    this.element.append(head, this.scroll, this.more);
  }

  /** `own`: what is known of the request sent from here; it stands at the end if it is far back. */
  show(queue, own) {
    say(this.title, `${this.label} ${whole(queue.count)}`);
    say(this.note, queue.count ? this.what : this.empty);
    this.scroll.hidden = !queue.count;
    this.element.hidden = this.kind === "swapped" && !queue.count;
    const before = this.rows;
    this.rows = new Map();
    const shown = queue.first.map((one, at) => [at + 1, one]);
    if (own?.state === this.kind && own.place > shown.length) shown.push([own.place, own]);
    for (const [place, one] of shown) {
      const row = before.get(one.id) ?? new Row(one.id);
      before.delete(one.id);
      this.rows.set(one.id, row);
      row.show(place, one);
    }
    for (const gone of before.values()) gone.element.remove();
    // Rows that stand where they should are not moved: a moved one would lose the focus.
    let at = this.body.firstElementChild;
    for (const { element } of this.rows.values()) {
      if (element === at) at = at.nextElementSibling;
      else this.body.insertBefore(element, at);
    }
    const rest = queue.count - shown.length;
    this.more.hidden = rest <= 0;
    say(this.more, `and ${whole(rest)} more`);
    this.mark();
  }

  mark() {
    for (const row of this.rows.values()) row.mark();
  }
}

/** All lists, in `place`; returns what shows a snapshot. */
export function queues(place) {
  const all = Object.keys(KINDS).map((kind) => new Queue(kind));
  place.replaceChildren(...all.map((queue) => queue.element));
  choice.listen(() => all.forEach((queue) => queue.mark()));
  return (now) => {
    const own = now.watched.find((one) => one.id === choice.mine);
    all.forEach((queue) => queue.show(now[queue.kind], own));
  };
}
