// The replay: two arms side by side in time.

import { clock, courses } from "./course.js";
import { study } from "./data.js";
import { Follow } from "./follow.js";
import { Lane } from "./lane.js";
import { mark, shown } from "./shown.js";
import { ink, make, say, whenRepainted, whole } from "./words.js";

const SAMPLES = 240; // of the strip that overviews the run
const STRIP = 64; // its height
const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 20000];
const LASTS = 60; // seconds that the whole takes at first
const LOGGED = 4;
const FRESH = 0.6; // real seconds for which a preemption stands out

const sampled = new Map();

/** How many wait, and how many are there, at even times; and the most that wait and that run at any server. */
function sample(course) {
  if (!sampled.has(course)) {
    const step = study.replay.length / (SAMPLES - 1);
    const counts = course.servers.map(() => [0, 1].map(() => new Int32Array(SAMPLES)));
    for (let request = 0; request < course.arrival.length; request++) {
      for (const { waits, begin, end } of course.stages(request)) {
        const some = counts[course.server[request]]?.[waits ? 0 : 1];
        const last = Math.min(Math.ceil(end / step), SAMPLES);
        for (let at = Math.max(Math.ceil(begin / step), 0); some && at < last; at++) some[at]++;
      }
    }
    const sums = (parts) => Array.from({ length: SAMPLES }, (_, at) =>
      counts.reduce((sum, server) => sum + parts.reduce((part, index) => part + server[index][at], 0), 0));
    sampled.set(course, {
      waiting: sums([0]),
      present: sums([0, 1]),
      most: [0, 1].map((part) => Math.max(1, ...counts.map((server) => Math.max(...server[part])))),
    });
  }
  return sampled.get(course);
}

class Side {
  constructor(at, changed, picked) {
    this.choice = make("select");
    this.choice.setAttribute("aria-label", at ? "Right arm" : "Left arm");
    courses.forEach(({ look }, index) => this.choice.append(new Option(look.name, index)));
    this.choice.value = at;
    this.choice.addEventListener("change", changed);
    this.picked = picked;
    this.mark = make("span");
    this.count = make("span", "count");
    this.log = make("ol", "log");
    this.lanes = make("div", "lanes");
    this.element = make("section", "side", make("p", "head", this.mark, this.choice, this.count), this.lanes, this.log);
  }

  load() {
    this.course = courses[this.choice.value];
    this.mark.replaceChildren(mark(this.course.look));
    const picked = (request) => this.picked(this.course.name(request));
    this.servers = this.course.servers.map((_, server) => new Lane(this.course, server, picked));
    this.log.hidden = !courses.some(({ lost }) => lost.time.length);
    this.lanes.replaceChildren(...this.servers.map(({ element }) => element));
  }

  show(time, id, speed) {
    const { course } = this;
    const { lost } = course;
    const count = course.losses(time);
    const since = time - FRESH * 1000 * speed;
    const fresh = new Set();
    for (let at = count - 1; at >= 0 && lost.time[at] > since; at--) fresh.add(lost.request[at]);
    const now = course.now(time);
    const looked = course.places.get(id);
    this.servers.forEach((lane, at) => lane.show(now[at], time, looked, (request) => fresh.has(request)));
    say(this.count, `${whole(count)} preemption${count === 1 ? "" : "s"} so far`);
    const key = `${count}`;
    if (this.log.dataset.count === key) return;
    this.log.dataset.count = key;
    const first = Math.max(count - LOGGED, 0);
    this.log.replaceChildren(...Array.from({ length: count - first }, (_, at) => make("li", "", this.told(count - 1 - at))));
  }

  /** A preemption in words. */
  told(at) {
    const { lost } = this.course;
    const [whose, by] = [this.course.name(lost.request[at]), lost.by[at] < 0 ? null : this.course.name(lost.by[at])];
    const how = lost.swap[at] ? "swapped out" : "to be computed again";
    const why = lost.displaced[at] ? `${by} displaced ${whose}` : by === null ? `${whose} found no room` : `${whose} made room for ${by}`;
    return `${clock(lost.time[at])}: ${why}, ${how}`;
  }
}

