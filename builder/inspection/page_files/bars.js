// The left side: the step's figures, a bar for each component, and what the bundle is.

const MEASURES = {
  time: { title: "Time", of: (cost) => cost.seconds, format: formatSeconds },
  bytes: { title: "Bytes", of: (cost) => cost.bytes, format: formatBytes },
  flops: { title: "FLOPs", of: (cost) => cost.flops, format: formatFlops },
};

function drawTotals(root, model, part, profile) {
  const total = part.totals[profile], { step } = model.data.profiles[profile], { target } = model.data;
  const isTimed = total.seconds !== null;
  const tile = (title, value, tip) => html("div", { class: "tile", "data-tip": tip }, html("span", {}, title), html("b", {}, value));
  replace(root,
    html("p", { class: "step", id: "step-time" },
      isTimed ? `Roofline of a ${profile} step on a ${target.name ?? target.architecture}, at least` : `A ${profile} step`,
      html("strong", {}, isTimed ? formatSeconds(total.seconds) : formatBytes(total.bytes)),
      describeStep(step)),
    html("div", { class: "tiles" },
      tile("Weights read", formatBytes(total.weight_bytes), `${formatCount(total.weight_bytes)} bytes a step`),
      tile("States moved", formatBytes(total.state_bytes), `${formatCount(total.state_bytes)} bytes a step, read and written`),
      tile("FLOPs", formatFlops(total.flops), `${formatCount(total.flops)} floating-point operations of products a step`),
      tile("Activations", formatBytes(total.activation_bytes), `${formatCount(total.activation_bytes)} bytes between ops, which caches may hold: not in the roofline`),
      tile("Ops", formatCount(part.ops.length), ["plugin", "native", "view"].map((kind) => `${part.ops.filter((op) => op.kind === kind).length} ${kind}`).join(", ")),
      tile("Engine layers", part.engine ? formatCount(part.layers.filter((layer) => layer.profile === profile).length) : "no engine", `in the profile ${profile}`)));
}

function describeStep(step) {
  const plural = (count, name) => `${formatCount(count)} ${name}${count === 1 ? "" : "s"}`;
  return `${plural(step.num_seqs, "sequence")}, ${plural(step.num_tokens, "new token")}, ${formatCount(step.context_len)} in context`;
}

function drawBars(root, part, profile, view, set) {
  const measures = Object.entries(MEASURES).filter(([name]) => name !== "time" || part.totals[profile].seconds !== null);
  const name = measures.some(([each]) => each === view.measure) ? view.measure : measures[0][0], measure = MEASURES[name];
  const amount = (component) => measure.of(component.costs[profile]);
  const components = part.components.filter((each) => each.num_ops > 0).sort((one, other) => amount(other) - amount(one));
  const total = components.reduce((sum, each) => sum + amount(each), 0) || 1, most = Math.max(...components.map(amount), 0) || 1;
  const tip = (each) => `${each.name}\n${describeCost(each.costs[profile])}`;
  replace(root,
    html("div", { class: "heading" }, html("h2", {}, "Components"),
      html("div", { class: "switch", role: "group", "aria-label": "Measure" }, measures.map(([key, each]) =>
        html("button", { "data-measure": key, "aria-pressed": String(key === name), onclick: () => set({ measure: key }) }, each.title)))),
    html("div", { class: "stacked", "aria-hidden": "true" }, components.map((each) =>
      html("i", { style: { width: `${(100 * amount(each)) / total}%`, background: each.color }, "data-tip": tip(each) }))),
    components.map((each) => {
      const isChosen = view.component === each.name, isNone = amount(each) === 0;
      return html("button", {
        class: classes("component", view.component !== null && !isChosen && "faded"), "aria-pressed": String(isChosen), "data-component": each.name,
        "data-tip": tip(each), onclick: () => set({ component: isChosen ? null : each.name }),
      },
        html("span", {}, html("i", { class: "dot", style: { background: each.color } }), each.name),
        html("span", { class: "number" }, `${measure.format(amount(each))}  `, html("span", { class: "dim" }, formatShare(amount(each) / total))),
        html("span", { class: "track" }, html("span", { class: classes("fill", isNone && "none"), style: { width: `${(100 * amount(each)) / most}%`, background: each.color } })));
    }));
}

// What the document says of the bundle as a whole.
function drawFacts(root, { bundle, options, limits, versions, parts, warnings }) {
  const plain = (value) => (Array.isArray(value) ? value.join(", ") : value === null ? "" : String(value));
  const engines = parts.filter((part) => part.engine !== null).flatMap(({ name, engine }) => [
    [`engine, ${name}`, `${formatMemory(engine.num_bytes)}, ${engine.tensorrt}`],
    ...Object.entries(engine.activation_bytes).map(([profile, bytes]) => [`activations, ${name}, ${profile}`, formatMemory(bytes)])]);
  const facts = [["bundle", bundle], ...[options, limits].flatMap((group) => Object.entries(group)), ...engines, ...Object.entries(versions), ...warnings.map((text) => ["warning", text])];
  const shown = facts.map(([name, value]) => [name.replaceAll("_", " "), plain(value)]).filter(([, value]) => value !== "");
  replace(root, shown.map(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]));
}
