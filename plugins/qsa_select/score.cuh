// Index scores of the complete groups that each row sees, and the best score of every 16 groups.
// Macros: ACTIVATION (bf16 or float), HEADS, DIM, RATIO (tokens of a group), PAGE (groups of a page), COUNT (groups to
// select), TILE_ROWS (rows that share a read of the keys), BLOCK_THREADS.
//
// The work is split into items, the keys of 16 groups against TILE_ROWS rows of one sequence, which are dealt out
// evenly to the blocks by the lengths at hand. Rows that see at most COUNT groups need no scores, and have no items.
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
  __device__ int num_items() const {         // of the keys that the last row sees
    const int groups = visible(count - 1);
    return count > 0 && groups > COUNT ? ceil_div(groups, GROUPS) : 0;
  }
  __device__ Rows tile(int index) const {
    const int skipped = index * TILE_ROWS;
    return {first + skipped, min(count - skipped, TILE_ROWS), position + skipped};
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
};

// Keys of a sequence, in pages.
struct Keys {
  const ACTIVATION* cache;
  const int* pages;
  int last_group;  // what lies behind it is read as this one

  __device__ int page_of(int group) const { return pages[min(group, last_group) / PAGE]; }
  __device__ const ACTIVATION* in_page(int page, int group) const {
    return cache + (int64(page) * PAGE + min(group, last_group) % PAGE) * DIM;
  }
};

// The first item of each sequence, and behind the last their number. A tile of rows counts as many items as the last.
__device__ __forceinline__ void number_items(const Operands& x, int* starts) {
  const int num_seqs = *x.num_seqs;
  for (int sequence = threadIdx.x; sequence < x.batch_size; sequence += BLOCK_THREADS) {
    const Rows rows = x.rows_of(sequence);
    const int items = ceil_div(rows.count, TILE_ROWS) * rows.num_items();
    starts[sequence] = items * int(sequence < num_seqs);  // no branch, behind which the loads would wait for `num_seqs`
  }
  __syncthreads();
  if (threadIdx.x < WARP) {
    int total = 0;
    for (int first = 0; first < x.batch_size; first += WARP) {
      const int sequence = first + threadIdx.x, items = sequence < x.batch_size ? starts[sequence] : 0;
      int sum = items;
#pragma unroll
      for (int lanes = 1; lanes < WARP; lanes *= 2) {
        const int before = __shfl_up_sync(FULL_MASK, sum, lanes);
        if (int(threadIdx.x) >= lanes) sum += before;
      }
      if (sequence < x.batch_size) starts[sequence] = total + sum - items;
      total += __shfl_sync(FULL_MASK, sum, WARP - 1);
    }
    if (threadIdx.x == 0) starts[x.batch_size] = total;
  }
  __syncthreads();
}

// Items from `first` to `last` of one sequence against `rows`. A warp has the keys of two items under way.
template <typename Scorer>
__device__ __forceinline__ void score_items(const Operands& x, int sequence, const Rows& rows, int first, int last,
                                            uint4* queries) {
  const Keys keys = {x.index_k_cache, x.block_table + int64(sequence) * x.max_blocks, rows.visible(rows.count - 1) - 1};
  typename Scorer::Tile tiles[2];
  int item = first + threadIdx.x / WARP;
  Scorer::find(tiles[0], keys, item);
  Scorer::find(tiles[1], keys, item + WARPS);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (item + i * WARPS < last) Scorer::load(tiles[i], keys, item + i * WARPS);
    Scorer::find(tiles[i], keys, item + (i + 2) * WARPS);
  }
  __syncthreads();  // of those who still read the queries before these
  Scorer::stage(queries, x, rows);
  __syncthreads();
  for (; item < last; item += 2 * WARPS) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int now = item + i * WARPS, next = now + 2 * WARPS;
      if (now < last) Scorer::score(tiles[i], keys, queries, x, rows, now);
      if (next < last) {
        Scorer::load(tiles[i], keys, next);
        Scorer::find(tiles[i], keys, next + 2 * WARPS);
      }
    }
  }
}

// Where the first keys wait for the table of pages, which is a chain of two loads, it is at least in the L2 cache.
__device__ __forceinline__ void prefetch_metadata(const Operands& x) {
  constexpr int LINE = 128 / sizeof(int), FEW = 8;  // more sequences are worked on one after another
  if (threadIdx.x == 0) prefetch_l2(x.query_start_loc), prefetch_l2(x.seq_lens), prefetch_l2(x.num_seqs);
  const int table = x.batch_size <= FEW ? x.batch_size * x.max_blocks : 0, step = gridDim.x * BLOCK_THREADS * LINE;
  for (int i = (blockIdx.x * BLOCK_THREADS + threadIdx.x) * LINE; i < table; i += step) prefetch_l2(x.block_table + i);
}

// The share of this block.
template <typename Scorer>
__device__ __forceinline__ void score_share(const Operands& x, uint4* queries) {
  int* starts = reinterpret_cast<int*>(queries + Scorer::FRAGMENTS);
  prefetch_metadata(x);
  wait_for_previous();
  start_next();
  number_items(x, starts);
  const uint32 share = uint32(starts[x.batch_size]) / gridDim.x, extra = uint32(starts[x.batch_size]) % gridDim.x;
  int item = int(share * blockIdx.x + min(blockIdx.x, extra));
  const int end = item + int(share + (blockIdx.x < extra));
  while (item < end) {
    int sequence = 0;
    for (int high = x.batch_size; high - sequence > 1;) {  // starts[sequence] <= item < starts[high]
      const int middle = (sequence + high) / 2;
      (starts[middle] <= item ? sequence : high) = middle;
    }
    const Rows all = x.rows_of(sequence);
    const int num_items = all.num_items(), tile = (item - starts[sequence]) / num_items;
    const int first = (item - starts[sequence]) % num_items, last = min(num_items, first + end - item);
    item += last - first;
    const Rows rows = all.tile(tile);
    if (first < rows.num_items()) score_items<Scorer>(x, sequence, rows, first, min(last, rows.num_items()), queries);
  }
}
