// Depthwise causal convolution with SiLU. A thread has VECTOR channels of up to CHUNK rows of a sequence; it loads all
// their inputs at once. Grid: channels, sequences, and the chunks of a sequence in turns.
// CHANNELS: convolved; WIDTH: of a row of x; TAPS: of the kernel; RING: rows of the state; ACTIVATION: bf16 or float.
#include "q4e.cuh"
#include "vector.cuh"

constexpr int HISTORY = TAPS - 1, CHUNK = 8;

using Values = Vector<ACTIVATION, VECTOR>;

struct Sequence {
  int start, length, context, slot;
};

// The inputs of `count` rows from `offset` on, behind those of the HISTORY rows before them; zeros before the first token.
__device__ __forceinline__ void load_window(Values (&window)[HISTORY + CHUNK], const Sequence& sequence, int offset,
                                            int count, const ACTIVATION* x, const ACTIVATION* ring) {
#pragma unroll
  for (int i = 0; i < HISTORY + CHUNK; ++i) {
    const int row = offset - HISTORY + i, position = sequence.context + row;
    window[i] = {};
    if (i >= HISTORY + count || position < 0) continue;
    window[i] = row < 0 ? load_vector<VECTOR>(ring + int64(position % RING) * CHANNELS)
                        : load_vector<VECTOR>(x + int64(sequence.start + row) * WIDTH);
  }
}

// The newest rows of the sequence. `window` has its first ones.
__device__ __forceinline__ void store_ring(const Values (&window)[HISTORY + CHUNK], const Sequence& sequence,
                                           const ACTIVATION* x, ACTIVATION* ring) {
  const int first = max(sequence.length - RING, 0);
#pragma unroll
  for (int row = 0; row < CHUNK; ++row) {
    if (row < first || row >= sequence.length) continue;
    *reinterpret_cast<Values*>(ring + int64((sequence.context + row) % RING) * CHANNELS) = window[HISTORY + row];
  }
  for (int row = max(first, CHUNK); row < sequence.length; ++row) {
    const Values newest = load_vector<VECTOR>(x + int64(sequence.start + row) * WIDTH);
    *reinterpret_cast<Values*>(ring + int64((sequence.context + row) % RING) * CHANNELS) = newest;
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
causal_conv1d(const ACTIVATION* x, const ACTIVATION* weight, ACTIVATION* conv_state, const int* query_start_loc,
              const int* seq_lens, const int* slot_ids, const int* num_seqs, ACTIVATION* out) {
  static_assert(HISTORY <= CHUNK && HISTORY <= RING, "only the first chunk of a sequence reads the state");
  // Threads behind the last channel load it once more and store nothing.
  const int place = (blockIdx.x * BLOCK + threadIdx.x) * VECTOR, channel = min(place, CHANNELS - VECTOR);
  const bool is_mine = place < CHANNELS;
  const auto weights = load_vector<VECTOR * TAPS>(weight + int64(channel) * TAPS);
  wait_for_previous();
  start_next();
  const int start = query_start_loc[blockIdx.y], length = query_start_loc[blockIdx.y + 1] - start;
  const Sequence sequence = {start, length, seq_lens[blockIdx.y] - length, slot_ids[blockIdx.y]};
  if (int(blockIdx.y) >= *num_seqs) return;

  ACTIVATION* ring = conv_state + int64(sequence.slot) * RING * CHANNELS + channel;
  for (int offset = blockIdx.z * CHUNK; offset < length; offset += gridDim.z * CHUNK) {
    const int count = min(CHUNK, length - offset);
    Values window[HISTORY + CHUNK];
    load_window(window, sequence, offset, count, x + channel, ring);
#pragma unroll
    for (int row = 0; row < CHUNK; ++row) {
      if (row >= count) break;
      float values[VECTOR] = {};
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap)
          values[i] += to_float(weights.items[i * TAPS + tap]) * to_float(window[row + tap].items[i]);
        values[i] = silu(values[i]);
      }
      if (is_mine) store_vector(out + int64(start + row + offset) * CHANNELS + channel, values);
    }
    // The thread that read the state is the one that replaces it, so no other can read what it writes.
    if (offset == 0 && is_mine) store_ring(window, sequence, x + channel, ring);
  }
}
