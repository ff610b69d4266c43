// The drawing of a graph: one pane for each plan, which move together.

/** Draws one graph, in as many panes as there are plans; `onChoose` hears what was clicked on. */
class Drawing {
  constructor(graph, root, holder, onChoose) {
    Object.assign(this, { graph, root, holder, onChoose, chosen: null, hits: null, transform: Libraries.zoomIdentity });
    this.panes = graph.sides.map((_, side) => {
      const layer = draw("g", { class: "layer" });
      const svg = draw(
        "svg",
        {
          class: "pane",
          role: "group",
          "aria-label": `The graph${DATA.plans[side] ? ` of ${DATA.plans[side].name}` : ""}`,
        },
        layer,
      );
      const caption = DATA.plans.length > 1 ? make("figcaption", {}, named(DATA.plans[side].name)) : null;
      holder.append(make("figure", {}, ...(caption ? [caption] : []), svg));
      return { svg, layer, side };
    });
    this.zoom = Libraries.zoom()
      .scaleExtent([0.02, 3])
      .filter(mayMove)
      .on("zoom", (event) => this.moved(event));
    for (const { svg } of this.panes) Libraries.select(svg).call(this.zoom).on("dblclick.zoom", null);
    this.render();
    this.fit();
  }

  moved({ transform, sourceEvent }) {
    this.transform = transform;
    for (const { svg, layer } of this.panes) {
      if (!this.printing) layer.setAttribute("transform", transform);
      svg.__zoom = transform;
    }
    if (sourceEvent) this.fitted = false;
  }

  move(transform) {
    this.zoom.transform(Libraries.select(this.panes[0].svg), transform);
  }

  /** Show all of it, as large as it fits, and from the top where that would be too small to read. */
  fit() {
    const { width, height } = layOut(this.root);
    const { clientWidth: w, clientHeight: h } = this.panes[0].svg;
    const scale = Math.min(
      1.2,
      Math.max(Math.min((w - 24) / width, (h - 24) / height), Math.min((w - 24) / width, 0.75)),
    );
    this.move(
      Libraries.zoomIdentity.translate((w - width * scale) / 2, Math.max(12, (h - height * scale) / 2)).scale(scale),
    );
    this.fitted = true;
  }

  /** Bring a place into the middle, large enough to read. */
  center(item) {
    const spot = this.spots.get(item);
    if (!spot) return;
    const { clientWidth: w, clientHeight: h } = this.panes[0].svg;
    const scale = Math.max(0.9, Math.min(1.2, this.transform.k));
    const [x, y] = [spot.x + spot.width / 2, spot.y + Math.min(spot.height / 2, h / scale / 2)];
    this.move(Libraries.zoomIdentity.translate(w / 2 - x * scale, h / 2 - y * scale).scale(scale));
    this.fitted = false;
  }

  /** Draw all of it for paper, smaller where it is wide, over several sheets where it is long. */
  print(starts) {
    this.printing = starts;
    const { width, height } = layOut(this.root);
    for (const { svg, layer } of this.panes) {
      if (starts) svg.setAttribute("viewBox", `-8 -8 ${width + 16} ${height + 16}`);
      else svg.removeAttribute("viewBox");
      svg.style.setProperty("--printed", `${height * Math.min(0.65, 1000 / this.panes.length / width)}px`);
      layer.setAttribute("transform", starts ? "" : this.transform);
    }
  }

  toggle(group) {
    const before = this.spots.get(group);
    setOpen(group, !group.open);
    this.render();
    const after = this.spots.get(group);
    if (this.fitted) this.fit();
    else if (before && after) {
      // what was clicked on stays where it is
      const { x, y, k } = this.transform;
      this.move(Libraries.zoomIdentity.translate(x + (before.x - after.x) * k, y + (before.y - after.y) * k).scale(k));
    }
  }

  openAll(open) {
    eachGroup(this.root, (group) => Object.assign(group, { open, placed: null }));
    this.root.placed = null;
    this.render();
    this.fit();
  }

  choose(item) {
    this.chosen = item;
    this.mark();
  }

  /** Make stand out what matches; `null` for all. */
  show(hits) {
    this.hits = hits;
    this.mark();
  }

  render() {
    layOut(this.root);
    this.spots = new Map();
    this.shapes = new Map();
    this.wires = [];
    for (const pane of this.panes) {
      const parts = [];
      this.level(this.root, 0, 0, pane.side, parts);
      pane.layer.replaceChildren(...parts);
    }
    this.mark();
  }

