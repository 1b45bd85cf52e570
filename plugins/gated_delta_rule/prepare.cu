// What the scan of a turn needs of its chunks beside their values, by a block for each chunk and key head. The products of
// keys with keys and queries serve all value heads of the key head.
#include "q4e.cuh"
#include "gated_delta_rule/chunks.cuh"

constexpr int WARPS = TRIANGLE, BLOCK = WARPS * WARP;
constexpr int SEGMENTS = KEY_DIM / 8;  // of 16 bytes of a row
constexpr int LOADING_WARPS = 8, GATE_WARPS = WARPS - LOADING_WARPS;
constexpr int ROWS_AT_ONCE = LOADING_WARPS * WARP / SEGMENTS, LOADS = ROWS / ROWS_AT_ONCE;
constexpr float LOG2E = 1.4426950408889634f;
static_assert(SEGMENTS <= WARP && (SEGMENTS & (SEGMENTS - 1)) == 0, "a row is a part of a warp");
static_assert(ROWS_AT_ONCE >= DRAFTS, "rows to replay are among the first that are loaded");

struct Shared {
  union {
    uint16 rows[2][ROWS][KEY_DIM + PAD];  // normalized keys, queries; until they are multiplied
    struct {
      Pairs below[REPEATS][triangle(ROW_TILES - 1, 0)][WARP];  // tiles of A below the diagonal, transposed
      float diagonal[REPEATS][ROW_TILES][TILE][TILE + 4];
      uint16 inverse[REPEATS][ROW_TILES][TILE][TILE + PAD];  // of 1 + those, transposed
    };
  };
  float decay[REPEATS][ROWS];  // log2 of G_j
  float rise[REPEATS][ROWS], fall[REPEATS][ROWS];  // decays from the tile before to the row, from the row to its tile's end
  float beta[REPEATS][ROWS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the launcher asks for another size");

struct Operands {
  const ACTIVATION *conv_out, *ba, *A_log, *dt_bias, *draft_rows;
};

// Keys (kind 0) and queries (1) of the chunk: eight values a thread and load. Those of rows that do not exist are zero.
__device__ __forceinline__ void load_rows(Shared& shared, const LongSequence& sequence, int first_row, int key_head,
                                          const Operands& operands, uint16* keys) {
  const int first = threadIdx.x / SEGMENTS, place = threadIdx.x % SEGMENTS * 8;
  const ACTIVATION* from = operands.conv_out + sequence.token(first_row + first) * CONV_WIDTH + key_head * KEY_DIM + place;
  Packed<ACTIVATION, 8> loaded[2][LOADS] = {};
#pragma unroll
  for (int i = 0; i < LOADS; ++i)
    if (sequence.is_new(first_row + first + i * ROWS_AT_ONCE)) {
      loaded[0][i] = load_once(from + i * ROWS_AT_ONCE * CONV_WIDTH + KEY_WIDTH);
      loaded[1][i] = load_once(from + i * ROWS_AT_ONCE * CONV_WIDTH);
    }
  if (first_row + first < sequence.pending)
    loaded[0][0] = load_packed<8>(operands.draft_rows + sequence.draft(first_row + first) + key_head * KEY_DIM + place);
#pragma unroll
  for (int task = 0; task < 2 * LOADS; ++task) {
    __syncwarp();
    const int kind = task / LOADS, row = first + task % LOADS * ROWS_AT_ONCE;
    const Packed<ACTIVATION, 8>& raw = loaded[kind][task % LOADS];
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += raw[j] * raw[j];
#pragma unroll
    for (int lane = SEGMENTS / 2; lane > 0; lane /= 2) squares += __shfl_xor_sync(FULL_MASK, squares, lane);
    const float scale = rsqrtf(squares + L2_EPS);
    const uint4 normalized = {pack_fp16(raw[0] * scale, raw[1] * scale), pack_fp16(raw[2] * scale, raw[3] * scale),
                              pack_fp16(raw[4] * scale, raw[5] * scale), pack_fp16(raw[6] * scale, raw[7] * scale)};
    *reinterpret_cast<uint4*>(&shared.rows[kind][row][place]) = normalized;
    if (kind == 0) *reinterpret_cast<uint4*>(keys + row * KEY_DIM + place) = normalized;
  }
}

// b and a of two rows a lane, of value head 0; null for a row that does not exist.
struct GateRows {
  const ACTIVATION* from[2];

  __device__ __forceinline__ GateRows(const LongSequence& sequence, int first_row, const Operands& operands) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + threadIdx.x % WARP * 2 + i;
      from[i] = row < sequence.rows() ? operands.ba + sequence.token(row) * 2 * V_HEADS : nullptr;
      if (row < sequence.pending) from[i] = operands.draft_rows + sequence.draft(row) + KEY_WIDTH + VALUE_WIDTH;
    }
  }
};

