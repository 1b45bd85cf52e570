// The tables: layers (ops), states, weights, and the engine's own layers. A click on a heading sorts.

const numeric = (title, of, format) => ({ title, of, format, isNumber: true });
const IN_ORDER = new Intl.Collator("en", { numeric: true });
const compareKeys = (one, other) => (typeof one === "number" ? one - other : IN_ORDER.compare(one, other));
const opLink = (op) => (op ? op.path : "");

const TABLES = {
  layers: {
    title: "Layers", kind: "op",
    rows: (part) => part.ops, nameOf: (op) => op.path, componentOf: (op) => op.component.name,
    columns: (profile) => {
      const of = (key) => (op) => op.costs[profile][key];
      return [
        numeric("#", (op) => op.index, formatCount), { title: "Module", of: (op) => op.path, isMono: true },
        { title: "Op", of: (op) => op.title, draw: (op) => [html("i", { class: "dot", style: { background: op.component.color } }), op.title] },
        numeric("Share", of("share"), formatShare), numeric("Roofline", of("seconds"), formatSeconds), numeric("Weights", of("weight_bytes"), formatBytes),
        numeric("States", of("state_bytes"), formatBytes), numeric("FLOPs", of("flops"), formatFlops), numeric("Activations", of("activation_bytes"), formatBytes),
        { title: "Kind", of: (op) => op.kind },
        { title: "Outputs", of: (op) => op.outputs.map((value) => `${value.dtype} ${formatShape(value.shape)}`).join(", ") },
      ];
    },
  },
  states: {
    title: "States", kind: "state",
    rows: (part) => [...part.states.values()], nameOf: (state) => state.name, componentOf: (state) => state.owner?.component.name,
    columns: () => [{ title: "State", of: (state) => state.name, isMono: true }, { title: "Kind", of: (state) => state.kind }, { title: "dtype", of: (state) => state.dtype },
      { title: "Shape", of: (state) => formatShape(state.shape) }, numeric("A sequence", (state) => state.sequence_bytes, formatMemory),
      { title: "Written by", of: (state) => opLink(state.writer), isMono: true }, numeric("Readers", (state) => state.readers.length, formatCount)],
  },
  weights: {
    title: "Weights", kind: "weight",
    rows: (part) => [...part.weights.values()], nameOf: (weight) => weight.name, componentOf: (weight) => weight.component,
    columns: () => [{ title: "Weight", of: (weight) => weight.name, isMono: true }, { title: "dtype", of: (weight) => weight.dtype }, { title: "Shape", of: (weight) => formatShape(weight.shape) },
      numeric("Size", (weight) => weight.num_bytes, formatMemory), { title: "Read by", of: (weight) => weight.readers.map(opLink).join(", "), isMono: true }],
  },
  engine: {
    title: "Engine", kind: "op",
    rows: (part, profile) => part.layers.filter((layer) => layer.profile === profile), nameOf: (layer) => layer.ops[0] ?? null, componentOf: (layer, part) => part.opOf.get(layer.ops[0])?.component.name,
    columns: () => [{ title: "Engine layer", of: (layer) => layer.name, isMono: true }, { title: "Type", of: (layer) => layer.type }, { title: "Plugin", of: (layer) => layer.plugin ?? "" },
      { title: "Ops", of: (layer) => layer.ops.join(", "), isMono: true }, { title: "Tactic", of: (layer) => layer.tactic ?? "", isMono: true }],
  },
};

function drawTable(root, name, part, view, matches, set) {
  const table = TABLES[name], columns = table.columns(view.profile), [column, direction] = view.sort[name] ?? [null, 1];
  const compare = (one, other) => (column === null ? 0 : compareKeys(columns[column].of(one), columns[column].of(other)));
  const rows = table.rows(part, view.profile).filter((row) => view.component === null || view.component === table.componentOf(row, part));
  const sorted = rows.map((row, i) => [row, i]).sort((one, other) => direction * compare(one[0], other[0]) || one[1] - other[1]).map(([row]) => row);
  if (!rows.length) return root.replaceChildren(html("p", { class: "note" }, `No ${table.title.toLowerCase()}${view.component === null ? "" : ` of ${view.component}`}.`));
  const sortBy = (i) => set({ sort: { ...view.sort, [name]: [i, i === column ? -direction : columns[i].isNumber && i ? -1 : 1] } });
  const head = columns.map((each, i) => html("th", { class: each.isNumber && "number", "aria-sort": i === column && (direction > 0 ? "ascending" : "descending") },
    html("button", { onclick: () => sortBy(i) }, each.title)));
  const body = sorted.map((row) => {
    const of = table.nameOf(row), choose = () => of !== null && set({ selection: { kind: table.kind, name: of } });
    const isSelected = view.selection?.kind === table.kind && view.selection.name === of;
    return html("tr", { "data-row": of, class: classes(isSelected && "selected", matches.has(`${table.kind} ${of}`) && "match"), tabindex: 0, onclick: choose,
      onkeydown: (event) => event.key === "Enter" && choose() },
      columns.map((each) => html("td", { class: classes(each.isNumber && "number", each.isMono && "mono") }, each.draw?.(row) ?? (each.isMono ? breakable(each.of(row)) : (each.format ?? String)(each.of(row))))));
  });
  root.replaceChildren(html("table", { "data-table": name }, html("thead", {}, html("tr", {}, head)), html("tbody", {}, body)));
}
