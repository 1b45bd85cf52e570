// The gated delta rule. A block has a value head of a sequence, or where that makes too few blocks one of SLICES parts
// of its columns. The state stays in registers: a thread has ROWS rows (keys) of four columns (values), a warp 4 * ROWS
// rows of 32 columns.
//
// Rows are taken in chunks of up to CHUNK: first those to replay, then the new ones. With S the state before a chunk,
// G_j the decay from there to its row j and D_ij that from row i to row j, all that a row needs of the state is
//     u_j = S^T k_j    and    w_j = S^T q_j
// and everything else follows column by column:
//     delta_j = beta_j * (v_j - G_j u_j - sum_{i<j} D_ij (k_i.k_j) delta_i)
//     o_j     = G_j w_j + sum_{i<=j} D_ij (k_i.q_j) delta_i
// So however many rows a step has, the state is read once, and written once: after the last row that is committed.
//
// K_HEADS, V_HEADS, KEY_DIM, VALUE_DIM; DRAFTS: half of the ring's rows; SILU_GATE: 0 or 1; ACTIVATION: bf16 or float;
// PART: elements of a row moved at once, 2 or 4; SLICES, ROWS, MIN_BLOCKS, SHARED_BYTES: geometry of the launch.
#include "q4e.cuh"
#include "packed_sequence.cuh"
#include "vector.cuh"

constexpr int CHUNK = 8, COLUMNS = 4, ROW_LANES = 4;
constexpr int SLICE = VALUE_DIM / SLICES;  // columns of the block
constexpr int ROW_GROUPS = ceil_div(KEY_DIM, ROWS * ROW_LANES), COLUMN_GROUPS = ceil_div(SLICE, WARP);
constexpr int KEYS = ROW_GROUPS * ROWS * ROW_LANES, VALUES = COLUMN_GROUPS * WARP;  // padded dims
constexpr int WARPS = ROW_GROUPS * COLUMN_GROUPS, BLOCK = WARPS * WARP;
constexpr int KEY_WIDTH = K_HEADS * KEY_DIM, VALUE_WIDTH = V_HEADS * VALUE_DIM;
constexpr int CONV_WIDTH = 2 * KEY_WIDTH + VALUE_WIDTH, DRAFT_WIDTH = KEY_WIDTH + VALUE_WIDTH + 2 * V_HEADS;
constexpr int REPEATS = V_HEADS / K_HEADS;  // value heads of a key head
constexpr float L2_EPS = 1e-6f;

struct Shared {
  float k[CHUNK][KEYS], q[CHUNK][KEYS];          // normalized; q scaled
  float v[CHUNK][VALUES], z[CHUNK][VALUES];
  float norm_weight[VALUE_DIM];
  float u[ROW_GROUPS][CHUNK][VALUES];            // of each group of rows; after that, u[0] is delta
  float w[ROW_GROUPS][CHUNK][VALUES];            // after that, w[0] is o
  float kk[CHUNK][CHUNK], kq[CHUNK][CHUNK];      // D_ij k_i.k_j and D_ij k_i.q_j
  float decay[CHUNK], beta[CHUNK];
  uint32 is_last, unused[3];
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

__device__ __forceinline__ int my_head() { return blockIdx.x / SLICES; }
__device__ __forceinline__ int my_key() { return my_head() / REPEATS * KEY_DIM; }  // first column of the key head
__device__ __forceinline__ int my_value() { return my_head() * VALUE_DIM + blockIdx.x % SLICES * SLICE; }

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
  float b, a;
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

// z of this head.
__device__ __forceinline__ const ACTIVATION* gates(const Operands& operands, int64 token) {
  return operands.qkvz + token * (CONV_WIDTH + VALUE_WIDTH) + CONV_WIDTH + my_head() * VALUE_DIM;
}

__device__ __forceinline__ float gate_of(float z) { return SILU_GATE ? silu(z) : sigmoid(z); }

// Row `row` of the step, zeros behind its last one.
__device__ __forceinline__ RawRow load_row(const Step& step, const Operands& operands, int row) {
  const int head = made_anew(my_head()), key = made_anew(my_key()), value = made_anew(my_value());
  RawRow raw = {};
  if (row < step.pending) {
    const ACTIVATION* from = draft_row(step, operands, row);
    load_lanes<KEY_DIM>(raw.k, from + key);
    load_lanes<SLICE>(raw.v, from + KEY_WIDTH + value);
    raw.b = to_float(from[KEY_WIDTH + VALUE_WIDTH + head]);
    raw.a = to_float(from[KEY_WIDTH + VALUE_WIDTH + V_HEADS + head]);
  } else if (row < step.rows()) {
    const int64 token = step.sequence.start + row - step.pending;
    const ACTIVATION* from = operands.conv_out + token * CONV_WIDTH;
    load_lanes<KEY_DIM>(raw.k, from + KEY_WIDTH + key);
    load_lanes<KEY_DIM>(raw.q, from + key);
    load_lanes<SLICE>(raw.v, from + 2 * KEY_WIDTH + value);
    if (SLICES == 1) load_lanes<SLICE>(raw.z, gates(operands, token));
    raw.b = to_float(operands.ba[token * 2 * V_HEADS + head]);
    raw.a = to_float(operands.ba[token * 2 * V_HEADS + V_HEADS + head]);
  }
  return raw;
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
      if (SLICES == 1) shared.z[j][place] = raw.z[i / 4][i % 4];
    }
  }
  if (threadIdx.x % WARP == 0) {
    shared.kq[j][j] = kq * k_scale * q_scale;
    shared.beta[j] = sigmoid(raw.b);
    shared.decay[j] = expf(rate * softplus(raw.a + bias));
  }
}