// beta and the decays of a value head, two rows a lane. A row that does not exist leaves the state as it is.
__device__ __forceinline__ void store_gates(Shared& shared, const GateRows& rows, int repeat, int head,
                                            const Operands& operands, float* decays) {
  const int lane = threadIdx.x % WARP;
  const float rate = -LOG2E * expf(to_float(operands.A_log[head])), bias = to_float(operands.dt_bias[head]);
  float sums[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float beta = 0.f;
    if (rows.from[i] != nullptr) {
      beta = sigmoid(to_float(rows.from[i][head]));
      sums[i] = rate * softplus(to_float(rows.from[i][V_HEADS + head]) + bias);
    }
    shared.beta[repeat][2 * lane + i] = beta;
  }
  const float total = warp_prefix(sums[0] + sums[1]);
  float before = __shfl_up_sync(FULL_MASK, total, 1);
  before = lane > 0 ? before : 0.f;
  const float last = __shfl_sync(FULL_MASK, total, WARP - 1);
  constexpr int LANES = TILE / 2;  // of a tile
  const float tile_before = __shfl_sync(FULL_MASK, before, lane / LANES * LANES);
  const float tile_end = __shfl_sync(FULL_MASK, total, lane / LANES * LANES + LANES - 1);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    const float decay = i ? total : before + sums[0];
    shared.decay[repeat][row] = decay;
    shared.rise[repeat][row] = exp2_approx(fminf(decay - tile_before, 0.f));
    shared.fall[repeat][row] = exp2_approx(fminf(tile_end - decay, 0.f));
    decays[row] = exp2_approx(decay);
    decays[ROWS + row] = exp2_approx(fminf(last - decay, 0.f));
  }
}

// Tile (i, j) of `scores`, and of A: of the products of queries i with keys j and of keys j with keys i.
__device__ __forceinline__ void multiply_tile(Shared& shared, int i, int j, int place, int key_head,
                                              const Prepared& prepared) {
  const int lane = threadIdx.x % WARP, group = lane / 4, pair = 2 * (lane % 4);
  float qk[2][4] = {}, kk[2][4] = {};
#pragma unroll
  for (int step = 0; step < KEY_TILES; ++step) {
    const Tile query = load_tile(&shared.rows[1][TILE * i][TILE * step], KEY_DIM + PAD);
    const Tile later = load_tile(&shared.rows[0][TILE * i][TILE * step], KEY_DIM + PAD);
    const Tile earlier = load_tile(&shared.rows[0][TILE * j][TILE * step], KEY_DIM + PAD);
    multiply_transposed(qk, query, as_pairs(earlier));
    multiply_transposed(kk, earlier, as_pairs(later));
    if (i == j) prepared.queries_of(place, key_head)[(i * KEY_TILES + step) * WARP + lane] = query;
  }
  __syncthreads();
#pragma unroll 1
  for (int repeat = 0; repeat < REPEATS; ++repeat) {
    float scores[2][4], below[2][4];
    const float* decay = shared.decay[repeat];
    const float* beta = shared.beta[repeat] + TILE * i;
    if (i == j) {
#pragma unroll
      for (int at = 0; at < 8; ++at) {
        // Of `qk`, the row is the later one.
        const int row = group + at % 4 / 2 * 8, column = at / 4 * 8 + pair + at % 2;
        const float difference = decay[TILE * i + row] - decay[TILE * i + column];
        const float between = exp2_approx(-fabsf(difference));
        scores[at / 4][at % 4] = row >= column ? qk[at / 4][at % 4] * rsqrtf(float(KEY_DIM)) * between : 0.f;
        if (column > row) shared.diagonal[repeat][i][column][row] = beta[column] * kk[at / 4][at % 4] * between;
      }
    } else {
      const float* rise = shared.rise[repeat] + TILE * i;
      const float* fall = shared.fall[repeat] + TILE * j;
      const float between = exp2_approx(fminf(decay[TILE * i - 1] - decay[TILE * j + TILE - 1], 0.f));
#pragma unroll
      for (int at = 0; at < 8; ++at) {
        const int row = group + at % 4 / 2 * 8, column = at / 4 * 8 + pair + at % 2;
        scores[at / 4][at % 4] = qk[at / 4][at % 4] * (rise[row] * between * rsqrtf(float(KEY_DIM)) * fall[column]);
        below[at / 4][at % 4] = kk[at / 4][at % 4] * (beta[column] * rise[column] * between * fall[row]);
      }
      shared.below[repeat][triangle(i - 1, j)][lane] = as_pairs(pack_tile(below));
    }
    const int head = key_head * REPEATS + repeat;
    prepared.scores[prepared.triangle_of(place, head) + triangle(i, j) * WARP + lane] = pack_tile(scores);
  }
}

