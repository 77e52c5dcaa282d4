// Numbers and names as people read them.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

/** 12,345 */
export const whole = (number) => WHOLE.format(number);

/** 12.3K */
export const short = (number) => (number < 10000 ? whole(number) : SHORT.format(number));

/** A rate, with a digit behind the point where it is small. */
export const rate = (number) => (number >= 10 || number === 0 ? short(number) : number.toFixed(1));

/** Milliseconds as [number, unit]. */
export function time(ms) {
  if (ms === null || ms === undefined) return ["–", ""];
  if (ms >= 100000) return [whole(ms / 1000), "s"];
  if (ms >= 1000) return [(ms / 1000).toFixed(ms >= 10000 ? 1 : 2), "s"];
  return [ms >= 100 ? whole(ms) : ms.toFixed(1), "ms"];
}

/** The same in one word. */
export const timed = (ms) => time(ms).join(" ").trim();

/** One request, several requests. */
export const count = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

/** An id that fits into a column: its beginning and its end. */
export const brief = (id) => (id.length > 15 ? `${id.slice(0, 8)}…${id.slice(-5)}` : id);

/** Change an element's text only where it differs, so that nothing is laid out in vain. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A new element with classes and text. */
export function make(tag, classes = "", text = "") {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  if (text) element.textContent = text;
  return element;
}
