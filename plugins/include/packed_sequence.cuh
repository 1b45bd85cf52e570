// A sequence of the packed batch: plugins/packed.py on the device.
#pragma once

struct PackedSequence {
  int start;    // its first row
  int length;   // new tokens; 0 for a sequence of padding
  int context;  // tokens before this step
  int slot;
};

// One round of loads: all of them decide whether the sequence exists, else the compiler moves some behind a branch on
// that, and they wait for each other.
__device__ __forceinline__ PackedSequence locate_sequence(int sequence, const int* query_start_loc, const int* seq_lens,
                                                          const int* slot_ids, const int* num_seqs) {
  const int start = query_start_loc[sequence], end = query_start_loc[sequence + 1], total = seq_lens[sequence];
  const int slot = slot_ids[sequence];
  const bool exists = (sequence < *num_seqs) & (slot >= 0) & (total >= 0);
  const int length = exists ? end - start : 0;
  return {start, length, total - length, slot};
}
