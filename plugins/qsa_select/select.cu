// The COUNT groups of the highest scores of each row, ties to the lower group, in ascending order: a block for each
// row. Macros: RATIO (tokens of a group), COUNT (groups to select), BLOCK_THREADS.
//
// Scores are bits of floats that are not negative, in the order of their values. The lowest one that is selected is
// found in two searches, each of which counts scores in bins over the range where it must be and goes on in the bin
// where it is. The first search is of the best scores of a few groups each: their COUNT-th highest bounds from below
// what can be selected. The second is of the scores that reach this bound, which are few as a rule. How many come before
// a score in the order of the groups then settles ties and places.
//
// The scores of a row are in shared memory if they fit; if not, the ones that reach the bound are. If even those have no
// room, all are searched where they are.
#include "q4e.cuh"

constexpr int WARPS = BLOCK_THREADS / WARP;
constexpr int GROUPS = 16;                  // that share a best score in memory
constexpr int BINS = 4 * BLOCK_THREADS;     // of a count
constexpr int CAPACITY = 16 * BLOCK_THREADS;  // scores in shared memory, or half as many with their groups
constexpr int ROOM = 2 * BLOCK_THREADS;     // of best scores that may reach the bound
static_assert(WARPS <= WARP, "the sums of the warps are summed by one");

__device__ __forceinline__ uint4 load_quad(const uint32* scores) { return *reinterpret_cast<const uint4*>(scores); }

// Which of the four reach `bound`, as bits.
__device__ __forceinline__ uint32 reaching(const uint4& quad, uint32 bound) {
  return uint32(quad.x >= bound) | uint32(quad.y >= bound) << 1 | uint32(quad.z >= bound) << 2 |
         uint32(quad.w >= bound) << 3;
}

// The lowest `count` bits, at most 31 and none if it is negative.
__device__ __forceinline__ uint32 low_bits(int count) { return (1u << max(count, 0)) - 1; }

struct Prefix {
  int before, total;  // sum over the threads before this one, and over all
};

// The block has to meet between two calls. Not inlined: code that runs once costs more to fetch than to call.
__device__ __noinline__ Prefix block_prefix(int value) {
  __shared__ int sums[WARPS];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  int sum = value;
#pragma unroll
  for (int lanes = 1; lanes < WARP; lanes *= 2) {
    const int before = __shfl_up_sync(FULL_MASK, sum, lanes);
    if (lane >= lanes) sum += before;
  }
  if (lane == WARP - 1) sums[warp] = sum;
  __syncthreads();
  const int of_warp = lane < WARPS ? sums[lane] : 0;
  const unsigned earlier = __reduce_add_sync(FULL_MASK, unsigned(lane < warp ? of_warp : 0));
  return {sum - value + int(earlier), int(__reduce_add_sync(FULL_MASK, unsigned(of_warp)))};
}

struct Range {
  uint32 low, high;
};

// Scores at any of which the block looks, four at a time.
struct Scores {
  const uint32* from;
  int count;
  bool only_best;  // of every four
};

