// The COUNT groups of the highest scores of many rows, ties to the lower group, in ascending order: a block takes every
// gridDim.x-th row of its turn. Of a long row it reads the best score of every 16 groups, and then the scores of those
// groups whose best score is among the highest: they hold all that can be selected. Scores stay in registers.
// Macros: RATIO (tokens of a group), COUNT (groups to select), BLOCK_THREADS.
#include "qsa_select/search.cuh"
#include "qsa_select/turn.cuh"

constexpr int CAPACITY = 8192;  // scores, or best scores, that a block holds
constexpr int MAX_BEST = 640;   // groups of 16 whose scores it holds
constexpr int QUADS = CAPACITY / 4 / BLOCK_THREADS, BEST_QUADS = ceil_div(MAX_BEST * (GROUPS / 4), BLOCK_THREADS);
static_assert(COUNT <= MAX_BEST && COUNT * GROUPS <= CAPACITY, "see tiles.py");

// Quads that are dealt to the threads, in the order of their groups; scores that do not exist are zero.
template <int K>
struct Dealt {
  Deal deal;
  int groups[K];  // the first of each
  Quad quads[K];

  __device__ __forceinline__ void load(const uint32* scores, int count) {
    load_quads<K>(scores, groups, count, quads);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const uint32 exist = bits_below(count - groups[k]);
#pragma unroll
      for (int i = 0; i < 4; ++i) quads[k].scores[i] = exist >> i & 1 ? quads[k].scores[i] : 0;
    }
  }

  // What the COUNT-th highest score lies between: if there are COUNT threads, or half as many, it is no lower than the
  // lowest of what each holds as its best, or its second best.
  __device__ __forceinline__ Range range() const {
    uint32 first = 0, second = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const uint32 best = quads[k].best();
      second = max(second, min(first, best));
      first = max(first, best);
    }
    return block_range(true, false, COUNT <= BLOCK_THREADS ? first : COUNT <= 2 * BLOCK_THREADS ? second : 0, first);
  }

  // The bin of the COUNT-th highest score, or of the COUNT-th highest best one of a quad, which is no higher.
  template <bool BY_QUADS>
  __device__ __forceinline__ Bin search(const Range& range, int shift, int enough, uint32* bins) const {
    return find_bin(
        [&](auto visit) {
#pragma unroll
          for (int k = 0; k < K; ++k) {
            if (deal.of(k) >= deal.count) continue;
            if (BY_QUADS) visit(quads[k].best());
#pragma unroll
            for (int i = 0; i < 4; ++i)
              if (!BY_QUADS) visit(quads[k].scores[i]);
          }
        },
        range, shift, enough, bins);
  }

  // Writes the groups of the COUNT highest scores, the lowest of which is in `bin`.
  __device__ __forceinline__ void write(const Bin& bin, int visible, int* selected) const {
    const bool is_exact = bin.above + bin.within == COUNT;
    uint32 masks[K], ties[K];
    int places[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const uint32 reaching = quads[k].reaching(bin.low) & bits_below(visible - groups[k]);
      ties[k] = is_exact ? 0 : reaching & ~quads[k].reaching(bin.low + 1);
      masks[k] = reaching & ~ties[k];
    }
    if (!is_exact) {
      keep_first<K>(ties, COUNT - bin.above);
#pragma unroll
      for (int k = 0; k < K; ++k) masks[k] |= ties[k];
    }
    block_places<K>(masks, places);
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (masks[k] >> i & 1) selected[places[k]++] = groups[k] + i;
  }
};

// All scores of a row.
__device__ __forceinline__ void select_of_all(const uint32* scores, int visible, uint32* bins, int* selected) {
  Dealt<QUADS> row = {Deal(ceil_div(visible, 4))};
#pragma unroll
  for (int k = 0; k < QUADS; ++k) row.groups[k] = 4 * row.deal.of(k);
  row.load(scores, visible);
  Range range = row.range();
  if (row.deal.count >= COUNT) range.low = row.search<true>(range, covering_shift(range), 2 * COUNT, bins).low;
  row.write(row.search<false>(range, covering_shift(range), COUNT, bins), visible, selected);
}

// The scores of the groups whose best scores are among the highest.
__device__ __forceinline__ void select_of_best(const uint32* scores, int visible, int max_items, uint32* bins,
                                               int* selected) {
  __shared__ int reaching[MAX_BEST];
  Range range;
  int total, shift;
  {
    const int num_best = ceil_div(visible, GROUPS);
    Dealt<QUADS> best = {Deal(ceil_div(num_best, 4))};
#pragma unroll
    for (int k = 0; k < QUADS; ++k) best.groups[k] = 4 * best.deal.of(k);
    best.load(scores + int64(max_items) * GROUPS, num_best);
    range = best.range();
    const Bin bin = best.search<false>(range, covering_shift(range), MAX_BEST, bins);
    total = list_reaching<QUADS>(best.quads, best.deal, bin, MAX_BEST, reaching);
    range.low = bin.low;
    shift = max(bin.shift - 4, 0);  // the COUNT-th highest of all is a little higher: narrow bins tell it apart
  }
  Dealt<BEST_QUADS> row = {Deal(total * (GROUPS / 4))};
  find_quads<BEST_QUADS>(reaching, total, visible, row.groups);
  row.load(scores, visible);
  row.write(row.search<false>(range, shift, COUNT, bins), visible, selected);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1024 / BLOCK_THREADS)
select_rows(const uint32* all_scores, const int* query_start_loc, const int* seq_lens, const int* num_seqs,
            int* all_selected, int index, int num_tokens, int capacity, int batch_size) {
  __shared__ __align__(16) uint32 bins[BINS];
  *reinterpret_cast<uint4*>(bins + 4 * threadIdx.x) = {0, 0, 0, 0};
  wait_for_previous();
  start_next();
  const Turn turn = find_turn(index, num_tokens, capacity, seq_lens, num_seqs, batch_size);
#pragma unroll 1
  for (int i = blockIdx.x; i < turn.num_rows; i += gridDim.x) {
    const TokenPlace place = locate_token(turn.first_row + i, query_start_loc, seq_lens, num_seqs, batch_size);
    if (place.sequence < 0) continue;
    const int visible = (place.position + 1) / RATIO;
    const uint32* scores = all_scores + int64(i) * turn.row_stride;
    int* selected = all_selected + int64(turn.first_row + i) * COUNT;
    __syncthreads();  // of the row before
    if (visible <= COUNT) {
      for (int group = threadIdx.x; group < COUNT; group += BLOCK_THREADS) selected[group] = group < visible ? group : -1;
    } else if (visible <= CAPACITY) {
      select_of_all(scores, visible, bins, selected);
    } else {
      select_of_best(scores, visible, turn.max_items, bins, selected);
    }
  }
}
