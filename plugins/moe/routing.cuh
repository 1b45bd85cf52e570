// Which experts a token takes, and the lists that group tokens by expert.
//
// An entry is a row of the hidden vectors and of the experts' outputs: `token * CHOICES + choice` for a routed expert,
// `tokens * CHOICES + token` for the shared one. Macros: EXPERTS, CHOICES.
#pragma once
#include "q4e.cuh"

// Logits of a token, behind them that of the shared expert's gate; a multiple of 4.
constexpr int LOGITS_PITCH = (EXPERTS + 4) / 4 * 4;

// A group of tokens that share a read of an expert: entries `first` up to `first + count` of the order.
struct Item {
  int expert, first, count;
};

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

// By one warp: the CHOICES experts of largest logits, in descending order; a tie goes to the lower expert. `candidates`
// has room for EXPERTS. All lanes see `chosen` afterwards.
//
// CHOICES lanes have an own largest logit of at least the CHOICES-th of the lanes' largest ones. So no expert below it is
// chosen, which leaves a few candidates to rank (all experts where all logits are equal).
__device__ __forceinline__ void choose_experts(const float* logits, uint2* candidates, Choice* chosen) {
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
  int rank = 0;
#pragma unroll
  for (int other = 0; other < WARP; ++other) {
    uint32 its_largest = __shfl_sync(FULL_MASK, largest, other);
    rank += its_largest > largest || (its_largest == largest && other < lane);
  }
  unsigned limit_lane = __ballot_sync(FULL_MASK, rank == CHOICES - 1);  // none if CHOICES > WARP
  uint32 limit = __shfl_sync(FULL_MASK, largest, limit_lane ? __ffs(limit_lane) - 1 : 0);
  limit = limit_lane ? max(limit, 1u) : 1u;
  int count = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    unsigned votes = __ballot_sync(FULL_MASK, keys[i] >= limit);
    int place = count + __popc(votes & ((1u << lane) - 1u));
    if (keys[i] >= limit) candidates[place] = make_uint2(keys[i], i * WARP + lane);
    count += __popc(votes);
  }
  __syncwarp();
  for (int mine = lane; mine < count; mine += WARP) {
    uint2 candidate = candidates[mine];
    int better = 0;
#pragma unroll 4
    for (int other = 0; other < count; ++other) {
      uint2 its = candidates[other];
      better += its.x > candidate.x || (its.x == candidate.x && its.y < candidate.y);
    }
    if (better < CHOICES) chosen[better] = {int(candidate.y), from_sortable(candidate.x)};
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
__device__ __forceinline__ int real_tokens(const int* query_start_loc, const int* num_seqs, int first_token, int tokens) {
  return max(0, min(tokens, query_start_loc[*num_seqs] - first_token));
}

__device__ __forceinline__ int token_of(int entry, int tokens) {
  return entry < tokens * CHOICES ? entry / CHOICES : entry - tokens * CHOICES;
}
