// Making elements out of names that a model has given: as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const SERIFLESS = 'system-ui, "Segoe UI", "Noto Sans", sans-serif';
const [TITLE, SMALL] = [`600 13px ${SERIFLESS}`, `11px ${SERIFLESS}`];
const ruler = document.createElement("canvas").getContext("2d");
const measuredWidths = new Map();

/** How wide a text is drawn, in pixels. */
function widthOf(text, font = SMALL) {
  const key = font + text;
  if (!measuredWidths.has(key)) {
    ruler.font = font;
    measuredWidths.set(key, Math.ceil(ruler.measureText(text).width));
  }
  return measuredWidths.get(key);
}

/** An element with attributes and children, in lists within lists or not; texts become text nodes. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** The same for SVG. */
function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A name that may be broken behind a dot, an underscore, a slash or a colon, and nowhere else. */
function named(text) {
  const parts = text.split(/(?<=[._/:])(?=[^._/:])/);
  return make(
    "span",
    { class: "name" },
    parts.flatMap((part, place) => (place ? [make("wbr"), part] : [part])),
  );
}

/** The end of a long name, cut where it may be broken; its last word is shown whole, where that is not far too long. */
function shortened(text, most) {
  if (text.length <= most) return text;
  const starts = [...text.matchAll(/(?<=[._/:])[^._/:]/g)].map((matches) => matches.index);
  const start = starts.find((place) => text.length - place < most) ?? starts.at(-1);
  const end = start === undefined ? text : `…${text.slice(start)}`;
  return end.length > 2 * most ? `…${end.slice(-most)}` : end;
}

/** Bytes for people, in powers of 1024. */
function bytes(count) {
  if (count < 1024) return `${count} B`;
  for (const unit of ["KiB", "MiB", "GiB"]) {
    count /= 1024;
    if (count < 1024) return `${count.toFixed(1)} ${unit}`;
  }
  return `${(count / 1024).toFixed(1)} TiB`;
}

const many = (count, one) => `${count.toLocaleString("en")} ${one}${count === 1 ? "" : "s"}`;
const shortPlace = (path) => path.slice(Math.max(path.lastIndexOf("/"), path.lastIndexOf("\\")) + 1);
const shortOp = (op) => op.slice(op.indexOf(".") + 1) || op;

/** A fraction as percent; what is not nothing never reads as nothing, nor what is not all as all. */
function percent(fraction) {
  if (!fraction || fraction === 1) return fraction ? "100 %" : "0 %";
  if (fraction < 0.0001) return "< 0.01 %";
  return `${(100 * Math.min(fraction, 0.9999)).toPrecision(fraction > 0.999 ? 4 : fraction > 0.99 ? 3 : 2)} %`;
}

/** A precision as the type that it is in one of the plans, or in all. */
const typeOf = (precision, side = null) =>
  precision !== "low" ? precision : (DATA.plans[side]?.type ?? [...new Set(DATA.plans.map(({ type }) => type))].join("/"));
/** The same with its sign, which tells it apart without colour. */
const badge = (precision, side, ...words) =>
  make("span", { class: `badge ${precision}` }, ...words, typeOf(precision, side));

/** Hears keys: Enter and the space bar do what a click does. */
const onEnter = (act) => (event) => {
  if (event.key !== "Enter" && event.key !== " ") return;
  event.preventDefault();
  act();
};
