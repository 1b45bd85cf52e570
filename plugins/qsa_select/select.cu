// The COUNT groups of the highest scores of each row, ties to the lower group, in ascending order: a block for each
// row. Macros: RATIO (tokens of a group), COUNT (groups to select), BLOCK_THREADS, SCORED (0 if no row can see more
// than COUNT groups, and nothing scored them).
//
// Scores are bits of floats that are not negative, in the order of their values. The lowest one that is selected is
// found in two searches, each of which counts scores in bins and goes on in the bin where it must be. The first is of
// the best scores of a few groups each: the COUNT-th highest of them bounds from below what can be selected. The scores
// that reach this bound, the candidates, are few as a rule, and the second search is of them. How many come before a
// score in the order of the groups then settles ties and places.
#include "qsa_select/search.cuh"

constexpr int QUADS = 4;                      // of four scores each, that a thread holds
constexpr int CAPACITY = 4 * QUADS * BLOCK_THREADS;
constexpr int BEST_QUADS = 5;                 // of groups whose best score reaches the bound
constexpr int MAX_BEST = BEST_QUADS * BLOCK_THREADS / (GROUPS / 4);
constexpr int MAX_CANDIDATES = GROUPS * MAX_BEST;
static_assert(MAX_CANDIDATES >= CAPACITY, "all scores of a row may be candidates, if they are held");

struct Candidate {
  uint32 score;
  int group;
};

// Stores the scores that reach `bound`, in the order of their groups, of those that the threads hold. Returns how many.
template <int K>
__device__ __forceinline__ int store_candidates(const Quad quads[K], const int groups[K], uint32 bound, int visible,
                                                Candidate* candidates) {
  uint32 masks[K];
  int places[K];
#pragma unroll
  for (int k = 0; k < K; ++k) masks[k] = quads[k].reaching(bound) & bits_below(visible - groups[k]);
  const int total = block_places<K>(masks, places);
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (masks[k] >> i & 1) candidates[places[k]++] = {quads[k].scores[i], groups[k] + i};
  }
  __syncthreads();
  return total;
}

// The candidates of a row of which the threads hold the best scores, one of 16 groups each, that were searched for
// `bin`.
__device__ __forceinline__ int store_candidates_of_best(const uint32* scores, const Quad best[QUADS],
                                                        const Deal& deal, const Bin& bin, int visible,
                                                        Candidate* candidates) {
  __shared__ int reaching[MAX_BEST];
  int groups[BEST_QUADS];
  const int total = list_reaching<QUADS>(best, deal, bin, MAX_BEST, reaching);
  find_quads<BEST_QUADS>(reaching, total, visible, groups);
  Quad quads[BEST_QUADS];
  load_quads<BEST_QUADS>(scores, groups, visible, quads);
  return store_candidates<BEST_QUADS>(quads, groups, bin.low, visible, candidates);
}

