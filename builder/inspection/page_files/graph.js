// The graph of the program: a box for each block of ops, folded or with its ops, states beside them.

const MARGIN = 14, HEADER = 28, BLOCK_GAP = 12, OPEN_GAP = 26, INSET = 10, LOAD_WIDTH = 130, SMALLEST_SCALE = 0.8, LEGEND = 44;

class Graph {
  // `choose(selection)` and `toggle(block)` are called on clicks.
  constructor(root, choose, toggle) {
    Object.assign(this, { root, choose, toggle, layouts: new Map() });
  }

  // Draws `part` (model.js) with the blocks of `open` unfolded.
  draw(part, profile, open) {
    const layouts = part.blocks.map((block) => (open.has(block) ? this.layoutOf(block) : null));
    const inner = Math.max(560, ...layouts.map((layout) => (layout ? layout.width + 2 * INSET : 0)));
    const available = this.root.clientWidth - 2, width = Math.max(inner + 2 * MARGIN, available);
    const middle = width / 2, drawn = [], headers = [], borders = [];
    let y = MARGIN;
    for (const [i, block] of part.blocks.entries()) {
      const box = { block, layout: layouts[i], x: MARGIN, y, width: width - 2 * MARGIN };
      box.height = HEADER + (box.layout ? box.layout.height + 8 : 0);
      drawn.push(this.drawBlock(part, profile, box, middle));
      headers.push(this.drawHeader(part, profile, box));
      borders.push(this.bordersOf(box, middle));
      y += box.height + (box.layout || layouts[i + 1] ? OPEN_GAP : BLOCK_GAP);
    }
    const edges = borders.slice(1).flatMap((border, i) => this.drawGap(borders[i], border));
    // A graph that is a little too wide is drawn smaller.
    const height = y + LEGEND, scale = Math.max(SMALLEST_SCALE, Math.min(1, available / width));
    this.root.replaceChildren(
      svg("svg", { class: "graph", width: width * scale, height: height * scale, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Graph of the ${part.name}` },
        drawn, svg("g", {}, edges), headers)
    );
  }

  layoutOf(block) {
    if (!this.layouts.has(block)) this.layouts.set(block, layoutBlock(block));
    return this.layouts.get(block);
  }

  drawBlock(part, profile, { block, layout, x, y, width, height }, middle) {
    const group = svg("g", { class: classes("block", layout && "open"), "data-block": block.id, transform: `translate(${x} ${y})` },
      svg("rect", { width, height, rx: 8 }));
    if (layout) {
      const ops = svg("g", { transform: `translate(${leftOf(layout, x, width, middle) - x} ${HEADER})` });
      ops.append(...layout.routes.map(drawRoute), ...drawStateEdges(layout));
      ops.append(...layout.cells.filter((cell) => cell.op).map((cell) => this.drawOp(part, profile, cell)));
      ops.append(...layout.states.map((each) => this.drawState(each)));
      group.append(ops);
    }
    return group;
  }

  drawHeader(part, profile, { block, layout, x, y, width }) {
    const isOpen = layout !== null, cost = block.costs[profile], scale = part.largestBlock[profile] || 1;
    const right = width - 12, left = right - LOAD_WIDTH;
    let at = left;
    const segments = [...cost.byComponent].map(([component, weight]) => {
      const length = (LOAD_WIDTH * weight) / scale;
      at += length;
      return svg("rect", { x: at - length, y: 10, width: length, height: 8, class: "load", style: { fill: component.color } });
    });
    const toggle = () => this.toggle(block);
    const count = `${block.ops.length} ${block.ops.length === 1 ? "op" : "ops"}`;
    return svg("g", {
      class: classes("fold", isOpen && "open"), transform: `translate(${x} ${y})`, role: "button", tabindex: 0, "aria-expanded": String(isOpen),
      "aria-label": `${block.title}, ${block.kind}, ${count}`, onclick: toggle, "data-fold": block.id,
      "data-tip": `${block.title}\n${count}\n${describeCost(cost)}`,
    },
      svg("rect", { x: 1, y: 1, width: width - 2, height: HEADER - 2, rx: 7 }),
      svg("text", { x: 12, y: 18.5 }, isOpen ? "▾" : "▸"),
      svg("text", { x: 28, y: 18.5, class: "name" }, block.title),
      svg("text", { x: 34 + 7.2 * block.title.length, y: 18.5, class: "kind" }, clipped(block.kind, Math.floor((left - 120 - 7.2 * block.title.length) / 6))),
      svg("text", { x: left - 10, y: 18.5, class: "value", "text-anchor": "end" }, cost.seconds === null ? formatBytes(cost.bytes) : formatSeconds(cost.seconds)),
      svg("rect", { x: left, y: 10, width: LOAD_WIDTH, height: 8, rx: 2, class: "groove" }), segments);
  }

  drawOp(part, profile, cell) {
    const op = cell.op, cost = op.costs[profile], length = (OP_WIDTH - 20) * (cost.weight / (part.largestOp[profile] || 1));
    const choose = (event) => (event.stopPropagation(), this.choose({ kind: "op", name: op.path }));
    return svg("g", {
      class: classes("op", op.isPlugin ? "plugin" : "native"), "data-op": op.path, role: "button", tabindex: -1,
      "aria-label": `${op.path}, ${op.op}`, style: { "--tone": op.component.color }, onclick: choose,
      transform: `translate(${cell.x - OP_WIDTH / 2} ${cell.y})`, "data-tip": `${op.path}\n${op.op}, ${op.kind}\n${describeCost(cost)}`,
    },
      svg("rect", { class: "box", width: OP_WIDTH, height: OP_HEIGHT, rx: 6 }),
      svg("rect", { class: "strip", width: 4, height: OP_HEIGHT - 10, x: 4, y: 5, rx: 2 }),
      svg("text", { class: "name", x: 14, y: 17 }, clipped(op.title, 20)),
      svg("text", { class: "share", x: OP_WIDTH - 8, y: 17, "text-anchor": "end" }, cost.weight ? formatShare(cost.share) : ""),
      svg("text", { class: "path", x: 14, y: 31 }, clipped(op.place, 27)),
      svg("rect", { class: "groove", x: 14, y: 37, width: OP_WIDTH - 22, height: 3, rx: 1.5 }),
      svg("rect", { class: "load", x: 14, y: 37, width: Math.max(0, length), height: 3, rx: 1.5 }));
  }

  drawState({ state, x, y }) {
    const choose = (event) => (event.stopPropagation(), this.choose({ kind: "state", name: state.name }));
    return svg("g", {
      class: "state", "data-state": state.name, role: "button", tabindex: -1, "aria-label": `state ${state.name}`, onclick: choose,
      transform: `translate(${x} ${y})`, "data-tip": `${state.name}\n${state.dtype} ${formatShape(state.shape)}`,
    },
      svg("rect", { width: STATE_WIDTH, height: STATE_HEIGHT, rx: STATE_HEIGHT / 2 }),
      svg("text", { x: 10, y: 12.8 }, clipped(state.title, 21)));
  }

  // Where values enter at the top of a block's box and leave at its bottom.
  bordersOf({ block, layout, x, y, width, height }, middle) {
    const bottom = y + height;
    if (layout) {
      const left = leftOf(layout, x, width, middle);
      const of = (role) => new Map(layout.cells.filter((cell) => cell.role === role).map((cell) => [cell.value, left + cell.x]));
      return { enters: of("entry"), leaves: of("exit"), top: y, bottom, headerEnd: y + HEADER };
    }
    const spread = (values) => new Map([...values].map((value, i) => [value, middle + 18 * (i - (values.size - 1) / 2)]));
    return { enters: spread(block.enters), leaves: spread(block.leaves), top: y, bottom };
  }

  drawGap(above, below) {
    return [...below.enters].filter(([value]) => above.leaves.has(value)).map(([value, x]) =>
      svg("path", { class: "edge", "data-value": value.name, "data-tip": describeValue(value), "stroke-width": value.thickness, d: curve(above.leaves.get(value), above.bottom, x, below.top) + (below.headerEnd ? `V${below.headerEnd}` : "") }));
  }
}

// Where a layout begins in a box: with what enters and leaves in the middle of all boxes, as far as there is room.
function leftOf(layout, x, width, middle) {
  const borders = layout.cells.filter((cell) => ["entry", "exit"].includes(cell.role));
  const center = borders.length ? mean(borders) : layout.width / 2;
  return Math.max(x + INSET, Math.min(middle - center, x + width - INSET - layout.width));
}

const curve = (x1, y1, x2, y2) => `M${x1} ${y1}C${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2} ${x2} ${y2}`;

function drawRoute(route) {
  const path = `M${route.x1} ${route.y1}V${route.bend}${curve(route.x1, route.bend, route.x2, route.y2).replace("M", "L")}V${route.end}`;
  return svg("path", { class: "edge", "data-value": route.value.name, "data-to": route.to.op?.path, "data-tip": describeValue(route.value), "stroke-width": route.value.thickness, d: path });
}

function drawStateEdges(layout) {
  const cells = new Map(layout.cells.filter((cell) => cell.op).map((cell) => [cell.op, cell]));
  return layout.states.flatMap(({ state, x, y }) =>
    [...new Set([state.writer, ...state.readers])].filter((op) => cells.has(op)).map((op) => {
      const cell = cells.get(op), y1 = Math.min(Math.max(y + STATE_HEIGHT / 2, cell.y + 8), cell.y + OP_HEIGHT - 8), x1 = cell.x + OP_WIDTH / 2;
      const bend = (x1 + x) / 2, y2 = y + STATE_HEIGHT / 2;
      return svg("path", { class: "edge effect", "data-of": state.name, d: `M${x1} ${y1}C${bend} ${y1} ${bend} ${y2} ${x} ${y2}` });
    }));
}

const describeValue = (value) => `${value.name}\n${value.dtype} ${formatShape(value.shape)}`;

function describeCost(cost) {
  const lines = [`${formatBytes(cost.bytes)} of weights and states`, `${formatFlops(cost.flops)} FLOPs`];
  if (cost.seconds !== null) lines.push(`${formatSeconds(cost.seconds)} at the roofline, ${formatShare(cost.share)} of the step`);
  return lines.join("\n");
}
