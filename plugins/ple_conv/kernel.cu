// Gate and dilated convolution of the n-gram embedding.
//
// ple_gate: one number for each stream of a token makes G of its value, another N, up to the gain. ple_conv: G and the
// convolution, a thread for CONV_VECTOR columns of a token. So what the convolution looks back at in this step is computed
// from values; what is older is in the state.
//
// Macros: those of gate.cuh, VECTOR and CONV_VECTOR; GATE_BLOCK * VECTOR >= HIDDEN.
#include "ple_conv/gate.cuh"

constexpr int WARPS = GATE_BLOCK / WARP;
constexpr int CONV_BLOCK = 128, COLUMN_BLOCKS = ceil_div(WIDTH, CONV_BLOCK * CONV_VECTOR);
constexpr int SPARE = RING - HISTORY;  // new tokens of a sequence that replace nothing that this step reads

// A block goes over tokens of one stream. The query is the stack.
extern "C" __global__ void __launch_bounds__(GATE_BLOCK)
ple_gate(const ACTIVATION* stack, const ACTIVATION* key, const ACTIVATION* value, const float* key_gain,
         const float* query_gain, Gate* gates, uint32* counters, int num_counters, int num_tokens, float eps) {
  __shared__ float4 partial[2][WARPS];  // by turns: a token's may still be read when the next one's are written
  const int stream = blockIdx.x % STREAMS;
  // Threads behind the last column load it once more, and do not add it.
  const bool is_mine = threadIdx.x * VECTOR < HIDDEN;
  const int column = is_mine ? threadIdx.x * VECTOR : HIDDEN - VECTOR, first = stream * HIDDEN + column;
  const auto key_gains = load_vector<VECTOR>(key_gain + first), query_gains = load_vector<VECTOR>(query_gain + first);
  wait_for_previous();
  start_next();  // not before: so all that was written before this kernel is there when the next one starts
  for (int i = blockIdx.x * GATE_BLOCK + threadIdx.x; i < num_counters; i += gridDim.x * GATE_BLOCK) counters[i] = 0;
  int turn = 0;
  for (int token = blockIdx.x / STREAMS; token < num_tokens; token += gridDim.x / STREAMS, turn ^= 1) {
    const auto queries = load_vector<VECTOR>(stack + int64(token) * WIDTH + first);
    const auto keys = load_vector<VECTOR>(key + int64(token) * WIDTH + first);
    const auto values = load_vector<VECTOR>(value + int64(token) * HIDDEN + column);
    float4 sums = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const float q = to_float(queries.items[i]), k = to_float(keys.items[i]), v = to_float(values.items[i]);
      sums.x += q * q, sums.y += k * k, sums.z += v * v;
      sums.w += q * k * (key_gains.items[i] * query_gains.items[i]);
    }
    if (!is_mine) sums = {0.f, 0.f, 0.f, 0.f};
    sums = {warp_sum(sums.x), warp_sum(sums.y), warp_sum(sums.z), warp_sum(sums.w)};
    if (threadIdx.x % WARP == 0) partial[turn][threadIdx.x / WARP] = sums;
    __syncthreads();
    if (threadIdx.x > 0) continue;
    for (int warp = 1; warp < WARPS; ++warp) {
      const float4 part = partial[turn][warp];
      sums.x += part.x, sums.y += part.y, sums.z += part.z, sums.w += part.w;
    }
    gates[int64(token) * STREAMS + stream] = gate_of(sums, eps);
  }
}

