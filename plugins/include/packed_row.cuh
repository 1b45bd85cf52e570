// Where a row of the packed batch belongs: plugins/packed.py on the device.
#pragma once

struct PackedRow {
  int sequence;  // -1 for a row of padding, of which the rest is not set
  int offset;    // of the row among the new tokens of its sequence
  int length;    // new tokens of the sequence
  int position;  // of the token in its sequence
  int slot;
};

// Every lane of a warp calls it, with the same `token`. The metadata of 32 sequences come in one round of loads.
__device__ __forceinline__ PackedRow find_row(int token, const int* query_start_loc, const int* seq_lens,
                                              const int* slot_ids, const int* num_seqs, int batch) {
  const int lane = threadIdx.x % WARP, count = *num_seqs;
  for (int first = 0; first < batch; first += WARP) {
    const int b = min(first + lane, batch - 1);
    const int start = query_start_loc[b], end = query_start_loc[b + 1], context_end = seq_lens[b], slot = slot_ids[b];
    const uint32 owner = __ballot_sync(FULL_MASK, first + lane < count && start <= token && token < end);
    if (owner) {
      const int from = __ffs(owner) - 1, offset = token - __shfl_sync(FULL_MASK, start, from);
      const int length = offset + __shfl_sync(FULL_MASK, end, from) - token;
      const int position = __shfl_sync(FULL_MASK, context_end, from) - length + offset;
      return {first + from, offset, length, position, __shfl_sync(FULL_MASK, slot, from)};
    }
  }
  return {-1};
}
