// The experts where tensor cores do not fit: float32 activations and sizes that are no multiples of their steps. A
// thread computes an output element for all tokens of a group. HIDDEN; ACTIVATION: bf16 or float; and the macros of
// groups.cuh.
#include "moe/groups.cuh"

constexpr int THREADS = 64;

template <typename Format>
__device__ __forceinline__ float global_scale(const Weights& matrix) {
  return is_same<Format, Nvfp4> ? matrix.global_scales[0] : 1.f;
}

// products[i] = row `row` of a matrix, COLUMNS elements, times the group's row `from[i]`.
template <typename Format, int COLUMNS>
__device__ __forceinline__ void multiply_row(const Weights& weights, int row, const ACTIVATION* const (&from)[GROUP],
                                             float (&products)[GROUP]) {
#pragma unroll
  for (int i = 0; i < GROUP; ++i) products[i] = 0.f;
  for (int k = 0; k < COLUMNS; ++k) {
    float weight = Format::value(weights.values, weights.block_scales, COLUMNS, row, k);
#pragma unroll
    for (int i = 0; i < GROUP; ++i) products[i] += weight * to_float(from[i][k]);
  }
  const float scale = global_scale<Format>(weights);
#pragma unroll
  for (int i = 0; i < GROUP; ++i) products[i] *= scale;
}

template <typename Format, int ROWS>
__device__ __forceinline__ void gate_up_rows(const Weights& experts, bool is_shared, int block, const Lists& lists,
                                             const ACTIVATION* x, ACTIVATION* hidden) {
  constexpr int BLOCKS = ceil_div(ROWS, THREADS);
  const int row = block % BLOCKS * THREADS + threadIdx.x;
  const Group group = lists.group(is_shared, block / BLOCKS);
  if (group.count == 0 || row >= ROWS) return;
  const ACTIVATION* from[GROUP];
#pragma unroll
  for (int i = 0; i < GROUP; ++i)
    from[i] = x + int64(lists.first_token + token_of(group.entry(i), lists.tokens)) * HIDDEN;
  const Weights gate = matrix<Format>(experts, 2 * group.expert, ROWS, HIDDEN);
  const Weights up = matrix<Format>(experts, 2 * group.expert + 1, ROWS, HIDDEN);
  float gates[GROUP], ups[GROUP];
  multiply_row<Format, HIDDEN>(gate, row, from, gates);
  multiply_row<Format, HIDDEN>(up, row, from, ups);
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    if (i < group.count)
      hidden[int64(group.entry(i)) * HIDDEN_PITCH + row] = from_float<ACTIVATION>(silu(gates[i]) * ups[i]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
gate_up_any(const ACTIVATION* x, const void* values, const void* block_scales, const float* global_scales,
            const void* shared_values, const void* shared_block_scales, const float* shared_global_scales,
            const int* order, const int4* items, const int* num_items, const int* query_start_loc, const int* num_seqs,
            ACTIVATION* hidden, int first_token, int tokens, int shared_blocks) {
  const Lists lists = {order, items, num_items, query_start_loc, num_seqs, first_token, tokens};
  const int block = blockIdx.x;
  wait_for_previous();
  start_next();
  if (block < shared_blocks) {
    const Weights shared = {shared_values, shared_block_scales, shared_global_scales};
    gate_up_rows<SHARED, SHARED_INNER>(shared, true, block, lists, x, hidden);
  } else {
    const Weights routed = {values, block_scales, global_scales};
    gate_up_rows<ROUTED, INNER>(routed, false, block - shared_blocks, lists, x, hidden);
  }
}

template <typename Format, int COLUMNS>
__device__ __forceinline__ void down_rows(const Weights& experts, bool is_shared, int block, const Lists& lists,
                                          const ACTIVATION* hidden, float* outputs) {
  constexpr int BLOCKS = ceil_div(HIDDEN, THREADS);
  const int row = block % BLOCKS * THREADS + threadIdx.x;
  const Group group = lists.group(is_shared, block / BLOCKS);
  if (group.count == 0 || row >= HIDDEN) return;
  const ACTIVATION* from[GROUP];
#pragma unroll
  for (int i = 0; i < GROUP; ++i) from[i] = hidden + int64(group.entry(i)) * HIDDEN_PITCH;
  const Weights weights = matrix<Format>(experts, group.expert, HIDDEN, COLUMNS);
  float products[GROUP];
  multiply_row<Format, COLUMNS>(weights, row, from, products);
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    if (i < group.count) outputs[int64(group.entry(i)) * HIDDEN + row] = products[i];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
down_any(const void* values, const void* block_scales, const float* global_scales, const void* shared_values,
         const void* shared_block_scales, const float* shared_global_scales, const ACTIVATION* hidden, const int* order,
         const int4* items, const int* num_items, const int* query_start_loc, const int* num_seqs, float* outputs,
         int first_token, int tokens, int shared_blocks) {
  const Lists lists = {order, items, num_items, query_start_loc, num_seqs, first_token, tokens};
  const int block = blockIdx.x;
  wait_for_previous();
  start_next();
  if (block < shared_blocks) {
    const Weights shared = {shared_values, shared_block_scales, shared_global_scales};
    down_rows<SHARED, SHARED_INNER>(shared, true, block, lists, hidden, outputs);
  } else {
    const Weights routed = {values, block_scales, global_scales};
    down_rows<ROUTED, INNER>(routed, false, block - shared_blocks, lists, hidden, outputs);
  }
}
