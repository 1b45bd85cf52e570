// The gated RMSNorm of a turn's outputs, by a block for each chunk and value head. The scan leaves a row's columns of a slice
// over their RMS, as fp16 in the place of the output.
#include "q4e.cuh"
#include "gated_delta_rule/chunks.cuh"

constexpr int BLOCK = 256, WARPS = BLOCK / WARP;
constexpr int TOGETHER = 4;  // rows that a warp has under way

extern "C" __global__ void __launch_bounds__(BLOCK)
finish(const ACTIVATION* qkvz, const ACTIVATION* norm_weight, const int* committed_len, const int* query_start_loc,
       const int* seq_lens, const int* slot_ids, const int* num_seqs, const float* norms, ACTIVATION* out, float eps,
       int batch_size, int from_chunk, int waits_first) {
  if (waits_first) wait_for_previous();
  start_next();
  const int head = blockIdx.x, place = blockIdx.y, chunk = from_chunk + place;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const Batch batch = {query_start_loc, seq_lens, slot_ids, num_seqs, committed_len, batch_size};
  LongSequence sequence;
  if (locate_chunks(chunk, chunk + 1, 0, batch, sequence)) {
    float weights[SLICES][2];
#pragma unroll
    for (int slice = 0; slice < SLICES; ++slice)
#pragma unroll
      for (int i = 0; i < 2; ++i) weights[slice][i] = to_float(norm_weight[slice * SLICE + 2 * lane + i]);
    norms += (int64(place) * V_HEADS + head) * (SLICES * ROWS);
#pragma unroll 1
    for (int first = warp * TOGETHER; first < ROWS; first += WARPS * TOGETHER) {
      uint32 words[TOGETHER][SLICES];
      Packed<ACTIVATION, 2> gates[TOGETHER][SLICES];
      float rms[TOGETHER][SLICES];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int row = (chunk - sequence.first) * ROWS + first + i;
        if (!sequence.is_new(row)) continue;
        const int64 token = sequence.token(row);
        // Lane t of four has the pairs of columns 8 n + 2 t side by side.
        const auto* from = reinterpret_cast<const uint32*>(out + token * VALUE_WIDTH + head * VALUE_DIM);
        const ACTIVATION* z = qkvz + token * (CONV_WIDTH + VALUE_WIDTH) + CONV_WIDTH + head * VALUE_DIM + 2 * lane;
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
          words[i][slice] = __ldcg(from + slice * (SLICE / 2) + lane % 4 * (SLICE / 8) + lane / 4);
          gates[i][slice] = load_packed<2>(z + slice * SLICE);
          rms[i][slice] = __ldcg(norms + slice * ROWS + first + i);
        }
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int row = (chunk - sequence.first) * ROWS + first + i;
        if (!sequence.is_new(row)) continue;
        float mean = 0.f;
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) mean += rms[i][slice] * rms[i][slice] / SLICES;
        const float scale = rsqrtf(mean + eps);
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
          const float2 normalized = unpack_fp16(words[i][slice]);
          float values[2] = {normalized.x, normalized.y};
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float z = gates[i][slice][c];
            values[c] *= rms[i][slice] * scale * weights[slice][c] * (SILU_GATE ? silu(z) : sigmoid(z));
          }
          store_packed(out + sequence.token(row) * VALUE_WIDTH + head * VALUE_DIM + slice * SLICE + 2 * lane,
                       pack<ACTIVATION>(values));
        }
      }
    }
  }
  // As in `prepare`: this launch must not end before the one in front of it.
  if (!waits_first && blockIdx.x == 0 && blockIdx.y == 0) wait_for_previous();
}