// Keeps row `row` of the step, which is not committed. What several blocks have is kept by the first of them.
__device__ __forceinline__ void keep_draft(const Step& step, const Operands& operands, int row, const RawRow& raw) {
  ACTIVATION* to = draft_row(step, operands, row);
  if (blockIdx.x % (REPEATS * SLICES) == 0) store_lanes<KEY_DIM>(to + my_key(), raw.k);
  store_lanes<SLICE>(to + KEY_WIDTH + my_value(), raw.v);
  if (blockIdx.x % SLICES == 0 && threadIdx.x % WARP == 0) {
    to[KEY_WIDTH + VALUE_WIDTH + my_head()] = from_float<ACTIVATION>(raw.b);
    to[KEY_WIDTH + VALUE_WIDTH + V_HEADS + my_head()] = from_float<ACTIVATION>(raw.a);
  }
}

// The products of row j of the chunk with all rows before it, a row j a warp. A lane has some keys of each product; by
// halves, the lanes exchange products for keys, until two lanes have all keys of one.
__device__ __forceinline__ void multiply_pairs(Shared& shared, int count) {
  const int lane = threadIdx.x % WARP;
#pragma unroll 1
  for (int first = 1; first < count; first += WARPS) {
    const int row = first + threadIdx.x / WARP, j = min(row, count - 1);
    float sums[2 * CHUNK] = {};  // kk, then kq
#pragma unroll 1
    for (int place = lane; place < KEYS; place += WARP) {
      const float k = shared.k[j][place], q = shared.q[j][place];
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) {
        const float earlier = shared.k[i][place];
        sums[i] += earlier * k, sums[CHUNK + i] += earlier * q;
      }
    }
#pragma unroll
    for (int half = CHUNK; half > 0; half /= 2) {
      const int mask = 2 * half;
      const bool upper = lane & mask;
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const float other = __shfl_xor_sync(FULL_MASK, upper ? sums[i] : sums[half + i], mask);
        sums[i] = (upper ? sums[half + i] : sums[i]) + other;
      }
    }
    const float sum = sums[0] + __shfl_xor_sync(FULL_MASK, sums[0], 1);
    const int i = lane / 2 % CHUNK;
    float decay = 1.f;
#pragma unroll
    for (int between = 1; between < CHUNK; ++between)
      decay *= between > i && between <= j ? shared.decay[between] : 1.f;
    if (row < count && i < j && lane % 2 == 0) (lane < WARP / 2 ? shared.kk : shared.kq)[i][j] = sum * decay;
  }
}

