// silu(gate x) * (up x) of the routed experts and of the shared one. A block computes 8 * UNIT_TILES hidden elements for a
// group of tokens; its warps share the elements of x among them.
// HIDDEN; WARPS; UNIT_TILES, MOST_SLOTS, ROUTED_CHUNK, SHARED_CHUNK: of `Stages`; ONE_TOKEN: 1 where the step has one token, whose
// experts are chosen here; NORMALIZED: 1 if the weights sum to one; and the macros of groups.cuh.
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
__device__ __forceinline__ int chosen_expert(const Step& step, int index, Candidates& candidates, bool is_first) {
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

// Brings x of the one token to where all warps find it, arranged, while the first of them may be choosing experts.
template <typename Format>
__device__ __forceinline__ void stage_token(const bf16* x, uint4* staged) {
  constexpr int IDLE = WARPS > 1 ? WARP : 0;
  if (threadIdx.x < IDLE) return;
  for (int i = threadIdx.x - IDLE; i < HIDDEN / 8; i += THREADS - IDLE)
    staged[i] = Format::arrange(reinterpret_cast<const uint4*>(x)[i]);
}

__device__ __forceinline__ Group group_of(bool is_shared, int index, const Step& step, Candidates& candidates,
                                          bool is_first = false) {
  if constexpr (ONE_TOKEN) {
    if (is_shared) return {0, CHOICES, 1, nullptr};
    return {chosen_expert(step, index, candidates, is_first), index, 1, nullptr};
  }
  return step.lists.group(is_shared, index);
}

// Adds up the warps' parts and writes hidden elements from `first_row` on of the group's tokens, arranged for `down`.
template <typename Format, int T>
__device__ __forceinline__ void finish(const float (&sums)[T][N][4], float gate_scale, float up_scale,
                                       const Group& group, float* parts, bf16* hidden, int first_row) {
  constexpr int ROWS = 8 * T;  // parts: [warp][gate, up][row][column]
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
template <typename Format, int ROWS, int CHUNK>
__device__ __forceinline__ void run(const Weights& experts, bool is_shared, int block, const Step& step) {
#if PRIVATE
  constexpr int SHARE = HIDDEN / WARPS;
  using Tiles = Stages<Format, HIDDEN, SHARE, CHUNK, UNIT_TILES, MOST_SLOTS, WARP>;
#else
  using Tiles = Stages<Format, HIDDEN, HIDDEN, CHUNK, UNIT_TILES, MOST_SLOTS, THREADS>;
#endif
  constexpr int BLOCKS = ROWS / (8 * UNIT_TILES), STEPS = CHUNK / Format::STEP / (PRIVATE ? 1 : WARPS);
  DYNAMIC_SHARED(uint8, shared);  // the token, slots
  uint4* const token = reinterpret_cast<uint4*>(shared);
  uint8* const slots = shared + (ONE_TOKEN ? 2 * HIDDEN : 0);
  const int first_row = block % BLOCKS * (8 * UNIT_TILES);
  Group group = {0, 0, 0, nullptr};
  if (!is_shared) {
    wait_for_previous();
    if constexpr (ONE_TOKEN) stage_token<Format>(step.x, token);
    group = group_of(false, block / BLOCKS, step, *reinterpret_cast<Candidates*>(slots), block == 0);
    start_next();
    if (group.count == 0) return;
  }
  const Weights weights = matrix<Format>(experts, 2 * group.expert, ROWS, HIDDEN);
#if PRIVATE
  const int warp = threadIdx.x / WARP;
  const Tiles tiles = {slots + warp * Tiles::BYTES, weights, first_row, first_row + ROWS, warp * SHARE, int(threadIdx.x) % WARP};
#else
  const Tiles tiles = {slots, weights, first_row, first_row + ROWS, 0, int(threadIdx.x)};
#endif
  tiles.start();
  const float gate_scale = sum_scale<Format>(weights, 0), up_scale = sum_scale<Format>(weights, 1);
  if (is_shared) {
    wait_for_previous();
    start_next();
    if constexpr (ONE_TOKEN) stage_token<Format>(step.x, token);
    if (PRIVATE && ONE_TOKEN) __syncthreads();
    group = group_of(true, block / BLOCKS, step, *reinterpret_cast<Candidates*>(slots));
    if (group.count == 0) return;
  }
  const bf16* tokens[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int row = token_of(group.entry(8 * n + threadIdx.x % WARP / 4), step.lists.tokens);
    tokens[n] = ONE_TOKEN ? reinterpret_cast<const bf16*>(token) : step.x + int64(row) * HIDDEN;
  }
  float sums[UNIT_TILES][N][4];
#if PRIVATE
  for (int n = 0; n < N; ++n) tokens[n] += warp * SHARE;
  tiles.template multiply<ONE_TOKEN != 0, STEPS>(tokens, 0, sums);
#else
  tiles.template multiply<ONE_TOKEN != 0, STEPS>(tokens, threadIdx.x / WARP * STEPS, sums);
#endif
  __syncthreads();
  finish<Format>(sums, gate_scale, up_scale, group, reinterpret_cast<float*>(slots), step.hidden, first_row);
}

extern "C" __global__ void __launch_bounds__(THREADS)
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
    run<ROUTED, INNER, ROUTED_CHUNK>(select(is_shared, shared, routed), is_shared, block, step);
  } else if (is_shared) {
    run<SHARED, SHARED_INNER, SHARED_CHUNK>(shared, true, block, step);
  } else {
    run<ROUTED, INNER, ROUTED_CHUNK>(routed, false, block, step);
  }
}
