// Tables that can be sorted, and that draw as many rows as are looked at.

const AT_ONCE = 100;

/** A table; `columns` are {label, value, cell, numeric}, `rows` anything; `differs` tells of two plans what to print. */
class Table {
  constructor(holder, columns, onRow = null, differs = null) {
    Object.assign(this, { holder, columns, onRow, differs, sort: null, down: false, rows: [], shown: 0 });
    this.body = make("tbody");
    this.heads = columns.map((column) =>
      make(
        "th",
        { scope: "col", class: column.numeric ? "number" : null, "data-key": column.label },
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

  show(rows, most = AT_ONCE) {
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
    this.more(most);
  }

  more(most = AT_ONCE) {
    const rows = this.sorted.slice(this.shown, this.shown + most);
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
    if (!this.onRow) return make("tr", {}, cells);
    const onclick = () => this.onRow(row);
    return make("tr", { class: "clickable", tabindex: "0", onclick, onkeydown: onEnter(onclick) }, cells);
  }
}

const compare = (one, other) =>
  typeof one === "number" && typeof other === "number"
    ? one - other
    : String(one).localeCompare(String(other), "en", { numeric: true });

const column = (label, value, cell = null) => ({ label, value, cell });
const numeric = (label, value, cell = null) => ({ label, value, cell, numeric: true });
/** A column of names, which may be broken. */
const names = (label, value) => column(label, value, (row) => named(value(row)));
/** A column of `file:line`, without the folders. */
const place = (label, value, kind = null) =>
  column(label, value, (row) => make("code", { class: kind, title: value(row) }, shortPlace(value(row))));

const precisionCell = (node, side) =>
  node
    ? [
        badge(node.precision, side),
        node.requested && node.requested !== node.precision ? make("span", { class: "soft" }, ` (${typeOf(node.requested, side)})`) : "",
      ]
    : make("span", { class: "soft" }, "–");

function nodeColumns(graph) {
  const of = (key) => (entry) => anySide(entry)[key];
  const precision = (label, side) =>
    column(label, (entry) => entry.sides[side]?.precision ?? "", (entry) => precisionCell(entry.sides[side], side));
  const change = (entry) => CHANGES[entry.change] ?? "";
  const precisions =
    graph.sides.length === 1
      ? [precision("precision", 0)]
      : [
          ...DATA.plans.map((plan, side) => precision(plan.name, side)),
          column("difference", change, (entry) =>
            make("span", { class: differs(entry) ? "changedto" : "soft" }, change(entry)),
          ),
        ];
  return [
    numeric("#", (entry) => entry.order),
    names("name", of("name")),
    names("op", of("op")),
    names("module", of("module")),
    ...(graph.key === "step" ? [names("phase", of("phase"))] : []),
    ...precisions,
    column("gives", (entry) => typesOf(anySide(entry))),
    place("rule", of("rule")),
    column("reason", of("reason")),
    place("line", of("source"), "soft"),
  ];
}

function castColumns(graph) {
  const plan = (row) => (row.only ? DATA.plans[row.side].name : "both");
  const users = (row) => [
    ...row.users.slice(0, 8).flatMap((name, at) => [at ? ", " : "", named(name)]),
    row.users.length > 8 ? ` and ${row.users.length - 8} more` : "",
  ];
  return [
    names("value", (row) => row.cast.value.name),
    column("from", (row) => row.cast.src),
    column("to", (row) => row.cast.dst),
    numeric(
      "bytes",
      (row) => row.cast.bytes,
      (row) => bytes(row.cast.bytes),
    ),
    column("of", (row) => ["a node", "an input", "stored data", "a cast"][row.cast.value.kind]),
    column("for", (row) => row.users.length, users),
    column("by", (row) => (row.cast.explicit ? "the model" : "the plan")),
    ...(graph.sides.length > 1
      ? [column("in", plan, (row) => make("span", { class: row.only ? "changedto" : "soft" }, named(plan(row))))]
      : []),
  ];
}

/** The casts of a graph, those of two plans with the names of the plans. */
function castRows(graph) {
  const rows = graph.sides.flatMap((side, number) => side.casts.map((cast) => ({ cast, side: number })));
  const key = (row) => `${row.cast.value.name} ${row.cast.src} ${row.cast.dst}`;
  const seen = graph.sides.map((_, number) => new Set(rows.filter((row) => row.side === number).map(key)));
  for (const row of rows) {
    row.users = row.cast.entry
      ? [
          ...row.cast.entry.readers.map(([node]) => node.name),
          ...(graph.sides[row.side].outputs.includes(row.cast.entry) ? ["return"] : []),
        ]
      : [];
    row.only = seen.length > 1 && !seen[1 - row.side].has(key(row));
  }
  return seen.length < 2 ? rows : rows.filter((row) => row.side === 0 || row.only);
}

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
  column(
    "rule",
    (row) => shortPlace(row.rule),
    (row) => make("code", { title: row.rule }, shortPlace(row.rule) || "none"),
  ),
  ...graph.sides.map((_, side) =>
    numeric(graph.sides.length > 1 ? DATA.plans[side].name : "nodes", (row) => row.counts[side]),
  ),
  column(
    "runs in",
    (row) => [...row.precisions].sort().join(" "),
    (row) => PRECISIONS.filter((one) => row.precisions.has(one)).flatMap((one) => [badge(one), " "]),
  ),
  column("reason", (row) => row.reason),
];

const RANGE_COLUMNS = [
  names("tensor", (row) => row.name),
  column("kind", (row) => row.kind),
  names("op", (row) => row.op),
  names("module", (row) => row.module),
  column("type", (row) => row.dtype),
  numeric(
    "range",
    (row) => Math.max(-150, ...exponentsOf(row.stored)),
    (row) => make("span", { class: isDead(row) ? "bad" : null }, rangeOf(row.stored)),
  ),
  ...["fp16", "bf16"].flatMap((dtype) =>
    ["zero", "subnormal", "infinite"].map((name, at) =>
      numeric(
        `${dtype} ${name}`,
        (row) => row.fractions[dtype][at],
        (row) =>
          make("span", { class: row.fractions[dtype][at] > 0.001 ? "bad" : "soft" }, percent(row.fractions[dtype][at])),
      ),
    ),
  ),
];
