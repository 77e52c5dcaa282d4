// Figures of lines as charts: values under the pointer, and only what is shown.

import { array, place, study } from "./data.js";
import { mark, shown } from "./shown.js";
import { ink, make, number, whenRepainted } from "./words.js";

const CELLS = 150000; // values of a panel up to which every x of a line is one of the chart
const GRID = 600; // else so many x, evenly
const DOTS = 40; // points of a line up to which each is marked
const NEAREST = 8; // lines whose values are told under the pointer
const HEIGHT = 190;
const FONT = "12px system-ui, sans-serif";

class Line {
  constructor({ arm, client, x, y, low, high, until }, byArm) {
    Object.assign(this, { arm, client, until });
    [this.x, this.y, this.low, this.high] = [x, y, low, high].map(array);
    this.look = byArm ? study.arms[arm] : study.clients[client];
    this.look ??= study.arms[0];
    this.name = this.look.name || "unnamed client";
  }

  get shown() {
    return shown.has("arms", this.arm) && shown.has("clients", this.client);
  }

  /** Its value at an x, between two points on the line through them; null beyond its ends. */
  at(x) {
    const { x: xs, y: ys, until } = this;
    const from = place(xs, x);
    if (from < 0) return null;
    if (until !== null) return x <= until ? ys[from] : null;
    if (xs[from] === x || from === xs.length - 1) return xs[from] === x ? ys[from] : null;
    return ys[from] + ((ys[from + 1] - ys[from]) * (x - xs[from])) / (xs[from + 1] - xs[from]);
  }
}

/** The x of a chart, common to its lines. */
function common(lines, { log, limits }) {
  const every = new Set();
  for (const { x, until } of lines) {
    x.forEach((value) => every.add(value));
    if (until !== null) every.add(until);
  }
  const xs = [...every].sort((a, b) => a - b);
  if (xs.length * lines.length <= CELLS || xs.length <= GRID) return xs;
  const scale = log ? Math.log : (value) => value;
  const back = log ? Math.exp : (value) => value;
  const [low, high] = (limits ?? [xs[0], xs.at(-1)]).map(scale);
  return Array.from({ length: GRID }, (_, at) => back(low + ((high - low) * at) / (GRID - 1)));
}

const text = ({ label, unit }) => (unit ? `${label} (${unit})` : label);
const withUnit = (value, { unit }) => `${number(value)}${unit ? ` ${unit}` : ""}`;
const named = (value, axis) => axis.ticks.get(value) ?? withUnit(value, axis);

class Chart {
  constructor(panel, figure) {
    this.panel = panel;
    for (const axis of [panel.x, panel.y]) axis.ticks = new Map(axis.ticks);
    const several = new Set(panel.series.map(({ arm }) => arm)).size > 1;
    const byArm = several || new Set(panel.series.map(({ client }) => client)).size < 2;
    this.lines = panel.series.map((series) => new Line(series, byArm));
    this.tip = make("div", "tip");
    this.tip.hidden = true;
    this.plot = make("div", "plot");
    const told = panel.title.toLowerCase().includes(panel.y.label.toLowerCase());
    const what = told ? panel.y.unit.replace("%", "") : text(panel.y);
    const keys = byArm ? [] : this.lines.map(({ look, name }) => make("span", "key", mark(look), name));
    this.element = make("div", "chart", make("h3", "", panel.title, make("small", "", what, ...keys)), this.plot);
    this.figure = figure;
  }

  /** Draw it, once. */
  draw() {
    const xs = common(this.lines, this.panel.x);
    const data = [xs, ...this.lines.map((line) => xs.map((x) => line.at(x)))];
    this.chart = new uPlot(this.options(), data, this.plot);
    this.chart.over.append(this.tip);
    this.show();
    new ResizeObserver(() => this.chart.setSize(this.size())).observe(this.plot);
  }

  size() {
    return { width: Math.max(this.plot.clientWidth, 120), height: HEIGHT };
  }

  options() {
    const { x, y } = this.panel;
    const step = uPlot.paths.stepped({ align: 1 });
    return {
      ...this.size(),
      legend: { show: false },
      padding: [8, 10, 0, 0],
      cursor: { y: false, points: { size: 7 }, sync: this.figure.below ? { key: this.figure.name } : {} },
      scales: {
        x: { time: false, distr: x.log ? 3 : 1, range: (_, low, high) => this.span(low, high) },
        y: { distr: y.log ? 3 : 1, ...(y.log ? {} : { range: (_, low, high) => this.reach(low, high) }) },
      },
      axes: [this.axis(x, this.figure.labelled(this)), this.axis(y, false)],
      series: [{}, ...this.lines.map((line) => ({
        stroke: () => ink(line.look.colour),
        dash: line.look.dash.map((part) => part * 1.5 * devicePixelRatio),
        width: 1.6,
        spanGaps: true,
        points: { show: line.x.length <= DOTS, size: 6 },
        ...(line.until === null ? {} : { paths: step }),
      }))],
      hooks: {
        drawClear: [(chart) => this.shade(chart)],
        draw: [(chart) => this.bars(chart)],
        setCursor: [(chart) => this.tell(chart)],
      },
    };
  }