  level(group, x, y, side, parts) {
    const labelled = new Set(); // casts whose bytes stand on a line already
    const drawn = group.placed.lines.map((line) => this.wire(line, x, y, side, labelled));
    parts.push(...[0, 1].flatMap((part) => drawn.map((matches) => matches[part]).filter(Boolean))); // labels on top
    for (const { item, ...spot } of group.placed.items) {
      const at = { ...spot, x: x + spot.x, y: y + spot.y };
      this.spots.set(item, at);
      const shape =
        item.kind === "group"
          ? this.module(item, at, side)
          : item.kind === "node"
            ? this.box(item, at, side)
            : this.pill(item, at, side);
      this.shapes.set(item, [...(this.shapes.get(item) ?? []), shape]);
      parts.push(shape);
      if (item.kind === "group" && item.open) this.level(item, at.x, at.y, side, parts);
    }
  }

  wire(line, x, y, side, labelled) {
    const edges = line.edges.filter((edge) => edge.side === side);
    if (!edges.length) return [];
    const casts = line.inner ? [] : castsOf(edges, side);
    const types = new Set(edges.map((edge) => precisionOfType(edge.type)));
    const kind = casts.length ? "cast" : types.size === 1 ? [...types][0] : "mixed";
    const path = draw("path", {
      class: `wire ${kind}`,
      d: curve(line.points, x, y),
      "marker-end": `url(#tip-${kind})`,
    });
    const names = edges
      .slice(0, 8)
      .map((edge) => `${edge.value.name}: ${[...edge.casts.map((cast) => cast.src), edge.type].join(" → ")}`);
    if (edges.length > 8) names.push(`and ${edges.length - 8} more`);
    path.append(draw("title", {}, names.join("\n")));
    if (!casts.length || !line.label) {
      this.wires.push({ shapes: [path], edges });
      return [path];
    }
    const words = casts.every((cast) => labelled.has(cast))
      ? casts.length === 1
        ? `as ${casts[0].dst}`
        : `${casts.length} casts, see beside`
      : castWords(casts);
    for (const cast of casts) labelled.add(cast);
    const [cx, cy] = [line.label[0] + x, line.label[1] + y];
    const width = widthOf(words) + 14;
    const label = draw(
      "g",
      { class: "castlabel" },
      draw("rect", { x: cx - width / 2, y: cy - 9, width, height: 18, rx: 9 }),
      draw("text", { x: cx, y: cy + 4 }, words),
    );
    this.wires.push({ shapes: [path, label], edges });
    return [path, label];
  }

  box(entry, { x, y, width, height }, side) {
    const node = entry.sides[side];
    const shape = draw(
      "g",
      {
        class: `box ${node ? node.precision : "absent"} ${differs(entry) ? "changed" : ""}`,
        transform: `translate(${x} ${y})`,
        "data-node": entry.name,
        tabindex: "0",
        role: "button",
      },
      draw("rect", { class: "body", width, height, rx: 6 }),
    );
    if (!node) {
      shape.append(
        draw("text", { class: "title", x: 18, y: 18 }, ABSENT),
        draw("text", { class: "small", x: 18, y: 34 }, shortened(entry.name, 26)),
      );
      return this.listen(shape, entry);
    }
    const stored = entry.stored[side],
      below = subtitle(entry, node);
    const y0 = below || storedWords(stored) ? 18 : 26;
    shape.append(
      draw("path", { class: "strip", d: `M6 0h5v${height}h-5a6 6 0 0 1 -6 -6v-${height - 12}a6 6 0 0 1 6 -6z` }),
      draw("text", { class: "title", x: 19, y: y0 }, titleOfNode(node)),
      draw("text", { class: "type", x: width - 8, y: y0 }, firstType(node)),
      draw("text", { class: "small", x: 19, y: 34 }, below),
    );
    if (storedWords(stored)) {
      const casts = stored.map(
        (cast) => `cast of stored ${cast.value.name}: ${cast.src} → ${cast.dst}, ${bytes(cast.bytes)}`,
      );
      const title = draw("title", {}, casts.join("\n"));
      shape.append(draw("text", { class: "stored", x: width - 8, y: 34 }, storedWords(stored), title));
    }
    shape.append(draw("title", {}, `${node.name} = ${node.op}\n${node.module}\n${typeOf(node.precision, side)}: ${node.reason}`));
    return this.listen(shape, entry);
  }

