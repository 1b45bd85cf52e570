// The right side: all that is known about what is selected.

const COST_ROWS = [
  ["Weights read", (cost) => formatBytes(cost.weight_bytes)],
  ["States moved", (cost) => formatBytes(cost.state_bytes)],
  ["Activations", (cost) => formatBytes(cost.activation_bytes)],
  ["FLOPs", (cost) => formatFlops(cost.flops)],
  ["Roofline", (cost) => formatSeconds(cost.seconds)],
  ["Share of step", (cost) => formatShare(cost.share)],
  ["Bound by", (cost) => cost.bound],
];

class Panel {
  // `choose(selection)` is called for links, `seek(query)` for those to many ops.
  constructor(root, choose, seek) {
    Object.assign(this, { root, choose, seek });
  }

  draw(model, part, profile, selection) {
    const draws = { op: () => this.op(part.opOf.get(selection.name)), state: () => this.state(part.states.get(selection.name)),
      weight: () => this.weight(part.weights.get(selection.name)), input: () => this.input(part.values.get(selection.name)) };
    Object.assign(this, { model, part, profile, dims: model.data.profiles[profile].step.dims });
    replace(this.root, selection ? draws[selection.kind]() : this.overview());
    this.root.scrollTop = 0;
  }

  link(kind, name, text = name) {
    return html("button", { class: "link", "data-link": name, onclick: () => this.choose({ kind, name }) }, breakable(text));
  }

  item(left, right, ...more) {
    const name = typeof left === "string" ? breakable(left) : left;
    return html("div", { class: "item" }, html("div", { class: "line" }, html("span", {}, name), html("span", {}, right)),
      more.filter(Boolean).map((each) => html("div", { class: "more" }, each)));
  }

  section(title, items) {
    return items.length ? [html("h2", {}, title), items] : [];
  }

  op(op) {
    return [
      html("h3", { id: "panel-title" }, breakable(op.path)),
      html("div", { class: "badges" }, html("span", { class: "badge mono" }, op.op),
        html("span", { class: classes("badge", op.isPlugin && "plugin") }, op.kind),
        html("span", { class: "badge" }, html("i", { class: "dot", style: { background: op.component.color } }), op.component.name)),
      this.costs(op.costs),
      this.section("Outputs", op.outputs.map((value) => this.value(value, [value.consumers.length ? "to " : "", this.ops(value.consumers), value.isOutput ? " output of the program" : ""]))),
      this.section("Inputs", [...op.inputs.map((value) => this.value(value, ["from ", this.ops([value.producer])])),
        ...op.feeds.map((value) => this.item(this.link("input", value.name), this.shape(value)))]),
      this.section("States", op.states.map((state) => this.item(this.link("state", state.name, state.title), state.writer === op ? "in place" : "reads", this.shape(state)))),
      this.section("Weights", op.weights.map((weight) => this.item(this.link("weight", weight.name), formatMemory(weight.num_bytes), `${weight.dtype} ${formatShape(weight.shape)}`))),
      this.section("ONNX nodes", op.onnx_nodes.map((node) => this.item(node.name, node.op_type))),
      this.section(`Engine layers, ${this.profile}`, this.engineLayers(op)),
    ];
  }

  value(value, more) {
    return this.item(value.name, "", this.shape(value), html("span", {}, more));
  }

  shape(tensor) {
    return html("span", { "data-tip": formatShape(tensor.shape) }, `${tensor.dtype} ${formatShape(tensor.shape, this.dims)}`);
  }

  ops(ops) {
    return ops.flatMap((op, i) => [i ? ", " : null, this.link("op", op.path)]);
  }

  engineLayers(op) {
    const tensors = (each) => each.map(({ dtype, dims }) => `${dtype} ${formatShape(dims)}`).join(", ");
    return (op.engine_layers[this.profile] ?? []).map((index) => this.part.layers[index]).map((layer) => {
      const others = layer.ops.filter((path) => path !== op.path);
      return this.item(layer.name, layer.type, layer.plugin && `plugin ${layer.plugin}`, layer.tactic && breakable(`tactic ${layer.tactic}`),
        layer.inputs.length ? `reads ${tensors(layer.inputs)}` : null, layer.outputs.length ? `writes ${tensors(layer.outputs)}` : null,
        others.length ? html("span", {}, "fused with ", this.ops(others.map((path) => this.part.opOf.get(path)).filter(Boolean))) : null,
        layer.inspector && html("code", {}, JSON.stringify(layer.inspector)));
    });
  }

