// Collects the tokens in the bins that hold whatever the filters may keep; the last block of a row then finds what they
// keep exactly and lets those tokens race. If there are too many of them it only finds how far the kept ones reach.
#include "sample_tokens/filter.cuh"

// A candidate: the nearer the smaller, of equally near ones the lower id.
__device__ __forceinline__ uint64 candidate(float distance, int id) {
  return uint64(__float_as_uint(distance)) << 32 | uint32(id);
}
__device__ __forceinline__ float distance_of(uint64 candidate) { return __uint_as_float(uint32(candidate >> 32)); }

struct Row {
  const ACTIVATION *logits, *raw_logits;
  int num_ids;
  Scale scale;
  Filters filters;
};

// Bitonic, ascending; `size` is a power of two.
__device__ __forceinline__ void sort(uint64* keys, int size) {
#pragma unroll 1
  for (int run = 2; run <= size; run *= 2)
#pragma unroll 1
    for (int stride = run / 2; stride > 0; stride /= 2) {
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < size / 2; i += THREADS) {
        const int low = 2 * i - (i & (stride - 1)), high = low + stride;
        const uint64 a = keys[low], b = keys[high];
        if ((a > b) == ((low & run) == 0)) keys[low] = b, keys[high] = a;
      }
    }
  __syncthreads();
}

// How many of the `count` sorted candidates are kept, ties with the last one included. With top-p alone, `all_mass` is
// that of all tokens, and `mass_in_front` that of tokens nearer than all candidates.
__device__ __forceinline__ int count_kept(const uint64* keys, int count, const Filters& filters, uint64 all_mass,
                                          uint64 mass_in_front) {
  constexpr int OWN = MAX_CANDIDATES / THREADS;
  __shared__ int kept;
  const int width = filters.top_k > 0 ? min(filters.top_k, count) : count, first = OWN * threadIdx.x;
  uint64 mass[OWN], own = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const float distance = first + i < width ? distance_of(keys[first + i]) : -negative_infinity();
    mass[i] = distance <= filters.floor ? mass_of(distance) : 0;
    own += mass[i];
  }
  const Scanned scanned = block_scan(own);
  const uint64 limit = filters.mass_limit(filters.only_top_p() ? all_mass : scanned.total);
  if (threadIdx.x == 0) kept = 1;
  __syncthreads();
  uint64 before = mass_in_front + scanned.before;
  int last = 0;  // behind the last one that this thread finds kept
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    if (first + i < width && before < limit && distance_of(keys[first + i]) <= filters.floor) last = first + i + 1;
    before += mass[i];
  }
  if (last > 0) atomicMax(&kept, last);
  __syncthreads();
  const float furthest = distance_of(keys[kept - 1]);
  int ties = 0;
#pragma unroll 1
  for (int i = kept + threadIdx.x; i < count && distance_of(keys[i]) == furthest; i += THREADS) ++ties;
  return kept + int(block_scan(ties).total);
}

