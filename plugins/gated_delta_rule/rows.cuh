// The rows of a step of the gated delta rule: loaded, normalized and laid out in shared memory, kept where they may be
// taken back. The macros are those of kernel.cu.
#pragma once
#include "gated_delta_rule/layout.cuh"
#include "packed_sequence.cuh"
#include "vector.cuh"

constexpr int CHUNK = 8, COLUMNS = 4, ROW_LANES = 4;
constexpr int ROW_GROUPS = ceil_div(KEY_DIM, ROWS * ROW_LANES), COLUMN_GROUPS = ceil_div(VALUE_DIM, WARP);
constexpr int KEYS = ROW_GROUPS * ROWS * ROW_LANES, VALUES = COLUMN_GROUPS * WARP;  // padded dims
constexpr int WARPS = ROW_GROUPS * COLUMN_GROUPS, BLOCK = WARPS * WARP;
constexpr int ROUNDS = ceil_div(CHUNK, WARPS);  // in which the warps take the rows of a chunk

struct Shared {
  float k[CHUNK][KEYS], q[CHUNK][KEYS];          // normalized; q scaled
  float v[CHUNK][VALUES], z[CHUNK][VALUES];
  float norm_weight[VALUES];
  float u[ROW_GROUPS][CHUNK][VALUES];            // of each group of rows; after that, u[0] is delta
  float w[ROW_GROUPS][CHUNK][VALUES];            // after that, w[0] is o
  float kk[CHUNK][CHUNK], kq[CHUNK][CHUNK];      // D_ij k_i.k_j and D_ij k_i.q_j
  float decay[CHUNK], beta[CHUNK];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the launcher asks for another size");

struct Step {
  PackedSequence sequence;
  int pending;  // rows to replay

