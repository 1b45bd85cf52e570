// The gated RMSNorm of a turn's outputs, by a block for each chunk and key head. The scan leaves a row's columns of a slice
// over their RMS, as fp16 in the place of the output. A row is moved by VALUE_DIM / 8 lanes, 16 bytes each.
#include "q4e.cuh"
#include "gated_delta_rule/chunks.cuh"

constexpr int BLOCK = 256, LANES = VALUE_DIM / 8, ROWS_AT_ONCE = BLOCK / LANES, ROUNDS = ROWS / ROWS_AT_ONCE;
constexpr int TOGETHER = ROUNDS < 2 ? ROUNDS : 2;  // rows that a thread has under way
static_assert(BLOCK % LANES == 0 && ROWS % (ROWS_AT_ONCE * TOGETHER) == 0, "whole rows");

// Lane t of four has word t of what each of the four had; a bit of the lane and one of the word change places at a time.
__device__ __forceinline__ void transpose_words(uint32 (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32 other = __shfl_xor_sync(FULL_MASK, upper ? words[i] : words[i + bit], bit);
      (upper ? words[i] : words[i + bit]) = other;
    }
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 5)  // so few registers that a block fits beside one of the scan
finish(const ACTIVATION* qkvz, const ACTIVATION* norm_weight, const ChunkRows* chunks, const float* norms, ACTIVATION* out,
       float eps, int from_chunk, int waits_first) {
  if (waits_first) wait_for_previous();
  start_next();
  const int key_head = blockIdx.x, place = blockIdx.y, lane = threadIdx.x % LANES, slice = lane / (SLICE / 8);
  // Lane t of four finds the pairs 8 n + 2 t of four n behind each other; after the exchange it has columns 8 (4 half + t).
  const int half = lane / 4 % 2, column = slice * SLICE + 32 * half + 8 * (lane % 4);
  const int found = slice * SLICE + 16 * (lane % 4) + 8 * half;
  const auto weights = load_packed<8>(norm_weight + column);
  const ChunkRows rows = load_chunk_rows(chunks + from_chunk + place);
#pragma unroll 1
  for (int task = 0; task < REPEATS * (ROUNDS / TOGETHER); ++task) {
    const int head = key_head * REPEATS + task % REPEATS;
    const int first = (task / REPEATS * TOGETHER) * ROWS_AT_ONCE + threadIdx.x / LANES;
    const float* norms_here = norms + (int64(place) * V_HEADS + head) * (SLICES * ROWS) + first;
    const int64 token = rows.token + first;
    const ACTIVATION* z = qkvz + token * (CONV_WIDTH + VALUE_WIDTH) + CONV_WIDTH + head * VALUE_DIM + column;
    ACTIVATION* row = out + token * VALUE_WIDTH + head * VALUE_DIM;
    uint32 words[TOGETHER][4] = {};
    Packed<ACTIVATION, 8> gates[TOGETHER];
    float rms[TOGETHER][SLICES];
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      const int by = i * ROWS_AT_ONCE;
      if (first + by < rows.from || first + by >= rows.to) continue;
      const uint4 loaded = __ldcg(reinterpret_cast<const uint4*>(row + by * VALUE_WIDTH + found));
      words[i][0] = loaded.x, words[i][1] = loaded.y, words[i][2] = loaded.z, words[i][3] = loaded.w;
      gates[i] = load_once(z + by * (CONV_WIDTH + VALUE_WIDTH));
#pragma unroll
      for (int j = 0; j < SLICES; ++j) rms[i][j] = __ldcg(norms_here + j * ROWS + by);
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      const int by = i * ROWS_AT_ONCE;
      transpose_words(words[i]);
      if (first + by < rows.from || first + by >= rows.to) continue;
      float mean = 0.f, mine = 0.f;
#pragma unroll
      for (int j = 0; j < SLICES; ++j) {
        mean += rms[i][j] * rms[i][j] / SLICES;
        mine = j == slice ? rms[i][j] : mine;
      }
      const float scale = mine * rsqrtf(mean + eps);
      float values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 pair = unpack_fp16(words[i][j / 2]);
        const float gate = gates[i][j];
        values[j] = (j % 2 ? pair.y : pair.x) * scale * weights[j] * (SILU_GATE ? silu(gate) : sigmoid(gate));
      }
      const auto packed = pack<ACTIVATION>(values);
      __stcs(reinterpret_cast<uint4*>(row + by * VALUE_WIDTH + column),
             make_uint4(packed.words[0], packed.words[1], packed.words[2], packed.words[3]));
    }
  }
  // As in `prepare`: this launch must not end before the one in front of it.
  if (!waits_first && blockIdx.x == 0 && blockIdx.y == 0) wait_for_previous();
}
