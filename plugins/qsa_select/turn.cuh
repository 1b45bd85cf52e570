// The rows of a step take turns in the workspace of the scores: each launch has as many as fit, by the lengths at hand.
// Macros: RATIO (tokens of a group).
#pragma once
#include "q4e.cuh"

struct Turn {
  int first_row, num_rows;
  int max_items;   // of 16 groups, of a row: their best scores follow the scores
  int row_stride;  // of scores

  __device__ __forceinline__ int end_row() const { return first_row + num_rows; }
};

// Turn `index` of a step of `num_tokens` rows, in a workspace of `capacity` scores. By whole warps.
__device__ __forceinline__ Turn find_turn(int index, int num_tokens, int capacity, const int* seq_lens,
                                          const int* num_seqs, int batch_size) {
  uint32 longest = 0;
  const int real = *num_seqs;
  for (int sequence = threadIdx.x % WARP; sequence < batch_size; sequence += WARP) {
    const int length = seq_lens[sequence];
    if (sequence < real) longest = max(longest, uint32(max(length, 0)));
  }
  longest = __reduce_max_sync(FULL_MASK, longest);
  const int items = max(ceil_div(int(longest) / RATIO, 16), 1), stride = items * 17 + (4 - items % 4) % 4;
  const int rows = min(capacity / stride, num_tokens);
  const int first = int(min(int64(index) * rows, int64(num_tokens)));
  return {first, min(rows, num_tokens - first), items, stride};
}
