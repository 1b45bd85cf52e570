// The COUNT groups of the highest scores of each row, ties to the lower group, in ascending order: a block for each
// row.
// Macros: RATIO (tokens of a group), COUNT (groups to select), BLOCK_THREADS.
//
// Scores are bits of floats that are not negative, in the order of their values. The search for the lowest one that
// is selected counts scores in bins over the range where it must be, and goes on in the one bin where it is. How
// many come before a score in the order of the groups then settles ties and places. What is searched is all scores
// of a row, in shared memory, or, if they do not fit, candidates: the COUNT-th highest of the best scores of 16
// groups each is a bound from below, which few scores reach as a rule. If more do than there is room for, all are
// searched where they are.
#include "q4e.cuh"

constexpr int WARPS = BLOCK_THREADS / WARP;
constexpr int GROUPS = 16;             // that share a best score
constexpr int BINS = 2 * BLOCK_THREADS;      // of a count
constexpr int CAPACITY = 8 * BLOCK_THREADS;  // scores in shared memory, or half as many with their groups
static_assert(WARPS <= WARP, "the sums of the warps are summed by one");

// Four scores; those from `n` on are not there.
struct Quad {
  uint32 scores[4];
};

// Calls `visit(index, quad)` for each four of `n` scores, whose memory holds whole quads; two loads at a time.
template <typename Visit>
__device__ __forceinline__ void for_each_quad(const uint32* scores, int n, Visit visit) {
  constexpr int BATCH = 2;
  for (int start = 4 * threadIdx.x; start < n; start += BATCH * 4 * BLOCK_THREADS) {
    uint4 quads[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int index = start + i * 4 * BLOCK_THREADS;
      if (index < n) quads[i] = *reinterpret_cast<const uint4*>(scores + index);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int index = start + i * 4 * BLOCK_THREADS;
      if (index < n) visit(index, Quad{quads[i].x, quads[i].y, quads[i].z, quads[i].w});
    }
  }
}

// Sum over the threads before this one; `total` over all.
template <typename T>
__device__ __forceinline__ T block_prefix(T value, T& total) {
  __shared__ T sums[WARPS];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  T sum = value;
#pragma unroll
  for (int lanes = 1; lanes < WARP; lanes *= 2) {
    const T before = __shfl_up_sync(FULL_MASK, sum, lanes);
    if (lane >= lanes) sum += before;
  }
  __syncthreads();  // of a call before this one
  if (lane == WARP - 1) sums[warp] = sum;
  __syncthreads();
  T warps = lane < WARPS ? sums[lane] : T(0);
#pragma unroll
  for (int lanes = 1; lanes < WARPS; lanes *= 2) {
    const T before = __shfl_up_sync(FULL_MASK, warps, lanes);
    if (lane >= lanes) warps += before;
  }
  total = __shfl_sync(FULL_MASK, warps, WARPS - 1);
  const T earlier = __shfl_sync(FULL_MASK, warps, max(warp - 1, 0));
  return sum - value + (warp > 0 ? earlier : T(0));
}

struct Range {
  uint32 low, high;
};

// Where the COUNT-th highest of the scores is, of which each thread knows the lowest and the highest of some. As
// soon as COUNT threads know any, it is no lower than the lowest of their highest.
__device__ __forceinline__ Range range_of(uint32 lowest, uint32 highest, int num_scores) {
  __shared__ Range ranges[WARPS];
  const bool has_any = 4 * threadIdx.x < num_scores;
  uint32 low = !has_any ? 0xffffffffu : num_scores > 4 * (COUNT - 1) && COUNT <= BLOCK_THREADS ? highest : lowest;
  low = __reduce_min_sync(FULL_MASK, low);
  const uint32 high = __reduce_max_sync(FULL_MASK, has_any ? highest : 0u);
  if (threadIdx.x % WARP == 0) ranges[threadIdx.x / WARP] = {low, high};
  __syncthreads();
  const Range range = ranges[threadIdx.x % WARPS];
  return {__reduce_min_sync(FULL_MASK, range.low), __reduce_max_sync(FULL_MASK, range.high)};
}

