// A read's first kernel for many tokens: the pending combine, the norm's factor of each stream, and the thin projections'
// weight times the norm's gain. So what comes after reads the combined stack, and the normed one is never in memory.
// A block for each stream of a weight row, then one for each stream of a token.
// HIDDEN: columns of a stream, whole vectors of 8; STREAMS; ROWS: of the weight; BLOCK_THREADS of a block; bf16 only.
#include "hc_norm/vectors.cuh"

constexpr int WEIGHT_BLOCKS = ROWS * STREAMS, ITEMS = ceil_div(HIDDEN / 8, BLOCK_THREADS);

__device__ __forceinline__ int column_of(int item) { return (item * BLOCK_THREADS + threadIdx.x) * 8; }

// One stream of a weight row, from `row` to `scaled`.
__device__ __forceinline__ void scale_weight(const bf16* row, const float* gain, bf16* scaled) {
  uint4 products[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (column_of(i) >= HIDDEN) break;
    float values[8], gains[8];
    unpack(load_streaming(row + column_of(i)), values);
    load_gain(gain + column_of(i), gains);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] *= gains[j];
    products[i] = pack(values);
  }
  wait_for_previous();
#pragma unroll
  for (int i = 0; i < ITEMS; ++i)
    if (column_of(i) < HIDDEN) *reinterpret_cast<uint4*>(scaled + column_of(i)) = products[i];
}

__device__ __forceinline__ uint4 combine(uint4 stack, uint4 y, uint32 weight) {
  return make_uint4(multiply_add_bf16(y.x, weight, stack.x), multiply_add_bf16(y.y, weight, stack.y),
                    multiply_add_bf16(y.z, weight, stack.z), multiply_add_bf16(y.w, weight, stack.w));
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
hc_read_combine(const bf16* stack, const bf16* y, const bf16* inject, const float* gain, const bf16* weight,
                bf16* combined, float* scales, bf16* scaled_weight, float eps) {
  start_next();
  if (blockIdx.x < WEIGHT_BLOCKS) {
    const int64 at = int64(blockIdx.x) * HIDDEN;
    scale_weight(weight + at, gain + blockIdx.x % STREAMS * HIDDEN, scaled_weight + at);
    return;
  }
  const int64 block = blockIdx.x - WEIGHT_BLOCKS, token = block / STREAMS, row = block * HIDDEN;
  wait_for_previous();
  const uint32 factor = inject[block].bits * 0x10001u;
  uint4 values[ITEMS], updates[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (column_of(i) >= HIDDEN) break;
    values[i] = __ldcg(reinterpret_cast<const uint4*>(stack + row + column_of(i)));
    updates[i] = __ldcg(reinterpret_cast<const uint4*>(y + token * HIDDEN + column_of(i)));
  }
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (column_of(i) >= HIDDEN) break;
    const uint4 result = combine(values[i], updates[i], factor);
    __stcg(reinterpret_cast<uint4*>(combined + row + column_of(i)), result);
    float floats[8];
    unpack(result, floats);
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += floats[j] * floats[j];
  }
  squares = block_sum<BLOCK_THREADS>(squares);
  if (threadIdx.x == 0) scales[block] = rsqrtf(squares / HIDDEN + eps);
}
