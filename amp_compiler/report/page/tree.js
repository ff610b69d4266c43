// Nodes by module. A module with one node is that node; many neighbours are put together by runs.

const CROWD = 60,
  RUN = 40; // children of one module: more are put together, so many at a time
const OPEN_AT_FIRST = 36; // boxes that are shown when the page opens, where that can be had

class Group {
  constructor(name, parent, label = name) {
    Object.assign(this, { kind: "group", name, parent, label, children: [], open: false });
  }
}

function treeOf(graph) {
  const root = new Group("", null);
  const groups = new Map([["", root]]);
  for (const entry of graph.entries) {
    let at = root;
    for (const name of pathOf(entry)) {
      const path = at === root ? name : `${at.name}.${name}`;
      if (!groups.has(path)) {
        groups.set(path, new Group(path, at, name));
        at.children.push(groups.get(path));
      }
      at = groups.get(path);
    }
    at.children.push(entry);
  }
  simplify(root);
  link(root, graph);
  root.open = true;
  openFirst(root);
  return root;
}

/** Phase and modules of an entry, from the outermost. */
function pathOf(entry) {
  const node = anySide(entry);
  if (entry.kind !== "node") return node.phase ? [node.phase] : [];
  return [...(node.phase ? [node.phase] : []), ...(node.module ? node.module.split(".") : [])];
}

function simplify(group) {
  group.children = group.children.map((child) => {
    if (child.kind !== "group") return child;
    simplify(child);
    if (child.children.length > 1) return child;
    const [only] = child.children;
    if (only.kind === "group" && !only.run) only.label = `${child.label}.${only.label}`;
    if (only.kind === "node") only.within = only.within ? `${child.label}.${only.within}` : child.label;
    return only;
  });
  const ends = group.children.filter(({ kind }) => kind === "input" || kind === "output");
  if (ends.length <= CROWD) group.children = group.children.filter((child) => !ends.includes(child));
  else ends.length = 0;
  while (group.children.length > CROWD) {
    const before = group.children;
    group.children = [];
    for (let at = 0; at < before.length; at += RUN) {
      const part = before.slice(at, at + RUN);
      if (part.length === 1) {
        group.children.push(part[0]);
        continue;
      }
      const [first, last] = [
        part[0].run?.[0] ?? part[0].label ?? part[0].name,
        part.at(-1).run?.[1] ?? part.at(-1).label ?? part.at(-1).name,
      ];
      const run = new Group(
        `${group.name}[${first} … ${last}]`,
        group,
        `${shortened(first, 22)} … ${shortened(last, 22)}`,
      );
      run.run = [first, last];
      run.children = part;
      group.children.push(run);
    }
  }
  group.children.unshift(...ends);
}

/** Parents, counts and the edges that each module has to draw. */
function link(root, graph) {
  const visit = (group) => {
    group.entries = [];
    group.level = new Map(); // pairs of children with the edges between them
    group.ports = new Map(); // what comes in and goes out
    for (const child of group.children) {
      child.parent = group;
      if (child.kind === "group") visit(child);
      group.entries.push(...(child.kind === "group" ? child.entries : [child]));
    }
    group.nodes = group.entries.filter((entry) => entry.kind === "node");
    const weigh = (side, precision, of) =>
      group.nodes.reduce((sum, { sides }) => sum + (sides[side]?.precision === precision ? of(sides[side]) : 0), 0);
    group.counts = graph.sides.map((_, side) => PRECISIONS.map((one) => weigh(side, one, () => 1)));
    const weights = graph.sides.map((_, side) => PRECISIONS.map((one) => weigh(side, one, ({ bytes }) => bytes)));
    group.shares = weights.map((sums, side) => (sums.some(Boolean) ? sums : group.counts[side])); // of the bytes made
    group.changed = group.nodes.filter(differs).length;
  };
  visit(root);
  for (const edges of graph.edges) for (const edge of edges) lift(edge);
}

/** Tell the module that holds both ends of an edge, and those that it leads into or out of. */
function lift(edge) {
  const above = new Set();
  for (let at = edge.from.parent; at; at = at.parent) above.add(at);
  let to = edge.to,
    from = edge.from;
  for (; !above.has(to.parent); to = to.parent) addPort(to.parent, "in", edge, to);
  for (; from.parent !== to.parent; from = from.parent) addPort(from.parent, "out", edge, from);
  const level = to.parent.level,
    numbers = pairOf(from, to);
  if (!level.has(numbers)) level.set(numbers, { from, to, edges: [] });
  level.get(numbers).edges.push(edge);
}

let lastNumber = 0;
const numbers = new WeakMap();
const numberOf = (item) => numbers.get(item) ?? (numbers.set(item, (lastNumber += 1)), lastNumber);
const pairOf = (from, to) => `${numberOf(from)} ${numberOf(to)}`;

function addPort(group, way, edge, child) {
  const key = `${way} ${numberOf(edge.from)} ${edge.value.name}`;
  if (!group.ports.has(key))
    group.ports.set(key, { kind: "port", way, name: edge.value.name, edges: [], children: new Map() });
  const port = group.ports.get(key);
  port.edges.push(edge);
  port.children.set(child, [...(port.children.get(child) ?? []), edge]);
}

/** Open modules from the outermost, as long as few boxes are to be seen; a large one where there is little else. */
function openFirst(root) {
  let shown = root.children.length;
  for (let level = groupsIn(root); level.length; level = level.filter(({ open }) => open).flatMap(groupsIn))
    for (const group of level) {
      const more = group.children.length - 1;
      group.open = shown + more <= (shown < OPEN_AT_FIRST / 3 ? CROWD : OPEN_AT_FIRST);
      if (group.open) shown += more;
    }
}

const groupsIn = (group) => group.children.filter((child) => child.kind === "group");

/** Open all modules around an entry. */
function reveal(item) {
  let opened = false;
  for (let at = item.parent; at; at = at.parent) {
    if (!at.open) {
      setOpen(at, true);
      opened = true;
    }
  }
  return opened;
}

/** Fold or unfold; only this module and those around it are laid out anew. */
function setOpen(group, open) {
  group.open = open;
  for (let at = group; at; at = at.parent) at.placed = null;
}

function eachGroup(group, visit) {
  for (const child of groupsIn(group)) {
    visit(child);
    eachGroup(child, visit);
  }
}
