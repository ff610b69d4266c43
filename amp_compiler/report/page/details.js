// All that is known of what was clicked on.

class Details {
  constructor(holder, onChoose) {
    Object.assign(this, { holder, onChoose });
  }

  clear() {
    this.holder.replaceChildren(
      make(
        "p",
        { class: "soft" },
        "Click a node to read its rule, its reason and its line. Click a module to unfold it.",
      ),
    );
  }

  show(graph, item) {
    this.graph = graph;
    const content = item.kind === "group" ? this.module(item) : this.node(item);
    this.holder.replaceChildren(...content);
    this.holder.scrollTop = 0;
  }

  /** A name to click on. */
  link(entry, words = entry.name) {
    return make("button", { class: "link", type: "button", onclick: () => this.onChoose(entry) }, named(words));
  }

  node(entry) {
    const several = this.graph.sides.length > 1;
    const head = [
      make("h3", {}, named(entry.name)),
      differs(entry) ? make("p", { class: "changedto" }, this.change(entry)) : null,
    ];
    const title = (side) => (several ? make("h4", {}, named(DATA.plans[side].name)) : null);
    const sides = entry.sides.map(
      (node, side) => node && make("section", {}, title(side), this.facts(entry, node, side)),
    );
    const matches = measuredOf(this.graph, entry).map(measured);
    return [...head, ...sides, ...matches].filter(Boolean);
  }

  change(entry) {
    const [before, after] = entry.sides;
    if (entry.change === "precision") return [badge(before.precision, 0), " → ", badge(after.precision, 1)];
    if (entry.change === "types") return `${typesOf(before)} → ${typesOf(after)}`;
    return CHANGES[entry.change];
  }

  facts(entry, node, side) {
    const soft = (words) => words && make("span", { class: "soft" }, ` ${words}`);
    const code = (path) => path && make("code", { title: path }, named(shortPlace(path)));
    const types = typesOf(node);
    return terms([
      [
        "runs in",
        badge(node.precision, side),
        node.requested && node.requested !== node.precision ? ` requested: ${typeOf(node.requested, side)}` : "",
        types && `, gives ${types}`,
      ],
      ["op", named(node.op), soft(node.family)],
      ["module", node.module && named(node.module)],
      ["phase", node.phase],
      ["rule", code(node.rule)],
      ["reason", node.reason],
      ["computes in", node.math, soft(shortPlace(node.math_rule))],
      [
        "gradients",
        node.backward !== node.precision ? typeOf(node.backward, side) : "",
        node.backward_math && `, summed in ${node.backward_math}`,
      ],
      ["line", code(node.source), DATA.code[node.source] && make("pre", {}, DATA.code[node.source])],
      ["planned as", node.planned && this.plannedAs(node.planned)],
      ["reads", this.list(node.reads.map((value) => this.read(value)))],
      ["read by", this.list(this.readers(node, side))],
    ]);
  }

  list(items) {
    return items.length
      ? make(
          "ul",
          {},
          items.slice(0, 40).map((item) => make("li", {}, item)),
          items.length > 40 ? make("li", { class: "soft" }, `and ${items.length - 40} more`) : null,
        )
      : "";
  }

  plannedAs(name) {
    const forward = GRAPHS.find((graph) => graph.key === "forward"),
      entry = forward?.node(name);
    return entry && forward !== this.graph
      ? make("button", { class: "link", type: "button", onclick: () => this.onChoose(entry, forward) }, named(name))
      : named(name);
  }

  read(value) {
    const { value: source, casts } = originOf(value);
    const name = source.kind === NODE ? this.link(this.graph.node(source.maker.name), source.name) : named(source.name);
    const kind = source.kind === INPUT ? " input" : source.kind === STORED ? " stored" : "";
    return [name, make("span", { class: "soft" }, `${kind} ${source.type}`), ...casts.map((cast) => this.cast(cast))];
  }

  cast(cast) {
    return make(
      "span",
      { class: "castnote" },
      `cast ${cast.src} → ${cast.dst}, ${cast.bytes ? bytes(cast.bytes) : "before it runs"}`,
    );
  }

  readers(node, side) {
    const matches = [];
    const visit = (value, casts) => {
      for (const [reader] of value.readers)
        matches.push([this.link(this.graph.node(reader.name)), ...casts.map((cast) => this.cast(cast))]);
      if (this.graph.sides[side].outputs.includes(value))
        matches.push(["returned", ...casts.map((cast) => this.cast(cast))]);
      for (const cast of this.graph.sides[side].casts)
        if (cast.value === value && cast.entry) visit(cast.entry, [...casts, cast]);
    };
    for (const value of node.makes) visit(value, []);
    return matches;
  }

  module(group) {
    const sides = group.counts.map((counts, side) => {
      const into = (entry) => entry.into.flatMap((edge) => (edge.side === side ? edge.casts : []));
      const inside = new Set(group.nodes.flatMap((entry) => [...entry.stored[side], ...into(entry)]));
      const total = [...inside].reduce((sum, cast) => sum + cast.bytes, 0);
      return make(
        "section",
        {},
        group.counts.length > 1 ? make("h4", {}, named(DATA.plans[side].name)) : null,
        terms([
          ["nodes", counts.map((count, at) => (count ? [badge(PRECISIONS[at], side, `${count} `), " "] : []))],
          ["casts", inside.size ? `${inside.size} for its nodes, ${bytes(total)}` : "none"],
        ]),
      );
    });
    const changed = group.changed ? make("p", {}, many(group.changed, "node"), " decided otherwise") : null;
    return [make("h3", {}, named(group.name || "all")), changed, ...sides].filter(Boolean);
  }
}

/** Terms with what is said of each; those of which nothing is said are left out. */
const terms = (rows) =>
  make(
    "dl",
    {},
    rows
      .filter(([, ...content]) => content.some((part) => part && part.length !== 0))
      .map(([term, ...content]) => [make("dt", {}, term), make("dd", {}, ...content)]),
  );
