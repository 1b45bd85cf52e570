// The COUNT groups of the highest scores of each row, ties to the lower group, in ascending order: a block for each
// row. Macros: RATIO (tokens of a group), COUNT (groups to select), BLOCK_THREADS, SCORED (0 if no row can see more
// than COUNT groups, and nothing scored them).
//
// Scores are bits of floats that are not negative, in the order of their values. The lowest one that is selected is
// found in two searches, each of which counts scores in bins and goes on in the bin where it must be. The first is of
// the best scores of a few groups each: the COUNT-th highest of them bounds from below what can be selected. The scores
// that reach this bound, the candidates, are few as a rule, and the second search is of them. How many come before a
// score in the order of the groups then settles ties and places.
#include "q4e.cuh"

constexpr int WARPS = BLOCK_THREADS / WARP;
constexpr int GROUPS = 16;                    // that share a best score in memory
constexpr int BINS = 4 * BLOCK_THREADS;       // of a search
constexpr int QUADS = 4;                      // of four scores each, that a thread holds
constexpr int CAPACITY = 4 * QUADS * BLOCK_THREADS;
constexpr int BEST_QUADS = 5;                 // of groups whose best score reaches the bound
constexpr int MAX_BEST = BEST_QUADS * BLOCK_THREADS / (GROUPS / 4);
constexpr int MAX_CANDIDATES = GROUPS * MAX_BEST;
static_assert(WARPS <= WARP, "the sums of the warps are summed by one");
static_assert(MAX_CANDIDATES >= CAPACITY, "all scores of a row may be candidates, if they are held");

struct Candidate {
  uint32 score;
  int group;
};

struct Quad {
  uint32 scores[4];

  __device__ __forceinline__ uint32 best() const { return max(max(scores[0], scores[1]), max(scores[2], scores[3])); }
  __device__ __forceinline__ uint32 worst() const { return min(min(scores[0], scores[1]), min(scores[2], scores[3])); }
  __device__ __forceinline__ uint32 reaching(uint32 bound) const {  // as bits
    return uint32(scores[0] >= bound) | uint32(scores[1] >= bound) << 1 | uint32(scores[2] >= bound) << 2 |
           uint32(scores[3] >= bound) << 3;
  }
};

// K quads of `count` scores, from `firsts` on. What does not exist is any score: `bits_below` tells. The memory holds
// whole quads, and at least one.
template <int K>
__device__ __forceinline__ void load_quads(const uint32* scores, const int firsts[K], int count, Quad quads[K]) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const uint4 quad = *reinterpret_cast<const uint4*>(scores + (firsts[k] < count ? firsts[k] : 0));
    quads[k] = {{quad.x, quad.y, quad.z, quad.w}};
  }
}

// A bit for each of four that is below `count`.
__device__ __forceinline__ uint32 bits_below(int count) { return (1u << min(max(count, 0), 4)) - 1; }

// How `count` quads are dealt out: to each warp the same number side by side, its lanes side by side, up to K times.
// `of(k)` is this lane's k-th, or `count` if it has no such.
struct Deal {
  int count, per_warp;

  __device__ explicit Deal(int count) : count(count), per_warp(ceil_div(count, WARPS)) {}
  __device__ __forceinline__ int of(int k) const {
    const int place = k * WARP + threadIdx.x % WARP;
    return place < per_warp ? min(int(threadIdx.x / WARP) * per_warp + place, count) : count;
  }
  __device__ bool all_have_one() const { return count >= (WARPS - 1) * per_warp + WARP && per_warp >= WARP; }
};

struct Prefix {
  int before, total;  // sum over the warps before this one, and over all
};

// Of values of whole warps. The block has to meet between two calls.
__device__ __forceinline__ Prefix block_prefix(int of_warp) {
  __shared__ int sums[WARPS];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  if (lane == 0) sums[warp] = of_warp;
  __syncthreads();
  const unsigned sum = lane < WARPS ? sums[lane] : 0;
  return {int(__reduce_add_sync(FULL_MASK, lane < warp ? sum : 0)), int(__reduce_add_sync(FULL_MASK, sum))};
}

// Sums over the lanes up to this one, of a word or of packed bytes.
__device__ __forceinline__ uint32 warp_prefix(uint32 value) {
#pragma unroll
  for (int lanes = 1; lanes < WARP; lanes *= 2) {
    const uint32 before = __shfl_up_sync(FULL_MASK, value, lanes);
    if (int(threadIdx.x % WARP) >= lanes) value += before;
  }
  return value;
}

// For K masks of four bits, of quads that were dealt out: how many bits are set before each mask. Returns how many are.
template <int K>
__device__ __forceinline__ int block_places(const uint32 masks[K], int places[K]) {
  uint32 own[ceil_div(K, 4)] = {}, sums[ceil_div(K, 4)], of_warp[ceil_div(K, 4)];
#pragma unroll
  for (int k = 0; k < K; ++k) own[k / 4] |= uint32(__popc(masks[k])) << (k % 4 * 8);  // a warp has at most 128
#pragma unroll
  for (int i = 0; i < ceil_div(K, 4); ++i) {
    sums[i] = warp_prefix(own[i]);
    of_warp[i] = __shfl_sync(FULL_MASK, sums[i], WARP - 1);
  }
  int count = 0;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int shift = k % 4 * 8;
    places[k] = count + int(((sums[k / 4] >> shift) & 255u) - ((own[k / 4] >> shift) & 255u));
    count += (of_warp[k / 4] >> shift) & 255u;
  }
  const Prefix prefix = block_prefix(count);