// The COUNT-th highest score is in a bin from `low` on, of `within` scores; `above` are higher than the bin.
struct Threshold {
  uint32 low;
  int above, within;
};

// Narrows `range`, in which the COUNT-th highest of `n` scores is and above which there is none, to a bin, until at
// most `enough` scores are in it or above, or the bin is of a single score.
__device__ __forceinline__ Threshold find_threshold(const uint32* scores, int n, int enough, Range range) {
  __shared__ uint32 bins[BINS];
  __shared__ Threshold found;
  int above = 0;
  while (true) {
    const int shift = max(0, 32 - __clz(int(range.high - range.low)) - (31 - __clz(BINS)));
    bins[threadIdx.x] = 0, bins[threadIdx.x + BLOCK_THREADS] = 0;
    __syncthreads();
    for_each_quad(scores, n, [&](int index, const Quad& quad) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32 score = quad.scores[i];
        if (index + i < n && score >= range.low && score <= range.high)
          atomicAdd(&bins[(score - range.low) >> shift], 1u);
      }
    });
    __syncthreads();
    const int bin = BINS - 1 - 2 * threadIdx.x;  // this thread's higher one
    const int higher = bins[bin], lower = bins[bin - 1];
    int total;
    const int before = above + block_prefix(higher + lower, total);
    if (before < COUNT && COUNT <= before + higher)
      found = {range.low + (uint32(bin) << shift), before, higher};
    else if (before + higher < COUNT && COUNT <= before + higher + lower)
      found = {range.low + (uint32(bin - 1) << shift), before + higher, lower};
    __syncthreads();
    const Threshold result = found;
    if (result.above + result.within <= enough || shift == 0) return result;
    range = {result.low, result.low + (1u << shift) - 1};
    above = result.above;
  }
}

// Writes the groups of the selected scores in order; `groups` of the scores, or null where a score's place is its
// group.
__device__ __forceinline__ void write_selected(const uint32* scores, const int* groups, int n,
                                               const Threshold& threshold, int* selected) {
  constexpr int SHARE = 8;
  // From `sure` on a score is selected; at `threshold.low`, if that is less, the first `ties` are.
  const bool is_exact = threshold.above + threshold.within == COUNT;
  const uint32 sure = is_exact ? threshold.low : threshold.low + 1;
  const int ties = is_exact ? 0 : COUNT - threshold.above;
  int num_sure = 0, num_ties = 0;  // in front of this round
  for (int start = 0; start < n; start += SHARE * BLOCK_THREADS) {
    const int first = start + SHARE * threadIdx.x;
    uint32 sure_mask = 0, tie_mask = 0;
#pragma unroll
    for (int half = 0; half < SHARE; half += 4) {
      if (first + half >= n) continue;
      const uint4 quad = *reinterpret_cast<const uint4*>(scores + first + half);
      const uint32 items[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool exists = first + half + i < n;
        sure_mask |= uint32(exists && items[i] >= sure) << (half + i);
        tie_mask |= uint32(exists && items[i] < sure && items[i] >= threshold.low) << (half + i);
      }
    }
    uint64 total;  // both counts: of the sure ones in the high half, of the ties in the low one
    const uint64 before = block_prefix(uint64(__popc(sure_mask)) << 32 | uint64(__popc(tie_mask)), total);
    const int sure_before = num_sure + int(before >> 32), ties_before = num_ties + int(uint32(before));
    for (uint32 mask = sure_mask | tie_mask; mask != 0; mask &= mask - 1) {
      const uint32 bit = mask & -mask;
      const int rank = ties_before + __popc(tie_mask & (bit - 1)), item = first + __popc(bit - 1);
      const int place = sure_before + __popc(sure_mask & (bit - 1)) + min(rank, ties);
      if ((sure_mask & bit) || rank < ties) selected[place] = groups == nullptr ? item : groups[item];
    }
    num_sure += int(total >> 32), num_ties += int(uint32(total));
  }
}

