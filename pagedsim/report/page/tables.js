// Tables that are sorted by their heads, and show only the arms and clients that are shown.

import { study } from "./data.js";
import { shown } from "./shown.js";
import { make } from "./words.js";

const NEXT = { none: "descending", descending: "ascending", ascending: "none" };
const UNITS = { µs: 1e-6, ms: 1e-3, k: 1e3, M: 1e6, G: 1e9 };

/** What a cell is sorted by: its exact value, or the number that its text begins with, or its text. */
function value(cell) {
  if (cell === undefined) return null;
  if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
  const text = cell.textContent.trim().replaceAll("−", "-").replaceAll(/(?<=\d),(?=\d{3})/g, "");
  const found = /^[-+×±]?\s*(-?\d+(?:\.\d+)?)\s*(µs|ms|k|M|G)?/.exec(text);
  if (found) return (text[0] === "-" ? -1 : 1) * Number(found[1]) * (UNITS[found[2]] ?? 1);
  return text === "–" || text === "" ? null : text;
}

/** Ascending; what has no value is last in either direction. */
function compare(a, b, way) {
  if (a === null || b === null) return (a === null) - (b === null);
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return way === "descending" ? -order : order;
}

class Sorted {
  constructor(table) {
    this.heads = [...table.tHead.rows[0].cells];
    this.body = table.tBodies[0];
    // Rows are sorted within their group, whose title stays above them.
    this.groups = [];
    for (const row of this.body.rows) {
      if (row.classList.contains("group") || !this.groups.length) this.groups.push({ title: null, rows: [] });
      if (row.classList.contains("group")) this.groups.at(-1).title = row;
      else this.groups.at(-1).rows.push(row);
    }
    if (Math.max(...this.groups.map(({ rows }) => rows.length)) < 2) return;
    this.heads.forEach((head, at) => {
      const button = make("button", "sort", ...head.childNodes);
      button.type = "button";
      head.setAttribute("aria-sort", "none");
      head.append(button);
      button.addEventListener("click", () => this.sort(at, NEXT[head.getAttribute("aria-sort")]));
    });
  }

  sort(at, way) {
    this.heads.forEach((head, other) => head.setAttribute("aria-sort", other === at ? way : "none"));
    for (const { title, rows } of this.groups) {
      const keyed = rows.map((row) => [value(row.cells[at]), row]);
      if (way !== "none") keyed.sort(([a], [b]) => compare(a, b, way));
      this.body.append(...(title ? [title] : []), ...keyed.map(([, row]) => row));
    }
  }
}

/** Give all tables of results their heads, and hide rows and marks with their arm or client. */
export function tables() {
  for (const table of document.querySelectorAll("table.results")) new Sorted(table);
  const arms = new Map(study.arms.map(({ name }, at) => [name, at]));
  const clients = new Map(study.clients.map(({ name }, at) => [name, at]));
  const rows = [...document.querySelectorAll("tr[data-arm], tr[data-client]")].map((row) => [
    row, arms.get(row.dataset.arm) ?? null, clients.get(row.dataset.client) ?? null,
  ]);
  const marks = document.querySelectorAll("g[data-arm]"); // in plots that are no charts
  shown.listen(() => {
    for (const one of marks) one.style.display = shown.has("arms", Number(one.dataset.arm)) ? "" : "none";
    for (const [row, arm, client] of rows) {
      row.hidden = !shown.has("arms", arm) || !shown.has("clients", client);
    }
  });
}
