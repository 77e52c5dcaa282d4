// What the requests and servers of one arm did, at any time of the replay.

import { array, place, study } from "./data.js";
import { seconds } from "./words.js";

/** A time of the replay as one of the run. */
export const clock = (time) => seconds(study.replay.begin * 1000 + time);

const WAITS = new Set(["queued", "preempted", "swapped out", "rejected"]);

export class Course {
  constructor(packed) {
    Object.assign(this, { ids: packed.ids, size: packed.size, look: study.arms[packed.arm] });
    for (const name of ["client", "arrival", "prompt", "output", "sequences", "server", "first", "kind", "end", "finished"]) {
      this[name] = array(packed[name]);
    }
    this.lost = Object.fromEntries(Object.entries(packed.lost).map(([name, at]) => [name, array(at)]));
    this.before = new Map(packed.before);
    this.places = new Map(packed.ids.map((id, at) => [String(id), at]));
    this.servers = packed.servers.map(({ name, total, time, used }) => ({ name, total, time: array(time), used: array(used) }));
    if (!this.servers.length) this.servers = [{ name: "", total: 0 }]; // seen from outside
  }

  name(at) {
    return String(this.ids[at]);
  }

  /** The stages of a request. */
  *stages(at) {
    let begin = this.arrival[at];
    for (let stage = this.first[at]; stage < this.first[at + 1]; stage++) {
      const kind = study.replay.stages[this.kind[stage]];
      yield { kind, waits: WAITS.has(kind), begin, end: this.end[stage] };
      begin = this.end[stage];
    }
  }

  /** A request at a time: its stage, its server, and its tokens; null before it came and after. */
  at(request, time) {
    if (time < this.arrival[request] || time >= this.end[this.first[request + 1] - 1]) return null;
    let decoded = 0, whole = 0, now = null;
    for (const stage of this.stages(request)) {
      const long = stage.end - stage.begin;
      const done = Math.min(Math.max(time - stage.begin, 0), long);
      if (stage.kind === "decode") {
        decoded += done;
        whole += long;
      }
      if (!now && time < stage.end) now = { kind: stage.kind, waits: stage.waits, share: done / long };
    }
    const prompt = this.prompt[request];
    const output = whole ? (this.output[request] * decoded) / whole : 0;
    const all = prompt + output * this.sequences[request];
    const computes = now.kind === "prefill again" || (now.kind === "prefill" && !decoded);
    const server = now.kind !== "on the way" && !decoded ? this.before.get(request) : undefined;
    return {
      request, ...now, computes, output: Math.floor(output),
      server: server ?? this.server[request],
      tokens: now.waits ? 0 : computes ? all * now.share : all,
    };
  }

  /** All requests at a time, by server: those that wait and those that run, by arrival. */
  now(time) {
    const servers = this.servers.map(() => ({ waiting: [], running: [] }));
    for (let request = 0; request < this.arrival.length && this.arrival[request] <= time; request++) {
      const one = this.at(request, time);
      if (one && servers[one.server]) servers[one.server][one.waits ? "waiting" : "running"].push(one);
    }
    return servers;
  }

  /** Blocks in use at a time, as they were recorded; null if they were not. */
  used(server, time) {
    const { time: times, used } = this.servers[server];
    const at = times ? place(times, time) : -1;
    return at < 0 ? (times ? 0 : null) : used[at];
  }

  /** How many preemptions there were until a time. */
  losses(time) {
    return place(this.lost.time, time) + 1;
  }

  /** When a request came, had its first token, and ended; NaN where it did not. */
  times(request) {
    const stages = [...this.stages(request)];
    const first = stages.find(({ kind }) => kind === "prefill" || kind === "decode");
    const over = this.finished[request] ? stages.at(-1).end : NaN;
    const began = first?.kind === "prefill" ? first.end : first?.begin;
    return { came: this.arrival[request], began: began ?? NaN, over, stages };
  }
}

/** All courses of the page. */
export const courses = study.replay?.courses.map((packed) => new Course(packed)) ?? [];
