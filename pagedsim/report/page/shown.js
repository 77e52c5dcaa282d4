// Which arms and clients are shown, in all charts, tables and replays at once.

import { study } from "./data.js";
import { make } from "./words.js";

class Shown {
  hidden = { arms: new Set(), clients: new Set() };
  listeners = [];

  /** Whether an arm or client is shown, by its number; null stands for all together. */
  has(kind, at) {
    return at === null || !this.hidden[kind].has(at);
  }

  toggle(kind, at) {
    const { [kind]: hidden } = this.hidden;
    if (!hidden.delete(at)) hidden.add(at);
    this.tell();
  }

  /** Show this one alone; if it is already alone, all. */
  only(kind, at) {
    const { [kind]: hidden } = this.hidden;
    const others = study[kind].map((_, other) => other).filter((other) => other !== at);
    const alone = !hidden.has(at) && others.every((other) => hidden.has(other));
    hidden.clear();
    if (!alone) others.forEach((other) => hidden.add(other));
    this.tell();
  }

  all() {
    this.hidden.arms.clear();
    this.hidden.clients.clear();
    this.tell();
  }

  tell() {
    for (const listener of this.listeners) listener();
  }

  /** Call `listener` now and whenever it changes. */
  listen(listener) {
    this.listeners.push(listener);
    listener();
  }
}

export const shown = new Shown();

/** The mark of a line: its colour and dashes. */
export function mark({ colour, dash }) {
  const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  line.setAttribute("class", "mark");
  line.setAttribute("viewBox", "0 0 22 8");
  line.innerHTML = '<path d="M1 4H21" fill="none" stroke-width="2.5"/>';
  line.firstChild.style.stroke = `var(${colour})`;
  line.firstChild.setAttribute("stroke-dasharray", dash.map((part) => part * 2.5).join(" "));
  return line;
}

/** The legend of the whole page: a button for each arm and each client, where there are several. */
export function legend(before) {
  const bar = make("nav", "legend");
  bar.setAttribute("aria-label", "What is shown");
  const buttons = [];
  for (const kind of ["arms", "clients"]) {
    if (study[kind].length < 2) continue;
    const group = make("div", kind);
    group.append(make("span", "name", kind === "arms" ? study.swept || "Arms" : "Clients"));
    study[kind].forEach((one, at) => {
      const button = make("button", "", ...(kind === "arms" ? [mark(one)] : []), one.name || "unnamed client");
      button.type = "button";
      button.title = "Click to hide or show; with Shift, to show this one alone";
      button.addEventListener("click", (event) => (event.shiftKey ? shown.only(kind, at) : shown.toggle(kind, at)));
      buttons.push([button, kind, at]);
      group.append(button);
    });
    bar.append(group);
  }
  if (!buttons.length) return;
  const all = make("button", "all", "show all");
  all.type = "button";
  all.addEventListener("click", () => shown.all());
  bar.append(all);
  before.before(bar);
  shown.listen(() => {
    for (const [button, kind, at] of buttons) button.setAttribute("aria-pressed", shown.has(kind, at));
    all.hidden = !shown.hidden.arms.size && !shown.hidden.clients.size;
  });
}
