// Where the ops of a block stand: rows by the longest path to them, then an order within the rows that crosses few
// edges, then positions near what they are connected with. An edge that passes a row has a lane of its own there.

const OP_WIDTH = 184, OP_HEIGHT = 46, LANE_WIDTH = 10, LANE_GAP = 6, COLUMN_GAP = 18, ROW_GAP = 30;
const STATE_WIDTH = 128, STATE_HEIGHT = 18, STATE_GAP = 4, STATE_COLUMN_GAP = 28;

// Takes a block of the model (model.js). Gives cells with their place, routes of edges, places of states, and the
// positions at which values enter and leave; x grows from 0 to `width`, y from 0 to `height`.
function layoutBlock(block) {
  const rows = makeRows(block);
  orderRows(rows);
  const width = placeColumns(rows);
  const { height, states, statesEnd } = placeRows(rows, width);
  return { cells: rows.flat(), states, routes: routes(rows), width: Math.max(width, statesEnd), height };
}

function makeRows(block) {
  const rankOf = new Map(), inside = new Set(block.ops);
  let last = 0;
  for (const op of block.ops) {
    const before = op.inputs.map((value) => value.producer).filter((other) => inside.has(other));
    const rank = 1 + Math.max(0, ...before.map((other) => rankOf.get(other)));
    rankOf.set(op, rank);
    last = Math.max(last, rank);
  }
  const rows = Array.from({ length: last + 2 }, () => []);
  const add = (rank, cell) => (rows[rank].push({ rank, above: [], below: [], ...cell }), rows[rank].at(-1));
  const cellOf = new Map(block.ops.map((op) => [op, add(rankOf.get(op), { op, width: OP_WIDTH })]));
  const lane = (rank, value, role, chain) => {
    const cell = add(rank, { value, role, chain, width: LANE_WIDTH });
    chain.push(cell);
    return cell;
  };
  const link = (value, above, below) => {
    const edge = { value, above, below };
    above.below.push(edge);
    below.above.push(edge);
  };
  for (const value of new Set([...block.enters, ...block.ops.flatMap((op) => op.outputs)])) {
    const readers = value.consumers.filter((op) => inside.has(op)).map((op) => [rankOf.get(op), cellOf.get(op)]);
    const chain = [];
    if (block.leaves.has(value)) readers.push([last + 1, lane(last + 1, value, "exit", chain)]);
    const start = inside.has(value.producer) ? cellOf.get(value.producer) : lane(0, value, "entry", chain);
    const ends = new Map([[start.rank, start]]);
    for (const [rank, cell] of readers.sort((one, other) => one[0] - other[0])) {
      let from = Math.max(...[...ends.keys()].filter((each) => each < rank));
      for (; from < rank - 1; from += 1) {
        ends.set(from + 1, lane(from + 1, value, "lane", chain));
        link(value, ends.get(from), ends.get(from + 1));
      }
      link(value, ends.get(rank - 1), cell);
    }
  }
  return rows;
}

// States stand on the right, and so do the ops that have some.
function orderRows(rows) {
  const middle = (cell, edges, end) => {
    const places = edges.map((edge) => edge[end].place);
    return places.length ? places.reduce((sum, each) => sum + each, 0) / places.length : cell.place;
  };
  const number = (row) => row.forEach((cell, place) => (cell.place = place / Math.max(1, row.length - 1)));
  rows.forEach(number);
  for (let sweep = 0; sweep < 12; sweep += 1) {
    const isDown = sweep % 2 === 0;
    for (const row of isDown ? rows : [...rows].reverse()) {
      for (const cell of row) cell.wish = isDown ? middle(cell, cell.above, "above") : middle(cell, cell.below, "below");
      row.sort((one, other) => Number(hasStates(one)) - Number(hasStates(other)) || one.wish - other.wish);
      number(row);
    }
  }
}

const hasStates = (cell) => Boolean(cell.op && cell.op.ownStates.length);

// Sets the middle `x` of every cell; gives the width that they take.
function placeColumns(rows) {
  for (const row of rows) row.forEach((cell, i) => (cell.x = i ? row[i - 1].x + distance(row[i - 1], cell) : cell.width / 2));
  for (let sweep = 0; sweep < 60; sweep += 1) {
    for (const row of sweep % 2 ? [...rows].reverse() : rows) {
      nearest(row, row.map(wishOf)).forEach((x, i) => (row[i].x = x));
    }
  }
  const cells = rows.flat();
  const left = Math.min(...cells.map((cell) => cell.x - cell.width / 2));
  cells.forEach((cell) => (cell.x -= left));
  return Math.max(...cells.map((cell) => cell.x + cell.width / 2));
}

