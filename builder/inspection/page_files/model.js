// The document as objects that know each other: parts, blocks, ops, values, states, weights.

const NUM_COLORS = 16;

function readModel(data) {
  const components = new Map();
  const componentOf = (name) => {
    if (!components.has(name)) components.set(name, { name, color: `var(--c${components.size % NUM_COLORS})` });
    return components.get(name);
  };
  data.parts.forEach((part) => part.components.forEach(({ name }) => componentOf(name)));
  const profiles = Object.keys(data.profiles);
  return { data, profiles, parts: data.parts.map((part) => new Part(part, profiles, componentOf)) };
}

class Part {
  constructor(data, profiles, componentOf) {
    Object.assign(this, { name: data.name, profiles, engine: data.engine, layers: data.engine?.layers ?? [], largestOp: {}, largestBlock: {} });
    this.totals = this.readCosts(data.totals);
    this.values = new Map(Object.entries(data.values).filter(([, { kind }]) => ["input", "result"].includes(kind)).map(([name, each]) =>
      [name, { ...each, name, isInput: each.kind === "input", producer: null, consumers: [], isOutput: data.outputs.includes(name) }]));
    this.states = new Map(data.states.map((each) => [each.name, { ...each, title: each.name.split(".").at(-1) }]));
    this.weights = new Map(data.weights.map((each) => [each.name, { ...each }]));
    this.ops = data.ops.map((each, index) => this.readOp(each, index, componentOf));
    this.opOf = new Map(this.ops.map((op) => [op.path, op]));
    this.joinTensors();
    this.components = data.components.map((each) => ({ ...each, ...componentOf(each.name), costs: this.readCosts(each.costs) }));
    this.blocks = this.makeBlocks();
  }

  readOp(data, index, componentOf) {
    const among = (tensors) => [...new Set(data.inputs)].filter((name) => tensors.has(name)).map((name) => tensors.get(name));
    const op = {
      ...data, index, isPlugin: data.kind === "plugin", component: componentOf(data.component), title: data.op.split(".").at(-1),
      costs: this.readCosts(data.costs), ownStates: [], states: among(this.states), weights: among(this.weights),
      inputs: among(this.values).filter((value) => !value.isInput), feeds: among(this.values).filter((value) => value.isInput),
      outputs: data.outputs.map((name) => this.values.get(name)),
    };
    op.place = placeOf(op);
    for (const profile of this.profiles) this.largestOp[profile] = Math.max(this.largestOp[profile] ?? 0, op.costs[profile].weight);
    return op;
  }

  joinTensors() {
    for (const op of this.ops) {
      op.outputs.forEach((value) => (value.producer = op));
      [...op.inputs, ...op.feeds].forEach((value) => value.consumers.push(op));
    }
    for (const state of this.states.values()) {
      state.writer = this.opOf.get(state.updated_by) ?? null;
      state.readers = state.read_by.map((path) => this.opOf.get(path)).filter((op) => op && op !== state.writer);
      state.owner = state.writer ?? state.readers[0] ?? null;
      state.owner?.ownStates.push(state);
    }
    for (const weight of this.weights.values()) weight.readers = weight.read_by.map((path) => this.opOf.get(path)).filter(Boolean);
    const results = [...this.values.values()].filter((value) => !value.isInput);
    const widest = Math.max(1, ...results.map((value) => elements(value.shape)));
    for (const value of results) value.thickness = (1 + 3.2 * Math.sqrt(elements(value.shape) / widest)).toFixed(2);
  }

  // By profile. `weight` is what bars compare: seconds, or bytes where the target is not known.
  readCosts(costs) {
    const read = (cost) => ({ ...cost, bytes: cost.weight_bytes + cost.state_bytes, weight: cost.seconds ?? cost.weight_bytes + cost.state_bytes });
    return Object.fromEntries(this.profiles.map((profile) => [profile, read(costs[profile])]));
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
