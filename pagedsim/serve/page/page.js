// The live page: snapshots come in, the parts show them.

import { Ask } from "./ask.js";
import { choice } from "./choice.js";
import { whenRepainted } from "./colour.js";
import { Feed } from "./feed.js";
import { gauges, totals } from "./gauges.js";
import { Grid } from "./grid.js";
import { queues } from "./queues.js";
import { make, say, short, timed, whole } from "./words.js";

const find = (id) => document.getElementById(id);

const grid = new Grid(find("grid"), find("tip"));
const watch = () => feed.watch([...new Set([choice.mine, choice.pinned].filter(Boolean))]);
const ask = new Ask({
  form: find("ask"), send: find("send"), stop: find("stop"), standing: find("standing"),
  stages: find("stages"), answer: find("answer"), keyField: find("key-field"),
}, watch);
const parts = [about, lag, memory, gauges(find("gauges")), queues(find("queues")), totals(find("totals")),
  (now) => grid.show(now), (now) => ask.show(now)];

const feed = new Feed((now) => parts.forEach((part) => part(now)), link);
choice.listen(watch);
whenRepainted(() => {
  grid.resize();
  choice.set({});
});

function link(state, words) {
  const element = find("link");
  element.dataset.state = state;
  say(element, words);
  find("main").classList.toggle("stale", state === "lost" || state === "failed");
}

function about(now) {
  const facts = { model: now.model, backend: now.backend, policy: now.policy };
  if (now.speed && now.speed !== 1) facts.speed = `× ${now.speed}`;
  const key = JSON.stringify(facts);
  const place = find("about");
  if (place.dataset.key !== key) {
    place.dataset.key = key;
    place.replaceChildren(...Object.entries(facts).map(([name, value]) => {
      const pair = make("div");
      pair.append(make("dt", "", name), make("dd", "", String(value)));
      return pair;
    }));
  }
  const title = `${whole(now.running.count)} running · pagedsim`;
  if (document.title !== title) document.title = title;
}

function lag({ lag_ms }) {
  const late = lag_ms >= 100;
  find("lag").hidden = !late;
  if (late) say(find("lag"), `This machine is too slow for the load: tokens come ${timed(lag_ms)} after they are due, and latencies are not the model's.`);
}

function memory({ blocks }) {
  const words = [
    `${whole(blocks.used)} of ${whole(blocks.total)} in use`,
    `${((100 * blocks.used) / blocks.total).toFixed(0)} %`,
    `${short(blocks.shared)} shared`,
    `${short(blocks.cached)} cached`,
  ];
  say(find("memory-figures"), words.join("  ·  "));
  const cell = blocks.cell === 1
    ? `A cell is a block of ${blocks.size} tokens, in the colour of the request that holds it.`
    : `A cell is ${blocks.cell} blocks of ${blocks.size} tokens, filled as far as they are in use, in the colour of the request that holds most of them.`;
  say(find("memory-caption"), `${cell} Point at a cell or a row to see whose it is; click to keep it.`);
  find("grid").setAttribute("aria-label", `KV blocks: ${words.join(", ")}. Arrow keys move over the cells.`);
}