// Copies `scores` into shared memory, if they have room, and finds the range of their COUNT-th highest. As soon as
// COUNT threads know some of them, it is no lower than the lowest of their highest.
__device__ __forceinline__ Range take(Scores& scores, uint32* kept) {
  __shared__ Range ranges[WARPS];
  constexpr int BATCH = 4;
  const bool has_room = scores.count <= CAPACITY, has_any = 4 * threadIdx.x < scores.count;
  uint32 lowest = 0xffffffffu, highest = 0;
#pragma unroll 1
  for (int start = 4 * threadIdx.x; start < scores.count; start += BATCH * 4 * BLOCK_THREADS) {
    uint4 quads[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int index = start + i * 4 * BLOCK_THREADS;
      if (index < scores.count) quads[i] = load_quad(scores.from + index);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int index = start + i * 4 * BLOCK_THREADS, left = scores.count - index;
      if (left <= 0) continue;
      const uint4 quad = quads[i];
      if (has_room) *reinterpret_cast<uint4*>(kept + index) = quad;
      const uint32 y = left > 1 ? quad.y : quad.x, z = left > 2 ? quad.z : quad.x, w = left > 3 ? quad.w : quad.x;
      lowest = min(lowest, min(min(quad.x, y), min(z, w)));
      highest = max(highest, max(max(quad.x, y), max(z, w)));
    }
  }
  if (has_room) scores.from = kept;
  const bool enough_know = COUNT <= BLOCK_THREADS && scores.count > 4 * (COUNT - 1);
  const uint32 low = __reduce_min_sync(FULL_MASK, !has_any ? 0xffffffffu : enough_know ? highest : lowest);
  const uint32 high = __reduce_max_sync(FULL_MASK, highest);
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

// Narrows `range`, in which the COUNT-th highest of `scores` is and above which there is none, to a bin, until at most
// `enough` are in it or above, or the bin is of a single score. `bins` are zero before and after.
__device__ __forceinline__ Threshold find_threshold(const Scores& scores, int enough, Range range, uint32* bins) {
  __shared__ Threshold found;
  int above = 0;
#pragma unroll 1
  while (true) {
    const int shift = max(0, 32 - __clz(int(range.high - range.low)) - (31 - __clz(BINS)));
#pragma unroll 1
    for (int index = 4 * threadIdx.x; index < scores.count; index += 4 * BLOCK_THREADS) {
      const uint4 quad = load_quad(scores.from + index);
      uint32 items[4] = {quad.x, quad.y, quad.z, quad.w};
      int left = scores.count - index;
      if (scores.only_best) {
#pragma unroll
        for (int i = 1; i < 4; ++i) items[0] = max(items[0], i < left ? items[i] : 0u);
        left = 1;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32 place = items[i] - range.low;  // beyond the range if the score is lower
        if (i < left && place <= range.high - range.low) atomicAdd(&bins[place >> shift], 1u);
      }
    }
    __syncthreads();
    const int first_bin = BINS - 4 * (threadIdx.x + 1);  // of four, from the highest
    uint4* mine = reinterpret_cast<uint4*>(bins + first_bin);
    const int counts[4] = {int(mine->w), int(mine->z), int(mine->y), int(mine->x)};
    *mine = {0, 0, 0, 0};
    int before = above + block_prefix(counts[0] + counts[1] + counts[2] + counts[3]).before;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (before < COUNT && COUNT <= before + counts[i])
        found = {range.low + (uint32(first_bin + 3 - i) << shift), before, counts[i]};
      before += counts[i];
    }
    __syncthreads();
    const Threshold result = found;
    if (result.above + result.within <= enough || shift == 0) return result;
    range = {result.low, result.low + (1u << shift) - 1};
    above = result.above;
  }
}

// Collects the scores of at least `bound` with their groups, in the order of the groups. Returns how many they are, or -1
// if they have no room. `best`: the best score of every 16 groups.
__device__ __forceinline__ int collect(const uint32* scores, const Scores& best, int visible, uint32 bound,
                                       uint32* kept_scores, int* kept_groups) {
  __shared__ int places[ROOM];  // in `best` of those that reach the bound
  const int share = ceil_div(best.count, 4 * BLOCK_THREADS) * 4, first = int(threadIdx.x) * share;
  if (share > WARP) return -1;
  uint32 mask = 0;
#pragma unroll 1
  for (int i = 0; i < share && first + i < best.count; i += 4)
    mask |= (reaching(load_quad(best.from + first + i), bound) & low_bits(min(best.count - first - i, 4))) << i;
  const Prefix bests = block_prefix(__popc(mask));
  if (bests.total > ROOM) return -1;
  int place = bests.before;
  for (; mask != 0; mask &= mask - 1) places[place++] = first + __ffs(int(mask)) - 1;
  __syncthreads();

  int groups[2];
  uint4 quads[2][GROUPS / 4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    groups[i] = places[min(2 * int(threadIdx.x) + i, bests.total - 1)] * GROUPS;
#pragma unroll
    for (int item = 0; item < GROUPS / 4; ++item) quads[i][item] = load_quad(scores + groups[i] + 4 * item);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32 bits = 0;
#pragma unroll
    for (int item = 0; item < GROUPS / 4; ++item) bits |= reaching(quads[i][item], bound) << (4 * item);
    bits &= low_bits(min(visible - groups[i], GROUPS));
    if (2 * int(threadIdx.x) + i < bests.total) mask |= bits << (i * GROUPS);
  }
  const Prefix candidates = block_prefix(__popc(mask));
  if (candidates.total > CAPACITY / 2) return -1;
  place = candidates.before;
  for (; mask != 0; mask &= mask - 1) {
    const int bit = __ffs(int(mask)) - 1, group = (bit < GROUPS ? groups[0] : groups[1]) + bit % GROUPS;
    kept_scores[place] = scores[group];
    kept_groups[place++] = group;
  }
  __syncthreads();
  return candidates.total;
}

