// The state of the page, kept in the address behind the #, and what draws it.

class Inspector {
  constructor(data) {
    this.model = readModel(data);
    this.open = new Map(this.model.parts.map((part) => [part, new Set()]));
    this.view = { part: this.model.parts[0].name, profile: this.model.profiles[0], tab: "graph", measure: "time", component: null, selection: null, sort: {} };
    this.matches = new Set();
    this.graph = new Graph(find("view"), (selection) => this.set({ selection }), (block) => this.toggle(block));
    this.panel = new Panel(find("panel"), (selection) => this.set({ selection }, true), (query) => this.seek(query));
    this.search = new Search(find("search"), find("matches"), searchEntries(this.model), {
      changed: (matches) => this.mark(matches), choose: (entry) => this.take(entry) });
  }

  start() {
    const { data } = this.model;
    find("title").textContent = data.bundle.split("/").at(-1) || data.bundle;
    find("subtitle").textContent = describeBundle(data);
    drawFacts(find("facts"), data);
    this.readHash();
    addEventListener("hashchange", () => this.readHash());
    addEventListener("resize", () => this.view.tab === "graph" && this.drawView());
    document.addEventListener("keydown", (event) => this.key(event));
    followWithTip(find("tip"));
  }

  get part() {
    return this.model.parts.find((part) => part.name === this.view.part);
  }

  // Changes what is shown; `isFar`: what is selected may be out of sight.
  set(changes, isFar = false) {
    Object.assign(this.view, changes);
    if (changes.part) Object.assign(this.view, { selection: changes.selection ?? null, component: null });
    const block = this.selectedBlock();
    if (isFar && block) this.open.get(this.part).add(block);
    this.writeHash();
    this.draw();
    if (isFar) this.reveal();
  }

  selectedBlock() {
    const { selection } = this.view;
    if (selection?.kind === "op") return this.part.opOf.get(selection.name).block;
    if (selection?.kind !== "state") return null;
    const state = this.part.states.get(selection.name);
    return state.owner?.block ?? null;
  }

  toggle(block, isOpen = !this.open.get(this.part).has(block)) {
    const open = this.open.get(this.part);
    if (isOpen) open.add(block);
    else open.delete(block);
    this.drawView();
    find("view").querySelector(`[data-fold="${block.id}"]`)?.focus({ preventScroll: true });
  }

  toggleAll(isOpen) {
    this.open.set(this.part, new Set(isOpen ? this.part.blocks : []));
    this.drawView();
  }

  seek(query) {
    find("search").focus();
    this.search.set(query);
  }

  take(entry) {
    const tab = TABLES[this.view.tab]?.kind === entry.kind || this.view.tab === "graph" && entry.kind !== "weight" ? {} : { tab: entry.kind === "weight" ? "weights" : "graph" };
    const part = entry.part === this.part ? {} : { part: entry.part.name };
    this.set({ ...part, ...tab, selection: { kind: entry.kind, name: entry.target ?? entry.name } }, true);
  }

  draw() {
    const { model, part, view } = this;
    const set = (changes) => this.set(changes);
    const buttons = (names, key) => (names.length < 2 ? [] : names.map((name) =>
      html("button", { [`data-${key}`]: name, "aria-pressed": String(view[key] === name), onclick: () => set({ [key]: name }) }, name[0].toUpperCase() + name.slice(1))));
    replace(find("parts"), buttons(model.parts.map(({ name }) => name), "part"));
    replace(find("profiles"), buttons(model.profiles, "profile"));
    drawTotals(find("totals"), model, part, view.profile);
    drawBars(find("bars"), part, view.profile, view, set);
    const tabs = { graph: "Graph", ...Object.fromEntries(Object.entries(TABLES).map(([name, table]) => [name, table.title])) };
    find("tabs").replaceChildren(...Object.entries(tabs).map(([name, title]) =>
      html("button", { role: "tab", "data-tab": name, "aria-selected": String(view.tab === name), "aria-controls": "view", onclick: () => set({ tab: name }) }, title)));
    this.panel.draw(model, part, view.profile, view.selection);
    this.drawView();
  }

  drawView() {
    const { part, view } = this, root = find("view"), scroll = [root.scrollLeft, root.scrollTop];
    const isSame = this.drawn === `${part.name} ${view.tab}`;
    this.drawn = `${part.name} ${view.tab}`;
    find("tools").replaceChildren(...(view.tab === "graph" ? this.tools() : []));
    if (view.tab === "graph") this.graph.draw(part, view.profile, this.open.get(part));
    else drawTable(root, view.tab, part, view, this.matches, (changes) => this.set(changes));
    root.scrollTo(...(isSame ? scroll : [0, 0]));
    this.highlight();
  }

  tools() {
    const legend = [["plugin", "plugin"], ["native", "native"], ["state-box", "state"]];
    return [html("div", { class: "legend" }, legend.map(([name, title]) => html("span", {}, html("i", { class: name }), title))),
      html("button", { id: "unfold-all", onclick: () => this.toggleAll(true) }, "Unfold all"), html("button", { id: "fold-all", onclick: () => this.toggleAll(false) }, "Fold all")];
  }