class Replay {
  constructor(place) {
    const { length } = study.replay;
    this.length = length;
    this.sides = courses.slice(0, 2).map((_, at) => new Side(at, () => this.load(), (id) => this.pick(id)));
    this.follow = new Follow((time) => this.seek(time), (id) => this.pick(id));
    this.button = make("button", "play");
    this.button.type = "button";
    this.button.addEventListener("click", () => this.toggle());
    this.speed = make("select");
    this.speed.setAttribute("aria-label", "Speed");
    SPEEDS.forEach((speed) => this.speed.append(new Option(`× ${speed}`, speed)));
    this.speed.value = SPEEDS.find((speed) => length / 1000 / speed <= LASTS) ?? SPEEDS.at(-1);
    this.clock = make("output");
    this.strip = make("canvas");
    this.scrub = make("input");
    Object.assign(this.scrub, { type: "range", min: 0, max: length, step: Math.max(1, Math.round(length / 5000)) });
    this.scrub.setAttribute("aria-label", "Time");
    this.scrub.addEventListener("input", () => this.seek(Number(this.scrub.value)));
    place.append(
      make("div", "controls", this.button, this.speed, this.clock),
      make("div", "strip", this.strip, this.scrub),
      make("div", "sides", ...this.sides.map(({ element }) => element)),
      this.follow.element,
    );
    this.load();
    this.seek(this.tellingTime());
    this.pick(this.tellingRequest());
    this.play(false);
    new ResizeObserver(() => this.resize()).observe(place);
    shown.listen(() => this.show());
    whenRepainted(() => this.resize());
  }

  load() {
    for (const side of this.sides) side.load();
    this.follow.show(this.id, this.courses);
    this.resize();
  }

  get courses() {
    return this.sides.map(({ course }) => course);
  }

  /** When the arms differ most in what waits; of quiet times, the fullest. */
  tellingTime() {
    const [one, other] = this.courses.map(sample);
    const telling = one.waiting.map((waiting, at) => {
      const full = one.present[at] + (other?.present[at] ?? 0);
      return Math.abs(waiting - (other?.waiting[at] ?? 0)) + full / 2;
    });
    return (this.length * telling.indexOf(Math.max(...telling))) / (SAMPLES - 1);
  }

  /** The request of this time that fares most differently. */
  tellingRequest() {
    const [one, other] = this.courses;
    let [most, id] = [-1, one.name(0)];
    one.ids.forEach((name, at) => {
      const there = other?.places.get(String(name));
      if (there === undefined || !(one.at(at, this.time) || other.at(there, this.time))) return;
      const [ours, theirs] = [one.times(at), other.times(there)];
      const apart = Math.abs(ours.over - ours.came - theirs.over + theirs.came);
      if (apart > most) [most, id] = [apart, String(name)];
    });
    return id;
  }

  pick(id) {
    this.id = id;
    this.follow.show(id, this.courses);
    this.show();
  }

  seek(time) {
    this.time = Math.min(Math.max(time, 0), this.length);
    this.show();
  }

  toggle() {
    if (!this.playing && this.time >= this.length) this.time = 0;
    this.play(!this.playing);
  }

  play(on) {
    this.playing = on;
    say(this.button, on ? "Pause" : "Play");
    if (!on) return;
    let last = performance.now();
    const frame = (now) => {
      if (!this.playing) return;
      this.seek(this.time + (now - last) * Number(this.speed.value));
      last = now;
      if (this.time >= this.length) this.play(false);
      else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  resize() {
    // Squares have the same size on both sides.
    const [waiting, running] = [0, 1].map((part) => Math.max(...this.courses.map((course) => sample(course).most[part])));
    for (const side of this.sides) side.servers.forEach((lane) => lane.resize(waiting, running));
    this.drawStrip();
    this.show();
  }

  /** How many wait over the whole, a line for each arm, and its preemptions below. */
  drawStrip() {
    const ratio = devicePixelRatio || 1;
    const width = this.strip.parentElement.clientWidth;
    Object.assign(this.strip, { width: width * ratio, height: STRIP * ratio });
    const pen = this.strip.getContext("2d");
    pen.scale(ratio, ratio);
    const lines = this.courses.map((course) => sample(course).waiting);
    const most = Math.max(1, ...lines.flat());
    const floor = STRIP - 4 - 7 * lines.length;
    this.courses.forEach((course, side) => {
      pen.strokeStyle = ink(course.look.colour);
      pen.lineWidth = 1.6;
      pen.setLineDash(course.look.dash.map((part) => part * 1.6));
      pen.beginPath();
      lines[side].forEach((waiting, at) => pen.lineTo((width * at) / (SAMPLES - 1), floor - (floor - 4) * (waiting / most)));
      pen.stroke();
      pen.setLineDash([]);
      pen.fillStyle = ink(course.look.colour);
      for (const time of course.lost.time) pen.fillRect((width * time) / this.length, floor + 4 + 7 * side, 1, 5);
    });
  }

  show() {
    if (this.time === undefined) return;
    const speed = this.playing ? Number(this.speed.value) : 1;
    for (const side of this.sides) side.show(this.time, this.id, speed);
    this.follow.at(this.time);
    this.scrub.value = this.time;
    say(this.clock, `${clock(this.time)} of ${clock(this.length)}`);
  }
}

/** The replay, in its place on the page. */
export function replay() {
  const place = document.getElementById("replay");
  if (place && courses.length) place.replay = new Replay(place);
}