// Selects from `count` candidates `get(i)` in the order of their groups.
template <typename Get>
__device__ __forceinline__ void select(Get get, int count, const Range& range, int shift, uint32* bins, int* selected) {
  constexpr int K = 2, SURE = 1 << 16;
  const int lane = threadIdx.x % WARP;
  const Bin bin = find_bin(
      [&](auto visit) {
        for (int i = threadIdx.x; i < count; i += BLOCK_THREADS) visit(get(i).score);
      },
      range, shift, COUNT, bins);
  // From `sure` on a score is selected; of the scores that are less, but in the bin, the first `ties` are.
  const bool is_exact = bin.above + bin.within == COUNT;
  const uint32 sure = is_exact ? bin.low : bin.low + 1;
  const int ties = is_exact ? 0 : COUNT - bin.above;
  int before = 0, ties_before = 0;  // how many are sure, and in the bin otherwise, in front of this round
  for (int start = 0; start < count; start += K * BLOCK_THREADS) {
    Candidate mine[K];
    uint32 sure_lanes[K], tie_lanes[K];
    int num_sure = 0, num_ties = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int index = start + (threadIdx.x / WARP * K + k) * WARP + lane;
      const bool exists = index < count;
      mine[k] = exists ? get(index) : Candidate{};
      sure_lanes[k] = __ballot_sync(FULL_MASK, exists && mine[k].score >= sure);
      tie_lanes[k] = __ballot_sync(FULL_MASK, exists && mine[k].score >= bin.low) & ~sure_lanes[k];
      num_sure += __popc(sure_lanes[k]), num_ties += __popc(tie_lanes[k]);
    }
    const Prefix prefix = block_prefix(num_sure * SURE + num_ties);
    int place = before + prefix.before / SURE, rank = ties_before + prefix.before % SURE;
    const uint32 lower = (1u << lane) - 1;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int my_rank = rank + __popc(tie_lanes[k] & lower), my_place = place + __popc(sure_lanes[k] & lower);
      if (sure_lanes[k] >> lane & 1 || (tie_lanes[k] >> lane & 1 && my_rank < ties))
        selected[my_place + min(my_rank, ties)] = mine[k].group;
      place += __popc(sure_lanes[k]), rank += __popc(tie_lanes[k]);
    }
    before += prefix.total / SURE, ties_before += prefix.total % SURE;
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
select_groups(const uint32* all_scores, const int* query_start_loc, const int* seq_lens, const int* num_seqs,
              int* selected, int first_row, int row_stride, int max_items, int batch_size) {
  __shared__ __align__(16) uint32 bins[BINS];
  DYNAMIC_SHARED(Candidate, candidates);  // MAX_CANDIDATES
  *reinterpret_cast<uint4*>(bins + 4 * threadIdx.x) = {0, 0, 0, 0};
  if (!SCORED) wait_for_previous();
  // The kernel of the scores lets this one start when all before it are done: what they wrote can be read already.
  const int row = first_row + blockIdx.x;
  const TokenPlace place = locate_token(row, query_start_loc, seq_lens, num_seqs, batch_size);
  const int visible = place.sequence < 0 ? 0 : (place.position + 1) / RATIO;
  selected += int64(row) * COUNT;
  const uint32* scores = all_scores + int64(blockIdx.x) * row_stride;
  const bool holds_all = visible <= CAPACITY;
  const uint32* held = holds_all ? scores : scores + int64(max_items) * GROUPS;
  const int num_held = holds_all ? visible : ceil_div(visible, GROUPS);
  if (SCORED) wait_for_previous();
  start_next();
  if (visible <= COUNT) {
    for (int i = threadIdx.x; i < COUNT && place.sequence >= 0; i += BLOCK_THREADS) selected[i] = i < visible ? i : -1;
    return;
  }

  Quad quads[QUADS];
  int groups[QUADS];
  const Deal deal(ceil_div(num_held, 4));
#pragma unroll
  for (int k = 0; k < QUADS; ++k) groups[k] = 4 * deal.of(k);
  load_quads<QUADS>(held, groups, num_held, quads);
#pragma unroll
  for (int k = 0; k < QUADS; ++k) {
    const uint32 exist = bits_below(num_held - groups[k]);
#pragma unroll
    for (int i = 0; i < 4; ++i) quads[k].scores[i] = exist >> i & 1 ? quads[k].scores[i] : 0;
  }
  const int num_searched = holds_all ? deal.count : num_held;
  const bool is_bounded = num_searched >= COUNT && num_held <= CAPACITY && COUNT <= MAX_BEST;
  const bool by_quads = holds_all && is_bounded;
  uint32 lowest = 0xffffffffu, highest = 0;
#pragma unroll
  for (int k = 0; k < QUADS; ++k) {
    if (deal.of(k) >= deal.count) continue;
    highest = max(highest, quads[k].best());
    lowest = min(lowest, by_quads ? quads[k].best() : quads[k].worst());
  }
  Range range = {0, 0x7fffffffu};
  if (num_held <= CAPACITY) {
    const bool enough_have = is_bounded && COUNT <= BLOCK_THREADS && deal.all_have_one();
    range = block_range(deal.of(0) < deal.count, enough_have, lowest, highest);
  }
  int shift = covering_shift(range);
  Bin bin = {range.low, shift, 0, 0};
  if (is_bounded) {
    bin = find_bin(
        [&](auto visit) {
#pragma unroll
          for (int k = 0; k < QUADS; ++k) {
            if (deal.of(k) >= deal.count) continue;
            if (by_quads) visit(quads[k].best());
#pragma unroll
            for (int i = 0; i < 4; ++i)
              if (!by_quads) visit(quads[k].scores[i]);
          }
        },
        range, shift, MAX_BEST, bins);
    range.low = bin.low;
    shift = max(bin.shift - 4, 0);  // the COUNT-th highest of all is a little higher: narrow bins tell it apart
  }
  int count = -1;
  if (holds_all) count = store_candidates<QUADS>(quads, groups, range.low, visible, candidates);
  if (!holds_all && is_bounded) count = store_candidates_of_best(scores, quads, deal, bin, visible, candidates);
  if (count >= 0)
    select([&](int i) { return candidates[i]; }, count, range, shift, bins, selected);
  else
    select([&](int i) { return Candidate{scores[i], i}; }, visible, range, shift, bins, selected);
}