  axis(axis, labelled) {
    const places = [...axis.ticks.keys()];
    const unit = axis.unit === "%" ? " %" : "";
    const tens = (_, splits) => splits.map((value) => (Number.isInteger(Math.log10(value)) ? value : null));
    const lines = { stroke: () => ink("--grid"), width: 1, ...(axis.log ? { filter: tens } : {}) };
    return {
      stroke: () => ink("--muted"), font: FONT, gap: 4, size: axis === this.panel.x ? 24 : 48,
      ...(labelled ? { label: text(axis), labelSize: 20, labelFont: FONT } : {}),
      grid: lines, ticks: { ...lines, size: 4 },
      values: (_, splits) => splits.map((value) => (value === null ? "" : (axis.ticks.get(value) ?? number(value) + unit))),
      ...(places.length ? { splits: places } : {}),
    };
  }

  /** The ends of the x axis, with some air about single points. */
  span(low, high) {
    const { limits, log } = this.panel.x;
    const air = log || !this.lines.some(({ x }) => x.length <= DOTS) ? 0 : (high - low) / 30;
    return limits ?? [low - air, high + air];
  }

  /** The ends of the y axis: 0, unless values are below, and some air above. */
  reach(low, most) {
    if (low === null) return [0, 1];
    const tops = this.lines.filter((line) => line.high && line.shown).flatMap((line) => [...line.high]);
    const high = Math.max(most, ...tops.filter(Number.isFinite).map((top) => Math.min(top, 2 * most)));
    if (this.panel.y.unit === "%" && high > 50 && high <= 100) return [Math.min(low, 0), 102];
    return [Math.min(low, 0), high > 0 ? high * 1.06 : 1];
  }

  shade(chart) {
    chart.ctx.fillStyle = ink("--grid");
    for (const [begin, end] of this.panel.shaded) {
      const [left, right] = [begin, end].map((x) => chart.valToPos(x, "x", true));
      chart.ctx.fillRect(left, chart.bbox.top, right - left, chart.bbox.height);
    }
  }

  /** Intervals about the points. */
  bars({ ctx, valToPos }) {
    ctx.lineWidth = 1.5 * devicePixelRatio;
    for (const { low, high, x, look } of this.lines.filter((line) => line.low && line.shown)) {
      ctx.strokeStyle = ink(look.colour);
      ctx.beginPath();
      x.forEach((value, at) => {
        if (!(high[at] > low[at])) return;
        const across = valToPos(value, "x", true);
        ctx.moveTo(across, valToPos(low[at], "y", true));
        ctx.lineTo(across, valToPos(high[at], "y", true));
      });
      ctx.stroke();
    }
  }

  /** The values under the pointer. */
  tell(chart) {
    const { idx, left, top } = chart.cursor;
    const away = idx === null || idx === undefined || left < 0 || !this.plot.matches(":hover");
    this.tip.hidden = away;
    if (away) return;
    const x = chart.data[0][idx];
    const values = this.lines.filter((line) => line.shown)
      .map((line) => [line, line.at(x)]).filter(([, value]) => value !== null && !Number.isNaN(value));
    const far = ([, value]) => Math.abs(chart.valToPos(value, "y") - top);
    const near = [...values].sort((a, b) => far(a) - far(b)).slice(0, NEAREST);
    const rows = values.filter((one) => near.includes(one)).map(([line, value]) => {
      const at = place(line.x, x);
      const sure = line.low && line.high[at] > line.low[at]
        ? ` (${number(line.low[at])} to ${number(line.high[at])})` : "";
      return make("div", "", mark(line.look), make("span", "", line.name), make("b", "", withUnit(value, this.panel.y) + sure));
    });
    const rest = values.length - rows.length;
    this.tip.replaceChildren(make("strong", "", named(x, this.panel.x)), ...rows, ...(rest ? [`and ${rest} more`] : []));
    const right = left > chart.over.clientWidth / 2;
    this.tip.style.left = right ? "" : `${left + 12}px`;
    this.tip.style.right = right ? `${chart.over.clientWidth - left + 12}px` : "";
    this.tip.style.top = `${Math.min(top, 40)}px`;
  }

  /** Show the lines that are to be shown; without any, hide the panel. */
  show() {
    const some = this.lines.some((line) => line.shown);
    this.element.hidden = !some;
    if (!this.chart || !some) return;
    this.chart.batch(() => this.lines.forEach((line, at) => {
      if (this.chart.series[at + 1].show !== line.shown) this.chart.setSeries(at + 1, { show: line.shown });
    }));
  }
}

/** Charts in place of all figures whose numbers are known. */
export function charts() {
  const all = [];
  for (const [name, { panels, across }] of Object.entries(study.figures)) {
    const figure = document.getElementById(`figure-${name}`);
    const below = across === 1; // panels over the same x
    const labelled = (chart) => !below || chart === some.at(-1);
    const some = panels.map((panel) => new Chart(panel, { name, below, labelled }));
    const place = make("div", "charts", ...some.map(({ element }) => element));
    place.style.setProperty("--across", Math.min(across, panels.length));
    figure.querySelector(".scroll").before(place);
    figure.classList.add("live");
    all.push(...some);
  }
  const waiting = [...all];
  const next = () => {
    waiting.shift()?.draw();
    if (waiting.length) setTimeout(next); // one at a time, so that the page can be read meanwhile
  };
  next();
  shown.listen(() => all.forEach((chart) => chart.show()));
  whenRepainted(() => all.forEach(({ chart }) => chart?.redraw(false, true)));
}
