// One server of a replay: who waits, who runs, and who holds the blocks.

import { Cells, hue, Squares } from "./squares.js";
import { shown } from "./shown.js";
import { ink, make, say, whole } from "./words.js";

const MOST_CELLS = 1200; // of an only server; several share them
const OTHER = -2; // what is in use without being any request's tokens

export class Lane {
  constructor(course, server, picked) {
    Object.assign(this, { course, server });
    const { name, total } = course.servers[server];
    const share = Math.max(MOST_CELLS / course.servers.length, 120);
    this.cell = Math.max(1, Math.ceil(total / share));
    this.cells = new Cells(Math.ceil(total / this.cell));
    this.parts = {
      waiting: ["Waiting", new Squares(picked, "Waiting requests")],
      running: ["Running", new Squares(picked, "Running requests")],
      ...(total ? { blocks: ["KV blocks", new Squares(picked, "KV blocks")] } : {}),
    };
    this.element = make("div", "lane", ...(name ? [make("h4", "", name)] : []));
    this.labels = {};
    for (const [part, [label, { canvas }]] of Object.entries(this.parts)) {
      this.labels[part] = make("span", "count");
      this.element.append(make("p", "what", make("b", "", label), this.labels[part]), make("div", part, canvas));
    }
  }

  /** Make room for so many that wait and run. */
  resize(mostWaiting, mostRunning) {
    const small = this.course.servers.length > 1;
    const { waiting, running, blocks } = this.parts;
    waiting[1].fit(mostWaiting, 12, 5, small ? 24 : 60);
    running[1].fit(mostRunning, 14, 6, small ? 28 : 56);
    blocks?.[1].fit(this.cells.owner.length, 12, 4, small ? 60 : 170);
  }

  /** `fresh(request)`: whether it was preempted just now. */
  show({ waiting, running }, time, looked, fresh) {
    const { course } = this;
    const faint = ({ request }) => !shown.has("clients", course.client[request]);
    const square = (share) => (one) => ({
      key: one.request, colour: hue(one.request), share: share(one), faint: faint(one),
      ring: one.request === looked ? "--ink" : one.kind === "queued" || !one.waits ? undefined : "--lost",
    });
    this.parts.waiting[1].draw(waiting.map((one) => ({
      ...square(() => 1)(one), ...(fresh(one.request) ? { colour: ink("--lost") } : {}),
    })));
    this.parts.running[1].draw(running.map(square((one) => (one.computes ? one.share : one.output / Math.max(course.output[one.request], 1)))));
    const lost = waiting.filter(({ kind }) => kind !== "queued").length;
    say(this.labels.waiting, whole(waiting.length) + (lost ? `, ${whole(lost)} of them preempted` : ""));
    const computing = running.filter(({ computes }) => computes).length;
    say(this.labels.running, whole(running.length) + (computing ? `, ${whole(computing)} in prefill` : ""));
    if (this.parts.blocks) this.blocks(running, time, looked);
  }

  blocks(running, time, looked) {
    const { course, cells, cell } = this;
    const { total } = course.servers[this.server];
    const used = course.used(this.server, time);
    const needs = running.map((one) => Math.ceil(one.tokens / course.size));
    const sum = needs.reduce((a, b) => a + b, 0);
    const shared = sum > used ? used / sum : 1; // a block of several requests counts once
    const wanted = new Map(running.map((one, at) => [one.request, Math.round((needs[at] * shared) / cell)]));
    wanted.set(OTHER, Math.round((used - Math.min(sum, used)) / cell));
    cells.hold(wanted);
    this.parts.blocks[1].draw(Array.from(cells.owner, (key) => ({
      key: key < 0 ? null : key,
      colour: key === OTHER ? ink("--muted") : key < 0 ? null : hue(key),
      faint: key === OTHER || (key >= 0 && !shown.has("clients", course.client[key])),
      ring: key === looked && key >= 0 ? "--ink" : undefined,
    })));
    say(this.labels.blocks, `${whole(used)} of ${whole(total)} in use, ${Math.round((100 * used) / total)} %`
      + (cell > 1 ? `; a cell is ${cell} blocks` : ""));
  }
}
