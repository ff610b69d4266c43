// Tables that can be sorted, and that draw as many rows as are looked at.

const AT_ONCE = 100;

/** A table; `columns` are {key, label, value, cell, numeric}, `rows` anything. */
class Table {
  constructor(holder, columns, onRow = null) {
    Object.assign(this, { holder, columns, onRow, sort: null, down: false, rows: [], shown: 0 });
    this.body = make("tbody");
    this.heads = columns.map((column) =>
      make(
        "th",
        { scope: "col", class: column.numeric ? "number" : null, "data-key": column.key },
        make("button", { type: "button", onclick: () => this.by(column) }, column.label),
      ),
    );
    this.rest = make("button", { class: "rest", type: "button", onclick: () => this.more() });
    this.table = make("table", {}, make("thead", {}, make("tr", {}, this.heads)), this.body);
    holder.replaceChildren(this.table, this.rest);
    new IntersectionObserver((seen) => seen.some((one) => one.isIntersecting) && this.more(), {
      rootMargin: "600px",
    }).observe(this.rest);
  }

  by(column) {
    this.down = this.sort === column ? !this.down : Boolean(column.numeric);
    this.sort = column;
    this.heads.forEach(
      (head, at) =>
        head.toggleAttribute("aria-sort", false) ||
        (this.columns[at] === column && head.setAttribute("aria-sort", this.down ? "descending" : "ascending")),
    );
    this.show(this.rows);
  }

  show(rows) {
    this.rows = rows;
    this.sorted = rows;
    if (this.sort) {
      const { value } = this.sort,
        sign = this.down ? -1 : 1;
      const keys = new Map(rows.map((row) => [row, value(row)]));
      this.sorted = [...rows].sort((one, other) => sign * compare(keys.get(one), keys.get(other)));
    }
    this.shown = 0;
    this.body.replaceChildren();
    this.more();
  }

  more(count = AT_ONCE) {
    const rows = this.sorted.slice(this.shown, this.shown + count);
    this.body.append(...rows.map((row) => this.line(row)));
    this.shown += rows.length;
    const left = this.sorted.length - this.shown;
    this.rest.hidden = !left;
    this.rest.textContent = `${many(left, "row")} more`;
  }

  line(row) {
    const cells = this.columns.map((column) => {
      const content = make("div", {}, column.cell ? column.cell(row) : String(column.value(row)));
      const kind = [column.numeric ? "number" : "", content.textContent ? "" : "empty"].join(" ").trim();
      return make("td", { "data-label": column.label, class: kind || null }, content);
    });
    return make("tr", this.onRow ? { class: "clickable", onclick: () => this.onRow(row) } : {}, cells);
  }
}

const compare = (one, other) =>
  typeof one === "number" && typeof other === "number"
    ? one - other
    : String(one).localeCompare(String(other), "en", { numeric: true });

const precisionCell = (node) =>
  node
    ? [
        badge(node.precision),
        node.asked && node.asked !== node.precision ? make("span", { class: "soft" }, ` (${node.asked})`) : "",
      ]
    : make("span", { class: "soft" }, "–");

function nodeColumns(graph) {
  const one = (key) => ({
    key,
    label: key,
    value: (entry) => anySide(entry)[key],
    cell: (entry) => named(anySide(entry)[key]),
  });
  const precisions =
    graph.sides.length === 1
      ? [
          {
            key: "precision",
            label: "precision",
            value: (entry) => anySide(entry).precision,
            cell: (entry) => precisionCell(anySide(entry)),
          },
        ]
      : [
          ...DATA.plans.map((plan, side) => ({
            key: `precision${side}`,
            label: plan.name,
            value: (entry) => entry.sides[side]?.precision ?? "",
            cell: (entry) => precisionCell(entry.sides[side]),
          })),
          {
            key: "change",
            label: "difference",
            value: (entry) => CHANGES[entry.change] ?? "",
            cell: (entry) => make("span", { class: entry.change ? "changedto" : null }, CHANGES[entry.change] ?? ""),
          },
        ];
  const order = { key: "order", label: "#", numeric: true, value: (entry) => entry.order };
  const place = {
    key: "rule",
    label: "rule",
    value: (entry) => shortPlace(anySide(entry).rule),
    cell: (entry) => make("code", { title: anySide(entry).rule }, shortPlace(anySide(entry).rule)),
  };
  const source = {
    key: "source",
    label: "line",
    value: (entry) => anySide(entry).source,
    cell: (entry) => make("code", { class: "soft", title: anySide(entry).source }, shortPlace(anySide(entry).source)),
  };
  const types = { key: "types", label: "gives", value: (entry) => typesOf(anySide(entry)) };
  const reason = { key: "reason", label: "reason", value: (entry) => anySide(entry).reason };
  const phase = graph.key === "step" ? [one("phase")] : [];
  return [order, one("name"), one("op"), one("module"), ...phase, ...precisions, types, place, reason, source];
}