  // Marks in the graph that is drawn: what is selected, found, connected, and not of the chosen component.
  highlight() {
    const { part, view, matches } = this, { selection, component } = view;
    const isSelected = (kind, name) => selection?.kind === kind && selection.name === name;
    const near = new Set(), op = selection?.kind === "op" ? part.opOf.get(selection.name) : null;
    op?.outputs.forEach((value) => near.add(value.name));
    const users = { input: () => part.values.get(selection.name).consumers, weight: () => part.weights.get(selection.name).readers }[selection?.kind]?.() ?? [];
    const isFound = (block) => block.ops.some((each) => matches.has(`op ${each.path}`) || each.ownStates.some((state) => matches.has(`state ${state.name}`)));
    for (const node of find("view").querySelectorAll(".fold")) node.classList.toggle("match", isFound(part.blocks.find(({ id }) => id === node.dataset.fold)));
    for (const kind of ["op", "state"]) {
      for (const node of find("view").querySelectorAll(`.${kind}`)) {
        const name = node.dataset[kind], of = kind === "op" ? part.opOf.get(name) : part.states.get(name).owner;
        node.classList.toggle("selected", isSelected(kind, name) || (kind === "op" && users.includes(of)));
        node.classList.toggle("match", matches.has(`${kind} ${name}`));
        node.classList.toggle("faded", component !== null && of?.component.name !== component);
        node.setAttribute("tabindex", isSelected(kind, name) ? 0 : -1);
      }
    }
    for (const edge of find("view").querySelectorAll(".edge")) {
      const { value, to, of } = edge.dataset;
      edge.classList.toggle("near", near.has(value) || (op !== null && to === op.path) || isSelected("state", of));
    }
  }

  reveal() {
    const { selection } = this.view;
    const rows = [...find("view").querySelectorAll("[data-op], [data-state], [data-row]")];
    const node = rows.find((each) => [each.dataset.op, each.dataset.state, each.dataset.row].includes(selection.name));
    node?.scrollIntoView({ block: "center", inline: "nearest" });
    node?.focus({ preventScroll: true });
  }

  mark(matches) {
    this.matches = new Set(matches.map((entry) => `${entry.kind} ${entry.target ?? entry.name}`));
    this.writeHash();
    if (this.drawn) this.drawView();
  }

  key(event) {
    if (event.target === find("search") || event.ctrlKey || event.metaKey || event.altKey) return;
    const isReading = event.key.startsWith("Arrow") && ["panel", "summary"].some((id) => find(id).contains(document.activeElement));
    if (isReading) return;
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key], fold = { ArrowRight: true, ArrowLeft: false }[event.key];
    const { selection } = this.view, op = selection?.kind === "op" ? this.part.opOf.get(selection.name) : null;
    const block = this.part.blocks.find(({ id }) => id === document.activeElement.dataset.fold);
    if (event.key === "/") find("search").focus(), find("search").select();
    else if (event.key === "Escape") this.set({ selection: null, component: null });
    else if ((event.key === "Enter" || event.key === " ") && block) this.toggle(block);
    else if (this.view.tab !== "graph") return;
    else if (step && block) this.moveFocus(block.index + step);
    else if (step && op) this.set({ selection: { kind: "op", name: (this.part.ops[op.index + step] ?? op).path } }, true);
    else if (fold !== undefined && (block ?? op)) this.toggle(block ?? op.block, fold);
    else return;
    event.preventDefault();
  }

  moveFocus(index) {
    const next = this.part.blocks[index];
    if (next) find("view").querySelector(`[data-fold="${next.id}"]`).focus();
  }

  writeHash() {
    const { part, profile, tab, component, selection } = this.view;
    const entries = { part, profile, tab, component, [selection?.kind ?? ""]: selection?.name, q: this.search.input.value };
    const hash = new URLSearchParams(Object.entries(entries).filter(([key, value]) => key && value));
    history.replaceState(null, "", `#${hash}`);
  }

  // What the address says, as far as the document has it.
  readHash() {
    const said = new URLSearchParams(location.hash.slice(1)), { model } = this;
    const known = (key, names, fallback) => (names.includes(said.get(key)) ? said.get(key) : fallback);
    const part = model.parts.find((each) => each.name === said.get("part")) ?? model.parts[0];
    const tables = { op: part.opOf, state: part.states, weight: part.weights, input: part.values };
    const kind = Object.keys(tables).find((each) => tables[each].has(said.get(each)));
    const selection = kind ? { kind, name: said.get(kind) } : null;
    this.view = { ...this.view, part: part.name, profile: known("profile", part.profiles, part.profiles[0]), tab: known("tab", ["graph", ...Object.keys(TABLES)], "graph") };
    if (said.get("q")) this.search.set(said.get("q"));
    this.set({ component: known("component", part.components.map(({ name }) => name), null), selection }, selection !== null);
  }
}

function describeBundle({ options, target, parts }) {
  const layers = new Set(parts[0].ops.map((op) => op.layer).filter((layer) => layer !== null)).size;
  const device = target === null ? "without an engine" : `for ${target.architecture}${target.name ? ` (${target.name})` : ""}`;
  return [`${layers} layers`, options.precision && `precision ${options.precision}`, device].filter(Boolean).join(", ");
}

// Shows `data-tip` of what is under the mouse.
function followWithTip(tip) {
  document.addEventListener("mousedown", () => (tip.hidden = true));
  document.addEventListener("mousemove", (event) => {
    const text = event.buttons ? null : event.target.closest?.("[data-tip]")?.dataset.tip;
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`;
  });
}

new Inspector(JSON.parse(find("document").textContent)).start();