  costs(costs) {
    const of = (profile) => (profile === this.profile ? "number now" : "number");
    return html("table", { id: "panel-costs" },
      html("thead", {}, html("tr", {}, html("th", {}, "A step"), this.part.profiles.map((profile) => html("th", { class: of(profile) }, profile)))),
      html("tbody", {}, COST_ROWS.map(([title, format]) =>
        html("tr", {}, html("td", {}, title), this.part.profiles.map((profile) => html("td", { class: of(profile) }, format(costs[profile])))))));
  }

  state(state) {
    return [
      html("h3", { id: "panel-title" }, breakable(state.name)),
      html("div", { class: "badges" }, html("span", { class: "badge" }, `state, ${state.kind}`)),
      this.section("Tensor", [this.item("dtype", state.dtype), this.item("shape", formatShape(state.shape)), this.item("of one sequence", formatMemory(state.sequence_bytes)), this.item(state.is_paged ? "a page" : "a slot", formatMemory(state.row_bytes))]),
      this.section("Written by", state.writer ? [this.item(this.link("op", state.writer.path), "in place")] : []),
      this.section("Read by", state.readers.map((op) => this.item(this.link("op", op.path), ""))),
    ];
  }

  weight(weight) {
    return [
      html("h3", { id: "panel-title" }, breakable(weight.name)),
      html("div", { class: "badges" }, html("span", { class: "badge" }, `weight, ${weight.component}`)),
      this.section("Tensor", [this.item("dtype", weight.dtype), this.item("shape", formatShape(weight.shape)), this.item("size", formatMemory(weight.num_bytes), `${formatCount(weight.num_bytes)} bytes`)]),
      this.section("Read by", weight.readers.map((op) => this.item(this.link("op", op.path), op.op))),
      this.section("Made from", weight.sources.map((name) => this.item(name, ""))),
      this.section("By", weight.transforms.map((name) => this.item(name, ""))),
    ];
  }

  input(value) {
    return [
      html("h3", { id: "panel-title" }, value.name),
      html("div", { class: "badges" }, html("span", { class: "badge" }, "input of the program")),
      this.section("Tensor", [this.item("dtype", value.dtype), this.item("shape", formatShape(value.shape), `${formatShape(value.shape, this.dims)} in this step`)]),
      this.section("Read by", value.consumers.map((op) => this.item(this.link("op", op.path), ""))),
    ];
  }

  overview() {
    const groups = [...this.groups()].sort((one, other) => other.weight - one.weight).slice(0, 14);
    const keys = [["/", "search"], ["↑ ↓", "matches; the op before, after"], ["← →", "fold, unfold"], ["Enter", "select"], ["Esc", "clear"]];
    return [
      html("h2", {}, `Where the time of a ${this.profile} step goes`),
      groups.map((group) => this.item([html("i", { class: "dot", style: { background: group.component.color } }),
        html("button", { class: "link", onclick: () => this.seek(`${group.place} ${group.title}`) }, breakable(group.title)), group.ops > 1 ? ` × ${group.ops}` : ""],
        formatShare(group.share), breakable(group.place))),
      this.section("Inputs of the program", [...this.part.values.values()].filter((value) => value.isInput).map((value) => this.item(this.link("input", value.name), this.shape(value)))),
      this.section("Formats, in the checkpoint → in the bundle", this.model.data.weight_table.map((row) => this.item(row.component, `${row.stored} → ${row.held}`, row.remark))),
      html("h2", {}, "Keys"),
      html("div", { class: "keys" }, keys.map(([key, does]) => [html("kbd", {}, key), html("span", {}, does)])),
    ];
  }

  // The same op of all layers.
  groups() {
    const groups = new Map();
    for (const { title, place, component, costs } of this.part.ops) {
      const key = `${place} ${title}`, cost = costs[this.profile];
      if (!groups.has(key)) groups.set(key, { title, place, component, ops: 0, weight: 0, share: 0 });
      const group = groups.get(key);
      group.ops += 1, group.weight += cost.weight, group.share += cost.share;
    }
    return groups.values();
  }
}
