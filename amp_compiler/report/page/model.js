// The data of the page, read back into nodes, values and casts that know one another. `page_data.py` writes it.

const DATA = JSON.parse(document.getElementById("data").textContent);
const PRECISIONS = ["low", "fp32", "keep"];
const [NODE, INPUT, STORED, CAST] = [0, 1, 2, 3];
const FEW_OUTPUTS = 4; // results that are drawn by themselves

/** Rows, from columns that say each value once. */
function rowsOf(columns) {
  const names = Object.keys(columns);
  const row = (_, at) => Object.fromEntries(names.map((name) => [name, columns[name][0][columns[name][1][at]]]));
  return names.length ? columns[names[0]][1].map(row) : [];
}

/** One plan's side of a graph, or a step: its nodes, values and casts. */
function readSide({ inputs, stored = [], ...rows }) {
  const [nodes, casts, values] = [rowsOf(rows.nodes), rowsOf(rows.casts), []];
  const [byName, reads] = [new Map(), new Map()];
  const make = (name, type, kind, maker = null) => {
    values.push({ index: values.length, name, type, kind, maker, readers: [] });
    return values.at(-1);
  };
  const declare = (name, ...rest) => byName.set(name, make(name, ...rest)).get(name); // of two the later one is read
  const read = (name, type = "") => byName.get(name) ?? declare(name, type, STORED);
  for (const [name, type] of inputs) declare(name, type, INPUT);
  for (const [name, type] of stored) declare(name, type, STORED);
  for (const node of nodes) node.makes = node.outputs.map(([name, type]) => declare(name, type, NODE, node));
  for (const cast of casts) if (cast.name) cast.entry = declare(cast.name, cast.dst, CAST, cast); // one of a step
  for (const cast of casts) {
    cast.value = read(cast.value, cast.src);
    if (cast.name) continue;
    const past = cast.src === cast.dst; // read past an upcast: nothing is cast
    cast.entry = cast.explicit || past ? null : make(cast.value.name, cast.dst, CAST, cast);
    if (!cast.explicit || past)
      for (const [user, place] of cast.users) reads.set(`${place} ${user}`, cast.entry ?? cast.value);
  }
  const readBy = (user, names) => names.map((name, place) => reads.get(`${place} ${user}`) ?? read(name));
  for (const node of nodes) {
    node.reads = readBy(node.name, node.inputs);
    node.reads.forEach((value, place) => value.readers.push([node, place]));
  }
  return { nodes, values, casts: casts.filter(({ src, dst }) => src !== dst), outputs: readBy("return", rows.outputs) };
}

/** Where a value comes from, and the casts on the way from there. */
function originOf(value) {
  const casts = [];
  let at = value;
  while (at.kind === CAST) {
    casts.unshift(at.maker);
    at = at.maker.value;
  }
  return { value: at, casts };
}

/** A graph with one entry for each node of either plan, so that two plans have one layout. */
class Graph {
  constructor(rows) {
    this.key = rows.key;
    this.sides = rows.sides.map(readSide);
    this.entries = [];
    this.byName = new Map();
    this.edges = this.sides.map(() => []);
    this.crowded = rows.sides.some(({ outputs }) => outputs.length > FEW_OUTPUTS);
    this.sides.forEach((side, number) => {
      for (const value of side.values) {
        if (value.kind === INPUT && (value.readers.length || this.isCast(side, value)))
          this.entry("input", value.name, number, value);
      }
      for (const node of side.nodes) this.entry("node", node.name, number, node);
      side.outputs.forEach((value, place) => this.entry("output", this.returned(place), number, value));
    });
    this.sides.forEach((side, number) => this.join(side, number));
    for (const entry of this.entries) entry.change = this.changeOf(entry);
    this.nodes = this.entries.filter((entry) => entry.kind === "node");
    this.nodes.forEach((entry, at) => (entry.order = at + 1));
  }

  /** Under which name a result stands: all under one where there are many. */
  returned(place) {
    return this.crowded ? "all" : String(place);
  }

  isCast(side, value) {
    return side.casts.some((cast) => cast.value === value);
  }

