// silu(gate x) * (up x) of the routed experts and of the shared one. A block computes 8 * ROUTED_TILES hidden
// elements for a group of tokens; its warps share the elements of x among them.
// HIDDEN; WARPS; ROUTED_TILES, ROUTED_AHEAD, SHARED_TILES, SHARED_AHEAD: of `RowTiles`; ONE_TOKEN: 1 where the step has
// one token, whose experts are chosen here; NORMALIZED: 1 if the weights sum to one; and the macros of groups.cuh.
#include "moe/groups.cuh"

constexpr int THREADS = WARPS * WARP;

struct Step {
  const bf16* x;  // of the first token
  const float* logits;
  int* chosen;
  float* weights;
  bf16* hidden;
  Lists lists;
};

// The `index`-th best expert of the one token. The first block tells `down_one` all of them: what it writes before it
// lets that kernel start, that one may read from its start on.
__device__ __forceinline__ int chosen_expert(const Step& step, int index, bool is_first) {
  __shared__ Candidates candidates;
  __shared__ Choice chosen[CHOICES];
  __shared__ float weights[CHOICES];
  if (threadIdx.x < WARP) {
    choose_experts(step.logits, candidates, chosen);
    if (is_first) {
      weigh_choices<NORMALIZED>(step.logits, chosen, weights);
      for (int i = threadIdx.x; i < CHOICES; i += WARP) {
        step.chosen[i] = chosen[i].expert;
        step.weights[i] = weights[i];
      }
      __threadfence();
    }
  }
  __syncthreads();
  return chosen[index].expert;
}

// Where all warps find x of the one token.
__device__ __forceinline__ uint4* staged_token() {
  __shared__ uint4 staged[ONE_TOKEN ? HIDDEN / 8 : 1];
  return staged;
}

// Brings it there, arranged, while the first warp may be choosing experts.
template <typename Format>
__device__ __forceinline__ void stage_token(const bf16* x) {
  constexpr int IDLE = WARPS > 1 ? WARP : 0;
  if (threadIdx.x < IDLE) return;
  for (int i = threadIdx.x - IDLE; i < HIDDEN / 8; i += THREADS - IDLE)
    staged_token()[i] = Format::arrange(reinterpret_cast<const uint4*>(x)[i]);
}

__device__ __forceinline__ Group group_of(bool is_shared, int index, const Step& step, bool is_first = false) {
  if constexpr (ONE_TOKEN) {
    if (is_shared) return {0, CHOICES, 1, nullptr};
    return {chosen_expert(step, index, is_first), index, 1, nullptr};
  }
  return step.lists.group(is_shared, index);
}

// Adds up the warps' parts and writes hidden elements from `first_row` on of the group's tokens, arranged for `down`.
template <typename Format, int T>
__device__ __forceinline__ void finish(const float (&sums)[T][N][4], float gate_scale, float up_scale,
                                       const Group& group, bf16* hidden, int first_row) {
  constexpr int ROWS = 8 * T;
  DYNAMIC_SHARED(float, parts);  // [warp][gate, up][row][column]
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int tile = 0; tile < T; ++tile)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int row = (threadIdx.x / WARP * 2 + i / 2) * ROWS + tile * 8 + lane / 4;
        parts[row * GROUP + n * 8 + lane % 4 * 2 + i % 2] = sums[tile][n][i];
      }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * group.count; i += THREADS) {
    int row = i % ROWS, column = i / ROWS;
    float gate = 0.f, up = 0.f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      gate += parts[(warp * 2 * ROWS + row) * GROUP + column];
      up += parts[((warp * 2 + 1) * ROWS + row) * GROUP + column];
    }
    float value = silu(gate * gate_scale) * (up * up_scale);
    hidden[int64(group.entry(column)) * HIDDEN_PITCH + first_row + row / 8 * 8 + Format::place(row % 8)] =
        from_float<bf16>(value);
  }
}

// Block `block` of those of the routed experts, or of the shared one, whose weights may be read before anything else.
template <typename Format, int ROWS, int T, int AHEAD>
__device__ __forceinline__ void run(const Weights& experts, bool is_shared, int block, const Step& step) {
  constexpr int BLOCKS = ROWS / (8 * T), STEPS = HIDDEN / Format::STEP / WARPS;
  static_assert(HIDDEN % (Format::STEP * WARPS) == 0, "as many steps for every warp");
  const int index = block / BLOCKS, first_row = block % BLOCKS * (8 * T);
  const int lane_row = first_row + threadIdx.x % WARP / 4;
  Group group = {0, 0, 0, nullptr};
  if (!is_shared) {
    wait_for_previous();
    if constexpr (ONE_TOKEN) stage_token<Format>(step.x);
    group = group_of(false, index, step, block == 0);
    start_next();
    if (group.count == 0) return;
  }
  const Weights weights = matrix<Format>(experts, 2 * group.expert, ROWS, HIDDEN);
  RowTiles<Format, HIDDEN, T, 8, STEPS, AHEAD> tiles(weights, lane_row, lane_row + ROWS, threadIdx.x / WARP * STEPS);
  const float gate_scale = sum_scale<Format>(weights, 0), up_scale = sum_scale<Format>(weights, 1);
  if (is_shared) {
    wait_for_previous();
    start_next();
    group = group_of(true, index, step);
    if (group.count == 0) return;
    if constexpr (ONE_TOKEN) {
      stage_token<Format>(step.x);
      __syncthreads();
    }
  }
  const bf16* tokens[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if constexpr (ONE_TOKEN)
      tokens[n] = reinterpret_cast<const bf16*>(staged_token());
    else
      tokens[n] = step.x + int64(token_of(group.entry(8 * n + threadIdx.x % WARP / 4), step.lists.tokens)) * HIDDEN;
  }
  float sums[T][N][4];
  tiles.template multiply<ONE_TOKEN != 0, TURNS>(tokens, sums);
  finish<Format>(sums, gate_scale, up_scale, group, step.hidden, first_row);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
gate_up(const bf16* x, const void* values, const void* block_scales, const float* global_scales,
        const void* shared_values, const void* shared_block_scales, const float* shared_global_scales,
        const float* logits, int* chosen, float* weights, const int* order, const int4* items, const int* num_items,
        const int* query_start_loc, const int* num_seqs, bf16* hidden, int first_token, int tokens, int shared_blocks) {
  const Weights routed = {values, block_scales, global_scales};
  const Weights shared = {shared_values, shared_block_scales, shared_global_scales};
  const Lists lists = {order, items, num_items, query_start_loc, num_seqs, first_token, tokens};
  const Step step = {x + int64(first_token) * HIDDEN, logits, chosen, weights, hidden, lists};
  const bool is_shared = int(blockIdx.x) < shared_blocks;
  const int block = is_shared ? blockIdx.x : blockIdx.x - shared_blocks;
  if constexpr (ALIKE) {
    run<ROUTED, INNER, ROUTED_TILES, ROUTED_AHEAD>(select(is_shared, shared, routed), is_shared, block, step);
  } else if (is_shared) {
    run<SHARED, SHARED_INNER, SHARED_TILES, SHARED_AHEAD>(shared, true, block, step);
  } else {
    run<ROUTED, INNER, ROUTED_TILES, ROUTED_AHEAD>(routed, false, block, step);
  }
}
