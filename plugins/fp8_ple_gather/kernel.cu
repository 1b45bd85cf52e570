// Copies and dequantizes FP8 table rows, a thread for VECTOR elements of the embedding. ROW: elements of a row, a
// multiple of VECTOR; OUTPUT: bf16 or float.
#include "q4e.cuh"
#include "vector.cuh"

constexpr int THREADS = 128, VECTORS = ROW / VECTOR;

extern "C" __global__ void __launch_bounds__(THREADS)
fp8_ple_gather(const int64* rows, const e4m3* table, const float* scales, OUTPUT* embedding, int count, int group_rows) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  wait_for_previous();
  start_next();
  if (i >= count) return;
  const int64 row = rows[i / VECTORS];
  const auto codes = load_vector<VECTOR>(table + row * ROW + i % VECTORS * VECTOR);
  const float scale = scales[uint32(row) / uint32(group_rows)];
  float values[VECTOR];
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) values[j] = to_float(codes.items[j]) * scale;
  store_vector(embedding + int64(i) * VECTOR, values);
}
