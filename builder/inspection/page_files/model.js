// The document as objects that know each other: parts, blocks, ops, values, states, weights.

const NUM_COLORS = 16;

function readModel(data) {
  const components = new Map();
  const componentOf = (name) => {
    if (!components.has(name)) components.set(name, { name, color: `var(--c${components.size % NUM_COLORS})` });
    return components.get(name);
  };
  return { data, parts: data.parts.map((part) => new Part(part, data.profiles.map((profile) => profile.name), componentOf)) };
}

class Part {
  constructor(data, profiles, componentOf) {
    Object.assign(this, { name: data.name, title: data.title, profiles, totals: data.totals, largestOp: {}, largestBlock: {} });
    this.values = new Map([...data.inputs.map((each) => [each, true]), ...data.values.map((each) => [each, false])].map(
      ([each, isInput]) => [each.name, { ...each, isInput, producer: null, consumers: [], isOutput: data.outputs.includes(each.name) }]));
    this.states = new Map(data.states.map((each) => [each.name, { ...each, title: each.name.split(".").at(-1), writer: null, readers: [] }]));
    this.weights = new Map(data.weights.map((each) => [each.name, { ...each, readers: [] }]));
    this.layers = data.engine_layers;
    this.ops = data.ops.map((each, index) => this.readOp(each, index, componentOf));
    this.opOf = new Map(this.ops.map((op) => [op.path, op]));
    for (const state of this.states.values()) (state.writer ?? state.readers[0])?.ownStates.push(state);
    this.components = data.components.map((each) => ({ ...componentOf(each.name), costs: this.readCosts(each.costs) }));
    this.blocks = this.makeBlocks();
    const values = [...this.values.values()].filter((value) => !value.isInput);
    const widest = Math.max(1, ...values.map((value) => elements(value.shape)));
    for (const value of values) value.thickness = (1 + 3.2 * Math.sqrt(elements(value.shape) / widest)).toFixed(2);
  }

  readOp(data, index, componentOf) {
    const op = {
      ...data, index, isPlugin: data.kind === "plugin", component: componentOf(data.component),
      title: data.op.split("::").at(-1).split(".")[0], ownStates: [], costs: this.readCosts(data.costs),
      inputs: [...new Set(data.inputs)].map((name) => this.values.get(name)).filter((value) => value && !value.isInput),
      feeds: [...new Set(data.inputs)].map((name) => this.values.get(name)).filter((value) => value?.isInput),
      outputs: data.outputs.map((name) => this.values.get(name)),
      states: [...new Set(data.states.map((each) => each.name))].map((name) => this.states.get(name)),
      weights: data.weights.map((name) => this.weights.get(name)),
    };
    op.place = placeOf(op);
    op.outputs.forEach((value) => (value.producer = op));
    [...op.inputs, ...op.feeds].forEach((value) => value.consumers.push(op));
    op.weights.forEach((weight) => weight.readers.push(op));
    for (const { name, writes } of data.states) {
      const state = this.states.get(name);
      if (writes) state.writer = op;
      else if (!state.readers.includes(op)) state.readers.push(op);
    }
    for (const profile of this.profiles) this.largestOp[profile] = Math.max(this.largestOp[profile] ?? 0, op.costs[profile].weight);
    return op;
  }

  // Figures by profile. `weight` is what bars compare: seconds, or bytes where no roofline is known.
  readCosts(costs) {
    return Object.fromEntries(this.profiles.map((profile) => {
      const cost = costs[profile], total = this.totals[profile];
      const bytes = cost.weight_bytes + cost.state_bytes;
      const weight = cost.seconds ?? bytes, all = total.seconds ?? total.weight_bytes + total.state_bytes;
      return [profile, { ...cost, bytes, weight, share: all ? weight / all : 0 }];
    }));
  }

  // Neighbors of one layer, or of none, are a block.
  makeBlocks() {
    const blocks = [], keyOf = (op) => (op.layer === null ? null : op.layer);
    for (const op of this.ops) {
      if (blocks.length && keyOf(blocks.at(-1).ops[0]) === keyOf(op)) blocks.at(-1).ops.push(op);
      else blocks.push({ id: `b${blocks.length}`, ops: [op] });
    }
    const last = new Map();
    blocks.forEach((block, i) => block.ops.forEach((op) => (op.block = block, last.set(op, i))));
    for (const [i, block] of blocks.entries()) {
      Object.assign(block, describeBlock(block), { enters: new Set(), leaves: new Set(), costs: this.blockCosts(block) });
      block.index = i;
    }
    for (const value of this.values.values()) {
      if (value.producer === null) continue;
      const first = value.producer.block.index, end = Math.max(first, ...value.consumers.map((op) => op.block.index));
      for (let i = first; i < end; i += 1) blocks[i].leaves.add(value), blocks[i + 1].enters.add(value);
    }
    return blocks;
  }

  blockCosts(block) {
    return Object.fromEntries(this.profiles.map((profile) => {
      const sum = { bytes: 0, flops: 0, seconds: 0, weight: 0, share: 0, byComponent: new Map() };
      for (const op of block.ops) {
        const cost = op.costs[profile];
        for (const key of ["bytes", "flops", "weight", "share"]) sum[key] += cost[key];
        sum.seconds = cost.seconds === null ? null : sum.seconds + cost.seconds;
        sum.byComponent.set(op.component, (sum.byComponent.get(op.component) ?? 0) + cost.weight);
      }
      this.largestBlock[profile] = Math.max(this.largestBlock[profile] ?? 0, sum.weight);
      return [profile, sum];
    }));
  }
}

// The module path without its layer and without the op's own name.
function placeOf(op) {
  const place = op.layer === null ? op.path : op.path.replace(/^(.*?\.)?layers\.\d+\./, "");
  return place.endsWith(`.${op.title}`) ? place.slice(0, -op.title.length - 1) : place;
}

function describeBlock(block) {
  const { layer, path } = block.ops[0];
  if (layer === null) {
    const modules = [...new Set(block.ops.map((op) => op.path.split(".")[0]))];
    return { title: modules.join(", "), kind: "" };
  }
  const modules = new Set(block.ops.flatMap((op) => op.path.split(".")));
  const kinds = [["linear_attn", "linear attention"], ["self_attn", "full attention"], ["ple", "n-gram embedding"]];
  return {
    title: path.match(/^(.*?\.)?layers\.\d+/)?.[0] ?? `layer ${layer}`,
    kind: kinds.filter(([module]) => modules.has(module)).map(([, kind]) => kind).join(" + "),
  };
}
