// The page: what is chosen, shown and filtered, and the address that says so.

const MOST_HITS = 60;

class Page {
  constructor() {
    this.views = GRAPHS.map((graph) => ({ graph, root: treeOf(graph), drawing: null }));
    this.details = new Details(document.getElementById("details"), (entry, graph) => this.choose(entry, graph));
    this.filters = new Filters(() => {
      this.filter();
      this.note();
    });
    this.tabs = [...document.querySelectorAll("#graphs button")];
    for (const tab of this.tabs)
      tab.addEventListener("click", () => {
        this.open(tab.value);
        this.note();
      });
    this.lists = [...document.querySelectorAll("#lists button")];
    for (const list of this.lists) list.addEventListener("click", () => this.list(list.value));
    const act = (id, what) => document.getElementById(id).addEventListener("click", () => what(this.view.drawing));
    act("fit", (drawing) => drawing.fit());
    act("unfold", (drawing) => drawing.openAll(true));
    act("fold", (drawing) => drawing.openAll(false));
    this.filters.search.addEventListener(
      "keydown",
      (event) => event.key === "Enter" && this.next(event.shiftKey ? -1 : 1),
    );
    addEventListener("hashchange", () => this.follow());
    addEventListener("resize", () => this.view.drawing.fitted && this.view.drawing.fit());
    addEventListener("beforeprint", () => this.print(true));
    matchMedia("print").addEventListener("change", ({ matches }) => this.print(matches));
    addEventListener("keydown", (event) => {
      if (event.key === "/" && !/INPUT|SELECT|TEXTAREA/.test(document.activeElement.tagName)) {
        event.preventDefault();
        this.filters.search.focus();
      }
    });
    this.follow();
  }

  /** Do what the address says. */
  follow() {
    const values = new URLSearchParams(location.hash.slice(1));
    const view = this.views.find(({ graph }) => graph.key === values.get("graph")) ?? this.views[0];
    this.filters.read(values);
    this.open(view.graph.key);
    const name = values.get("node"),
      entry = name && view.graph.node(name);
    document.getElementById("missing").hidden = !name || Boolean(entry);
    if (name && !entry) document.getElementById("missing").textContent = `There is no node '${name}' in this graph.`;
    if (entry) this.choose(entry, view.graph, false);
    else {
      view.drawing.choose(null);
      this.details.clear();
    }
  }

  /** Write down in the address what is to be seen. */
  note() {
    const values = new URLSearchParams();
    if (this.view !== this.views[0]) values.set("graph", this.view.graph.key);
    if (this.view.drawing.chosen?.kind === "node") values.set("node", this.view.drawing.chosen.name);
    this.filters.write(values);
    history.replaceState(null, "", values.size ? `#${values}` : location.pathname + location.search);
  }

  open(key) {
    const view = this.views.find(({ graph }) => graph.key === key);
    const changed = view !== this.view;
    this.view = view;
    for (const tab of this.tabs) tab.setAttribute("aria-selected", String(tab.value === key));
    for (const other of this.views) if (other.holder) other.holder.hidden = other !== view;
    if (!view.holder) {
      view.holder = make("div", { class: `panes of${view.graph.sides.length}` });
      document.getElementById("drawing").append(view.holder);
      view.drawing = new Drawing(view.graph, view.root, view.holder, (item) => this.choose(item));
    }
    if (changed) {
      this.filters.offer(view.graph);
      this.fill();
      this.details.graph = view.graph;
      if (view.drawing.chosen) this.details.show(view.graph, view.drawing.chosen);
      else this.details.clear();
    }
    this.filters.show();
    this.filter();
  }

  /** Show the details of something; from elsewhere than the drawing it is brought into its middle. */
  choose(item, graph = this.view.graph, note = true) {
    if (graph !== this.view.graph) this.open(graph.key);
    const { drawing } = this.view;
    const inDrawing = document.activeElement?.closest?.("#drawing") || item.kind === "group";
    if (reveal(item)) drawing.render();
    drawing.choose(item);
    if (!inDrawing) drawing.center(item);
    this.details.show(graph, item);
    document.getElementById("missing").hidden = true;
    if (note) this.note();
  }