  __device__ __forceinline__ int rows() const { return pending + sequence.length; }
  __device__ __forceinline__ bool is_draft() const { return sequence.length <= DRAFTS; }
  // How many of the rows are in the state that is written.
  __device__ __forceinline__ int committed() const { return is_draft() ? pending + 1 : rows(); }
};

__device__ __forceinline__ int my_head() { return blockIdx.x; }
__device__ __forceinline__ int my_key() { return my_head() / REPEATS * KEY_DIM; }  // first column of the key head
__device__ __forceinline__ int my_value() { return my_head() * VALUE_DIM; }

struct Operands {
  const ACTIVATION *conv_out, *qkvz, *ba;
  ACTIVATION* draft_rows;
};

// Four elements a lane, of up to 128 * FOURS.
constexpr int FOURS = ceil_div(KEY_DIM > VALUE_DIM ? KEY_DIM : VALUE_DIM, 4 * WARP);
using Four = Packed<ACTIVATION, 4>;

__device__ __forceinline__ int lane_place(int i) { return (i * WARP + threadIdx.x % WARP) * 4; }

// What a warp loads of a row; of one to replay there is no query and no output gate.
struct RawRow {
  Four k[FOURS], q[FOURS], v[FOURS], z[FOURS];
  ACTIVATION b, a;
};

template <int DIM>
__device__ __forceinline__ void load_lanes(Four (&fours)[FOURS], const ACTIVATION* from) {
#pragma unroll
  for (int i = 0; i < FOURS; ++i) {
    fours[i] = {};
    if (lane_place(i) >= DIM) continue;
#pragma unroll
    for (int part = 0; part < 4 / PART; ++part) {
      const auto loaded = load_packed<PART>(from + lane_place(i) + part * PART);
      constexpr int WORDS = sizeof(loaded) / 4;
#pragma unroll
      for (int word = 0; word < WORDS; ++word) fours[i].words[part * WORDS + word] = loaded.words[word];
    }
  }
}

template <int DIM>
__device__ __forceinline__ void store_lanes(ACTIVATION* to, const Four (&fours)[FOURS]) {
#pragma unroll
  for (int i = 0; i < FOURS; ++i)
    if (lane_place(i) < DIM)
#pragma unroll
      for (int word = 0; word < int(sizeof(Four)) / 4; ++word)
        reinterpret_cast<uint32*>(to + lane_place(i))[word] = fours[i].words[word];
}

// In the ring of the sequence: row `row` of the step.
__device__ __forceinline__ ACTIVATION* draft_row(const Step& step, const Operands& operands, int row) {
  const uint32 position = step.sequence.context - step.pending + row;
  return operands.draft_rows + (int64(step.sequence.slot) * (2 * DRAFTS) + position % (2 * DRAFTS)) * DRAFT_WIDTH;
}

// Row `token` of the batch, zeros if it does not exist.
__device__ __forceinline__ RawRow load_new_row(const Operands& operands, int64 token, bool exists) {
  const int head = made_anew(my_head()), key = made_anew(my_key()), value = made_anew(my_value());
  RawRow raw = {};
  if (exists) {
    const ACTIVATION* from = operands.conv_out + token * CONV_WIDTH;
    load_lanes<KEY_DIM>(raw.k, from + KEY_WIDTH + key);
    load_lanes<KEY_DIM>(raw.q, from + key);
    load_lanes<VALUE_DIM>(raw.v, from + 2 * KEY_WIDTH + value);
    load_lanes<VALUE_DIM>(raw.z, operands.qkvz + token * (CONV_WIDTH + VALUE_WIDTH) + CONV_WIDTH + value);
    raw.b = operands.ba[token * 2 * V_HEADS + head], raw.a = operands.ba[token * 2 * V_HEADS + V_HEADS + head];
  }
  return raw;
}

// Row `row` of the step, zeros behind its last one.
__device__ __forceinline__ RawRow load_row(const Step& step, const Operands& operands, int row) {
  const int head = made_anew(my_head()), key = made_anew(my_key()), value = made_anew(my_value());
  RawRow raw = {};
  if (row < step.pending) {
    const ACTIVATION* from = draft_row(step, operands, row);
    load_lanes<KEY_DIM>(raw.k, from + key);
    load_lanes<VALUE_DIM>(raw.v, from + KEY_WIDTH + value);
    raw.b = from[KEY_WIDTH + VALUE_WIDTH + head], raw.a = from[KEY_WIDTH + VALUE_WIDTH + V_HEADS + head];
  } else if (row < step.rows()) {
    raw = load_new_row(operands, step.sequence.start + row - step.pending, true);
  }
  return raw;
}

// Brings row `token` of the batch near.
__device__ __forceinline__ void prefetch_row(const Operands& operands, int64 token) {
  const int place = lane_place(0), key = my_key() + place, value = my_value() + place;
  const ACTIVATION* from = operands.conv_out + token * CONV_WIDTH;
  if (place < KEY_DIM) prefetch_l2(from + KEY_WIDTH + key), prefetch_l2(from + key);
  if (place < VALUE_DIM) {
    prefetch_l2(from + 2 * KEY_WIDTH + value);
    prefetch_l2(operands.qkvz + token * (CONV_WIDTH + VALUE_WIDTH) + CONV_WIDTH + value);
  }
  if (place == 0) prefetch_l2(operands.ba + token * 2 * V_HEADS + my_head());
}

// Row j of the chunk, by a warp. Every warp comes here, so that the sums need no check of who does.
__device__ __forceinline__ void stage_row(Shared& shared, int j, const RawRow& raw, float rate, float bias,
                                          bool exists) {
  float kk = 0.f, qq = 0.f, kq = 0.f;
#pragma unroll
  for (int i = 0; i < 4 * FOURS; ++i) {
    const float k = raw.k[i / 4][i % 4], q = raw.q[i / 4][i % 4];
    kk += k * k, qq += q * q, kq += k * q;
  }
  kk = warp_sum(kk), qq = warp_sum(qq), kq = warp_sum(kq);
  if (!exists) return;
  const float k_scale = rsqrtf(kk + L2_EPS), q_scale = rsqrtf(qq + L2_EPS) * rsqrtf(float(KEY_DIM));
#pragma unroll
  for (int i = 0; i < 4 * FOURS; ++i) {
    const int place = lane_place(i / 4) + i % 4;
    if (place < KEYS) {
      shared.k[j][place] = raw.k[i / 4][i % 4] * k_scale;
      shared.q[j][place] = raw.q[i / 4][i % 4] * q_scale;
    }
    if (place < VALUES) {
      shared.v[j][place] = raw.v[i / 4][i % 4];
      shared.z[j][place] = raw.z[i / 4][i % 4];
    }
  }
  if (threadIdx.x % WARP == 0) {
    shared.kq[j][j] = kq * k_scale * q_scale;
    shared.beta[j] = sigmoid(to_float(raw.b));
    shared.decay[j] = expf(rate * softplus(to_float(raw.a) + bias));
  }
}

// Keeps row `row` of the step, which is not committed. What several blocks have is kept by the first of them.
__device__ __forceinline__ void keep_draft(const Step& step, const Operands& operands, int row, const RawRow& raw) {
  ACTIVATION* to = draft_row(step, operands, row);
  if (my_head() % REPEATS == 0) store_lanes<KEY_DIM>(to + my_key(), raw.k);
  store_lanes<VALUE_DIM>(to + KEY_WIDTH + my_value(), raw.v);
  if (threadIdx.x % WARP == 0) {
    to[KEY_WIDTH + VALUE_WIDTH + my_head()] = raw.b;
    to[KEY_WIDTH + VALUE_WIDTH + V_HEADS + my_head()] = raw.a;
  }
}