// Writes the groups of the selected scores in order; `groups` of the scores, or null where a score's place is its group.
__device__ __forceinline__ void write_selected(const Scores& scores, const int* groups, const Threshold& threshold,
                                               int* selected) {
  constexpr int SHARE = 8, SURE = 1 << 16;
  static_assert(SHARE * BLOCK_THREADS < SURE, "two counts in a word");
  // From `sure` on a score is selected; at `threshold.low`, if that is less, the first `ties` are.
  const bool is_exact = threshold.above + threshold.within == COUNT;
  const uint32 sure = is_exact ? threshold.low : threshold.low + 1;
  const int ties = is_exact ? 0 : COUNT - threshold.above;
  int num_sure = 0, num_ties = 0;  // in front of this round
#pragma unroll 1
  for (int start = 0; start < scores.count; start += SHARE * BLOCK_THREADS) {
    const int first = start + SHARE * int(threadIdx.x);
    uint32 sure_mask = 0, mask = 0;
#pragma unroll
    for (int half = 0; half < SHARE; half += 4) {
      const int left = scores.count - first - half;
      const uint4 quad = left > 0 ? load_quad(scores.from + first + half) : uint4{0, 0, 0, 0};
      sure_mask |= (reaching(quad, sure) & low_bits(min(left, 4))) << half;
      mask |= (reaching(quad, threshold.low) & low_bits(min(left, 4))) << half;
    }
    const uint32 tie_mask = mask & ~sure_mask;
    const Prefix prefix = block_prefix(__popc(sure_mask) * SURE + __popc(tie_mask));
    const int sure_before = num_sure + prefix.before / SURE, ties_before = num_ties + prefix.before % SURE;
    for (; mask != 0; mask &= mask - 1) {
      const uint32 bit = mask & -mask;
      const int rank = ties_before + __popc(tie_mask & (bit - 1)), item = first + __popc(bit - 1);
      const int place = sure_before + __popc(sure_mask & (bit - 1)) + min(rank, ties);
      if ((sure_mask & bit) || rank < ties) selected[place] = groups == nullptr ? item : groups[item];
    }
    num_sure += prefix.total / SURE, num_ties += prefix.total % SURE;
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
select_groups(const uint32* all_scores, const int* query_start_loc, const int* seq_lens, const int* num_seqs,
              int* selected, int first_row, int row_stride, int max_items, int batch_size) {
  __shared__ __align__(16) uint32 kept[CAPACITY];
  __shared__ __align__(16) uint32 bins[BINS];
  int* kept_groups = reinterpret_cast<int*>(kept) + CAPACITY / 2;
  *reinterpret_cast<uint4*>(bins + 4 * threadIdx.x) = {0, 0, 0, 0};
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
  const bool fits = visible <= CAPACITY;
  Scores searched = {scores, visible, true};
  if (!fits) searched = {scores + int64(max_items) * GROUPS, ceil_div(visible, GROUPS), false};
  Range range = take(searched, kept);
  const int* groups = nullptr;
  bool is_bounded = (fits ? ceil_div(visible, 4) : searched.count) < COUNT;  // too few for a first search
  if (is_bounded && !fits) range.low = 0;
  Threshold threshold;
#pragma unroll 1
  while (true) {
    if (is_bounded) searched.only_best = false;
    if (is_bounded && !fits) {
      const int count = range.low > 0 ? collect(scores, searched, visible, range.low, kept, kept_groups) : -1;
      searched = count < 0 ? Scores{scores, visible, false} : Scores{kept, count, false};
      groups = count < 0 ? nullptr : kept_groups;
    }
    threshold = find_threshold(searched, is_bounded ? COUNT : ROOM, range, bins);
    if (is_bounded) break;
    is_bounded = true;
    range.low = threshold.low;
  }
  write_selected(searched, groups, threshold, selected);
}