// Column `column` of the inverse of 1 + a tile of the diagonal, by forward substitution.
__device__ __forceinline__ void invert_column(const float (*tile)[TILE + 4], int column, uint16* inverse) {
  float x[TILE];
#pragma unroll
  for (int i = 0; i < TILE; ++i) {
    float sum = i == column ? 1.f : 0.f;
#pragma unroll
    for (int m = 0; m < i; ++m) sum -= tile[i][m] * x[m];
    x[i] = sum;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* from = x + 8 * half;
    *reinterpret_cast<uint4*>(inverse + 8 * half) = {pack_fp16(from[0], from[1]), pack_fp16(from[2], from[3]),
                                                     pack_fp16(from[4], from[5]), pack_fp16(from[6], from[7])};
  }
}

// Row `i` of tiles of (1 + A)^-1, from the diagonal to the left: T_ij = -(sum_{j<m<=i} T_im A_mj) (1 + A_jj)^-1.
__device__ __forceinline__ void solve_row(const Shared& shared, int repeat, int i, Pairs* solve) {
  const int lane = threadIdx.x % WARP;
  Tile row[ROW_TILES];
#pragma unroll
  for (int j = ROW_TILES - 1; j >= 0; --j) {
    if (j > i) continue;
    __syncwarp();  // else tiles are loaded earlier than there are registers
    if (j == i) {
      row[j] = load_tile_transposed(&shared.inverse[repeat][j][0][0], TILE + PAD);
    } else {
      float sums[2][4] = {}, product[2][4] = {};
#pragma unroll
      for (int m = ROW_TILES - 1; m > j; --m)
        if (m <= i) multiply_transposed(sums, row[m], shared.below[repeat][triangle(m - 1, j)][lane]);
      multiply_transposed(product, pack_tile(sums), load_pairs(&shared.inverse[repeat][j][0][0], TILE + PAD));
#pragma unroll
      for (int c = 0; c < 8; ++c) product[c / 4][c % 4] = -product[c / 4][c % 4];
      row[j] = pack_tile(product);
    }
    const uint32 words[4] = {row[j].x, row[j].y, row[j].z, row[j].w};
    uint32 scaled[4];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const float2 values = unpack_fp16(words[word]);
      const float* beta = &shared.beta[repeat][TILE * j + word / 2 * 8 + 2 * (lane % 4)];
      scaled[word] = pack_fp16(values.x * beta[0], values.y * beta[1]);
    }
    solve[triangle(i, j) * WARP + lane] = {{scaled[0], scaled[2], scaled[1], scaled[3]}};
  }
}

