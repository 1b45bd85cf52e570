// Gate and dilated convolution of the n-gram embedding for many tokens.
//
// ple_gate_many: the gates, a block for pairs of tokens of one stream. ple_conv_many: a thread goes over a run of tokens
// with CONV_VECTOR columns, whose N it looks back at are in registers; in front of a run it makes them anew. Nothing that
// this step writes to the state is written there: ple_store_state does it.
//
// Macros: those of gate.cuh, VECTOR and CONV_VECTOR; GATE_BLOCK * VECTOR >= HIDDEN.
#include "ple_conv/gate.cuh"
#include "packed_sequence.cuh"

constexpr int WARPS = GATE_BLOCK / WARP, PAIR = 2;
constexpr int CONV_BLOCK = 128;

// `sums` over the warp: lane 4 * i has sum i.
__device__ __forceinline__ float warp_sums(float (&sums)[8]) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int left = 4; left > 0; left /= 2) {
    const bool is_upper = lane & left * 4;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const float given = is_upper ? sums[i] : sums[i + left], kept = is_upper ? sums[i + left] : sums[i];
      sums[i] = kept + __shfl_xor_sync(FULL_MASK, given, left * 4);
    }
  }
  sums[0] += __shfl_xor_sync(FULL_MASK, sums[0], 2);
  return sums[0] + __shfl_xor_sync(FULL_MASK, sums[0], 1);
}

// The query is the stack.
extern "C" __global__ void __launch_bounds__(GATE_BLOCK)
ple_gate_many(const ACTIVATION* stack, const ACTIVATION* key, const ACTIVATION* value, const float* key_gain,
              const float* query_gain, Gate* gates, int num_tokens, float eps) {
  __shared__ float partial[2][WARPS][PAIR * 4];  // by turns: a pair's may still be read when the next one's are written
  const int stream = blockIdx.x % STREAMS;
  // Threads behind the last column load it once more, and do not add it.
  const bool is_mine = threadIdx.x * VECTOR < HIDDEN;
  const int column = is_mine ? threadIdx.x * VECTOR : HIDDEN - VECTOR, first = stream * HIDDEN + column;
  const auto key_gains = load_vector<VECTOR>(key_gain + first), query_gains = load_vector<VECTOR>(query_gain + first);
  float gains[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) gains[i] = key_gains.items[i] * query_gains.items[i];
  wait_for_previous();
  start_next();
  int turn = 0;
  for (int token = blockIdx.x / STREAMS * PAIR; token < num_tokens; token += gridDim.x / STREAMS * PAIR, turn ^= 1) {
    Vector<ACTIVATION, VECTOR> queries[PAIR], keys[PAIR], values[PAIR];
#pragma unroll
    for (int i = 0; i < PAIR; ++i) {
      const int64 row = min(token + i, num_tokens - 1);
      queries[i] = load_vector<VECTOR>(stack + row * WIDTH + first);
      keys[i] = load_vector<VECTOR>(key + row * WIDTH + first);
      values[i] = load_vector<VECTOR>(value + row * HIDDEN + column);
    }
    float sums[PAIR * 4] = {};
#pragma unroll
    for (int i = 0; i < PAIR; ++i)
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        const float q = to_float(queries[i].items[j]), k = to_float(keys[i].items[j]), v = to_float(values[i].items[j]);
        sums[4 * i] += q * q, sums[4 * i + 1] += k * k, sums[4 * i + 2] += v * v, sums[4 * i + 3] += q * k * gains[j];
      }
#pragma unroll
    for (float& sum : sums) sum = is_mine ? sum : 0.f;
    const float sum = warp_sums(sums);
    const int lane = threadIdx.x % WARP;
    if (lane % 4 == 0) partial[turn][threadIdx.x / WARP][lane / 4] = sum;
    __syncthreads();
    if (threadIdx.x >= PAIR || token + int(threadIdx.x) >= num_tokens) continue;
    float4 total = {0.f, 0.f, 0.f, 0.f};
    for (int warp = 0; warp < WARPS; ++warp) {
      const float* part = partial[turn][warp] + threadIdx.x * 4;
      total.x += part[0], total.y += part[1], total.z += part[2], total.w += part[3];
    }
    gates[int64(token + threadIdx.x) * STREAMS + stream] = gate_of(total, eps);
  }
}

// The columns of a thread.
struct Columns {
  int first, stream, in_stream;
  bool is_mine;  // a thread behind the last column works on it once more and stores nothing

  __device__ __forceinline__ Columns(int block) {
    const int place = (block * CONV_BLOCK + threadIdx.x) * CONV_VECTOR;
    is_mine = place < WIDTH, first = is_mine ? place : WIDTH - CONV_VECTOR;
    stream = first / HIDDEN, in_stream = first % HIDDEN;
  }
};

struct Column {
  float n[CONV_VECTOR];
};

__device__ __forceinline__ Column normed_row(const ACTIVATION* value, float scale, const Vector<float, CONV_VECTOR>& gains) {
  const auto values = load_vector<CONV_VECTOR>(value);
  Column column;
#pragma unroll
  for (int i = 0; i < CONV_VECTOR; ++i) column.n[i] = normed(values.items[i], scale, gains.items[i]);
  return column;
}

