// Row ids of the n-gram table. Block (x, y) hashes tiles x, x + gridDim.x, ... of sequence y, a thread for each head of a
// token; the row of blocks behind the sequences fills the rows of padding. HEADS, NGRAM: heads of a token, tokens of the
// longest n-gram; TILE: tokens of a tile, at least NGRAM - 1; BLOCK >= HEADS * TILE.
#include "q4e.cuh"
#include "packed_sequence.cuh"

constexpr int HEADS_PER_NGRAM = HEADS / (NGRAM - 1);

extern "C" __global__ void __launch_bounds__(BLOCK)
ple_hash(const int* input_ids, int* ngram_ids, const int64* multipliers, const int64* head_sizes,
         const int64* head_offsets, const int* query_start_loc, const int* seq_lens, const int* slot_ids,
         const int* num_seqs, int64* rows, int num_tokens, int num_sequences, int ring_rows, int eos) {
  const int head = threadIdx.x % HEADS, place = threadIdx.x / HEADS;
  const uint64 size = head_sizes[head];
  const int64 first_row = head_offsets[head];
  uint64 multiplier[NGRAM];
#pragma unroll
  for (int age = 0; age < NGRAM; ++age) multiplier[age] = multipliers[age];
  wait_for_previous();
  start_next();
  const PackedSequence sequence =
      locate_sequence(min(int(blockIdx.y), num_sequences - 1), query_start_loc, seq_lens, slot_ids, num_seqs);
  const int tile = blockIdx.x * TILE + place;
  if (blockIdx.y == num_sequences) {  // a gather will read what the rows of padding name
    for (int token = query_start_loc[*num_seqs] + tile; place < TILE && token < num_tokens; token += gridDim.x * TILE)
      rows[int64(token) * HEADS + head] = 0;
    return;
  }
  const int* ids = input_ids + sequence.start;
  int* ring = ngram_ids + int64(sequence.slot) * ring_rows;
  for (int t = tile; place < TILE && t < sequence.length; t += gridDim.x * TILE) {
    uint64 mixed = uint64(ids[t]) * multiplier[0];
    bool is_cut = false;
#pragma unroll
    for (int age = 1; age < NGRAM; ++age) {
      const int position = sequence.context + t - age;
      const int token = t >= age ? ids[t - age] : position >= 0 ? ring[position % ring_rows] : eos;
      is_cut |= token == eos;
      if (head >= (age - 1) * HEADS_PER_NGRAM) mixed ^= uint64(is_cut ? eos : token) * multiplier[age];
    }
    rows[int64(sequence.start + t) * HEADS + head] = mixed % size + first_row;
  }
  if (blockIdx.x > 0) return;
  __syncthreads();  // the history was read by this block, which is the only one that may overwrite it
  for (int i = threadIdx.x; i < min(sequence.length, ring_rows); i += BLOCK) {
    const int t = sequence.length - 1 - i;
    ring[(sequence.context + t) % ring_rows] = ids[t];
  }
}
