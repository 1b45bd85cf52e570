// Index scores of the complete groups that each row sees, and the best score of every 16 groups.
// Macros: ACTIVATION (bf16 or float), HEADS, DIM, RATIO (tokens of a group), PAGE (groups of a page), COUNT (groups to
// select), TILE_ROWS (rows that share a read of the keys), BLOCK_THREADS.
//
// The work is split into items, the keys of 16 groups against TILE_ROWS rows of one sequence, which are dealt out
// evenly by the lengths at hand. Rows that see at most COUNT groups need no scores, and have no items.
#pragma once
#include "q4e.cuh"

constexpr int GROUPS = 16;  // of an item
constexpr int WARPS = BLOCK_THREADS / WARP;

// A score is never negative, and no NaN: its bits are in the order of its value.
__device__ __forceinline__ uint32 ordered_bits(float score) { return __float_as_uint(score) & 0x7fffffffu; }

// Rows of one sequence; `position` is the index of the first in the sequence.
struct Rows {
  int first, count, position;

  __device__ int visible(int row) const { return (position + row + 1) / RATIO; }  // groups that the row sees
  __device__ int num_tiles() const { return ceil_div(count, TILE_ROWS); }
  __device__ Rows tile(int index) const {
    const int skipped = index * TILE_ROWS;
    return {first + skipped, min(count - skipped, TILE_ROWS), position + skipped};
  }
  __device__ int num_items() const {  // of the keys that the last row sees
    const int groups = visible(count - 1);
    return count > 0 && groups > COUNT ? ceil_div(groups, GROUPS) : 0;
  }
};

struct Operands {
  const ACTIVATION *index_q, *index_k_cache;
  const int *query_start_loc, *seq_lens, *block_table, *num_seqs;
  uint32* scores;           // for each row of this launch the scores, and behind them the best of each item
  int first_row, num_rows;  // of this launch
  int row_stride, max_items, max_blocks, batch_size;

  // The rows of `sequence` that are in this launch.
  __device__ Rows rows_of(int sequence) const {
    const int start = query_start_loc[sequence], end = query_start_loc[sequence + 1];
    const int first = max(start, first_row), last = min(end, first_row + num_rows);
    return {first, max(last - first, 0), seq_lens[sequence] - (end - first)};
  }
  __device__ uint32* scores_of(int row) const { return scores + int64(row - first_row) * row_stride; }

  // A group that the sequence does not have may be asked for as well: it reads some page.
  __device__ int page_of(int sequence, int group) const {
    return max(block_table[int64(sequence) * max_blocks + min(group / PAGE, max_blocks - 1)], 0);
  }
  __device__ const ACTIVATION* key(int page, int group) const {
    return index_k_cache + (int64(page) * PAGE + group % PAGE) * DIM;
  }
};

// Items `item`, `item + step`, ... below `last`, of one sequence: what a warp does with one tile of rows.
struct Share {
  int sequence, item, step, last;
};

// The first item of each sequence, and behind the last their number. A tile of rows counts as many items as the last.
__device__ __forceinline__ void number_items(const Operands& x, int* starts) {
  const int num_seqs = *x.num_seqs;
#pragma unroll 1
  for (int sequence = threadIdx.x; sequence < x.batch_size; sequence += BLOCK_THREADS) {
    const Rows rows = x.rows_of(sequence);
    const int items = rows.num_tiles() * rows.num_items();
    starts[sequence] = items * int(sequence < num_seqs);  // no branch that the loads would have to wait for
  }
  __syncthreads();
  if (threadIdx.x < WARP) {
    int total = 0;
#pragma unroll 1
    for (int first = 0; first < x.batch_size; first += WARP) {
      const int sequence = first + threadIdx.x, items = sequence < x.batch_size ? starts[sequence] : 0;
      const int sum = warp_prefix(items);
      if (sequence < x.batch_size) starts[sequence] = total + sum - items;
      total += __shfl_sync(FULL_MASK, sum, WARP - 1);
    }
    if (threadIdx.x == 0) starts[x.batch_size] = total;
  }
  __syncthreads();
}

// What is left to do: of a single sequence, tiles of rows whose items all blocks share; of several, a part of all
// items.
struct Work {
  int item, end;  // of several: the items of this block
  int tile;       // of a single one

  // The next tile of rows and the warp's share of it; false if there is none.
  __device__ bool next(const Operands& x, const int* starts, Rows& rows, Share& share) {
    const int warp = threadIdx.x / WARP;
    if (x.batch_size == 1) {
      const Rows all = x.rows_of(0);
      if ((*x.num_seqs == 0) | (tile >= all.num_tiles())) return false;  // no load waits for another
      rows = all.tile(tile++);
      share.last = rows.num_items();
      return true;
    }
    if (item >= end) return false;
    int sequence = 0;
#pragma unroll 1
    for (int high = x.batch_size; high - sequence > 1;) {  // starts[sequence] <= item < starts[high]
      const int middle = (sequence + high) / 2;
      (starts[middle] <= item ? sequence : high) = middle;
    }
    const Rows all = x.rows_of(sequence);
    const uint32 offset = item - starts[sequence], num_items = all.num_items();
    const int first = int(offset % num_items), last = min(int(num_items), first + end - item);
    item += last - first;
    rows = all.tile(int(offset / num_items));
    share = {sequence, first + warp, WARPS, min(last, rows.num_items())};
    return true;
  }
};

// The items of this block.
template <typename Scorer>
__device__ __forceinline__ void score_items(const Operands& x) {
  DYNAMIC_SHARED(int, starts);  // of a batch of several
  wait_for_previous();
  start_next();
  Share share = {0, int(blockIdx.x + gridDim.x * (threadIdx.x / WARP)), int(gridDim.x) * WARPS, 0};
  Work work = {};
  Scorer scorer;
  scorer.find(x, share);  // of a single sequence, while its lengths are under way
  if (x.batch_size > 1) {
    number_items(x, starts);
    const uint32 total = starts[x.batch_size], part = total / gridDim.x, extra = total % gridDim.x;
    work.item = int(part * blockIdx.x + min(blockIdx.x, extra));
    work.end = work.item + int(part + (blockIdx.x < extra));
  }
  Rows rows;
  while (work.next(x, starts, rows, share)) {
    if (share.item >= share.last) continue;
    if (x.batch_size > 1 || work.tile > 1) scorer.find(x, share);
    Share now = share;
    scorer.start(x, rows);
    for (; now.item < now.last; now.item += now.step) {
      scorer.load(x, now);
      scorer.find(x, {now.sequence, now.item + now.step, 0, 0});
      scorer.score(x, rows, now.item);
    }
  }
}
