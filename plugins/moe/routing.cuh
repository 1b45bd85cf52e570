// Which experts a token takes, and the lists that group tokens by expert.
//
// An entry is a row of the hidden vectors and of the experts' outputs: `token * CHOICES + choice` for a routed expert,
// `tokens * CHOICES + token` for the shared one. Macros: EXPERTS, CHOICES.
#pragma once
#include "q4e.cuh"

// Logits of a token, behind them that of the shared expert's gate; a multiple of 4.
constexpr int LOGITS_PITCH = (EXPERTS + 4) / 4 * 4;

struct Choice {
  int expert;
  float logit;
};

// Larger for larger floats, never zero. NaN gets a place as well, so that every token finds its experts.
__device__ __forceinline__ uint32 sortable(float x) {
  uint32 bits = __float_as_uint(x);
  return max(bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u), 1u);
}
__device__ __forceinline__ float from_sortable(uint32 key) {
  return bits_to_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

// What `choose_experts` needs of shared memory: logits above, experts below, so that a larger one is a better one.
struct Candidates {
  uint64 of[EXPERTS];
};

// By one warp: the CHOICES experts of largest logits, in descending order; a tie goes to the lower expert. All lanes
// see `chosen` afterwards.
//
// At least CHOICES lanes have a logit that is not below the CHOICES-th of the lanes' largest ones. So no expert below
// it is chosen, which leaves a few candidates to rank.
__device__ __forceinline__ void choose_experts(const float* logits, Candidates& candidates, Choice* chosen) {
  constexpr int PER_LANE = ceil_div(EXPERTS, WARP);
  const int lane = threadIdx.x % WARP;
  uint32 keys[PER_LANE], largest = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    int expert = i * WARP + lane;
    keys[i] = expert < EXPERTS ? sortable(__ldcg(logits + expert)) : 0;
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) largest = max(largest, keys[i]);
  uint32 limit = 1;  // with more choices than lanes all experts are candidates
  if constexpr (CHOICES <= WARP) {
    int better = 0;
#pragma unroll
    for (int other = 0; other < WARP; ++other) better += __shfl_sync(FULL_MASK, largest, other) > largest;
    limit = max(limit, __reduce_min_sync(FULL_MASK, better < CHOICES ? largest : 0xffffffffu));
  }
  int count = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const bool is_candidate = keys[i] >= limit;
    const unsigned votes = __ballot_sync(FULL_MASK, is_candidate);
    if (is_candidate)
      candidates.of[count + __popc(votes & ((1u << lane) - 1u))] = uint64(keys[i]) << 32 | ~uint32(i * WARP + lane);
    count += __popc(votes);
  }
  __syncwarp();
#pragma unroll 1
  for (int place = lane; place < count; place += WARP) {
    const uint64 mine = candidates.of[place];
    int better = 0;
#pragma unroll 8
    for (int i = 0; i < count; ++i) better += candidates.of[i] > mine;
    if (better < CHOICES) chosen[better] = {int(~uint32(mine)), from_sortable(uint32(mine >> 32))};
  }
  __syncwarp();
}

// By one warp: the weights of the chosen experts, to be read by all its lanes.
template <bool SUM_TO_ONE>
__device__ __forceinline__ void weigh_choices(const float* logits, const Choice* chosen, float* weights) {
  const int lane = threadIdx.x % WARP;
  const float largest = chosen[0].logit;
  float sum = 0.f;
  for (int i = lane; i < (SUM_TO_ONE ? CHOICES : EXPERTS); i += WARP)
    sum += expf((SUM_TO_ONE ? chosen[i].logit : __ldcg(logits + i)) - largest);
  sum = warp_sum(sum);
  for (int i = lane; i < CHOICES; i += WARP) weights[i] = expf(chosen[i].logit - largest) / sum;
  __syncwarp();
}

// The rows of `tokens` rows from `first_token` on that belong to a sequence: they come first.
__device__ __forceinline__ int real_tokens(const int* query_start_loc, const int* num_seqs, int first_token,
                                           int tokens) {
  return max(0, min(tokens, query_start_loc[*num_seqs] - first_token));
}

__device__ __forceinline__ int token_of(int entry, int tokens) {
  return entry < tokens * CHOICES ? entry / CHOICES : entry - tokens * CHOICES;
}
