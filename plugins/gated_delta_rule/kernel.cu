// The gated delta rule, one block a value head of a sequence. The state stays in registers: a thread has ROWS rows
// (keys) of four columns (values), a warp 4 * ROWS rows of 32 columns.
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
// PART: elements of a row moved at once, 2 or 4; ROWS, MIN_BLOCKS, SHARED_BYTES: geometry of the launch.
#include "q4e.cuh"
#include "packed_sequence.cuh"
#include "vector.cuh"

constexpr int CHUNK = 8, COLUMNS = 4, ROW_LANES = 4;
constexpr int ROW_GROUPS = ceil_div(KEY_DIM, ROWS * ROW_LANES), COLUMN_GROUPS = ceil_div(VALUE_DIM, WARP);
constexpr int KEYS = ROW_GROUPS * ROWS * ROW_LANES, VALUES = COLUMN_GROUPS * WARP;  // padded dims
constexpr int WARPS = ROW_GROUPS * COLUMN_GROUPS, BLOCK = WARPS * WARP;
constexpr int KEY_WIDTH = K_HEADS * KEY_DIM, VALUE_WIDTH = V_HEADS * VALUE_DIM;
constexpr int CONV_WIDTH = 2 * KEY_WIDTH + VALUE_WIDTH, DRAFT_WIDTH = KEY_WIDTH + VALUE_WIDTH + 2 * V_HEADS;
constexpr int REPEATS = V_HEADS / K_HEADS;  // value heads of a key head
constexpr float L2_EPS = 1e-6f;