// The first row and column of this thread's part of the state.
__device__ __forceinline__ int my_row() {
  return (threadIdx.x / WARP / COLUMN_GROUPS * ROW_LANES + threadIdx.x % WARP / (WARP / ROW_LANES)) * ROWS;
}
__device__ __forceinline__ int my_column() {
  return threadIdx.x / WARP % COLUMN_GROUPS * WARP + threadIdx.x % (WARP / ROW_LANES) * COLUMNS;
}
__device__ __forceinline__ bool has_row(int i) {
  return (KEYS == KEY_DIM || my_row() + i < KEY_DIM) && (VALUES == SLICE || my_column() < SLICE);
}

// `from` and `to` are the thread's first element.
__device__ __forceinline__ void load_state(float (&state)[ROWS][COLUMNS], const float* from, bool exists) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    uint4 words = {0, 0, 0, 0};
    if (exists && has_row(i)) words = load_streaming(from + i * VALUE_DIM);
    state[i][0] = bits_to_float(words.x), state[i][1] = bits_to_float(words.y);
    state[i][2] = bits_to_float(words.z), state[i][3] = bits_to_float(words.w);
  }
}

__device__ __forceinline__ void store_state(const float (&state)[ROWS][COLUMNS], float* to) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
    if (has_row(i))
      __stcs(reinterpret_cast<float4*>(to + i * VALUE_DIM),
             make_float4(state[i][0], state[i][1], state[i][2], state[i][3]));
}

// u and w of every row of the chunk, summed over the rows of the state that a warp has.
__device__ __forceinline__ void multiply_state(Shared& shared, const float (&state)[ROWS][COLUMNS], int count) {
  const bool high = threadIdx.x & 16, odd = threadIdx.x & 8;  // bits of the row lane
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    float u[COLUMNS] = {}, w[COLUMNS] = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const float k = shared.k[j][my_row() + i], q = shared.q[j][my_row() + i];
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) u[c] += k * state[i][c], w[c] += q * state[i][c];
    }
    // Each of the four row lanes ends with the sums of two values: first u or w, then a half of its columns.
    float half[COLUMNS], sums[2];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const float other = __shfl_xor_sync(FULL_MASK, high ? u[c] : w[c], 16);
      half[c] = (high ? w[c] : u[c]) + other;
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float other = __shfl_xor_sync(FULL_MASK, odd ? half[c] : half[c + 2], 8);
      sums[c] = (odd ? half[c + 2] : half[c]) + other;
    }
    auto& to = (high ? shared.w : shared.u)[threadIdx.x / WARP / COLUMN_GROUPS][j];
    *reinterpret_cast<float2*>(&to[my_column() + (odd ? 2 : 0)]) = make_float2(sums[0], sums[1]);
  }
}

// delta and o of every row, by a thread for each column. The end of the rows is looked for now and then only, so that
// loads of several rows are under way at once. Where other blocks have other columns, `slices` gets o of the rows from
// `from` on.
__device__ __forceinline__ void solve_columns(Shared& shared, int count, int from, float* slices) {
  const int column = threadIdx.x;
  float deltas[CHUNK], decay = 1.f;
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) {
    if ((j == 1 || j % 2 == 0) && j >= count) break;
    float u = 0.f, w = 0.f;
#pragma unroll
    for (int group = 0; group < ROW_GROUPS; ++group) u += shared.u[group][j][column], w += shared.w[group][j][column];
    decay *= shared.decay[j];
    float read = decay * u, o = decay * w;
#pragma unroll
    for (int i = 0; i < j; ++i) read += shared.kk[i][j] * deltas[i], o += shared.kq[i][j] * deltas[i];
    deltas[j] = shared.beta[j] * (shared.v[j][column] - read);
    o += shared.kq[j][j] * deltas[j];
    shared.u[0][j][column] = deltas[j], shared.w[0][j][column] = o;
    if (SLICES > 1 && from <= j && j < count) __stcg(slices + int64(j - from) * VALUE_WIDTH + column, o);
  }
}

