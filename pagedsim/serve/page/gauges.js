// Numbers of now over lines of the last minute.

import { count, make, rate, say, short, time, timed, whole } from "./words.js";

const SPAN = 60;
const HEIGHT = 38;
const spread = (one) => (one ? `95 % within ${timed(one.p95)}` : "none recently");

const GAUGES = [
  {
    name: "Running", series: "running", show: whole,
    title: "Requests in the batch: each gets a token with every step, once its prompt is computed",
    value: (now) => [whole(now.running.count), ""],
    note: (now) => `${short(now.totals.finished)} finished`,
  },
  {
    name: "Waiting", series: "waiting", show: whole,
    title: "Requests that are in no batch yet, or lost their memory and wait again; swapped: their blocks are on the CPU",
    value: (now) => [whole(now.waiting.count), ""],
    note: (now) => `${whole(now.swapped.count)} swapped`,
  },
  {
    name: "Output tokens/s", series: "output_tokens", show: short,
    title: "Tokens sampled a second, a mean over the last three; prompt tokens are those computed, again after a preemption too",
    value: (now) => [rate(now.recent.output_tokens_per_s), ""],
    note: (now) => `${rate(now.recent.prompt_tokens_per_s)} prompt tokens/s`,
  },
  {
    name: "Time to first token", series: "ttft_ms", show: timed,
    title: "From arrival to the first token: the median over the last 10 s; the line is each second's mean",
    value: (now) => time(now.recent.ttft_ms?.p50), note: (now) => spread(now.recent.ttft_ms),
  },
  {
    name: "Time per token", series: "tpot_ms", show: timed,
    title: "Time per output token after the first: the median over requests finished in the last 10 s; the line is each second's mean",
    value: (now) => time(now.recent.tpot_ms?.p50), note: (now) => spread(now.recent.tpot_ms),
  },
  {
    name: "Preemptions", series: "preemptions", show: whole,
    title: "How often a running request lost its memory to others: it was swapped out, or is computed again; the line is each second's number",
    value: (now) => [short(now.totals.preemptions), ""],
    note: (now) => `${rate(now.recent.preemptions_per_s)} a second`,
  },
];

/** A line over the last minute, oldest on the left; a second without a value is a gap. */
export class Spark {
  constructor() {
    this.element = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.element.setAttribute("class", "spark");
    this.element.setAttribute("viewBox", `0 0 ${SPAN - 1} ${HEIGHT}`);
    this.element.setAttribute("preserveAspectRatio", "none");
    this.element.setAttribute("aria-hidden", "true");
    this.paths = Object.fromEntries(["base", "area", "line", "mark"].map((name) => {
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("class", name);
      this.element.append(path);
      return [name, path];
    }));
    this.paths.base.setAttribute("d", `M0 ${HEIGHT}H${SPAN - 1}`);
  }

  draw(values) {
    const key = values.join();
    if (key === this.key) return;
    this.key = key;
    const most = Math.max(...values.map((value) => value ?? 0), 1e-9);
    const shift = SPAN - values.length;
    let line = "", area = "", begin = null;
    values.forEach((value, at) => {
      if (value === null) return;
      const point = `${at + shift} ${(HEIGHT - (value / most) * (HEIGHT - 2)).toFixed(2)}`;
      const fresh = at === 0 || values[at - 1] === null;
      if (fresh) begin = at + shift;
      line += (fresh ? "M" : "L") + point;
      area += (fresh ? `M${begin} ${HEIGHT}L` : "L") + point;
      if (at === values.length - 1 || values[at + 1] === null) {
        line += "h0.01"; // so that a single second is a dot
        area += `V${HEIGHT}Z`;
      }
    });
    this.paths.line.setAttribute("d", line);
    this.paths.area.setAttribute("d", area);
  }

  /** Mark a second, counted from the left of the span; null: none. */
  mark(at) {
    this.paths.mark.setAttribute("d", at === null ? "" : `M${at} 0V${HEIGHT}`);
  }
}

class Gauge {
  constructor(kind) {
    this.kind = kind;
    this.values = [];
    this.at = null;
    this.element = make("article", "gauge");
    this.element.title = kind.title;
    this.number = document.createTextNode("–");
    this.unit = make("small");
    const value = make("p", "value");
    value.append(this.number, this.unit);
    this.note = make("p", "note");
    this.spark = new Spark();
    this.left = make("span");
    this.right = make("span");
    const scale = make("p", "scale");
    scale.append(this.left, this.right);
    this.element.append(make("h2", "", kind.name), value, this.note, this.spark.element, scale);
    this.element.addEventListener("pointermove", (event) => this.point(event));
    this.element.addEventListener("pointerleave", () => this.point(null));
  }

  show(now) {
    const [number, unit] = this.kind.value(now);
    if (this.number.data !== number) this.number.data = number;
    say(this.unit, unit);
    say(this.note, this.kind.note(now));
    this.values = now.history[this.kind.series];
    this.spark.draw(this.values);
    this.scale();
  }

  point(event) {
    this.at = null;
    if (event) {
      const box = this.spark.element.getBoundingClientRect();
      const share = (event.clientX - box.left) / box.width;
      this.at = Math.round(Math.min(Math.max(share, 0), 1) * (SPAN - 1));
    }
    this.spark.mark(this.at);
    this.scale();
  }

  scale() {
    if (this.at === null) {
      const most = Math.max(...this.values.map((value) => value ?? 0), 0);
      say(this.left, "60 s");
      say(this.right, most ? `up to ${this.kind.show(most)}` : "");
      return;
    }
    const value = this.values[this.at - SPAN + this.values.length];
    say(this.left, `${SPAN - this.at} s ago`);
    say(this.right, value === undefined || value === null ? "–" : this.kind.show(value));
  }
}

/** All gauges, in `place`; returns what shows a snapshot. */
export function gauges(place) {
  const all = GAUGES.map((kind) => new Gauge(kind));
  place.replaceChildren(...all.map((one) => one.element));
  return (now) => all.forEach((one) => one.show(now));
}

/** What the server has done since it started, in words. */
export function totals(place) {
  return (now) => {
    const { finished, aborted, rejected, prompt_tokens, output_tokens } = now.totals;
    say(place, [
      `${count(now.step, "step")}`, `${whole(finished)} finished`, `${whole(aborted)} aborted`,
      `${whole(rejected)} rejected`, `${count(prompt_tokens, "prompt token")} computed`,
      `${count(output_tokens, "output token")}`,
    ].join("  ·  "));
  };
}