// Collects the scores of at least `bound` with their groups, in the order of the groups. Returns how many they are,
// or -1 if there is no room. `best`: the best score of every 16 groups.
__device__ __forceinline__ int collect(const uint32* scores, const uint32* best, int visible, uint32 bound,
                                       uint32* kept_scores, int* kept_groups) {
  __shared__ int places[BLOCK_THREADS];  // in `best` of those that reach the bound
  const int num_bests = ceil_div(visible, GROUPS), share = ceil_div(num_bests, BLOCK_THREADS);
  const int first = min(int(threadIdx.x) * share, num_bests), last = min(first + share, num_bests);
  int count = 0, total;
  for (int i = first; i < last; ++i) count += best[i] >= bound;
  int place = block_prefix(count, total);
  if (total > BLOCK_THREADS) return -1;
  for (int i = first; i < last; ++i)
    if (best[i] >= bound) places[place++] = i;
  __syncthreads();

  const bool has_group = int(threadIdx.x) < total;
  const int group = has_group ? places[threadIdx.x] * GROUPS : 0;
  uint32 mine[GROUPS], mask = 0;
#pragma unroll
  for (int i = 0; i < GROUPS; i += 4) {
    const uint4 quad = *reinterpret_cast<const uint4*>(scores + group + i);
    mine[i] = quad.x, mine[i + 1] = quad.y, mine[i + 2] = quad.z, mine[i + 3] = quad.w;
  }
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) mask |= uint32(has_group && group + i < visible && mine[i] >= bound) << i;
  place = block_prefix(__popc(mask), total);
  if (total > CAPACITY / 2) return -1;
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    if (mask >> i & 1) {
      kept_scores[place] = mine[i];
      kept_groups[place++] = group + i;
    }
  }
  __syncthreads();
  return total;
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
select_groups(const uint32* all_scores, const int* query_start_loc, const int* seq_lens, const int* num_seqs,
              int* selected, int first_row, int row_stride, int max_items, int batch_size) {
  __shared__ __align__(16) uint32 kept[CAPACITY];
  int* kept_groups = reinterpret_cast<int*>(kept) + CAPACITY / 2;
  const int row = first_row + blockIdx.x;
  wait_for_previous();
  start_next();
  const TokenPlace place = locate_token(row, query_start_loc, seq_lens, num_seqs, batch_size);
  if (place.sequence < 0) return;
  const int visible = (place.position + 1) / RATIO;
  selected += int64(row) * COUNT;
  if (visible <= COUNT) {
    for (int i = threadIdx.x; i < COUNT; i += BLOCK_THREADS) selected[i] = i < visible ? i : -1;
    return;
  }
  const uint32* scores = all_scores + int64(blockIdx.x) * row_stride;
  const uint32* best = scores + int64(max_items) * GROUPS;

  const bool fits = visible <= CAPACITY;
  const int num_known = fits ? visible : ceil_div(visible, GROUPS);
  uint32 lowest = 0xffffffffu, highest = 0;
  for_each_quad(fits ? scores : best, num_known, [&](int index, const Quad& quad) {
    if (fits)
      *reinterpret_cast<uint4*>(kept + index) = {quad.scores[0], quad.scores[1], quad.scores[2], quad.scores[3]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (index + i >= num_known) continue;
      lowest = min(lowest, quad.scores[i]);
      highest = max(highest, quad.scores[i]);
    }
  });
  Range range = range_of(lowest, highest, num_known);
  const uint32* searched = fits ? kept : scores;
  const int* groups = nullptr;
  int n = visible;
  if (!fits) {
    const bool bounded = num_known >= COUNT;
    range.low = bounded ? find_threshold(best, num_known, BLOCK_THREADS, range).low : 0;
    const int count = bounded ? collect(scores, best, visible, range.low, kept, kept_groups) : -1;
    if (count >= 0) searched = kept, groups = kept_groups, n = count;
  }
  write_selected(searched, groups, n, find_threshold(searched, n, COUNT, range), selected);
}
