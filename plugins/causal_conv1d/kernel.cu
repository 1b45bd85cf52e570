// Depthwise causal convolution with SiLU. A thread has VECTOR channels of up to CHUNK rows of a sequence; it loads all
// their inputs at once. Grid: channels, sequences, and the chunks of a sequence in turns.
// CHANNELS: convolved; WIDTH: of a row of x; TAPS: of the kernel; RING: rows of the state; ACTIVATION: bf16 or float.
#include "q4e.cuh"
#include "packed_sequence.cuh"
#include "vector.cuh"

constexpr int HISTORY = TAPS - 1, CHUNK = 8;

using Values = Packed<ACTIVATION, VECTOR>;

// A row of the state, up to RING rows before or behind the row `current`.
__device__ __forceinline__ int ring_row(int current, int offset) {
  const int row = current + offset;
  return row < 0 ? row + RING : row >= RING ? row - RING : row;
}

// The inputs of `count` rows from `offset` on, behind those of the HISTORY rows before them; zeros before the first
// token. `ring` has the row `next_row` for the first of the new tokens.
__device__ __forceinline__ void load_window(Values (&window)[HISTORY + CHUNK], const PackedSequence& sequence,
                                            int offset, int count, const ACTIVATION* x, const ACTIVATION* ring,
                                            int next_row) {
  const ACTIVATION* first = x + int64(sequence.start + offset) * WIDTH;
  window[HISTORY] = load_packed<VECTOR>(first);
#pragma unroll
  for (int i = 0; i < HISTORY; ++i) {  // without a branch: one that does not exist is `first`, and zeroed
    const int back = HISTORY - i;
    const bool exists = sequence.context + offset >= back;
    const ACTIVATION* from = offset > 0 ? first - back * WIDTH : ring + ring_row(next_row, -back) * CHANNELS;
    window[i] = load_packed<VECTOR>(exists ? from : first);
#pragma unroll
    for (uint32& word : window[i].words) word = exists ? word : 0;
  }
#pragma unroll
  for (int row = 1; row < CHUNK; ++row)
    if (row < count) window[HISTORY + row] = load_packed<VECTOR>(first + row * WIDTH);
}

// The newest rows of the sequence. `window` has its first ones.
__device__ __forceinline__ void store_ring(const Values (&window)[HISTORY + CHUNK], const PackedSequence& sequence,
                                           const ACTIVATION* x, ACTIVATION* ring, int next_row) {
  const int first = max(sequence.length - RING, 0);
#pragma unroll
  for (int row = 0; row < min(CHUNK, RING); ++row) {
    if (row >= sequence.length) return;
    if (row >= first) store_packed(ring + ring_row(next_row, row) * CHANNELS, window[HISTORY + row]);
  }
  for (int row = max(first, min(CHUNK, RING)); row < sequence.length; ++row) {
    const Values newest = load_packed<VECTOR>(x + int64(sequence.start + row) * WIDTH);
    store_packed(ring + (sequence.context + row) % RING * CHANNELS, newest);
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
causal_conv1d(const ACTIVATION* x, const ACTIVATION* weight, ACTIVATION* conv_state, const int* query_start_loc,
              const int* seq_lens, const int* slot_ids, const int* num_seqs, ACTIVATION* out) {
  static_assert(HISTORY <= CHUNK && HISTORY <= RING, "only the first chunk of a sequence reads the state");
  // Threads behind the last channel load it once more and store nothing.
  const int place = (blockIdx.x * BLOCK + threadIdx.x) * VECTOR, channel = min(place, CHANNELS - VECTOR);
  const bool is_mine = place < CHANNELS;
  const auto weights = load_packed<VECTOR * TAPS>(weight + int64(channel) * TAPS);
  wait_for_previous();
  start_next();
  const auto sequence = locate_sequence(blockIdx.y, query_start_loc, seq_lens, slot_ids, num_seqs);
  ACTIVATION* ring = conv_state + int64(sequence.slot) * (RING * CHANNELS) + channel;
  const int next_row = uint32(sequence.context) % RING;
  for (int offset = blockIdx.z * CHUNK; offset < sequence.length; offset += gridDim.z * CHUNK) {
    const int count = min(CHUNK, sequence.length - offset);
    Values window[HISTORY + CHUNK];
    load_window(window, sequence, offset, count, x + channel, ring, next_row);
#pragma unroll
    for (int row = 0; row < CHUNK; ++row) {
      if (row >= count) break;
      float values[VECTOR] = {};
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) values[i] += weights[i * TAPS + tap] * window[row + tap][i];
        values[i] = silu(values[i]);
      }
      if (is_mine) store_vector(out + int64(sequence.start + offset + row) * CHANNELS + channel, values);
    }
    // The thread that read the state is the one that replaces it, so no other can read what it writes.
    if (offset == 0 && is_mine) store_ring(window, sequence, x + channel, ring, next_row);
  }
}