#pragma unroll
  for (int k = 0; k < K; ++k) places[k] += prefix.before;
  return prefix.total;
}

struct Range {
  uint32 low, high;
};

// The least that a bin's width has to be shifted left, for all bins to cover the range.
__device__ __forceinline__ int covering_shift(const Range& range) {
  return max(0, 32 - __clz(int(range.high - range.low)) - (31 - __clz(BINS)));
}

// The range of the COUNT-th highest score, if each thread that has any gives the lowest and the highest of some. When
// COUNT threads have, it is no lower than the lowest of their highest.
__device__ __forceinline__ Range block_range(bool has_any, bool enough_have, uint32 lowest, uint32 highest) {
  __shared__ Range ranges[WARPS];
  const uint32 low = __reduce_min_sync(FULL_MASK, !has_any ? 0xffffffffu : enough_have ? highest : lowest);
  const uint32 high = __reduce_max_sync(FULL_MASK, highest);
  if (threadIdx.x % WARP == 0) ranges[threadIdx.x / WARP] = {low, high};
  __syncthreads();
  const Range range = ranges[threadIdx.x % WARPS];
  return {__reduce_min_sync(FULL_MASK, range.low), __reduce_max_sync(FULL_MASK, range.high)};
}

// The bin where the COUNT-th highest score is: scores from `low` on, 2^`shift` wide. `within` are in it, `above`
// higher.
struct Bin {
  uint32 low;
  int shift, above, within;
};

// Finds the bin in `range`, above which there is no score, until at most `enough` are in it or above, or it is of a
// single score. `visit(count)` calls `count` for each score. What is beyond the last bin of this width counts as in
// it, and is searched if need be. `bins` are zero before and after.
template <typename Visit>
__device__ __forceinline__ Bin find_bin(Visit visit, Range range, int shift, int enough, uint32* bins) {
  __shared__ Bin found;
  int above = 0;
#pragma unroll 1
  while (true) {
    visit([&](uint32 score) {
      if (score >= range.low && score <= range.high)
        atomicAdd(&bins[min((score - range.low) >> shift, uint32(BINS - 1))], 1u);
    });
    __syncthreads();
    const int first = BINS - 4 * (threadIdx.x + 1);  // of four bins, from the highest
    uint4* mine = reinterpret_cast<uint4*>(bins + first);
    const int counts[4] = {int(mine->w), int(mine->z), int(mine->y), int(mine->x)};
    *mine = {0, 0, 0, 0};
    const int own = counts[0] + counts[1] + counts[2] + counts[3], sum = int(warp_prefix(own));
    int before = above + block_prefix(__shfl_sync(FULL_MASK, sum, WARP - 1)).before + sum - own;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (before < COUNT && COUNT <= before + counts[i])
        found = {range.low + (uint32(first + 3 - i) << shift), shift, before, counts[i]};
      before += counts[i];
    }
    __syncthreads();
    const Bin bin = found;
    const bool is_open = (bin.low - range.low) >> shift == BINS - 1 && (range.high - bin.low) >> shift > 0;
    if (bin.above + bin.within <= enough || (shift == 0 && !is_open)) return bin;
    range = {bin.low, is_open ? range.high : bin.low + (1u << shift) - 1};
    shift = covering_shift(range);
    above = bin.above;
  }
}

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
  uint32 masks[QUADS];
  int places[QUADS], groups[BEST_QUADS];
#pragma unroll
  for (int k = 0; k < QUADS; ++k) masks[k] = deal.of(k) < deal.count ? best[k].reaching(bin.low) : 0;
  int total = block_places<QUADS>(masks, places);
  if (total > MAX_BEST) {
    // The bin is of a single score. Of the groups with just that, enough are in the first ones whose best score it is.
    uint32 ties[QUADS];
#pragma unroll
    for (int k = 0; k < QUADS; ++k) ties[k] = masks[k] & ~best[k].reaching(bin.low + 1);
    __syncthreads();
    block_places<QUADS>(ties, places);
#pragma unroll
    for (int k = 0; k < QUADS; ++k)
      for (uint32 mask = ties[k]; mask != 0; mask &= mask - 1)
        if (places[k]++ >= COUNT - bin.above) masks[k] &= ~(mask & -mask);
    __syncthreads();
    total = block_places<QUADS>(masks, places);
  }
#pragma unroll
  for (int k = 0; k < QUADS; ++k)
    for (uint32 mask = masks[k]; mask != 0; mask &= mask - 1)
      reaching[places[k]++] = 4 * deal.of(k) + __ffs(int(mask)) - 1;
  __syncthreads();
  const Deal parts(total * (GROUPS / 4));
  Quad quads[BEST_QUADS];
#pragma unroll
  for (int k = 0; k < BEST_QUADS; ++k) {
    const int quad = parts.of(k);
    groups[k] = quad < parts.count ? reaching[quad / (GROUPS / 4)] * GROUPS + quad % (GROUPS / 4) * 4 : visible;
  }
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
