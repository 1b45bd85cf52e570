// The gated RMSNorm of a turn's outputs, by a block for each chunk and value head. The scan leaves a row's columns of a slice
// over their RMS, as fp16 in the place of the output. A row is moved by VALUE_DIM / 8 lanes, 16 bytes each.
#include "q4e.cuh"
#include "gated_delta_rule/chunks.cuh"

constexpr int BLOCK = 256, LANES = VALUE_DIM / 8, ROWS_AT_ONCE = BLOCK / LANES, ROUNDS = ROWS / ROWS_AT_ONCE;
static_assert(BLOCK % LANES == 0 && ROWS % ROWS_AT_ONCE == 0, "whole rows");

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

extern "C" __global__ void __launch_bounds__(BLOCK)
finish(const ACTIVATION* qkvz, const ACTIVATION* norm_weight, const int* committed_len, const int* query_start_loc,
       const int* seq_lens, const int* slot_ids, const int* num_seqs, const float* norms, ACTIVATION* out, float eps,
       int batch_size, int from_chunk, int waits_first) {
  if (waits_first) wait_for_previous();
  start_next();
  const int head = blockIdx.x, place = blockIdx.y, chunk = from_chunk + place;
  const int lane = threadIdx.x % LANES, slice = lane / (SLICE / 8), first_row = threadIdx.x / LANES;
  const Batch batch = {query_start_loc, seq_lens, slot_ids, num_seqs, committed_len, batch_size};
  LongSequence sequence;
  if (locate_chunks(chunk, chunk + 1, 0, batch, sequence)) {
    // Lane t of four finds the pairs 8 n + 2 t of four n behind each other; after the exchange it has columns 8 (4 half + t).
    const int half = lane / 4 % 2, column = slice * SLICE + 32 * half + 8 * (lane % 4);
    const int found = slice * SLICE + 16 * (lane % 4) + 8 * half;
    const auto weights = load_packed<8>(norm_weight + column);
    norms += (int64(place) * V_HEADS + head) * (SLICES * ROWS);
    const int64 token = sequence.token((chunk - sequence.first) * ROWS);
    const ACTIVATION* z = qkvz + token * (CONV_WIDTH + VALUE_WIDTH) + CONV_WIDTH + head * VALUE_DIM + column;
    out += token * VALUE_WIDTH + head * VALUE_DIM;
    uint32 words[ROUNDS][4] = {};
    Packed<ACTIVATION, 8> gates[ROUNDS];
    float rms[ROUNDS][SLICES];
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      const int row = first_row + round * ROWS_AT_ONCE;
      if (!sequence.is_new((chunk - sequence.first) * ROWS + row)) continue;
      const uint4 loaded = __ldcg(reinterpret_cast<const uint4*>(out + int64(row) * VALUE_WIDTH + found));
      words[round][0] = loaded.x, words[round][1] = loaded.y, words[round][2] = loaded.z, words[round][3] = loaded.w;
      gates[round] = load_packed<8>(z + int64(row) * (CONV_WIDTH + VALUE_WIDTH));
#pragma unroll
      for (int i = 0; i < SLICES; ++i) rms[round][i] = __ldcg(norms + i * ROWS + row);
    }
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      const int row = first_row + round * ROWS_AT_ONCE;
      transpose_words(words[round]);
      if (!sequence.is_new((chunk - sequence.first) * ROWS + row)) continue;
      float mean = 0.f, mine = 0.f;
#pragma unroll
      for (int i = 0; i < SLICES; ++i) {
        mean += rms[round][i] * rms[round][i] / SLICES;
        mine = i == slice ? rms[round][i] : mine;
      }
      const float scale = mine * rsqrtf(mean + eps);
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 pair = unpack_fp16(words[round][i / 2]);
        const float gate = gates[round][i];
        values[i] = (i % 2 ? pair.y : pair.x) * scale * weights[i] * (SILU_GATE ? silu(gate) : sigmoid(gate));
      }
      store_packed(out + int64(row) * VALUE_WIDTH + column, pack<ACTIVATION>(values));
    }
  }
  // As in `prepare`: this launch must not end before the one in front of it.
  if (!waits_first && blockIdx.x == 0 && blockIdx.y == 0) wait_for_previous();
}
