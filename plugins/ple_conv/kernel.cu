// Gate and dilated convolution of the n-gram embedding, one block a stream of a token and a thread for VECTOR columns.
// STREAMS, HIDDEN: of the stack; TAPS, DILATION: of the convolution; RING: rows of the state; BLOCK * VECTOR >= HIDDEN;
// ACTIVATION: bf16 or float.
//
// The N of a token is its value times one number and the gain. So a block computes that number for its own token and for
// those of this step that the convolution looks back at; older ones are in the state.
#include "q4e.cuh"
#include "vector.cuh"

constexpr int WIDTH = STREAMS * HIDDEN, HISTORY = (TAPS - 1) * DILATION, WARPS = BLOCK / WARP;
constexpr int SPARE = RING - HISTORY;  // new tokens of a sequence that replace nothing that this step reads
constexpr float GATE_FLOOR = 1e-6f;

using Values = Vector<ACTIVATION, VECTOR>;

struct Operands {
  Values query, key, value;  // of one token and stream; the query is the stack
};

__device__ __forceinline__ Operands load_operands(const ACTIVATION* stack, const ACTIVATION* key,
                                                  const ACTIVATION* value, int token, int first, int column) {
  const int64 place = int64(token) * WIDTH + first;
  return {load_vector<VECTOR>(stack + place), load_vector<VECTOR>(key + place),
          load_vector<VECTOR>(value + int64(token) * HIDDEN + column)};
}

// What the gate is made of: sums of squares of query, key and value, and of query * key * both gains.
__device__ __forceinline__ float4 partial_sums(const Operands& operands, const float (&gains)[VECTOR], bool is_mine) {
  float4 sums = {0.f, 0.f, 0.f, 0.f};
  if (!is_mine) return sums;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    const float query = to_float(operands.query.items[i]), key = to_float(operands.key.items[i]);
    const float value = to_float(operands.value.items[i]);
    sums.x += query * query, sums.y += key * key, sums.z += value * value, sums.w += query * key * gains[i];
  }
  return sums;
}

// The first `count` of `sums`, each over the block.
__device__ __forceinline__ void block_sums(float4 (&sums)[TAPS], int count) {
  __shared__ float4 partial[TAPS][WARPS];
#pragma unroll
  for (int j = 0; j < TAPS; ++j) {
    if (j >= count) break;
    const float4 sum = {warp_sum(sums[j].x), warp_sum(sums[j].y), warp_sum(sums[j].z), warp_sum(sums[j].w)};
    if (threadIdx.x % WARP == 0) partial[j][threadIdx.x / WARP] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < TAPS; ++j) {
    if (j >= count) break;
    sums[j] = partial[j][0];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) {
      const float4 part = partial[j][warp];
      sums[j].x += part.x, sums[j].y += part.y, sums[j].z += part.z, sums[j].w += part.w;
    }
  }
}

struct Gate {
  float gate;   // G = gate * value
  float scale;  // N = scale * value * gain
};

__device__ __forceinline__ Gate gate_of(const float4& sums, float eps) {
  const float norms = rsqrtf(sums.x / HIDDEN + eps) * rsqrtf(sums.y / HIDDEN + eps);
  const float score = sums.w * norms * rsqrtf(float(HIDDEN));
  const float root = sqrtf(fmaxf(fabsf(score), GATE_FLOOR));
  const float gate = sigmoid(score > 0.f ? root : score < 0.f ? -root : 0.f);
  return {gate, gate * rsqrtf(gate * gate * sums.z / HIDDEN + eps)};
}

__device__ __forceinline__ float normed(ACTIVATION value, float scale, float gain) {
  return round_to<ACTIVATION>(to_float(value) * scale * gain);
}

