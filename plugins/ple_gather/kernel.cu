// Copies table rows, a thread for each WORD of the embedding. WORDS: of a row; WORD: uint4, uint2, uint32 or uint16.
#include "q4e.cuh"

constexpr int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
ple_gather(const int64* rows, const WORD* table, WORD* embedding, int count) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  wait_for_previous();
  start_next();
  if (i < count) embedding[i] = table[rows[i / WORDS] * WORDS + i % WORDS];
}