// The sequence that row `token` belongs to; `num_seqs` for a row of padding.
__device__ __forceinline__ int sequence_of(int token, const int* query_start_loc, int num_seqs) {
  int low = 0, high = num_seqs;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (query_start_loc[middle + 1] <= token)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// What DILATION tokens in a row read; behind the last one it is read again.
struct Group {
  Vector<ACTIVATION, CONV_VECTOR> stacked[DILATION], values[DILATION];
  Gate gates[DILATION];
};

__device__ __forceinline__ Group load_group(const ACTIVATION* stack, const ACTIVATION* value, const Gate* gates, int token,
                                            int stop) {
  Group group;
#pragma unroll
  for (int phase = 0; phase < DILATION; ++phase) {
    const int64 row = min(token + phase, stop - 1);
    group.stacked[phase] = load_vector<CONV_VECTOR>(stack + row * WIDTH);
    group.values[phase] = load_vector<CONV_VECTOR>(value + row * HIDDEN);
    group.gates[phase] = gates[row * STREAMS];
  }
  return group;
}

// Grid: blocks of columns, runs of `run` tokens.
extern "C" __global__ void __launch_bounds__(CONV_BLOCK)
ple_conv_many(const ACTIVATION* stack, const ACTIVATION* value, const float* conv_gain, const ACTIVATION* conv_weight,
              const ACTIVATION* ple_conv_state, const int* query_start_loc, const int* seq_lens, const int* slot_ids,
              const int* num_seqs, const Gate* gates, ACTIVATION* out, int num_tokens, int run) {
  const Columns at(blockIdx.x);
  const auto gains = load_vector<CONV_VECTOR>(conv_gain + at.first);
  const auto packed_weights = load_vector<CONV_VECTOR * TAPS>(conv_weight + int64(at.first) * TAPS);
  float weights[TAPS][CONV_VECTOR];
#pragma unroll
  for (int j = 0; j < TAPS; ++j)
#pragma unroll
    for (int i = 0; i < CONV_VECTOR; ++i) weights[j][i] = to_float(packed_weights.items[i * TAPS + TAPS - 1 - j]);
  wait_for_previous();
  start_next();
  value += at.in_stream, stack += at.first, out += at.first, gates += at.stream;
  int token = blockIdx.y * run;
  const int end = min(token + run, num_tokens);
  while (token < end) {
    const int index = sequence_of(token, query_start_loc, *num_seqs);
    if (index >= *num_seqs) return;  // a row of padding, and so is what follows
    const PackedSequence sequence = locate_sequence(index, query_start_loc, seq_lens, slot_ids, num_seqs);
    const int stop = min(end, sequence.start + sequence.length);
    if (stop <= token) return;
    const ACTIVATION* ring = ple_conv_state + int64(sequence.slot) * RING * WIDTH + at.first;
    Column past[DILATION][TAPS - 1];  // of the next token, of the one behind it, ...: newest first
#pragma unroll
    for (int phase = 0; phase < DILATION; ++phase)
#pragma unroll
      for (int j = 0; j < TAPS - 1; ++j) {
        const int offset = token - sequence.start + phase - (j + 1) * DILATION, position = sequence.context + offset;
        const int64 row = sequence.start + offset;
        past[phase][j] = {};
        if (offset >= 0) {
          past[phase][j] = normed_row(value + row * HIDDEN, gates[row * STREAMS].scale, gains);
        } else if (position >= 0) {
          const auto older = load_vector<CONV_VECTOR>(ring + int64(position % RING) * WIDTH);
#pragma unroll
          for (int i = 0; i < CONV_VECTOR; ++i) past[phase][j].n[i] = to_float(older.items[i]);
        }
      }
    Group now = load_group(stack, value, gates, token, stop);
    for (; token < stop; token += DILATION) {
      const Group next = load_group(stack, value, gates, token + DILATION, stop);
#pragma unroll
      for (int phase = 0; phase < DILATION; ++phase) {
        const Gate gate = now.gates[phase];
        float result[CONV_VECTOR];
        Column newest;
#pragma unroll
        for (int i = 0; i < CONV_VECTOR; ++i) {
          const ACTIVATION plain = now.values[phase].items[i];
          newest.n[i] = normed(plain, gate.scale, gains.items[i]);
          float convolved = weights[0][i] * newest.n[i];
#pragma unroll
          for (int j = 1; j < TAPS; ++j) convolved += weights[j][i] * past[phase][j - 1].n[i];
          result[i] = to_float(now.stacked[phase].items[i]) + gate.gate * to_float(plain) + silu(convolved);
        }
        if (at.is_mine && token + phase < stop) store_vector(out + int64(token + phase) * WIDTH, result);
#pragma unroll
        for (int j = TAPS - 2; j > 0; --j) past[phase][j] = past[phase][j - 1];
        past[phase][0] = newest;
      }
      now = next;
    }
    token = stop;
  }
}

// The state of the newest tokens. Grid: blocks of columns, sequences.
extern "C" __global__ void __launch_bounds__(CONV_BLOCK)
ple_store_state(const ACTIVATION* value, const float* conv_gain, ACTIVATION* ple_conv_state, const int* query_start_loc,
                const int* seq_lens, const int* slot_ids, const int* num_seqs, const Gate* gates) {
  const Columns at(blockIdx.x);
  const auto gains = load_vector<CONV_VECTOR>(conv_gain + at.first);
  wait_for_previous();
  start_next();
  const PackedSequence sequence = locate_sequence(blockIdx.y, query_start_loc, seq_lens, slot_ids, num_seqs);
  if (!at.is_mine) return;
  ACTIVATION* ring = ple_conv_state + int64(sequence.slot) * RING * WIDTH + at.first;
#pragma unroll 4
  for (int offset = max(sequence.length - RING, 0); offset < sequence.length; ++offset) {
    const int64 row = sequence.start + offset;
    const Column newest = normed_row(value + row * HIDDEN + at.in_stream, gates[row * STREAMS + at.stream].scale, gains);
    store_vector(ring + int64((sequence.context + offset) % RING) * WIDTH, newest.n);
  }
}