// A block goes over tokens of the same columns. What is read in front of the wait was written before ple_gate began.
extern "C" __global__ void __launch_bounds__(CONV_BLOCK, CONV_BLOCKS_AN_SM)
ple_conv(const ACTIVATION* stack, const ACTIVATION* value, const float* conv_gain, const ACTIVATION* conv_weight,
         ACTIVATION* ple_conv_state, const int* query_start_loc, const int* seq_lens, const int* slot_ids,
         const int* num_seqs, const Gate* gates, uint32* counters, ACTIVATION* out, int num_tokens, int batch) {
  const int column_block = blockIdx.x % COLUMN_BLOCKS, place_in_row = (column_block * CONV_BLOCK + threadIdx.x) * CONV_VECTOR;
  const bool is_mine = place_in_row < WIDTH;
  const int first = is_mine ? place_in_row : WIDTH - CONV_VECTOR, stream = first / HIDDEN, column = first % HIDDEN;
  const auto gains = load_vector<CONV_VECTOR>(conv_gain + first);
  const auto weights = load_vector<CONV_VECTOR * TAPS>(conv_weight + int64(first) * TAPS);
  start_next();
  for (int token = blockIdx.x / COLUMN_BLOCKS; token < num_tokens; token += gridDim.x / COLUMN_BLOCKS) {
    const TokenPlace place = locate_token(token, query_start_loc, seq_lens, num_seqs, batch);
    if (place.sequence < 0) break;  // of padding, and so is what follows
    const int offset = place.position - place.context, length = seq_lens[place.sequence] - place.context;
    ACTIVATION* ring = ple_conv_state + int64(slot_ids[place.sequence]) * RING * WIDTH + first;
    const auto stacked = load_vector<CONV_VECTOR>(stack + int64(token) * WIDTH + first);
    Vector<ACTIVATION, CONV_VECTOR> taps[TAPS];  // newest first: the value of a token of this step, the N of an older one
#pragma unroll
    for (int j = 0; j < TAPS; ++j) {
      const int age = j * DILATION;
      if (age <= offset)
        taps[j] = load_vector<CONV_VECTOR>(value + int64(token - age) * HIDDEN + column);
      else if (age <= place.position)
        taps[j] = load_vector<CONV_VECTOR>(ring + int64((place.position - age) % RING) * WIDTH);
      else
        taps[j] = {};
    }
    wait_for_previous();
    const Gate* gate = gates + int64(token) * STREAMS + stream;
    float convolved[CONV_VECTOR] = {}, newest[CONV_VECTOR], result[CONV_VECTOR];
#pragma unroll
    for (int j = 0; j < TAPS; ++j) {
      const bool is_new = j * DILATION <= offset;
      const float scale = is_new ? gate[-int64(j) * DILATION * STREAMS].scale : 0.f;
#pragma unroll
      for (int i = 0; i < CONV_VECTOR; ++i) {
        const ACTIVATION tap = taps[j].items[i];
        const float n = is_new ? normed(tap, scale, gains.items[i]) : to_float(tap);
        convolved[i] += to_float(weights.items[i * TAPS + TAPS - 1 - j]) * n;
        if (j == 0) newest[i] = n;
      }
    }
#pragma unroll
    for (int i = 0; i < CONV_VECTOR; ++i)
      result[i] = to_float(stacked.items[i]) + gate->gate * to_float(taps[0].items[i]) + silu(convolved[i]);
    if (is_mine) store_vector(out + int64(token) * WIDTH + first, result);
    if (length <= SPARE) {
      if (is_mine) store_vector(ring + int64(place.position % RING) * WIDTH, newest);
      continue;
    }
    // Blocks of the first tokens may still read rows that this sequence replaces: the last of them stores all rows.
    if (offset >= HISTORY) continue;
    uint32* counter = counters + place.sequence * COLUMN_BLOCKS + column_block;
    if (!is_last_block(counter, min(length, HISTORY)) || !is_mine) continue;
    const int last = place.context + length - 1;
    for (int position = last; position > last - min(length, RING); --position) {
      const int other = token + position - place.position;
      const auto values = load_vector<CONV_VECTOR>(value + int64(other) * HIDDEN + column);
      const float scale = gates[int64(other) * STREAMS + stream].scale;
#pragma unroll
      for (int i = 0; i < CONV_VECTOR; ++i) newest[i] = normed(values.items[i], scale, gains.items[i]);
      store_vector(ring + int64(position % RING) * WIDTH, newest);
    }
  }
  wait_for_previous();
}
