// One request under both arms: its stages as bars on one scale, and its numbers.

import { clock } from "./course.js";
import { study } from "./data.js";
import { hue } from "./squares.js";
import { make, seconds, whole } from "./words.js";

const named = (kind) => kind.replaceAll(" ", "-");
const known = (ms) => (Number.isNaN(ms) ? "–" : seconds(ms));

export class Follow {
  /** `seek(time)` moves the replay; `pick(id)` follows another request. */
  constructor(seek, pick) {
    this.seek = seek;
    this.title = make("b");
    this.field = make("input");
    this.field.type = "search";
    this.field.setAttribute("aria-label", "Request to follow");
    this.field.addEventListener("change", () => pick(this.field.value.trim()));
    this.note = make("span", "note");
    this.bars = make("div", "bars");
    this.kinds = make("p", "kinds note");
    const head = make("p", "what", "Following request ", this.field, " ", this.note);
    this.element = make("div", "follow", head, this.bars, this.kinds);
    this.heads = [];
  }

  show(id, sides) {
    this.field.value = id ?? "";
    const found = sides.map((course) => [course, course.places.get(id)]);
    const [course, at] = found.find(([, place]) => place !== undefined) ?? [];
    this.heads = [];
    this.bars.replaceChildren();
    this.kinds.replaceChildren();
    if (!course) {
      this.note.textContent = id ? "is not in this stretch" : "click a square, or type an id";
      return;
    }
    const client = study.clients[course.client[at]]?.name;
    this.note.textContent = [
      client, `${whole(course.prompt[at])} prompt and ${whole(course.output[at])} output tokens`,
      study.replay.same ? "" : "not the same request: workloads differ",
    ].filter(Boolean).join(" · ");
    const times = found.map(([one, place]) => (place === undefined ? null : one.times(place)));
    this.begin = Math.min(...times.filter(Boolean).map(({ came }) => came));
    this.length = Math.max(...times.filter(Boolean).map(({ stages }) => stages.at(-1).end)) - this.begin || 1;
    found.forEach(([one, place], side) => this.bars.append(...this.row(one, place, times[side])));
    const kinds = new Set(times.flatMap((one) => one?.stages ?? []).map(({ kind }) => kind));
    this.kinds.append(...[...kinds].map((kind) => make("span", "", make("i", named(kind)), kind)));
    this.field.style.borderLeftColor = hue(at);
  }

  row(course, request, times) {
    const name = make("span", "arm", course.look.name);
    if (!times) return [name, make("span", "note", "not in this stretch"), make("span")];
    const bar = make("div", "bar");
    for (const { kind, begin, end } of times.stages) {
      const part = make("i", named(kind));
      part.style.left = `${(100 * (begin - this.begin)) / this.length}%`;
      part.style.width = `${(100 * (end - begin)) / this.length}%`;
      part.title = `${kind}: ${seconds(end - begin)}, from ${clock(begin)} on`;
      bar.append(part);
    }
    const head = make("u");
    this.heads.push(head);
    bar.append(head);
    bar.addEventListener("click", ({ clientX }) => {
      const box = bar.getBoundingClientRect();
      this.seek(this.begin + (this.length * (clientX - box.left)) / box.width);
    });
    const lost = course.lost.request.reduce((sum, other) => sum + (other === request), 0);
    const numbers = `first token after ${known(times.began - times.came)}, ended after ${known(times.over - times.came)}`
      + (lost ? `, preempted ${lost === 1 ? "once" : `${lost} times`}` : "");
    return [name, bar, make("span", "numbers", numbers)];
  }

  /** Where the replay is. */
  at(time) {
    const share = (time - this.begin) / this.length;
    for (const head of this.heads) {
      head.hidden = !(share >= 0 && share <= 1);
      head.style.left = `${100 * share}%`;
    }
  }
}
