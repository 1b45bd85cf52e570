// Chooses the experts of each token and groups the tokens by expert. One warp a token; the last block makes the
// lists. EXPERTS, CHOICES; NORMALIZED: 1 if the weights of a token sum to one; GROUP: tokens at most that share a
// read of an expert.
#include "moe/routing.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int PER_THREAD = ceil_div(EXPERTS, THREADS);

// The sum of `x` of the threads before this one, by the whole block.
__device__ __forceinline__ uint32 sum_before(uint32 x) {
  __shared__ uint32 totals[WARPS];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  uint32 sum = warp_prefix(x);
  if (lane == WARP - 1) totals[warp] = sum;
  __syncthreads();
  for (int before = 0; before < warp; ++before) sum += totals[before];
  return sum - x;
}

// `places` is for EXPERTS ints of shared memory. Entries are at most 65535: two sums fit a word.
__device__ __forceinline__ void make_lists(const int* chosen, int entries, int* places, int* order, int4* items,
                                           int* num_items) {
  for (int expert = threadIdx.x; expert < EXPERTS; expert += THREADS) places[expert] = 0;
  __syncthreads();
  for (int entry = threadIdx.x; entry < entries; entry += THREADS) atomicAdd(&places[chosen[entry]], 1);
  __syncthreads();
  const int begin = min(EXPERTS, int(threadIdx.x) * PER_THREAD), end = min(EXPERTS, begin + PER_THREAD);
  uint32 counts = 0;
  for (int expert = begin; expert < end; ++expert)
    counts += uint32(ceil_div(places[expert], GROUP)) << 16 | uint32(places[expert]);
  uint32 before = sum_before(counts);
  int first = before & 0xffffu, item = before >> 16;
  for (int expert = begin; expert < end; ++expert) {
    int count = places[expert];
    places[expert] = first;
    for (int done = 0; done < count; done += GROUP)
      items[item++] = make_int4(expert, first + done, min(GROUP, count - done), 0);
    first += count;
  }
  if (threadIdx.x == THREADS - 1) *num_items = item;
  __syncthreads();
  for (int entry = threadIdx.x; entry < entries; entry += THREADS)
    order[atomicAdd(&places[chosen[entry]], 1)] = entry;
}

extern "C" __global__ void __launch_bounds__(THREADS)
route(const float* logits, int* chosen, float* weights, int* order, int4* items, int* num_items, uint32* counter,
      const int* query_start_loc, const int* num_seqs, int first_token, int tokens) {
  DYNAMIC_SHARED(Candidates, candidates);  // one a warp
  __shared__ Choice choices[WARPS][CHOICES];
  __shared__ float choice_weights[WARPS][CHOICES];
  const int warp = threadIdx.x / WARP, token = blockIdx.x * WARPS + warp;
  wait_for_previous();
  start_next();
  const int real = real_tokens(query_start_loc, num_seqs, first_token, tokens);
  if (token < tokens) {  // rows of padding too: not to wait for `real`
    const float* of_token = logits + int64(token) * LOGITS_PITCH;
    choose_experts(of_token, candidates[warp], choices[warp]);
    weigh_choices<NORMALIZED>(of_token, choices[warp], choice_weights[warp]);
    for (int i = threadIdx.x % WARP; i < CHOICES; i += WARP) {
      chosen[token * CHOICES + i] = choices[warp][i].expert;
      weights[token * CHOICES + i] = choice_weights[warp][i];
    }
  }
  if (gridDim.x == 1) __syncthreads();
  if (gridDim.x == 1 || is_last_block(counter, gridDim.x))
    make_lists(chosen, real * CHOICES, reinterpret_cast<int*>(candidates), order, items, num_items);
}
