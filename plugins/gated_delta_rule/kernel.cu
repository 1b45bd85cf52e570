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
// K_HEADS, V_HEADS, KEY_DIM, VALUE_DIM; DRAFTS: half of the ring's rows; LONGEST: rows of a
// sequence at most, longer ones are left to other kernels; SILU_GATE: 0 or 1; ACTIVATION: bf16 or float;
// PART: elements of a row moved at once, 2 or 4; IS_LONE: whether there is one sequence, of few rows; ROWS, MIN_BLOCKS,
// SHARED_BYTES: geometry of the launch. `rows_each`: rows of the batch for a sequence; `blocks_ahead`: how many blocks
// the multiprocessors hold.
#include "q4e.cuh"
#include "gated_delta_rule/rows.cuh"

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

// delta and o of every row, by a thread for each column. The end of the rows is looked for now and then only, so that
// loads of several rows are under way at once.
__device__ __forceinline__ void solve_columns(Shared& shared, int count) {
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

// The gated norm of rows `from` to `to` - 1 of the chunk, a row a warp; `out` is for row `from`.
__device__ __forceinline__ void store_outputs(const Shared& shared, int from, int to, ACTIVATION* out, float eps) {
#pragma unroll 1
  for (int first = from; first < to; first += WARPS) {
    const int row = first + threadIdx.x / WARP, j = min(row, to - 1);
    float o[4 * FOURS], squares = 0.f;
#pragma unroll
    for (int i = 0; i < 4 * FOURS; ++i) {
      const int place = lane_place(i / 4) + i % 4;
      o[i] = place < VALUES ? shared.w[0][j][place] : 0.f;
      squares += o[i] * o[i];
    }
    const float scale = rsqrtf(warp_sum(squares) / VALUE_DIM + eps);
#pragma unroll
    for (int i = 0; i < FOURS; ++i) {
      const int place = lane_place(i);
      if (row >= to || place >= VALUE_DIM) continue;
      float values[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float z = shared.z[j][place + c];
        values[c] = o[4 * i + c] * scale * shared.norm_weight[place + c] * (SILU_GATE ? silu(z) : sigmoid(z));
      }
      store_packed(out + int64(row - from) * VALUE_WIDTH + place, pack<ACTIVATION>(values));
    }
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS)
gated_delta_rule(const ACTIVATION* conv_out, const ACTIVATION* qkvz, const ACTIVATION* ba, const ACTIVATION* A_log,
                 const ACTIVATION* dt_bias, const ACTIVATION* norm_weight, float* recurrent_state,
                 ACTIVATION* draft_rows, int* committed_len, const int* query_start_loc, const int* seq_lens,
                 const int* slot_ids, const int* num_seqs, ACTIVATION* out, float eps, int rows_each,
                 int blocks_ahead) {
  DYNAMIC_SHARED(Shared, memory);
  Shared& shared = *memory;
  const Operands operands = {conv_out, qkvz, ba, draft_rows};
  // Converted and stored behind the loads that follow, which would else wait for these.
  const ACTIVATION log_rate = A_log[my_head()], raw_bias = dt_bias[my_head()];
  const ACTIVATION gain = norm_weight[min(int(threadIdx.x), VALUE_DIM - 1)];
  float* recurrent = recurrent_state + int64(my_head()) * (KEY_DIM * VALUE_DIM) + my_row() * VALUE_DIM + my_column();
  if (IS_LONE && threadIdx.x == 0) prefetch_l2_bytes(recurrent, KEY_DIM * VALUE_DIM * 4);
  wait_for_previous();
  start_next();
  // What is probable is fetched together with what decides it: the rows of batches of equal sequences, and the state of
  // a lone one, whose slot is the first one as a rule.
  const int warp = threadIdx.x / WARP;
  const int probable_row = int(blockIdx.y) * rows_each + warp;
  const bool is_probable = warp < min(rows_each, CHUNK);
  RawRow raws[ROUNDS];
  if (IS_LONE) raws[0] = load_new_row(operands, probable_row, is_probable);
  else if (is_probable) prefetch_row(operands, probable_row);
  __syncwarp();
  float state[ROWS][COLUMNS];
  if (IS_LONE) load_state(state, recurrent, true);
  int2 lengths;
  if (IS_LONE) lengths = *reinterpret_cast<const int2*>(committed_len);
  Step step = {locate_sequence(blockIdx.y, query_start_loc, seq_lens, slot_ids, num_seqs)};
  const float rate = -expf(to_float(log_rate)), bias = to_float(raw_bias);
  if (threadIdx.x < VALUE_DIM) shared.norm_weight[threadIdx.x] = to_float(gain);
  if (IS_LONE && is_probable) stage_row(shared, warp, raws[0], rate, bias, true);
  if (IS_LONE) __syncthreads();  // else the compiler moves loads behind the exit
  const PackedSequence& sequence = step.sequence;
  if (sequence.length <= 0 || sequence.length > LONGEST) return;
  committed_len += 2 * sequence.slot;
  recurrent += int64(sequence.slot) * (V_HEADS * KEY_DIM * VALUE_DIM);
  if (!IS_LONE || sequence.slot != 0 || sequence.context == 0) {
    lengths = *reinterpret_cast<const int2*>(committed_len);
    load_state(state, recurrent, sequence.context > 0);
  }
  if (sequence.context > 0)
    step.pending = min(sequence.context - held_length(lengths, sequence.context), DRAFTS - 1);
  if (blockIdx.x == 0 && threadIdx.x == 0)
    store_length(committed_len, lengths, sequence.context - step.pending, sequence.context,
                 sequence.context + step.committed() - step.pending);

  if (!IS_LONE && threadIdx.x == BLOCK - WARP) {  // the state of the block that will come when this one ends
    const int other = blockIdx.y * V_HEADS + my_head() + blocks_ahead;
    if (other / V_HEADS < int(gridDim.y)) {
      const PackedSequence next = locate_sequence(other / V_HEADS, query_start_loc, seq_lens, slot_ids, num_seqs);
      if (next.length > 0 && next.length <= LONGEST && next.context > 0)
        prefetch_l2_bytes(recurrent_state + (int64(next.slot) * V_HEADS + other % V_HEADS) * (KEY_DIM * VALUE_DIM),
                          KEY_DIM * VALUE_DIM * 4);
    }
  }
  const bool is_staged = IS_LONE && sequence.start == 0 && step.pending == 0;  // what the first round would stage
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round)
    if (round > 0 || !is_staged) raws[round] = load_row(step, operands, round * WARPS + warp);
#pragma unroll 1
  for (int first = 0; first < step.rows(); first += CHUNK) {
    const int count = min(CHUNK, step.rows() - first);
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      const int j = round * WARPS + warp;
      if (first + round > 0 || !is_staged) stage_row(shared, j, raws[round], rate, bias, j < count);
      if (step.is_draft() && j < count && first + j > step.pending) keep_draft(step, operands, first + j, raws[round]);
    }
    __syncthreads();
    multiply_pairs(shared, count);
    multiply_state(shared, state, count);
    __syncthreads();
    if (threadIdx.x < VALUES) solve_columns(shared, count);
    __syncthreads();
    const int from = max(step.pending - first, 0), kept = min(max(step.committed() - first, 0), count);
    const int64 token = sequence.start + first + from - step.pending;
    store_outputs(shared, from, count, out + token * VALUE_WIDTH + my_value(), eps);
    advance_state(state, shared, 0, kept);
    if (kept > 0 && first + kept == step.committed()) store_state(state, recurrent);
    if (first + count < step.rows()) advance_state(state, shared, kept, count);
    if (first + count == step.rows()) return;
    __syncthreads();
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round)
      raws[round] = load_row(step, operands, first + CHUNK + round * WARPS + warp);
  }
}