  module(group, { x, y, width, height }, side) {
    const shape = draw(
      "g",
      {
        class: `module ${group.open ? "open" : "folded"} ${group.changed ? "changed" : ""}`,
        transform: `translate(${x} ${y})`,
        tabindex: "0",
        role: "button",
        "aria-expanded": group.open,
        "data-module": group.name,
      },
      draw("rect", { class: "body", width, height, rx: 8 }),
    );
    shape.append(draw("title", {}, group.name));
    shape.append(draw("text", { class: "fold", x: 16, y: 20 }, group.open ? "−" : "+"));
    shape.append(draw("text", { class: "title", x: 28, y: 19 }, shortened(group.label, 60)));
    if (!group.open) {
      shape.append(draw("text", { class: "small", x: 28, y: 34 }, many(group.nodes.length, "node")));
      let left = 10;
      const counts = group.shares[side],
        total = counts.reduce((sum, count) => sum + count, 0);
      counts.forEach((count, index) => {
        const part = ((width - 20) * count) / Math.max(1, total);
        if (count)
          shape.append(
            draw("rect", { class: `part ${PRECISIONS[index]}`, x: left, y: height - 13, width: part, height: 7 }),
          );
        left += part;
      });
    }
    return this.listen(shape, group);
  }

  pill(item, { x, y, width, height }, side) {
    const value = item.kind === "port" ? portValue(item, side) : item.sides[side];
    const words = item.kind === "port" ? shortened(item.name, 22) : titleOf(item);
    const type = value?.type ?? "";
    const shape = draw(
      "g",
      {
        class: `pill ${item.kind} ${precisionOfType(type)} ${value ? "" : "absent"}`,
        transform: `translate(${x} ${y})`,
      },
      draw("rect", { class: "body", width, height, rx: height / 2 }),
      draw("text", { x: width / 2, y: 16 }, words),
      draw("title", {}, `${SAID_OF[item.way ?? item.kind]}${value?.name ?? ""} ${type}`),
    );
    return shape;
  }

  listen(shape, item) {
    const act = () => (item.kind === "group" ? (this.toggle(item), this.onChoose(item)) : this.onChoose(item));
    shape.addEventListener("click", act);
    const focused = () => (act(), this.shapes.get(item)?.[0].focus());
    shape.addEventListener("keydown", onEnter(focused));
    return shape;
  }

  /** Show what is chosen and what matches, without drawing anew. */
  mark() {
    for (const [item, shapes] of this.shapes) {
      const matches = item.kind === "group" ? item.nodes.some((entry) => this.hits?.has(entry)) : this.hits?.has(item);
      const out = this.hits !== null && !matches;
      for (const shape of shapes) {
        shape.classList.toggle("chosen", item === this.chosen);
        shape.classList.toggle("out", out);
      }
    }
    for (const { shapes, edges } of this.wires) {
      const chosen = Boolean(this.chosen) && edges.some((edge) => edge.from === this.chosen || edge.to === this.chosen);
      const out = this.hits !== null && !edges.some((edge) => this.hits.has(edge.from) || this.hits.has(edge.to));
      for (const shape of shapes) {
        shape.classList.toggle("chosen", chosen);
        shape.classList.toggle("out", out);
      }
    }
  }
}

const SAID_OF = { in: "from outside: ", out: "read outside: ", output: "returned: ", input: "" };

/** What goes through a port in one plan; without a type where several do. */
function portValue(port, side) {
  const edges = port.edges.filter((edge) => edge.side === side);
  const types = new Set(edges.map((edge) => (port.way === "in" ? edge.type : edge.value.type)));
  return edges.length ? { name: port.name, type: types.size === 1 ? [...types][0] : "" } : null;
}

/** The wheel scrolls the page, and with Ctrl zooms; one finger scrolls, two move the graph. */
function mayMove(event) {
  if (event.type === "wheel") return event.ctrlKey || event.metaKey;
  if (event.type.startsWith("touch")) return event.touches.length > 1;
  return !event.button;
}

/** Points as a smooth line. */
function curve(points, dx, dy) {
  const at = points.map(([x, y]) => [round(x + dx), round(y + dy)]);
  const middle = ([a, b], [c, d]) => [round((a + c) / 2), round((b + d) / 2)];
  let path = `M${at[0]}`;
  if (at.length === 2) return `${path}L${at[1]}`;
  path += `L${middle(at[0], at[1])}`;
  for (let index = 1; index < at.length - 1; index += 1) path += `Q${at[index]} ${middle(at[index], at[index + 1])}`;
  return `${path}L${at.at(-1)}`;
}

const round = (number) => Math.round(number * 10) / 10;