struct Shared {
  float k[CHUNK][KEYS], q[CHUNK][KEYS];          // normalized; q scaled
  float v[CHUNK][VALUES], gate[CHUNK][VALUES];   // of the outputs
  float norm_weight[VALUES];
  float u[ROW_GROUPS][CHUNK][VALUES];            // of each group of rows; after that, u[0] is delta
  float w[ROW_GROUPS][CHUNK][VALUES];            // after that, w[0] is o
  float kk[CHUNK][CHUNK], kq[CHUNK][CHUNK];      // D_ij k_i.k_j and D_ij k_i.q_j
  float decay[CHUNK], beta[CHUNK];
  float squares[CHUNK][COLUMN_GROUPS];           // of o
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the launcher asks for another size");

struct Step {
  PackedSequence sequence;
  int pending;    // rows to replay
  int rows;       // these and the new ones
  int committed;  // of all rows, those in the state that is written
};

struct Operands {
  const ACTIVATION *conv_out, *qkvz, *ba;
  ACTIVATION* draft_rows;
  float rate, bias;  // decay = exp(rate * softplus(a + bias))
};

// Four elements a lane, of up to 128 * FOURS.
constexpr int FOURS = ceil_div(KEY_DIM > VALUE_DIM ? KEY_DIM : VALUE_DIM, 4 * WARP);
using Four = Packed<ACTIVATION, 4>;

__device__ __forceinline__ int lane_place(int i) { return (i * WARP + threadIdx.x % WARP) * 4; }

// What a warp loads of a row: its key, query, b and a, or its value and output gate.
struct RawRow {
  Four first[FOURS], second[FOURS];
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

// Task 2 * row is the row's key part, task 2 * row + 1 its value part.
__device__ __forceinline__ RawRow load_row(const Step& step, const Operands& operands, int task) {
  const int head = blockIdx.x, row = task / 2, key = head / REPEATS * KEY_DIM, value = head * VALUE_DIM;
  RawRow raw = {};
  if (row < step.pending) {
    const ACTIVATION* from = draft_row(step, operands, row);
    if (task % 2) {
      load_lanes<VALUE_DIM>(raw.first, from + KEY_WIDTH + value);
    } else {
      load_lanes<KEY_DIM>(raw.first, from + key);
      raw.b = to_float(from[KEY_WIDTH + VALUE_WIDTH + head]);
      raw.a = to_float(from[KEY_WIDTH + VALUE_WIDTH + V_HEADS + head]);
    }
  } else if (row < step.rows) {
    const int64 token = step.sequence.start + row - step.pending;
    const ACTIVATION* from = operands.conv_out + token * CONV_WIDTH;
    if (task % 2) {
      load_lanes<VALUE_DIM>(raw.first, from + 2 * KEY_WIDTH + value);
      load_lanes<VALUE_DIM>(raw.second, operands.qkvz + token * (CONV_WIDTH + VALUE_WIDTH) + CONV_WIDTH + value);
    } else {
      load_lanes<KEY_DIM>(raw.first, from + KEY_WIDTH + key);
      load_lanes<KEY_DIM>(raw.second, from + key);
      raw.b = to_float(operands.ba[token * 2 * V_HEADS + head]);
      raw.a = to_float(operands.ba[token * 2 * V_HEADS + V_HEADS + head]);
    }
  }
  return raw;
}

// Brings a new row's task, as in `load_row`, near; which rows there are to replay is not known yet.
__device__ __forceinline__ void prefetch_row(const Step& step, const Operands& operands, int task) {
  if (task / 2 >= step.sequence.length) return;
  const int64 token = step.sequence.start + task / 2;
  const int head = blockIdx.x, key = head / REPEATS * KEY_DIM + lane_place(0), value = head * VALUE_DIM + lane_place(0);
  const ACTIVATION* from = operands.conv_out + token * CONV_WIDTH;
  if (task % 2) {
    if (lane_place(0) >= VALUE_DIM) return;
    prefetch_l2(from + 2 * KEY_WIDTH + value);
    prefetch_l2(operands.qkvz + token * (CONV_WIDTH + VALUE_WIDTH) + CONV_WIDTH + value);
  } else {
    if (lane_place(0) >= KEY_DIM) return;
    prefetch_l2(from + KEY_WIDTH + key);
    prefetch_l2(from + key);
    prefetch_l2(operands.ba + token * 2 * V_HEADS + head);
  }
}

__device__ __forceinline__ void stage_key(Shared& shared, int j, const RawRow& raw, const Operands& operands) {
  float kk = 0.f, qq = 0.f, kq = 0.f;
#pragma unroll
  for (int i = 0; i < 4 * FOURS; ++i) {
    const float k = raw.first[i / 4][i % 4], q = raw.second[i / 4][i % 4];
    kk += k * k, qq += q * q, kq += k * q;
  }
  kk = warp_sum(kk), qq = warp_sum(qq), kq = warp_sum(kq);
  const float k_scale = rsqrtf(kk + L2_EPS), q_scale = rsqrtf(qq + L2_EPS) * rsqrtf(float(KEY_DIM));
#pragma unroll
  for (int i = 0; i < 4 * FOURS; ++i) {
    const int place = lane_place(i / 4) + i % 4;
    if (place < KEYS) {
      shared.k[j][place] = raw.first[i / 4][i % 4] * k_scale;
      shared.q[j][place] = raw.second[i / 4][i % 4] * q_scale;
    }
  }
  if (threadIdx.x % WARP == 0) {
    shared.kq[j][j] = kq * k_scale * q_scale;
    shared.beta[j] = sigmoid(raw.b);
    shared.decay[j] = expf(operands.rate * softplus(raw.a + operands.bias));
  }
}

__device__ __forceinline__ void stage_value(Shared& shared, int j, const RawRow& raw) {
#pragma unroll
  for (int i = 0; i < 4 * FOURS; ++i) {
    const int place = lane_place(i / 4) + i % 4;
    if (place < VALUES) {
      const float z = raw.second[i / 4][i % 4];
      shared.v[j][place] = raw.first[i / 4][i % 4];
      shared.gate[j][place] = SILU_GATE ? silu(z) : sigmoid(z);
    }
  }
}

// Keeps a new row that is not committed. Key heads are kept by their first value head.
__device__ __forceinline__ void keep_draft(const Step& step, const Operands& operands, int task, const RawRow& raw) {
  const int head = blockIdx.x;
  ACTIVATION* to = draft_row(step, operands, task / 2);
  if (task % 2) {
    store_lanes<VALUE_DIM>(to + KEY_WIDTH + head * VALUE_DIM, raw.first);
    return;
  }
  if (head % REPEATS == 0) store_lanes<KEY_DIM>(to + head / REPEATS * KEY_DIM, raw.first);
  if (threadIdx.x % WARP == 0) {
    to[KEY_WIDTH + VALUE_WIDTH + head] = from_float<ACTIVATION>(raw.b);
    to[KEY_WIDTH + VALUE_WIDTH + V_HEADS + head] = from_float<ACTIVATION>(raw.a);
  }
}

// Task `task` of the chunk that begins with row `first`.
__device__ __forceinline__ void stage_row(Shared& shared, const Step& step, const Operands& operands, int first,
                                          int task) {
  const RawRow raw = load_row(step, operands, 2 * first + task);
  task % 2 ? stage_value(shared, task / 2, raw) : stage_key(shared, task / 2, raw, operands);
  const bool is_kept = step.sequence.length <= DRAFTS && first + task / 2 > step.pending;
  if (is_kept) keep_draft(step, operands, 2 * first + task, raw);
}

// The products of different rows of the chunk, a pair a warp.
__device__ __forceinline__ void multiply_pairs(Shared& shared, int count) {
  const int lane = threadIdx.x % WARP;
  int pair = threadIdx.x / WARP;
  for (int j = 1; j < count; ++j) {
    for (; pair < j; pair += WARPS) {
      float kk = 0.f, kq = 0.f, decay = 1.f;
#pragma unroll
      for (int i = lane; i < KEYS; i += WARP) {
        const float k = shared.k[pair][i];
        kk += k * shared.k[j][i], kq += k * shared.q[j][i];
      }
      kk = warp_sum(kk), kq = warp_sum(kq);
#pragma unroll 1
      for (int row = pair + 1; row <= j; ++row) decay *= shared.decay[row];
      if (lane == 0) shared.kk[pair][j] = kk * decay, shared.kq[pair][j] = kq * decay;
    }
    pair -= j;
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
  return (KEYS == KEY_DIM || my_row() + i < KEY_DIM) && (VALUES == VALUE_DIM || my_column() < VALUE_DIM);
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

// delta and o of every row, by a thread for each column.
__device__ __forceinline__ void solve_columns(Shared& shared, int count) {
  const int column = threadIdx.x;
  float deltas[CHUNK], decay = 1.f;
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) {
    if (j >= count) break;
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
    const float squares = warp_sum(o * o);
    if (column % WARP == 0) shared.squares[j][column / WARP] = squares;
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

// Rows `from` to `to` - 1 of the chunk; `out` is for row `from`.
__device__ __forceinline__ void store_outputs(const Shared& shared, int from, int to, ACTIVATION* out, float eps) {
#pragma unroll 1
  for (int i = threadIdx.x; i < (to - from) * (VALUES / 2); i += BLOCK) {
    const int j = from + i / (VALUES / 2), column = i % (VALUES / 2) * 2;
    if (column >= VALUE_DIM) continue;
    float squares = 0.f;
#pragma unroll
    for (int group = 0; group < COLUMN_GROUPS; ++group) squares += shared.squares[j][group];
    const float scale = rsqrtf(squares / VALUE_DIM + eps);
    float values[2];
#pragma unroll
    for (int c = 0; c < 2; ++c)
      values[c] = shared.w[0][j][column + c] * scale * shared.norm_weight[column + c] * shared.gate[j][column + c];
    store_vector(out + int64(j - from) * VALUE_WIDTH + column, values);
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
                 const int* slot_ids, const int* num_seqs, ACTIVATION* out, float eps) {
  DYNAMIC_SHARED(Shared, memory);
  Shared& shared = *memory;
  const int head = blockIdx.x, warp = threadIdx.x / WARP;
  const Operands operands = {conv_out, qkvz, ba, draft_rows, -expf(to_float(A_log[head])), to_float(dt_bias[head])};
  if (threadIdx.x < VALUE_DIM) shared.norm_weight[threadIdx.x] = to_float(norm_weight[threadIdx.x]);
  wait_for_previous();
  start_next();
  Step step = {locate_sequence(blockIdx.y, query_start_loc, seq_lens, slot_ids, num_seqs)};
  const PackedSequence& sequence = step.sequence;
  if (sequence.length <= 0) return;
  float* recurrent = recurrent_state + (int64(sequence.slot) * V_HEADS + head) * (KEY_DIM * VALUE_DIM);
  recurrent += my_row() * VALUE_DIM + my_column();
  committed_len += 2 * sequence.slot;

  const int2 lengths = *reinterpret_cast<const int2*>(committed_len);
  prefetch_row(step, operands, warp);
  float state[ROWS][COLUMNS];
  load_state(state, recurrent, sequence.context > 0);
  if (sequence.context > 0)
    step.pending = min(sequence.context - held_length(lengths, sequence.context), DRAFTS - 1);
  step.rows = step.pending + sequence.length;
  step.committed = sequence.length <= DRAFTS ? step.pending + 1 : step.rows;
  if (head == 0 && threadIdx.x == 0)
    store_length(committed_len, lengths, sequence.context - step.pending, sequence.context,
                 sequence.context + step.committed - step.pending);

#pragma unroll 1
  for (int first = 0; first < step.rows; first += CHUNK) {
    const int count = min(CHUNK, step.rows - first);
    if (first > 0) __syncthreads();
#pragma unroll 1
    for (int task = warp; task < 2 * count; task += WARPS) stage_row(shared, step, operands, first, task);
    __syncthreads();
    multiply_pairs(shared, count);
    multiply_state(shared, state, count);
    __syncthreads();
    if (warp < COLUMN_GROUPS) solve_columns(shared, count);
    __syncthreads();
    const int kept = min(max(step.committed - first, 0), count);
    advance_state(state, shared, 0, kept);
    if (kept > 0 && first + kept == step.committed) store_state(state, recurrent);
    if (first + count < step.rows) advance_state(state, shared, kept, count);
    const int from = max(step.pending - first, 0);
    const int64 token = sequence.start + first + from - step.pending;
    store_outputs(shared, from, count, out + token * VALUE_WIDTH + head * VALUE_DIM, eps);
  }
}
