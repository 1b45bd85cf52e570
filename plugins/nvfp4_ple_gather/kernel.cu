// Copies and dequantizes NVFP4 table rows, a thread for eight elements of the embedding, half a block of one scale.
// BLOCKS: of a row; OUTPUT: bf16 or float.
#include "q4e.cuh"
#include "vector.cuh"

constexpr int THREADS = 128, VECTOR = 8, VECTORS = 2 * BLOCKS;

extern "C" __global__ void __launch_bounds__(THREADS)
nvfp4_ple_gather(const int64* rows, const uint32* table, const e4m3* block_scales, const float* scales,
                 OUTPUT* embedding, int count, int group_rows) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  wait_for_previous();
  start_next();
  if (i >= count) return;
  const int64 row = rows[i / VECTORS];
  const uint32 codes = table[row * VECTORS + i % VECTORS];
  const float block_scale = to_float(block_scales[row * BLOCKS + i % VECTORS / 2]);
  const float scale = scales[uint32(row) / uint32(group_rows)];
  float values[VECTOR];
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    const uint32 code = codes >> (4 * j);
    // Two exponent bits and one of mantissa, where a float has them: the bias is 126 too small.
    const float magnitude = bits_to_float((code & 7u) << 22) * 0x1p126f;
    values[j] = ((code & 8u) ? -magnitude : magnitude) * block_scale * scale;
  }
  store_vector(embedding + int64(i) * VECTOR, values);
}