  entry(kind, name, side, content) {
    const key = `${kind} ${name}`;
    if (!this.byName.has(key)) {
      const added = {
        kind,
        name,
        sides: this.sides.map(() => null),
        stored: this.sides.map(() => []),
        into: [],
      };
      this.entries.push(added);
      this.byName.set(key, added);
    }
    const matches = this.byName.get(key);
    matches.sides[side] = content;
    return matches;
  }

  /** The entry of a node by its name. */
  node(name) {
    return this.byName.get(`node ${name}`);
  }

  join(side, number) {
    const seen = new Set();
    const read = (value, to) => {
      const { value: source, casts } = originOf(value);
      const key = `${value.index} ${to.kind} ${to.name}`;
      if (seen.has(key)) return;
      seen.add(key);
      if (source.kind === STORED) {
        to.stored[number].push(...casts);
        return;
      }
      const from = source.kind === NODE ? this.node(source.maker.name) : this.byName.get(`input ${source.name}`);
      const edge = { from, to, value: source, type: value.type, casts, side: number };
      to.into.push(edge);
      this.edges[number].push(edge);
    };
    for (const node of side.nodes) for (const value of node.reads) read(value, this.node(node.name));
    side.outputs.forEach((value, place) => read(value, this.byName.get(`output ${this.returned(place)}`)));
  }

  /** What two plans say otherwise of an entry: "", "precision", "types", "rule", "added" or "removed". */
  changeOf(entry) {
    if (this.sides.length < 2 || entry.kind !== "node") return "";
    const [before, after] = entry.sides;
    if (!before) return "added";
    if (!after) return "removed";
    if (before.precision !== after.precision || fp8Of(before) !== fp8Of(after)) return "precision";
    if (typesOf(before) !== typesOf(after)) return "types";
    return before.rule !== after.rule || before.reason !== after.reason || before.requested !== after.requested ? "rule" : "";
  }
}

/** Whether two plans give an entry another precision or type, or only one has it; who decided is no difference. */
const differs = (entry) => Boolean(entry.change) && entry.change !== "rule";
const fp8Of = ({ math }) => (math?.startsWith("fp8") ? math : ""); // `fp32` is what kernels of 16 bits compute in anyway
const typesOf = (node) => node.makes.map((value) => value.type).join(", ");
const anySide = (entry) => entry.sides.find(Boolean);
const precisionOfType = (type) => (type === "fp32" ? "fp32" : type === "fp16" || type === "bf16" ? "low" : "keep");
const GRAPHS = DATA.graphs.map((rows) => new Graph(rows));

/** The rows of the profile, by the node of the plan, the node of the step and the module that they belong to. */
const PROFILE = (() => {
  const rows = DATA.profile;
  if (!rows) return null;
  const byNode = new Map(),
    byModule = new Map();
  const add = (map, key, row) => key && (map.has(key) ? map.get(key).push(row) : map.set(key, [row]));
  for (const row of rows) {
    const weight = row.kind.startsWith("weight");
    if (weight) add(byModule, row.module, row);
    else {
      add(byNode, row.name, row);
      if (row.planned !== row.name) add(byNode, row.planned, row);
    }
  }
  return { rows, byNode, byModule };
})();

/** What was measured of an entry: what it makes, and the weights of its module where it alone reads them. */
function measuredOf(graph, entry) {
  if (!PROFILE || entry.kind !== "node") return [];
  const node = anySide(entry);
  const names = graph.key === "step" ? node.makes.map((value) => value.name) : [entry.name];
  const matches = [...new Set(names.flatMap((name) => PROFILE.byNode.get(name) ?? []))];
  const results = matches.filter((row) => row.op !== "aten._to_copy");
  const own = results.length ? results : matches; // what a cast gives has the exponents of what it is given
  const weights =
    node.phase && node.phase !== "forward" ? [] : readsStored(node) ? (PROFILE.byModule.get(node.module) ?? []) : [];
  return [...own, ...weights];
}

const readsStored = (node) => node.reads.some((value) => originOf(value).value.kind === STORED);