const CAST_COLUMNS = [
  { key: "value", label: "value", value: (row) => row.cast.value.name, cell: (row) => named(row.cast.value.name) },
  { key: "src", label: "from", value: (row) => row.cast.src },
  { key: "dst", label: "to", value: (row) => row.cast.dst },
  {
    key: "bytes",
    label: "bytes",
    numeric: true,
    value: (row) => row.cast.bytes,
    cell: (row) => [make("i", { class: "size", style: `--share:${row.share}` }), bytes(row.cast.bytes)],
  },
  { key: "of", label: "of", value: (row) => ["a node", "an input", "stored data", "a cast"][row.cast.value.kind] },
  {
    key: "users",
    label: "for",
    value: (row) => row.users.length,
    cell: (row) =>
      row.users
        .slice(0, 8)
        .flatMap((name, at) => [at ? ", " : "", named(name)])
        .concat(row.users.length > 8 ? ` and ${row.users.length - 8} more` : []),
  },
  { key: "by", label: "by", value: (row) => (row.cast.own ? "the model" : "the plan") },
];

/** The casts of a graph, those of two plans with the names of the plans. */
function castRows(graph) {
  const rows = graph.sides.flatMap((side, number) => side.casts.map((cast) => ({ cast, side: number })));
  const most = Math.max(1, ...rows.map((row) => row.cast.bytes));
  const key = (row) => `${row.cast.value.name} ${row.cast.src} ${row.cast.dst}`;
  const seen = graph.sides.map((_, number) => new Set(rows.filter((row) => row.side === number).map(key)));
  for (const row of rows) {
    row.share = (row.cast.bytes / most).toFixed(4);
    row.users = row.cast.made
      ? [
          ...row.cast.made.readers.map(([node]) => node.name),
          ...(graph.sides[row.side].outputs.includes(row.cast.made) ? ["return"] : []),
        ]
      : [];
    row.only = seen.length > 1 && !seen[1 - row.side].has(key(row));
  }
  return seen.length < 2 ? rows : rows.filter((row) => row.side === 0 || row.only);
}

const castSide = {
  key: "in",
  label: "in",
  value: (row) => (row.only ? DATA.plans[row.side].name : "both"),
  cell: (row) =>
    make("span", { class: row.only ? "changedto" : "soft" }, named(row.only ? DATA.plans[row.side].name : "both")),
};

/** The rules that decided, with how many nodes each. */
function ruleRows(graph) {
  const rows = new Map();
  graph.sides.forEach((side, number) => {
    for (const node of side.nodes) {
      const key = `${node.rule}\n${node.reason.split("; ")[0]}`;
      if (!rows.has(key))
        rows.set(key, {
          rule: node.rule,
          reason: node.reason.split("; ")[0],
          counts: graph.sides.map(() => 0),
          precisions: new Set(),
        });
      rows.get(key).counts[number] += 1;
      rows.get(key).precisions.add(node.precision);
    }
  });
  return [...rows.values()].sort((one, other) => Math.max(...other.counts) - Math.max(...one.counts));
}

const ruleColumns = (graph) => [
  {
    key: "rule",
    label: "rule",
    value: (row) => shortPlace(row.rule),
    cell: (row) => make("code", { title: row.rule }, shortPlace(row.rule) || "none"),
  },
  ...graph.sides.map((_, side) => ({
    key: `nodes${side}`,
    label: graph.sides.length > 1 ? DATA.plans[side].name : "nodes",
    numeric: true,
    value: (row) => row.counts[side],
  })),
  {
    key: "precision",
    label: "runs in",
    value: (row) => [...row.precisions].sort().join(" "),
    cell: (row) => PRECISIONS.filter((one) => row.precisions.has(one)).flatMap((one) => [badge(one), " "]),
  },
  { key: "reason", label: "reason", value: (row) => row.reason },
];

const RANGE_COLUMNS = [
  { key: "name", label: "tensor", value: (row) => row.name, cell: (row) => named(row.name) },
  { key: "kind", label: "kind", value: (row) => row.kind },
  { key: "op", label: "op", value: (row) => row.op, cell: (row) => named(row.op) },
  { key: "module", label: "module", value: (row) => row.module, cell: (row) => named(row.module) },
  { key: "type", label: "type", value: (row) => row.type },
  {
    key: "range",
    label: "range",
    value: (row) =>
      Math.max(
        -150,
        ...Object.keys(row.stored)
          .filter((name) => /^-?\d+$/.test(name))
          .map(Number),
      ),
    cell: (row) => rangeOf(row.stored),
    numeric: true,
  },
  ...["fp16", "bf16"].flatMap((dtype) =>
    ["zero", "subnormal", "infinite"].map((name, at) => ({
      key: `${dtype}-${name}`,
      label: `${dtype} ${name}`,
      numeric: true,
      value: (row) => row.fractions[dtype][at],
      cell: (row) =>
        make("span", { class: row.fractions[dtype][at] > 0.001 ? "bad" : "soft" }, percent(row.fractions[dtype][at])),
    })),
  ),
];