  /** The next of the nodes that match. */
  next(by) {
    const { graph, drawing } = this.view,
      matches = this.matches;
    if (!matches.length) return;
    const at = matches.indexOf(drawing.chosen);
    this.choose(matches[at < 0 ? 0 : (at + by + matches.length) % matches.length], graph);
  }

  filter() {
    const { graph, drawing } = this.view;
    this.matches = this.filters.of(graph);
    drawing.show(this.filters.active ? new Set(this.matches) : null);
    this.nodeTable.show(this.matches);
    const message = this.filters.active
      ? `${this.matches.length.toLocaleString("en")} of ${many(graph.nodes.length, "node")}`
      : many(graph.nodes.length, "node");
    document.getElementById("found").textContent = message;
    const hits = this.filters.q.trim() ? this.matches.slice(0, MOST_HITS) : [];
    const beyond = hits.length < this.matches.length ? `and ${this.matches.length - hits.length} more, in the table` : "";
    const where = (entry) => make("span", { class: "soft" }, ` ${shortened(anySide(entry).module, 20)}`);
    const list = document.getElementById("hits");
    list.hidden = !hits.length;
    const items = [...hits.map((entry) => [this.details.link(entry), where(entry)]), beyond];
    list.replaceChildren(...items.map((item) => make("li", {}, item)));
  }

  /** The tables of a graph. */
  fill() {
    const { graph } = this.view;
    const at = (name) => document.getElementById(name);
    const show = (entry) => {
      this.choose(entry);
      at("graph").scrollIntoView({ block: "start" });
    };
    this.nodeTable = new Table(at("list-nodes"), nodeColumns(graph), show, differs);
    const casts = new Table(at("list-casts"), castColumns(graph), null, (row) => row.only);
    casts.by(casts.columns[3]); // the largest first
    casts.show(castRows(graph));
    const byRule = (row) => this.filters.set({ rule: row.rule });
    const rules = new Table(at("list-rules"), ruleColumns(graph), byRule, ({ counts }) => counts[0] !== counts[1]);
    rules.show(ruleRows(graph));
    this.tables = [this.nodeTable, casts, rules];
    if (PROFILE) {
      const measuredBy = (row) =>
        graph.nodes.find((entry) => measuredOf(graph, entry).includes(row)) ?? graph.node(row.planned);
      const ranges = new Table(at("ranges"), RANGE_COLUMNS, (row) => measuredBy(row) && show(measuredBy(row)));
      ranges.show([...PROFILE.rows].sort((one, other) => isDead(other) - isDead(one))); // in red
      this.tables.push(ranges);
    }
    const differing = at("differing");
    const of = (...kinds) => many(graph.nodes.filter(({ change }) => kinds.includes(change)).length, "node");
    differing.hidden = graph.sides.length < 2;
    differing.textContent =
      `${of("precision")} in another precision, ${of("types")} of another type alone, ` +
      `${of("added", "removed")} in one plan alone`;
    this.lists.forEach((list, place) => {
      const { length } = place ? this.tables[place].rows : graph.nodes;
      list.querySelector("span").textContent = length.toLocaleString("en");
      at(`list-${list.value}`).dataset.title = list.textContent;
    });
    this.list(this.listed ?? "nodes");
  }

  /** On paper stand all rows, and the whole graph; of two plans the rows that differ. */
  print(starts) {
    const { drawing, graph } = this.view;
    drawing.print(starts);
    for (const table of this.tables) {
      const { rows } = table,
        some = starts && graph.sides.length > 1 && table.differs;
      table.show(some ? rows.filter(table.differs) : rows, starts ? Infinity : AT_ONCE);
      const { dataset } = table.holder;
      if (some) dataset.title = dataset.title.replace(/ .*/, ` that differ: ${table.sorted.length}`);
      table.rows = rows;
    }
  }

  list(name) {
    this.listed = name;
    for (const list of this.lists) {
      list.setAttribute("aria-selected", String(list.value === name));
      document.getElementById(`list-${list.value}`).hidden = list.value !== name;
    }
  }
}

const page = new Page();
document.documentElement.dataset.ready = "yes";