const distance = (one, other) => (one.width + other.width) / 2 + (one.op || other.op ? COLUMN_GAP : LANE_GAP);
const mean = (cells) => cells.reduce((sum, cell) => sum + cell.x, 0) / cells.length;

// An op wants to be in the middle of its neighbors; the lanes of a value one below the other, and below or above an op.
function wishOf(cell) {
  const near = [...cell.above.map((edge) => edge.above), ...cell.below.map((edge) => edge.below)];
  if (cell.op) return near.length ? { x: mean(near), weight: 1 } : { x: cell.x, weight: 0.01 };
  const ends = near.filter((other) => other.op);
  return { x: ends.length ? 0.8 * mean(cell.chain) + 0.2 * mean(ends) : mean(cell.chain), weight: 4 };
}

// Positions in order, with room for each cell, that are nearest to the wishes in the weighted sum of squares.
function nearest(row, wishes) {
  let offset = 0;
  const offsets = row.map((cell, i) => (offset += i ? distance(row[i - 1], cell) : 0));
  const pools = [];
  for (const [i, { x, weight }] of wishes.entries()) {
    pools.push({ sum: (x - offsets[i]) * weight, weight, count: 1 });
    while (pools.length > 1) {
      const [one, other] = pools.slice(-2);
      if (one.sum / one.weight <= other.sum / other.weight) break;
      pools.splice(-2, 2, { sum: one.sum + other.sum, weight: one.weight + other.weight, count: one.count + other.count });
    }
  }
  return pools.flatMap((pool) => Array(pool.count).fill(pool.sum / pool.weight)).map((x, i) => x + offsets[i]);
}

// Sets `y` and `bottom` of every cell and the row's own `end`; states stand beside the row of the op that writes them.
function placeRows(rows, width) {
  const states = [], x = width + STATE_COLUMN_GAP;
  let y = 0;
  for (const [rank, row] of rows.entries()) {
    const owned = row.filter((cell) => cell.op).flatMap((cell) => cell.op.ownStates.map((state) => ({ state, cell })));
    const tall = owned.length * (STATE_HEIGHT + STATE_GAP) - STATE_GAP;
    const isBorder = rank === 0 || rank === rows.length - 1;
    const end = y + (isBorder ? 0 : Math.max(OP_HEIGHT, tall));
    row.forEach((cell) => Object.assign(cell, { y, end, bottom: cell.op ? y + OP_HEIGHT : end }));
    owned.forEach((each, i) => states.push({ ...each, x, y: y + i * (STATE_HEIGHT + STATE_GAP) }));
    y = end + (isBorder ? 14 : ROW_GAP);
  }
  return { height: Math.max(...rows.flat().map((cell) => cell.end)), states, statesEnd: states.length ? x + STATE_WIDTH : 0 };
}

// Of every edge between two neighboring rows the points at both ends; several at one side of an op are spread over it.
function routes(rows) {
  const spread = (cell, edges, end) => {
    const ends = [...new Set(edges.map((edge) => (end === "below" ? edge.value : edge)))];
    const order = (each) => edges.filter((edge) => edge === each || edge.value === each)[0];
    ends.sort((one, other) => order(one)[end].x - order(other)[end].x);
    const step = Math.min(26, (cell.width - 36) / Math.max(1, ends.length - 1));
    return new Map(ends.map((each, i) => [each, cell.x + (cell.op ? (i - (ends.length - 1) / 2) * step : 0)]));
  };
  const starts = new Map(rows.flat().map((cell) => [cell, spread(cell, cell.below, "below")]));
  return rows.flat().flatMap((cell) => {
    const ends = spread(cell, cell.above, "above");
    return cell.above.map((edge) => ({
      value: edge.value,
      from: edge.above,
      to: cell,
      x1: starts.get(edge.above).get(edge.value),
      y1: edge.above.bottom,
      bend: edge.above.end,
      x2: ends.get(edge),
      y2: cell.y,
      end: cell.op ? cell.y : cell.end,
    }));
  });
}
