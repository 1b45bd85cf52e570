// Depthwise causal convolution with SiLU. A thread has VECTOR channels of a row and loads all its inputs at once; a
// block has CHUNK rows of a sequence, a warp for each. Grid: channels, sequences, the chunks of a sequence in turns.
// CHANNELS: convolved; WIDTH: of a row of x; TAPS: of the kernel; RING: rows of the state; ACTIVATION: bf16 or float.
#include "q4e.cuh"
#include "packed_sequence.cuh"
#include "vector.cuh"

constexpr int HISTORY = TAPS - 1;

using Values = Packed<ACTIVATION, VECTOR>;

// A row of the state, up to RING rows before or behind the row `current`.
__device__ __forceinline__ int ring_row(int current, int offset) {
  const int row = current + offset;
  return row < 0 ? row + RING : row >= RING ? row - RING : row;
}

// The inputs of row `row` of the sequence, the oldest first; zeros before the first token. `next_row` is the state's
// row for the first of the new tokens.
__device__ __forceinline__ void load_window(Values (&window)[TAPS], const PackedSequence& sequence, int row,
                                            const ACTIVATION* x, const ACTIVATION* ring, int next_row) {
  const ACTIVATION* own = x + int64(sequence.start + row) * WIDTH;
#pragma unroll
  for (int tap = 0; tap < TAPS; ++tap) {  // without a branch: one that does not exist is `own`, and zeroed
    const int back = HISTORY - tap;
    const bool exists = sequence.context + row >= back;
    const ACTIVATION* from = row < back ? ring + ring_row(next_row, row - back) * CHANNELS : own - back * WIDTH;
    window[tap] = load_packed<VECTOR>(exists ? from : own);
#pragma unroll
    for (uint32& word : window[tap].words) word = exists ? word : 0;
  }
}

extern "C" __global__ void __launch_bounds__(CHUNK * WARP)
causal_conv1d(const ACTIVATION* x, const ACTIVATION* weight, ACTIVATION* conv_state, const int* query_start_loc,
              const int* seq_lens, const int* slot_ids, const int* num_seqs, ACTIVATION* out) {
  static_assert(HISTORY <= RING, "the state holds what a row looks back at");
  // Threads behind the last channel load it once more and store nothing.
  const int place = (blockIdx.x * WARP + threadIdx.x % WARP) * VECTOR, channel = min(place, CHANNELS - VECTOR);
  const bool is_mine = place < CHANNELS;
  const auto weights = load_packed<VECTOR * TAPS>(weight + int64(channel) * TAPS);
  wait_for_previous();
  start_next();
  const auto sequence = locate_sequence(blockIdx.y, query_start_loc, seq_lens, slot_ids, num_seqs);
  ACTIVATION* ring = conv_state + int64(sequence.slot) * (RING * CHANNELS) + channel;
  const int next_row = uint32(sequence.context) % RING;
  // What a step of so few rows writes to the state replaces nothing that one of them reads.
  const bool is_short = sequence.length <= RING - HISTORY;
#pragma unroll 1
  for (int row = blockIdx.z * CHUNK + threadIdx.x / WARP; row < sequence.length; row += gridDim.z * CHUNK) {
    Values window[TAPS];
    load_window(window, sequence, row, x + channel, ring, next_row);
    float values[VECTOR] = {};
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
#pragma unroll
      for (int tap = 0; tap < TAPS; ++tap) values[i] += weights[i * TAPS + tap] * window[tap][i];
      values[i] = silu(values[i]);
    }
    if (!is_mine) continue;
    store_packed(out + int64(sequence.start + row) * CHANNELS + channel, pack<ACTIVATION>(values));
    if (is_short) store_packed(ring + ring_row(next_row, row) * CHANNELS, window[HISTORY]);
  }
  if (is_short || blockIdx.z > 0) return;
  // The block of the first rows, which alone reads the state, replaces it.
  __syncthreads();
#pragma unroll 1
  for (int row = max(sequence.length - RING, 0) + threadIdx.x / WARP; row < sequence.length; row += CHUNK) {
    const Values newest = load_packed<VECTOR>(x + channel + int64(sequence.start + row) * WIDTH);
    if (is_mine) store_packed(ring + (sequence.context + row) % RING * CHANNELS, newest);
  }
}