// The state after rows `from` to `to` - 1 of the chunk.
__device__ __forceinline__ void advance_state(float (&state)[ROWS][COLUMNS], const Shared& shared, int from, int to) {
#pragma unroll 1
  for (int j = from; j < to; ++j) {
    const float4 delta = *reinterpret_cast<const float4*>(&shared.u[0][j][my_column()]);
    const float decay = shared.decay[j];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const float k = shared.k[j][my_row() + i];
      state[i][0] = decay * state[i][0] + k * delta.x, state[i][1] = decay * state[i][1] + k * delta.y;
      state[i][2] = decay * state[i][2] + k * delta.z, state[i][3] = decay * state[i][3] + k * delta.w;
    }
  }
}

// The gated norm of a row whose o and z the lanes of a warp have, if it `exists`.
__device__ __forceinline__ void store_output(const Shared& shared, const float (&o)[4 * FOURS],
                                             const float (&z)[4 * FOURS], ACTIVATION* out, float eps, bool exists) {
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < 4 * FOURS; ++i) squares += o[i] * o[i];
  const float scale = rsqrtf(warp_sum(squares) / VALUE_DIM + eps);
#pragma unroll
  for (int i = 0; i < FOURS; ++i) {
    const int place = lane_place(i);
    if (!exists || place >= VALUE_DIM) continue;
    float values[4];
#pragma unroll
    for (int c = 0; c < 4; ++c)
      values[c] = o[4 * i + c] * scale * shared.norm_weight[place + c] * gate_of(z[4 * i + c]);
    store_packed(out + place, pack<ACTIVATION>(values));
  }
}

// The outputs of rows `from` to `to` - 1 of the chunk, which the block has all columns of; `out` is for row `from`.
__device__ __forceinline__ void store_outputs(const Shared& shared, int from, int to, ACTIVATION* out, float eps) {
#pragma unroll 1
  for (int first = from; first < to; first += WARPS) {
    const int row = first + threadIdx.x / WARP, j = min(row, to - 1);
    float o[4 * FOURS], z[4 * FOURS];
#pragma unroll
    for (int i = 0; i < 4 * FOURS; ++i) {
      const int place = lane_place(i / 4) + i % 4;
      o[i] = place < VALUES ? shared.w[0][j][place] : 0.f, z[i] = place < VALUES ? shared.z[j][place] : 0.f;
    }
    store_output(shared, o, z, out + int64(row - from) * VALUE_WIDTH, eps, row < to);
  }
}

// The outputs of all new rows from what the blocks of the head have published; `slices` and `out` are for row 0.
__device__ __forceinline__ void join_slices(const Shared& shared, const Operands& operands,
                                            const PackedSequence& sequence, const float* slices, ACTIVATION* out,
                                            float eps) {
#pragma unroll 1
  for (int first = 0; first < sequence.length; first += WARPS) {
    const int row = first + threadIdx.x / WARP;
    const int64 token = sequence.start + min(row, sequence.length - 1);
    Four raw[FOURS];
    load_lanes<VALUE_DIM>(raw, gates(operands, token));
    float o[4 * FOURS], z[4 * FOURS];
#pragma unroll
    for (int i = 0; i < FOURS; ++i) {
      const bool exists = lane_place(i) < VALUE_DIM;
      const float* from = slices + token * VALUE_WIDTH + (exists ? lane_place(i) : 0);
      const float4 four = __ldcg(reinterpret_cast<const float4*>(from));
      o[4 * i] = exists ? four.x : 0.f, o[4 * i + 1] = exists ? four.y : 0.f;
      o[4 * i + 2] = exists ? four.z : 0.f, o[4 * i + 3] = exists ? four.w : 0.f;
#pragma unroll
      for (int c = 0; c < 4; ++c) z[4 * i + c] = raw[i][c];
    }
    store_output(shared, o, z, out + token * VALUE_WIDTH, eps, row < sequence.length);
  }
}

// How many tokens the state holds: the larger of the latest two lengths that is not beyond the context.
__device__ __forceinline__ int held_length(int2 lengths, int context) {
  return max(lengths.x <= context ? lengths.x : 0, lengths.y <= context ? lengths.y : 0);
}

// Over the older length. It is beyond the context, so blocks that have yet to read the two are not misled.
__device__ __forceinline__ void store_length(int* committed_len, int2 lengths, int held, int context, int length) {
  if (context == 0)
    *reinterpret_cast<int2*>(committed_len) = make_int2(length, 0);
  else
    committed_len[lengths.x == held ? 1 : 0] = length;
}

extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS)
gated_delta_rule(const ACTIVATION* conv_out, const ACTIVATION* qkvz, const ACTIVATION* ba, const ACTIVATION* A_log,
                 const ACTIVATION* dt_bias, const ACTIVATION* norm_weight, float* recurrent_state,
                 ACTIVATION* draft_rows, int* committed_len, const int* query_start_loc, const int* seq_lens,
                 const int* slot_ids, const int* num_seqs, ACTIVATION* out, float* slices, uint32* counters,
                 float eps) {
  DYNAMIC_SHARED(Shared, memory);
  Shared& shared = *memory;
  const Operands operands = {conv_out, qkvz, ba, draft_rows};
  const float rate = -expf(to_float(A_log[my_head()])), bias = to_float(dt_bias[my_head()]);
#pragma unroll 1
  for (int i = threadIdx.x; i < VALUE_DIM; i += BLOCK) shared.norm_weight[i] = to_float(norm_weight[i]);
  wait_for_previous();
  start_next();
  Step step = {locate_sequence(blockIdx.y, query_start_loc, seq_lens, slot_ids, num_seqs)};
  const PackedSequence& sequence = step.sequence;
  if (sequence.length <= 0) return;
  float* recurrent = recurrent_state + (int64(sequence.slot) * V_HEADS + my_head()) * (KEY_DIM * VALUE_DIM);
  recurrent += my_row() * VALUE_DIM + blockIdx.x % SLICES * SLICE + my_column();
  committed_len += 2 * sequence.slot;

  // Where latency counts everything is loaded at once, on the guess that there is nothing to replay.
  constexpr bool GUESSES = SLICES > 1;
  const int2 lengths = *reinterpret_cast<const int2*>(committed_len);
  RawRow raw = {};
  if (GUESSES) raw = load_row(step, operands, threadIdx.x / WARP);
  float state[ROWS][COLUMNS];
  load_state(state, recurrent, sequence.context > 0);
  if (sequence.context > 0)
    step.pending = min(sequence.context - held_length(lengths, sequence.context), DRAFTS - 1);
  if (blockIdx.x == 0 && threadIdx.x == 0)
    store_length(committed_len, lengths, sequence.context - step.pending, sequence.context,
                 sequence.context + step.committed() - step.pending);

  bool is_last = false;  // of the head's blocks; thread 0 knows
#pragma unroll 1
  for (int first = 0; first < step.rows(); first += CHUNK) {
    const int count = min(CHUNK, step.rows() - first);
    if (first > 0) __syncthreads();
#pragma unroll
    for (int round = 0; round < CHUNK; round += WARPS) {
      const int j = round + threadIdx.x / WARP;
      if (!GUESSES || round + first + step.pending > 0) raw = load_row(step, operands, first + j);
      stage_row(shared, j, raw, rate, bias, j < count);
      if (step.is_draft() && j < count && first + j > step.pending) keep_draft(step, operands, first + j, raw);
    }
    if (GUESSES) raw = {};
    __syncthreads();
    multiply_pairs(shared, count);
    multiply_state(shared, state, count);
    __syncthreads();
    const int from = max(step.pending - first, 0), kept = min(max(step.committed() - first, 0), count);
    const int64 output = (sequence.start + first + from - step.pending) * int64(VALUE_WIDTH) + my_value();
    if (threadIdx.x < COLUMN_GROUPS * WARP) solve_columns(shared, count, from, slices + output);
    __syncthreads();
    if (SLICES > 1 && first + count == step.rows() && threadIdx.x == 0)
      is_last = is_last_arrival(counters + blockIdx.y * V_HEADS + my_head(), SLICES);
    advance_state(state, shared, 0, kept);
    if (kept > 0 && first + kept == step.committed()) store_state(state, recurrent);
    if (first + count < step.rows()) advance_state(state, shared, kept, count);
    if (SLICES == 1) store_outputs(shared, from, count, out + output, eps);
  }
  if (SLICES == 1) return;
  if (threadIdx.x == 0) shared.is_last = is_last;
  __syncthreads();
  const int head = my_head() * VALUE_DIM;
  if (shared.is_last) join_slices(shared, operands, sequence, slices + head, out + head, eps);
}
