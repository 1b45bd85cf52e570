// Chooses the experts of many tokens and places the chosen ones by expert, in the order of tokens: `route`, whose last block
// lists the tiles, then `place`. A block has 32 tokens, a bit each in a word of every expert. EXPERTS, CHOICES; NORMALIZED:
// 1 if the weights of a token sum to one; TILE_TOKENS: at most so many tokens a tile, a multiple of 8.
#include "moe/routing.cuh"

constexpr int WARPS = 16, THREADS = WARPS * WARP, BLOCK_TOKENS = 32;
constexpr int PER_THREAD = ceil_div(EXPERTS, THREADS);

// The sum of `x` of the threads before this one, by the whole block.
__device__ __forceinline__ int sum_before(int x) {
  __shared__ int totals[WARPS];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  int sum = warp_prefix(x);
  __syncthreads();  // of a call before this one
  if (lane == WARP - 1) totals[warp] = sum;
  __syncthreads();
  for (int before = 0; before < warp; ++before) sum += totals[before];
  return sum - x;
}

// Calls `use` with the number of tokens that each block of `route` counted for the expert whose bytes `counts` are.
template <typename Use>
__device__ __forceinline__ void each_count(const uint8* counts, int blocks, const Use& use) {
#pragma unroll 4
  for (int first = 0; first < blocks; first += 16) {
    const uint4 sixteen = __ldcg(reinterpret_cast<const uint4*>(counts + first));
    const uint32 words[4] = {sixteen.x, sixteen.y, sixteen.z, sixteen.w};
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (first + i < blocks) use(first + i, int(words[i / 4] >> (8 * (i % 4)) & 255u));
  }
}

// The tiles of all experts, and `firsts[block][expert]`, where a block's tokens of an expert begin. An expert's tokens
// are shared out evenly among as few tiles as there can be.
__device__ __forceinline__ void make_lists(const uint8* counts, int blocks, int pitch, int* firsts, int4* tiles,
                                           int* num_tiles) {
  const int begin = min(EXPERTS, int(threadIdx.x) * PER_THREAD), end = min(EXPERTS, begin + PER_THREAD);
  int totals[PER_THREAD] = {}, mine = 0, my_tiles = 0;
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    if (begin + i >= end) break;
    each_count(counts + int64(begin + i) * pitch, blocks, [&](int, int count) { totals[i] += count; });
    mine += totals[i], my_tiles += ceil_div(totals[i], TILE_TOKENS);
  }
  int first = sum_before(mine), tile = sum_before(my_tiles);
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    const int expert = begin + i;
    if (expert >= end) break;
    const int parts = ceil_div(totals[i], TILE_TOKENS), part = parts ? ceil_div(ceil_div(totals[i], parts), 8) * 8 : 0;
    for (int done = 0; done < totals[i]; done += part)
      tiles[tile++] = make_int4(expert, first + done, min(part, totals[i] - done), 0);
    each_count(counts + int64(expert) * pitch, blocks, [&](int block, int count) {
      firsts[int64(block) * EXPERTS + expert] = first;
      first += count;
    });
  }
  if (threadIdx.x == THREADS - 1) *num_tiles = tile;
}

extern "C" __global__ void __launch_bounds__(THREADS)
many_route(const float* logits, int* chosen, float* weights, uint8* counts, int* firsts, int4* tiles, int* num_tiles,
           uint32* counter, const int* query_start_loc, const int* num_seqs, int first_token, int tokens, int pitch) {
  DYNAMIC_SHARED(Candidates, candidates);  // one a warp
  __shared__ Choice choices[WARPS][CHOICES];
  __shared__ float choice_weights[WARPS][CHOICES];
  __shared__ uint32 takers[EXPERTS];
  const int warp = threadIdx.x / WARP;
  for (int expert = threadIdx.x; expert < EXPERTS; expert += THREADS) takers[expert] = 0;
  __syncthreads();
  wait_for_previous();
  start_next();
  const int real = real_tokens(query_start_loc, num_seqs, first_token, tokens);
  for (int i = warp; i < BLOCK_TOKENS; i += WARPS) {
    const int token = blockIdx.x * BLOCK_TOKENS + i;
    if (token >= real) break;
    const float* of_token = logits + int64(token) * LOGITS_PITCH;
    choose_experts(of_token, candidates[warp], choices[warp]);
    weigh_choices<NORMALIZED>(of_token, choices[warp], choice_weights[warp]);
    for (int choice = threadIdx.x % WARP; choice < CHOICES; choice += WARP) {
      const int expert = choices[warp][choice].expert;
      chosen[token * CHOICES + choice] = expert;
      weights[token * CHOICES + choice] = choice_weights[warp][choice];
      atomicAdd(&takers[expert], 1u << i);  // a token takes an expert once
    }
    __syncwarp();
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < EXPERTS; expert += THREADS)
    counts[int64(expert) * pitch + blockIdx.x] = uint8(__popc(takers[expert]));
  if (is_last_block(counter, gridDim.x)) make_lists(counts, gridDim.x, pitch, firsts, tiles, num_tiles);
}

extern "C" __global__ void __launch_bounds__(THREADS)
many_place(const int* chosen, const int* firsts, int* token_of_position, int* positions, const int* query_start_loc,
           const int* num_seqs, int first_token, int tokens) {
  __shared__ uint32 takers[EXPERTS];
  for (int expert = threadIdx.x; expert < EXPERTS; expert += THREADS) takers[expert] = 0;
  __syncthreads();
  wait_for_previous();
  start_next();
  const int first = blockIdx.x * BLOCK_TOKENS;
  const int count = min(BLOCK_TOKENS, real_tokens(query_start_loc, num_seqs, first_token, tokens) - first);
  for (int i = threadIdx.x; i < count * CHOICES; i += THREADS)
    atomicAdd(&takers[chosen[first * CHOICES + i]], 1u << (i / CHOICES));
  __syncthreads();
  for (int i = threadIdx.x; i < count * CHOICES; i += THREADS) {
    const int expert = chosen[first * CHOICES + i], token = i / CHOICES;
    const int before = __popc(takers[expert] & ((1u << token) - 1u));
    const int position = firsts[int64(blockIdx.x) * EXPERTS + expert] + before;
    positions[first * CHOICES + i] = position;
    token_of_position[position] = first + token;
  }
}
