// A steady colour for each request, by its id, on light and on dark paper.

const HUES = 18;
const LIGHT = [[0.64, 0.085], [0.71, 0.09], [0.78, 0.08]]; // lightness and chroma
const DARK = [[0.55, 0.085], [0.63, 0.09], [0.71, 0.08]];

const dark = matchMedia("(prefers-color-scheme: dark)");
let palette = [];
let paper = {};
const known = new Map();

function paint() {
  palette = [];
  for (const [light, chroma] of dark.matches ? DARK : LIGHT) {
    for (let hue = 0; hue < HUES; hue++) palette.push(`oklch(${light} ${chroma} ${hue * 20 + 12})`);
  }
  const style = getComputedStyle(document.documentElement);
  paper = {};
  for (const name of ["ink", "free", "cached", "hatch", "card"]) {
    paper[name] = style.getPropertyValue(`--${name}`).trim();
  }
  known.clear();
}

/** FNV-1a over the letters of an id. */
function hash(id) {
  let value = 2166136261;
  for (let at = 0; at < id.length; at++) {
    value = Math.imul(value ^ id.charCodeAt(at), 16777619);
  }
  return (value ^ (value >>> 15)) >>> 0;
}

/** The colour of a request. */
export function colourOf(id) {
  let colour = known.get(id);
  if (colour === undefined) {
    if (known.size > 20000) known.clear();
    colour = palette[hash(id) % palette.length];
    known.set(id, colour);
  }
  return colour;
}

/** The page's own colours: ink, free, cached, hatch, card. */
export const papers = () => paper;

/** Call `changed` when the reader changes between light and dark. */
export function whenRepainted(changed) {
  dark.addEventListener("change", () => {
    paint();
    changed();
  });
}

paint();
