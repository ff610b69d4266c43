// Histograms of binary exponents, below the ranges of the 16-bit types.

const CHART = { width: 340, left: 40, right: 8, top: 46, bars: 96, bottom: 26 };

/** The exponents of one tensor, with what FP16 and BF16 hold of them. */
function histogram(row, counts) {
  const matches = exponentsOf(counts).map((exponent) => [exponent, counts[exponent]]);
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
  const lowest = Math.min(...matches.map(([exponent]) => exponent), -26),
    highest = Math.max(...matches.map(([exponent]) => exponent), 17);
  const step = (CHART.width - CHART.left - CHART.right) / (highest - lowest + 1);
  const x = (exponent) => CHART.left + (exponent - lowest) * step;
  const most = Math.max(1, ...matches.map(([, count]) => count));
  const floor = CHART.top + CHART.bars;
  const svg = draw("svg", {
    class: "histogram",
    viewBox: `0 0 ${CHART.width} ${floor + CHART.bottom}`,
    role: "img",
    "aria-label": `Exponents of ${row.name}, from ${lowest} to ${highest}`,
  });
  Object.entries(DATA.ranges).forEach(([dtype, [least, normal, greatest]], line) => {
    const y = 6 + 19 * line,
      inside = (exponent) => Math.max(lowest, Math.min(highest + 1, exponent));
    svg.append(draw("text", { class: "axis end", x: CHART.left - 5, y: y + 11 }, dtype));
    for (const [kind, from, to, words] of [
      ["subnormal", least, normal, "subnormal"],
      ["normal", normal, greatest + 1, "normal numbers"],
    ]) {
      const [a, b] = [x(inside(from)), x(inside(to))];
      if (b <= a) continue;
      const bar = draw("rect", { class: `range ${kind}`, x: a, y, width: b - a, height: 14 });
      bar.append(draw("title", {}, `${words} of ${dtype}: 2^${from} to 2^${to}`));
      svg.append(bar);
    }
  });
  for (const [exponent, count] of matches) {
    const height = Math.max(1, (CHART.bars * count) / most);
    const bar = draw("rect", {
      class: "column",
      x: x(exponent) + step * 0.08,
      y: floor - height,
      width: step * 0.84,
      height,
    });
    bar.append(draw("title", {}, `2^${exponent}: ${count.toLocaleString("en")}, ${percent(count / total)}`));
    svg.append(bar);
  }
  svg.append(draw("line", { class: "base", x1: CHART.left, x2: CHART.width - CHART.right, y1: floor, y2: floor }));
  svg.append(
    draw("text", { class: "axis end", x: CHART.left - 5, y: CHART.top + 8 }, percent(most / Math.max(1, total))),
  );
  const every = [5, 10, 20, 50].find((gap) => gap * step > 30);
  for (let exponent = Math.ceil(lowest / every) * every; exponent <= highest; exponent += every) {
    svg.append(draw("text", { class: "axis", x: x(exponent) + step / 2, y: floor + 14 }, `2${superscript(exponent)}`));
  }
  return svg;
}

const superscript = (number) =>
  [...String(number)].map((letter) => (letter === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(letter)])).join("");

/** The exponents that occur; beside them, zeros, infinities and NaN are counted. */
const exponentsOf = (counts) =>
  Object.keys(counts)
    .filter((name) => /^-?\d+$/.test(name))
    .map(Number);

/** The least and the greatest exponent, in words. */
function rangeOf(counts) {
  const matches = exponentsOf(counts);
  if (matches.length) return `2${superscript(Math.min(...matches))} to 2${superscript(Math.max(...matches))}`;
  return counts.infinite || counts.nan ? "nothing finite" : "only zeros";
}
const isDead = (row) => !exponentsOf(row.stored).length;

/** Histogram and what becomes of the numbers, as one block of the details. */
function measured(row) {
  const note = (...words) => make("p", { class: "soft" }, ...words);
  const special = ["zero", "infinite", "nan"].filter((name) => row.stored[name]);
  const words = { zero: "zeros", infinite: "infinite", nan: "NaN" };
  const counts = special.map((name) => `${row.stored[name].toLocaleString("en")} ${words[name]}`);
  const updates = row.updates && Object.entries(row.updates).map(([dtype, lost]) => `${percent(lost)} in ${dtype}`);
  const heads = ["would become", "zero", "subnormal", "infinite"];
  const lines = Object.entries(row.fractions).map(([dtype, parts]) => {
    const kind = (part) => (part > 0.001 ? "number bad" : "number");
    const cells = parts.map((part) => make("td", { class: kind(part) }, percent(part)));
    return make("tr", {}, make("th", {}, dtype), cells);
  });
  const head = heads.map((name, at) => make("th", { class: at ? "number" : null }, name));
  const name = row.kind.startsWith("weight") ? named(row.name) : "";
  const range = make("span", { class: "soft" }, ` ${row.dtype}, ${rangeOf(row.stored)}`);
  return make(
    "section",
    { class: "measured" },
    make("h4", {}, `${row.kind} `, name, range),
    row.exponents
      ? note("As it stood in the step, with the loss scale. Without it: ", rangeOf(row.exponents), ".")
      : null,
    histogram(row, row.stored),
    updates ? note(`Updates too small for a 16-bit weight: ${updates.join(", ")}.`) : null,
    counts.length ? note(`Beside them ${counts.join(", ")}.`) : null,
    make("table", { class: "lost" }, make("thead", {}, make("tr", {}, head)), make("tbody", {}, lines)),
  );
}
