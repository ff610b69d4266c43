// What is searched for, and its place in the address, so that a link shows the same.

const FIELDS = ["op", "module", "rule", "phase", "change"];

class Filters {
  constructor(onChange) {
    this.onChange = onChange;
    this.reset();
    this.search = document.getElementById("search");
    this.search.addEventListener("input", () => this.set({ q: this.search.value }));
    this.buttons = [...document.querySelectorAll("#precisions button")];
    for (const button of this.buttons) {
      button.addEventListener("click", () => {
        const off = new Set(this.off);
        if (!off.delete(button.value)) off.add(button.value);
        this.set({ off });
      });
    }
    this.selects = new Map(FIELDS.map((name) => [name, document.getElementById(`by-${name}`)]));
    for (const [name, select] of this.selects)
      select?.addEventListener("change", () => this.set({ [name]: select.value }));
    const more = document.getElementById("more"); // shows the filters where there is little room
    more.addEventListener("click", () =>
      more.setAttribute("aria-expanded", String(more.getAttribute("aria-expanded") !== "true")),
    );
    document.getElementById("clear").addEventListener("click", () => {
      this.reset();
      this.set({});
    });
  }

  reset() {
    Object.assign(this, { q: "", off: new Set(), op: "", module: "", rule: "", phase: "", change: "" });
  }

  get active() {
    return Boolean(this.q.trim() || this.off.size || FIELDS.some((name) => this[name]));
  }

  set(values) {
    Object.assign(this, values);
    this.show();
    this.onChange();
  }

  show() {
    if (this.search.value !== this.q) this.search.value = this.q;
    for (const button of this.buttons) button.setAttribute("aria-pressed", String(!this.off.has(button.value)));
    for (const [name, select] of this.selects) if (select) select.value = this[name];
    document.getElementById("clear").hidden = !this.active;
  }

  /** Fill the lists with what is in a graph. */
  offer(graph) {
    const counted = (texts) => {
      const counts = new Map();
      for (const text of texts) if (text) counts.set(text, (counts.get(text) ?? 0) + 1);
      return counts;
    };
    const nodes = graph.nodes.map(anySide);
    const modules = nodes.flatMap(({ module }) =>
      module.split(".").map((_, at, parts) => parts.slice(0, at + 1).join(".")),
    );
    const offers = {
      op: [...counted(nodes.map((node) => node.op))].sort((one, other) => other[1] - one[1]),
      module: [...counted(modules)],
      rule: [
        ...counted(graph.nodes.flatMap((entry) => [...new Set(entry.sides.filter(Boolean).map((node) => node.rule))])),
      ].sort((one, other) => other[1] - one[1]),
      phase: [...counted(nodes.map((node) => node.phase))],
      change: [
        ["any", graph.nodes.filter(differs).length],
        ...counted(graph.nodes.map((entry) => entry.change)),
      ].filter(([, count]) => count),
    };
    for (const [name, select] of this.selects) {
      if (!select) continue;
      const all = make("option", { value: "" }, "all");
      const label = (text) => (name === "change" ? CHANGES[text] : name === "rule" ? shortPlace(text) : text);
      const option = ([text, count]) => make("option", { value: text }, `${label(text)} (${count})`);
      const options = offers[name].slice(0, 2000).map(option);
      select.replaceChildren(all, ...options);
      select.closest("label").hidden = !options.length;
      if (!offers[name].some(([text]) => text === this[name])) this[name] = "";
    }
    this.show();
  }

  /** The entries that match. */
  of(graph) {
    const words = this.q.toLowerCase().split(/\s+/).filter(Boolean);
    return graph.nodes.filter((entry) => {
      if (this.change && (this.change === "any" ? !differs(entry) : entry.change !== this.change)) return false;
      return entry.sides.some((node) => {
        if (!node || this.off.has(node.precision)) return false;
        if (["op", "rule", "phase"].some((field) => this[field] && node[field] !== this[field])) return false;
        if (this.module && node.module !== this.module && !node.module.startsWith(`${this.module}.`)) return false;
        const { name, op, family, module, rule, reason, source, requested, math } = node;
        const texts = [name, op, family, module, rule, reason, source, requested, math, typesOf(node)];
        node.text ??= texts.join("\n").toLowerCase();
        return words.every((word) => node.text.includes(word));
      });
    });
  }

  read(values) {
    this.reset();
    for (const name of ["q", ...FIELDS]) this[name] = values.get(name) ?? "";
    this.off = new Set((values.get("without") ?? "").split(",").filter((name) => PRECISIONS.includes(name)));
  }

  write(values) {
    for (const name of ["q", ...FIELDS]) if (this[name].trim()) values.set(name, this[name]);
    if (this.off.size) values.set("without", [...this.off].join(","));
  }
}

const CHANGES = {
  any: "any difference",
  precision: "other precision",
  types: "other type",
  rule: "other rule or reason",
  added: "only in the second",
  removed: "only in the first",
};
