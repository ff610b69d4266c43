// Places. Every open module is laid out by itself, and is one box in the module around it.

const PAD = 14,
  HEAD = 30,
  BOX = 44,
  FOLDED = 56,
  PILL = 24;
const MANY_PORTS = 10; // values that come in, or go out: more are drawn as one

/** The size and the inner places of a module; known ones are kept until it is folded or unfolded. */
function layOut(group) {
  if (group.placed) return group.placed;
  const sizes = new Map(group.children.map((child) => [child, sizeOf(child)]));
  const lines = [...group.level.values()].filter((line) => line.from !== line.to);
  for (const port of portsOf(group)) {
    sizes.set(port, { width: port.width, height: PILL });
    for (const [child, edges] of port.children) {
      lines.push({ from: port.way === "in" ? port : child, to: port.way === "in" ? child : port, edges, inner: true });
    }
  }
  const level = arrange([...sizes.keys()], lines, sizes);
  const title = group.parent ? widthOf(shortened(group.label, 60), TITLE) + 60 : 0;
  const dx = group.parent ? PAD : 0,
    dy = group.parent ? HEAD + PAD / 2 : 0;
  const width = Math.max(level.width + 2 * dx, title);
  const shift = (width - level.width) / 2;
  for (const item of level.items) {
    item.x += shift;
    item.y += dy;
  }
  for (const line of level.lines) {
    line.points = line.points.map(([x, y]) => [x + shift, y + dy]);
    if (line.label) line.label = [line.label[0] + shift, line.label[1] + dy];
  }
  group.placed = { ...level, width, height: level.height + dy + (group.parent ? PAD : 0) };
  return group.placed;
}

function sizeOf(child) {
  if (child.kind === "group") return child.open ? layOut(child) : { width: foldedWidth(child), height: FOLDED };
  if (child.kind !== "node") return { width: 28 + widthOf(titleOf(child)), height: PILL };
  return { width: boxWidth(child), height: BOX };
}

const foldedWidth = (group) =>
  Math.max(150, 44 + widthOf(shortened(group.label, 60), TITLE), 110 + widthOf(many(group.nodes.length, "node")));

function boxWidth(entry) {
  const widths = entry.sides.map((node) => {
    if (!node) return Math.max(widthOf(ABSENT, TITLE), widthOf(shortened(entry.name, 26)));
    const stored = Math.max(
      ...entry.stored.map((casts) => (storedWords(casts) ? 14 + widthOf(storedWords(casts)) : 0)),
    );
    return Math.max(
      widthOf(titleOfNode(node), TITLE) + 12 + widthOf(firstType(node)),
      widthOf(subtitle(entry, node)) + stored,
    );
  });
  return Math.max(96, 30 + Math.max(...widths));
}

const ABSENT = "not in this plan";

/** The bytes that casts of stored data move when the model runs; a file may hold them cast already. */
function storedWords(casts) {
  const total = casts.reduce((sum, cast) => sum + cast.bytes, 0);
  return total ? `+ ${bytes(total)}` : "";
}

/** The type that a node makes, and behind it the one that a rule has it compute in. */
const firstType = ({ makes, math }) => (makes[0]?.type ?? "") + (math ? ` (${math.match(/^\w*/)[0]})` : "");
/** A node's name where it is its op and a number, else the op. */
const titleOfNode = (node) => (tellsOp(node) ? node.name : shortOp(node.op));
const tellsOp = (node) => node.name.replace(/(_\d+)+$/, "") === shortOp(node.op);
/** What the title leaves to say: the module that is this node alone, or the name. */
const subtitle = (entry, node) => shortened(tellsOp(node) ? (entry.within ?? "") : entry.name, 26);
/** The words of an input, or of results: of two plans how many the one with more of them returns. */
function titleOf(entry) {
  if (entry.kind === "input") return shortened(entry.name, 24);
  const returned = Math.max(...entry.sides.map((_, side) => entry.into.filter((edge) => edge.side === side).length));
  return returned > 1 ? `${returned} returned` : "returned";
}

/** The values that come into a module and go out of it, with how wide each is drawn. */
function portsOf(group) {
  if (!group.parent) return [];
  const ports = [...group.ports.values()];
  return ["in", "out"].flatMap((way) => {
    const matches = ports.filter((port) => port.way === way);
    if (matches.length <= MANY_PORTS)
      return matches.map((port) => Object.assign(port, { width: 24 + widthOf(shortened(port.name, 22)) }));
    const all = {
      kind: "port",
      way,
      name: `${matches.length} values`,
      width: 100,
      edges: matches.flatMap((port) => port.edges),
    };
    all.children = new Map();
    for (const port of matches)
      for (const [child, edges] of port.children)
        all.children.set(child, [...(all.children.get(child) ?? []), ...edges]);
    return [all];
  });
}

/** One level, by dagre. */
function arrange(items, lines, sizes) {
  const boxes = items.map((item) => sizes.get(item));
  const numbers = new Map(items.map((item, index) => [item, index]));
  const joints = lines.map((line) => {
    const wide = line.inner ? 0 : Math.max(...[0, 1].map((side) => widthOf(castWords(castsOf(line.edges, side)))));
    return [numbers.get(line.from), numbers.get(line.to), wide ? wide + 14 : 0];
  });
  const key = JSON.stringify([boxes.map(({ width, height }) => [width, height]), joints]);
  if (!arranged.has(key)) arranged.set(key, arrangement(boxes, joints));
  const { spots, ways, width, height } = arranged.get(key);
  return {
    width,
    height,
    items: items.map((item, index) => ({ item, ...spots[index] })),
    lines: lines.map((line, index) => ({ ...line, ...ways[index] })),
  };
}

const arranged = new Map(); // layers of a model are much alike

/** Places of boxes and lines; `joints` are [from, to, width of the label]. */
function arrangement(boxes, joints) {
  const graph = new Libraries.graphlib.Graph();
  graph.setGraph({ rankdir: "TB", nodesep: 22, ranksep: 30, edgesep: 14 });
  boxes.forEach(({ width, height }, index) => graph.setNode(String(index), { width, height }));
  for (const [from, to, wide] of joints) {
    graph.setEdge(
      String(from),
      String(to),
      wide ? { width: wide, height: 18, labelpos: "c", weight: 1 } : { width: 0, height: 0, weight: 1 },
    );
  }
  Libraries.layout(graph);
  const { width, height } = graph.graph();
  return {
    width: Math.max(width, 0), // of no boxes it is not finite
    height: Math.max(height, 0),
    spots: boxes.map((_, index) => {
      const { x, y, width: w, height: h } = graph.node(String(index));
      return { x: x - w / 2, y: y - h / 2, width: w, height: h };
    }),
    ways: joints.map(([from, to]) => {
      const edge = graph.edge(String(from), String(to));
      return { points: edge.points.map(({ x, y }) => [x, y]), label: edge.x === undefined ? null : [edge.x, edge.y] };
    }),
  };
}

/** The casts on some edges of one plan, each once. */
const castsOf = (edges, side) => [...new Set(edges.flatMap((edge) => (edge.side === side ? edge.casts : [])))];

/** What is written on a line with casts. */
function castWords(casts) {
  if (!casts.length) return "";
  const total = bytes(casts.reduce((sum, cast) => sum + cast.bytes, 0));
  const kinds = new Set(casts.map((cast) => `${cast.src} → ${cast.dst}`));
  return casts.length === 1 ? `${[...kinds][0]} · ${total}` : `${casts.length} casts · ${total}`;
}