__device__ __forceinline__ void store_normed(ACTIVATION* row, const Values& values, float scale,
                                             const Vector<float, VECTOR>& gains) {
  float stored[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) stored[i] = normed(values.items[i], scale, gains.items[i]);
  store_vector(row, stored);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
ple_conv(const ACTIVATION* stack, const ACTIVATION* key, const ACTIVATION* value, const float* key_gain,
         const float* query_gain, const float* conv_gain, const ACTIVATION* conv_weight, ACTIVATION* ple_conv_state,
         const int* query_start_loc, const int* seq_lens, const int* slot_ids, const int* num_seqs, ACTIVATION* out,
         float* scales, uint32* counters, int batch, float eps) {
  const int stream = blockIdx.x % STREAMS, token = blockIdx.x / STREAMS;
  // Threads behind the last column load it once more, and neither add nor store anything.
  const bool is_mine = threadIdx.x * VECTOR < HIDDEN;
  const int column = is_mine ? threadIdx.x * VECTOR : HIDDEN - VECTOR, first = stream * HIDDEN + column;
  const auto key_gains = load_vector<VECTOR>(key_gain + first), query_gains = load_vector<VECTOR>(query_gain + first);
  const auto conv_gains = load_vector<VECTOR>(conv_gain + first);
  const auto weights = load_vector<VECTOR * TAPS>(conv_weight + int64(first) * TAPS);
  float gains[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) gains[i] = key_gains.items[i] * query_gains.items[i];

  wait_for_previous();
  start_next();
  const Operands own = load_operands(stack, key, value, token, first, column);
  const TokenPlace place = locate_token(token, query_start_loc, seq_lens, num_seqs, batch);
  if (place.sequence < 0) return;
  ACTIVATION* ring = ple_conv_state + int64(slot_ids[place.sequence]) * RING * WIDTH + first;
  const int length = seq_lens[place.sequence] - place.context;
  const int in_step = min(TAPS, (place.position - place.context) / DILATION + 1);
  Values taps[TAPS] = {own.value};  // newest first: the value of a token of this step, the N of an older one
  float4 sums[TAPS] = {partial_sums(own, gains, is_mine)};
#pragma unroll
  for (int j = 1; j < TAPS; ++j) {
    if (j < in_step) {
      const Operands earlier = load_operands(stack, key, value, token - j * DILATION, first, column);
      taps[j] = earlier.value, sums[j] = partial_sums(earlier, gains, is_mine);
    } else if (place.position >= j * DILATION) {
      taps[j] = load_vector<VECTOR>(ring + int64((place.position - j * DILATION) % RING) * WIDTH);
    } else {
      taps[j] = {};
    }
  }
  block_sums(sums, in_step);

  const Gate gate = gate_of(sums[0], eps);
  float convolved[VECTOR] = {};
#pragma unroll
  for (int j = 0; j < TAPS; ++j) {
    const float scale = j == 0 ? gate.scale : j < in_step ? gate_of(sums[j], eps).scale : 0.f;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const ACTIVATION tap = taps[j].items[i];
      const float n = j < in_step ? normed(tap, scale, conv_gains.items[i]) : to_float(tap);
      convolved[i] += to_float(weights.items[i * TAPS + TAPS - 1 - j]) * n;
    }
  }
  float result[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i)
    result[i] = to_float(own.query.items[i]) + gate.gate * to_float(own.value.items[i]) + silu(convolved[i]);
  if (is_mine) store_vector(out + int64(token) * WIDTH + first, result);

  if (length <= SPARE) {
    if (is_mine) store_normed(ring + int64(place.position % RING) * WIDTH, own.value, gate.scale, conv_gains);
    return;
  }
  // Other blocks of the sequence may still read what this one would replace: the last of them stores for all.
  if (threadIdx.x == 0) scales[blockIdx.x] = gate.scale;
  if (!is_last_block(counters + place.sequence * STREAMS + stream, length) || !is_mine) return;
  const int last = place.context + length - 1;
  for (int position = last; position > last - min(length, RING); --position) {
    const int other = token + position - place.position;
    const auto values = load_vector<VECTOR>(value + int64(other) * HIDDEN + column);
    const float scale = __ldcg(scales + int64(other) * STREAMS + stream);
    store_normed(ring + int64(position % RING) * WIDTH, values, scale, conv_gains);
  }
}
