// What is searched for, and its place in the address, so that a link shows the same.

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
    this.changes = document.getElementById("by-change"); // of two plans
    this.changes?.addEventListener("change", () => this.set({ change: this.changes.value }));
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
    Object.assign(this, { q: "", off: new Set(), change: "" });
  }

  get active() {
    return Boolean(this.q.trim() || this.off.size || this.change);
  }

  set(values) {
    Object.assign(this, values);
    this.show();
    this.onChange();
  }

  show() {
    if (this.search.value !== this.q) this.search.value = this.q;
    for (const button of this.buttons) button.setAttribute("aria-pressed", String(!this.off.has(button.value)));
    if (this.changes) this.changes.value = this.change;
    document.getElementById("clear").hidden = !this.active;
  }

  /** Fill the list of differences with what is in a graph. */
  offer(graph) {
    if (!this.changes) return;
    const counts = new Map([["any", graph.nodes.filter(differs).length]]);
    for (const { change } of graph.nodes) if (change) counts.set(change, (counts.get(change) ?? 0) + 1);
    const offers = [...counts].filter(([, count]) => count);
    const options = offers.map(([name, count]) => make("option", { value: name }, `${CHANGES[name]} (${count})`));
    this.changes.replaceChildren(make("option", { value: "" }, "all"), ...options);
    this.changes.closest("label").hidden = !options.length;
    if (!offers.some(([name]) => name === this.change)) this.change = "";
    this.show();
  }

  /** The entries that match. */
  of(graph) {
    const words = this.q.toLowerCase().split(/\s+/).filter(Boolean);
    return graph.nodes.filter((entry) => {
      if (this.change && (this.change === "any" ? !differs(entry) : entry.change !== this.change)) return false;
      return entry.sides.some((node) => {
        if (!node || this.off.has(node.precision)) return false;
        node.text ??= [...SEARCHED.map((name) => node[name]), typesOf(node)].join("\n").toLowerCase();
        return words.every((word) => node.text.includes(word));
      });
    });
  }

  read(values) {
    this.reset();
    for (const name of ["q", "change"]) this[name] = values.get(name) ?? "";
    this.off = new Set((values.get("without") ?? "").split(",").filter((name) => PRECISIONS.includes(name)));
  }

  write(values) {
    for (const name of ["q", "change"]) if (this[name].trim()) values.set(name, this[name]);
    if (this.off.size) values.set("without", [...this.off].join(","));
  }
}

const SEARCHED = ["name", "op", "family", "module", "phase", "rule", "reason", "source", "requested", "math"];
const CHANGES = {
  any: "any difference",
  precision: "other precision",
  types: "other type",
  rule: "other rule or reason",
  added: "only in the second",
  removed: "only in the first",
};