// The largest distance that is kept, with no list of candidates: for any number of tokens, but slow. Top-k asks at
// which distance the number of tokens reaches k, and top-p, with the total known from that, at which their mass within
// the floor reaches its limit. The answer's bits are found in three digits from the highest on, in a pass each.
__device__ __forceinline__ float furthest_kept(const Row& row, uint64* mass, uint32* counts) {
  constexpr int DIGITS = MAX_CANDIDATES;
  float furthest = row.filters.floor;
  uint64 target = row.filters.top_k;
#pragma unroll 1
  for (int by_mass = target == 0; by_mass <= (row.filters.top_p < 1.f); ++by_mass) {
    uint32 prefix = 0, known = 0;
    uint64 count_before = 0, mass_before = 0;
#pragma unroll 1
    for (int shift = 20; shift >= 0; shift -= 10) {
#pragma unroll 1
      for (int i = threadIdx.x; i < DIGITS; i += THREADS) mass[i] = 0, counts[i] = 0;
      __syncthreads();
#pragma unroll 4
      for (int id = threadIdx.x; id < row.num_ids; id += THREADS) {
        const float distance = row.scale.distance(row.logits[id]);
        const uint32 bits = __float_as_uint(distance), digit = (bits & ~known) >> shift;
        if ((bits & known) != prefix) continue;
        atomicAdd(&counts[digit], 1u);
        if (distance <= row.filters.floor) atomicAdd(&mass[digit], mass_of(distance));
      }
      __syncthreads();
      const BinScan<DIGITS, uint64> masses(mass);
      const BinScan<DIGITS, uint32> numbers(counts);
      if (target == 0) target = row.filters.mass_limit(masses.scanned.total);
      const int digit = by_mass ? masses.reaching(target - mass_before) : numbers.reaching(target - count_before);
      uint64 count = 0, weight = 0;  // of the digits in front
#pragma unroll 1
      for (int i = threadIdx.x; i < digit; i += THREADS) count += counts[i], weight += mass[i];
      count_before += block_scan(count).total, mass_before += block_scan(weight).total;
      prefix |= uint32(digit) << shift, known |= (shift == 20 ? 0x7ffu : 0x3ffu) << shift;
      __syncthreads();
    }
    const float reached = __uint_as_float(prefix);
    const uint64 ties = by_mass || reached > furthest ? 0 : target - count_before;  // at k, as many as top-k counts
    target = row.filters.mass_limit(mass_before + ties * mass_of(reached));
    furthest = fminf(furthest, reached);
  }
  return furthest;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
gather(const ACTIVATION* logits, const ACTIVATION* raw_logits, const float* temperatures, const int* top_k,
       const float* top_p, const float* min_p, const int64* seeds, const int* offsets, const ChunkStats* chunks,
       RowState* states, RowCounters* counters, uint64* candidates, uint32* semaphores, int* token_ids, float* logprobs,
       int* ranks, int vocab_size, int num_ids) {
  __shared__ uint64 keys[MAX_CANDIDATES];
  __shared__ uint32 counts[MAX_CANDIDATES];
  __shared__ uint32 place;
  const int at = blockIdx.y;
  wait_for_previous();
  start_next();
  if (states[at].stage != FILTER) return;
  const RowStats stats = merge_stats(chunks + int64(at) * gridDim.x, gridDim.x);
  const int64 start = int64(at) * vocab_size;
  const Row row = {logits + start, raw_logits + start, num_ids, {stats.best, temperatures[at]},
                   load_filters(top_k, top_p, min_p, at, num_ids)};
  RowCounters& counter = counters[at];
  candidates += int64(at) * MAX_CANDIDATES;

  int boundary = min(BINS - 1, bin_of(row.filters.floor));
  uint64 all_mass = 0, mass_in_front = 0;
  bool only_boundary = false;  // top-p keeps too many to list them, but all in front of that bin
  if (row.filters.top_k > 0) {
    boundary = min(boundary, BinScan<BINS, uint32>(counter.counts).reaching(row.filters.top_k));
  } else if (row.filters.only_top_p()) {
    const BinScan<BINS, uint64> masses(counter.mass);
    all_mass = masses.scanned.total;
    boundary = masses.reaching(row.filters.mass_limit(all_mass));
    uint64 count = 0, mass = 0;
#pragma unroll 1
    for (int bin = threadIdx.x; bin < boundary; bin += THREADS) count += counter.counts[bin], mass += counter.mass[bin];
    only_boundary = block_scan(count).total + counter.counts[boundary] > MAX_CANDIDATES;
    mass = block_scan(mass).total;
    if (only_boundary) mass_in_front = mass;
  }
  const int first_bin = only_boundary ? boundary : 0;
  float distances[ITEMS];
  uint64 own = 0;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int id = blockIdx.x * CHUNK + i * THREADS + threadIdx.x;
    distances[i] = id < num_ids ? row.scale.distance(row.logits[id]) : -negative_infinity();
    const int bin = bin_of(distances[i]);
    own += first_bin <= bin && bin <= boundary;
  }
  const Scanned found = block_scan(own);
  if (threadIdx.x == 0 && found.total > 0) place = atomicAdd(&counter.num_candidates, uint32(found.total));
  __syncthreads();
  uint32 next = place + uint32(found.before);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int bin = bin_of(distances[i]);
    if (bin < first_bin || bin > boundary) continue;
    const int id = blockIdx.x * CHUNK + i * THREADS + threadIdx.x;
    if (next < MAX_CANDIDATES) candidates[next] = candidate(distances[i], id);
    ++next;
  }
  if (!is_last_block(semaphores + at, gridDim.x)) return;

  const int count = int(__ldcg(&counter.num_candidates));
  if (count > MAX_CANDIDATES) {
    const float furthest = furthest_kept(row, keys, counts);
    if (threadIdx.x == 0) states[at] = {RACE, furthest};
    return;
  }
  int size = 2;
  while (size < count) size *= 2;
#pragma unroll 1
  for (int i = threadIdx.x; i < size; i += THREADS) keys[i] = i < count ? __ldcg(candidates + i) : ~uint64(0);
  sort(keys, size);
  const int kept = count_kept(keys, count, row.filters, all_mass, mass_in_front);
  if (only_boundary) {
    if (threadIdx.x == 0) states[at] = {RACE, distance_of(keys[kept - 1])};
    return;
  }
  uint64 best = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < kept; i += THREADS) {
    const int id = int(uint32(keys[i]));
    best = max(best, ranked(race_score(distance_of(keys[i]), uint64(seeds[at]), offsets[at], id), id));
  }
  const int token = ranked_id(block_best(best));
  const float raw = to_float(row.raw_logits[token]);
  const bool knows_rank = logits == raw_logits;  // then every token above is a candidate too
  uint64 above = 0;
  if (knows_rank)
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) above += to_float(row.raw_logits[uint32(keys[i])]) > raw;
  above = block_scan(above).total;
  if (threadIdx.x == 0) {
    token_ids[at] = token, logprobs[at] = raw - stats.log_sum, ranks[at] = 1 + int(above);
    states[at] = {knows_rank ? DONE : RANK, 0.f};
  }
}
