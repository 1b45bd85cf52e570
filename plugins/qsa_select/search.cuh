// Searches of the scores that a block's threads hold, for the COUNT-th highest: scores are counted in bins, and the search
// goes on in the bin where it must be. Scores are bits of floats that are not negative, in the order of their values.
// Macros: COUNT (groups to select), BLOCK_THREADS.
#pragma once
#include "q4e.cuh"

constexpr int WARPS = BLOCK_THREADS / WARP;
constexpr int GROUPS = 16;               // that share a best score in memory
constexpr int BINS = 4 * BLOCK_THREADS;  // of a search
static_assert(WARPS <= WARP, "the sums of the warps are summed by one");

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

// Of bits in masks as `block_places` takes them, only the first `count` stay. The block has to meet before.
template <int K>
__device__ __forceinline__ void keep_first(uint32 masks[K], int count) {
  int places[K];
  block_places<K>(masks, places);
#pragma unroll
  for (int k = 0; k < K; ++k)
    for (uint32 mask = masks[k]; mask != 0; mask &= mask - 1)
      if (places[k]++ >= count) masks[k] &= ~(mask & -mask);
  __syncthreads();
}

// Lists, in order, which of the dealt best scores reach the bin that a search for `most` at most has found.
template <int K>
__device__ __forceinline__ int list_reaching(const Quad best[K], const Deal& deal, const Bin& bin, int most,
                                             int* reaching) {
  uint32 masks[K];
  int places[K];
#pragma unroll
  for (int k = 0; k < K; ++k) masks[k] = deal.of(k) < deal.count ? best[k].reaching(bin.low) : 0;
  int total = block_places<K>(masks, places);
  if (total > most) {
    // The bin is of a single score. Of the groups with just that, enough are in the first ones whose best score it is.
    uint32 ties[K];
#pragma unroll
    for (int k = 0; k < K; ++k) ties[k] = masks[k] & ~best[k].reaching(bin.low + 1);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; ++k) masks[k] &= ~ties[k];
    keep_first<K>(ties, COUNT - bin.above);
#pragma unroll
    for (int k = 0; k < K; ++k) masks[k] |= ties[k];
    total = block_places<K>(masks, places);
  }
#pragma unroll
  for (int k = 0; k < K; ++k)
    for (uint32 mask = masks[k]; mask != 0; mask &= mask - 1)
      reaching[places[k]++] = 4 * deal.of(k) + __ffs(int(mask)) - 1;
  __syncthreads();
  return total;
}

// First groups of the `K` quads that are dealt to a thread, of groups whose best score is listed; `none` beyond them.
template <int K>
__device__ __forceinline__ void find_quads(const int* reaching, int total, int none, int groups[K]) {
  const Deal parts(total * (GROUPS / 4));
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int quad = parts.of(k);
    groups[k] = quad < parts.count ? reaching[quad / (GROUPS / 4)] * GROUPS + quad % (GROUPS / 4) * 4 : none;
  }
}