// Brings the rows of a unit that is yet to come near, if they are of the same sequence.
__device__ __forceinline__ void prefetch_rows(const LongSequence& sequence, int first_row, int key_head,
                                              const Operands& operands) {
  constexpr int LINE = 64, LINES = ceil_div(KEY_DIM, LINE);  // of 128 bytes
  const int row = first_row + threadIdx.x / (2 * LINES);
  if (threadIdx.x >= 2 * LINES * ROWS || !sequence.is_new(row)) return;
  const ACTIVATION* from = operands.conv_out + sequence.token(row) * CONV_WIDTH + key_head * KEY_DIM;
  prefetch_l2(from + threadIdx.x % 2 * KEY_WIDTH + threadIdx.x / 2 % LINES * LINE);
}

// A chunk of a key head, from the product of its rows on.
__device__ __forceinline__ void prepare_tiles(Shared& shared, int place, int key_head, const Prepared& prepared) {
  const int warp = threadIdx.x / WARP, i = warp < 1 ? 0 : warp < 3 ? 1 : warp < 6 ? 2 : 3;
  multiply_tile(shared, i, warp - triangle(i, 0), place, key_head, prepared);
  __syncthreads();
  for (int task = threadIdx.x; task < REPEATS * ROWS; task += BLOCK) {
    const int repeat = task / ROWS, tile = task / TILE % ROW_TILES, column = task % TILE;
    invert_column(shared.diagonal[repeat][tile], column, shared.inverse[repeat][tile][column]);
  }
  __syncthreads();
  for (int task = warp; task < REPEATS * ROW_TILES; task += WARPS) {
    const int repeat = task % REPEATS, head = key_head * REPEATS + repeat;
    solve_row(shared, repeat, ROW_TILES - 1 - task / REPEATS, prepared.solve + prepared.triangle_of(place, head));
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK, MIN_BLOCKS)
prepare(const ACTIVATION* conv_out, const ACTIVATION* ba, const ACTIVATION* A_log, const ACTIVATION* dt_bias,
        const ACTIVATION* draft_rows, const int* committed_len, const int* query_start_loc, const int* seq_lens,
        const int* slot_ids, const int* num_seqs, uint16* keys, Tile* queries, Pairs* solve, Tile* scores, float* decays,
        ChunkRows* chunks, int batch_size, int from_chunk, int units) {
  DYNAMIC_SHARED(Shared, memory);
  Shared& shared = *memory;
  start_next();
  const Batch batch = {query_start_loc, seq_lens, slot_ids, num_seqs, committed_len, batch_size};
  const Operands operands = {conv_out, ba, A_log, dt_bias, draft_rows};
  const Prepared prepared = {keys, queries, solve, scores, decays};
#pragma unroll 1
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int place = unit / K_HEADS, key_head = unit % K_HEADS, chunk = from_chunk + place, warp = threadIdx.x / WARP;
    LongSequence sequence = {};
    const bool exists = locate_chunks(chunk, chunk + 1, 0, batch, sequence);
    const int first_row = (chunk - sequence.first) * ROWS, rows = exists ? sequence.rows() - first_row : 0;
    if (key_head == 0 && threadIdx.x == 0)
      chunks[chunk] = {int(sequence.token(first_row)), sequence.pending - first_row, rows, 0};
    if (rows <= 0) continue;
    const int next = unit + gridDim.x;
    if (next < units) prefetch_rows(sequence, first_row + (next / K_HEADS - place) * ROWS, next % K_HEADS, operands);
    if (warp < LOADING_WARPS) {
      load_rows(shared, sequence, first_row, key_head, operands, prepared.keys_of(place, key_head));
    } else {
      const GateRows gate_rows(sequence, first_row, operands);
#pragma unroll
      for (int first = 0; first < REPEATS; first += GATE_WARPS) {
        const int repeat = first + warp - LOADING_WARPS, head = key_head * REPEATS + repeat;
        if (repeat < REPEATS) store_gates(shared, gate_rows, repeat, head, operands, prepared.decays_of(place, head));
      }
    }
    __syncthreads();
    prepare_tiles(shared, place, key_head, prepared);
    __syncthreads();
  }
  // The launch must not end before those in front of it, which the next scan has to wait for as well: a block sees to that.
  if (blockIdx.x == 0) wait_for_previous();
}
