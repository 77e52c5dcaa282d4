// Elements, numbers as people read them, and the colours of the paper.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });

/** 12,345 */
export const whole = (number) => WHOLE.format(number);

/** Four significant digits, and all digits before the point. */
export const number = (value) => (Math.abs(value) >= 1000 ? whole(value) : SHORT.format(value));

/** Milliseconds as seconds. */
export const seconds = (ms) => `${ms >= 99950 ? whole(ms / 1000) : (ms / 1000).toFixed(ms < 9995 ? 2 : 1)} s`;

/** A new element with classes, and what is in it. */
export function make(tag, classes = "", ...inside) {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  element.append(...inside);
  return element;
}

/** Change an element's text only where it differs. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const papers = new Map();

/** The value of one of the page's CSS variables, on the paper of now. */
export function ink(name) {
  if (!papers.has(name)) {
    papers.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  }
  return papers.get(name);
}

/** Whether the paper is dark. */
export const isDark = () => dark.matches;

/** Call `changed` when the reader changes between light and dark. */
export function whenRepainted(changed) {
  dark.addEventListener("change", () => {
    papers.clear();
    changed();
  });
}
