// The numbers of the study, as Python left them in the page.

export const study = JSON.parse(document.getElementById("study").textContent);

const KINDS = { d: Float64Array, f: Float32Array, i: Int32Array, b: Uint8Array };
const decoded = new Map();

/** The array with this number; null without a number. */
export function array(at) {
  if (at === null || at === undefined) return null;
  let values = decoded.get(at);
  if (values === undefined) {
    const [kind, text] = study.arrays[at];
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    values = new KINDS[kind](bytes.buffer);
    decoded.set(at, values);
  }
  return values;
}

/** The last place in ascending `values` that is not above `value`; -1 if all are. */
export function place(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
