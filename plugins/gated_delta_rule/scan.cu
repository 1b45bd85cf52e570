// The scan over the chunks of a turn: a block has SLICE columns of the state of a value head of a sequence, in registers.
//
// Four warps advance the state, 16 columns each, without a word to each other: the state is kept transposed, as sums of
// tensor cores [columns, keys], which as they are become operands of the next product, and so do the deltas. Four more
// compute the outputs, 16 rows of the chunk each, from the state and the deltas that the first leave in shared memory.
//
// Values are taken as they are as long as they fit fp16; if the state is not finite behind the turn, it is repeated with
// all values, on which everything depends linearly, made smaller.
#include "q4e.cuh"
#include "gated_delta_rule/chunks.cuh"

constexpr int STATE_WARPS = SLICE / TILE, WARPS = STATE_WARPS + ROW_TILES, BLOCK = WARPS * WARP;
constexpr int KEY_PITCH = KEY_DIM + PAD, ROW_PITCH = ROWS + PAD, SLICE_PITCH = SLICE + PAD;
constexpr float TINY = 1e-30f, SMALLER = 0x1p-24f, SMALLEST = 0x1p-100f;

// What a chunk brings along.
struct Stage {
  uint16 keys[ROWS][KEY_PITCH];
  Pairs solve[TRIANGLE][WARP];
  ACTIVATION values[ROWS][SLICE_PITCH];
  float decays[2][ROWS];
};
struct Shared {
  Stage stages[2];
  uint16 state[SLICE][KEY_PITCH];   // in front of the chunk, transposed
  uint16 deltas[SLICE][ROW_PITCH];  // transposed
};
static_assert(sizeof(Shared) == SHARED_BYTES && SHARED_BYTES % 16 == 0, "the launcher asks for another size");

// The part of the work that a block has at a time.
struct Part {
  LongSequence sequence;
  int head, slice;
  int from, to;  // chunks of the sequence
  int place;     // of the first of them in the turn
  float scale;   // of values and state

  __device__ __forceinline__ int key_head() const { return head / REPEATS; }
  __device__ __forceinline__ int column() const { return head * VALUE_DIM + slice * SLICE; }
};

struct Memory {
  const ACTIVATION *conv_out, *draft_rows;
  float* recurrent_state;
  Prepared prepared;
  uint16* out;   // a row's columns of a slice over their RMS, in the order of `store_outputs`
  float* norms;  // [chunks, V_HEADS, SLICES, ROWS]: that RMS

  __device__ __forceinline__ float* norms_of(const Part& part, int chunk) const {
    const int64 place = part.place + chunk - part.from;
    return norms + ((place * V_HEADS + part.head) * SLICES + part.slice) * ROWS;
  }
};

// By the warps of the outputs, which have less to do.
__device__ __forceinline__ void copy_chunk(Stage& stage, const Part& part, const Memory& memory, int chunk) {
  constexpr int THREADS = ROW_TILES * WARP, KEY_SEGMENTS = KEY_DIM / 8, SEGMENTS = SLICE / 8;
  const int thread = threadIdx.x - STATE_WARPS * WARP, place = part.place + chunk - part.from;
  const uint16* keys = memory.prepared.keys_of(place, part.key_head());
#pragma unroll
  for (int round = 0; round < ROWS * KEY_SEGMENTS / THREADS; ++round) {
    const int i = round * THREADS + thread;
    copy_async_16(&stage.keys[i / KEY_SEGMENTS][i % KEY_SEGMENTS * 8], keys + i * 8);
  }
  const Pairs* solve = memory.prepared.solve + memory.prepared.triangle_of(place, part.head);
#pragma unroll
  for (int round = 0; round < ceil_div(TRIANGLE * WARP, THREADS); ++round) {
    const int i = round * THREADS + thread;
    if (i < TRIANGLE * WARP) copy_async_16(&stage.solve[0][0] + i, solve + i);
  }
  const float* decays = memory.prepared.decays_of(place, part.head);
  if (thread < 2 * ROWS / 4) copy_async_16(&stage.decays[0][0] + thread * 4, decays + thread * 4);
  const int first = chunk * ROWS + thread / SEGMENTS, column = part.column() + thread % SEGMENTS * 8;
  ACTIVATION* to = &stage.values[thread / SEGMENTS][thread % SEGMENTS * 8];
  const ACTIVATION* from = memory.conv_out + part.sequence.token(first) * CONV_WIDTH + 2 * KEY_WIDTH + column;
#pragma unroll
  for (int row = 0; row < ROWS; row += THREADS / SEGMENTS) {
    const bool exists = part.sequence.is_new(first + row);
    copy_async_16(to + row * SLICE_PITCH, exists ? from + int64(row) * CONV_WIDTH : memory.conv_out, exists);
  }
  if (first < part.sequence.pending)  // of which there are fewer than rows that are copied at once
    copy_async_16(to, memory.draft_rows + part.sequence.draft(first) + KEY_WIDTH + column);
  commit_copies();
}

// Sums of 16 columns of the state, [16 columns, keys], and what becomes of them.
struct State {
  float sums[2 * KEY_TILES][4];

  // In memory: the lane's first element, and how far element i of sums n is from it.
  __device__ __forceinline__ static int first() { return threadIdx.x % 4 * 2 * VALUE_DIM + threadIdx.x % WARP / 4; }
  __device__ __forceinline__ static constexpr int offset(int n, int i) {
    return (8 * n + i % 2) * VALUE_DIM + i / 2 * 8;
  }
  __device__ __forceinline__ void load(const float* from, float scale) {
    from += first();
#pragma unroll
    for (int n = 0; n < 2 * KEY_TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = from[offset(n, i)] * scale;
  }
  __device__ __forceinline__ void store(float* to, float scale) const {
    to += first();
#pragma unroll
    for (int n = 0; n < 2 * KEY_TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) to[offset(n, i)] = sums[n][i] * scale;
  }
  __device__ __forceinline__ bool is_finite() const {
    float sum = 0.f;  // of zeros, or NaN
#pragma unroll
    for (int n = 0; n < 2 * KEY_TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += 0.f * sums[n][i];
    return sum == 0.f;
  }
};

// A tile of sums; also to shared memory, from `to` on.
__device__ __forceinline__ Tile keep_tile(const float (*sums)[4], uint16* to, int pitch) {
  const int lane = threadIdx.x % WARP;
  const Tile packed = pack_tile(sums);
  const uint32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    uint16* row = to + (lane / 4 + word % 2 * 8) * pitch;
    *reinterpret_cast<uint32*>(row + word / 2 * 8 + 2 * (lane % 4)) = words[word];
  }
  return packed;
}

// The factor of the column pair 2t, 2t + 1 of sums n, for each of its four elements.
__device__ __forceinline__ float2 pair_of(const float* factors, int n) {
  return *reinterpret_cast<const float2*>(factors + 8 * n + 2 * (threadIdx.x % 4));
}

// What the values of the chunk differ by from what the state says, [16 columns, rows].
__device__ __forceinline__ void read_state(Tile (&errors)[ROW_TILES], const Tile (&before)[KEY_TILES], const Stage& stage,
                                           float scale) {
  const int column = threadIdx.x / WARP * TILE;
  float reads[2 * ROW_TILES][4] = {};
#pragma unroll
  for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
    for (int row = 0; row < ROW_TILES; ++row)
      multiply_transposed(reads + 2 * row, before[n], load_pairs(&stage.keys[TILE * row][TILE * n], KEY_PITCH));
#pragma unroll
  for (int row = 0; row < ROW_TILES; ++row) {
    const auto* first = reinterpret_cast<const uint16*>(&stage.values[TILE * row][column]);
    const Tile values = load_tile_transposed(first, SLICE_PITCH);
    const uint32 words[2][2] = {{values.x, values.y}, {values.z, values.w}};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 decay = pair_of(stage.decays[0], 2 * row + n);
      float(&sums)[4] = reads[2 * row + n];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums[2 * i] = low_bf16(words[n][i]) * scale - decay.x * sums[2 * i];
        sums[2 * i + 1] = high_bf16(words[n][i]) * scale - decay.y * sums[2 * i + 1];
      }
    }
    errors[row] = pack_tile(reads + 2 * row);
  }
}

// The state behind the chunk, from its deltas [16 columns, rows].
__device__ __forceinline__ void advance_state(State& state, float (&deltas)[2 * ROW_TILES][4], const Stage& stage) {
  const float decay = stage.decays[0][ROWS - 1];
#pragma unroll
  for (int n = 0; n < 2 * KEY_TILES; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) state.sums[n][i] *= decay;
#pragma unroll
  for (int row = 0; row < ROW_TILES; ++row) {
#pragma unroll
    for (int n = 2 * row; n < 2 * row + 2; ++n) {
      const float2 rest = pair_of(stage.decays[1], n);
#pragma unroll
      for (int i = 0; i < 4; ++i) deltas[n][i] *= i % 2 ? rest.y : rest.x;
    }
    const Tile scaled = pack_tile(deltas + 2 * row);
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
      const Pairs keys = load_pairs_transposed(&stage.keys[TILE * row][TILE * n], KEY_PITCH);
      multiply_transposed(state.sums + 2 * n, scaled, keys);
    }
  }
}

// The four warps of the state. Returns whether it is finite; if so, or if it is the last attempt, it is stored.
__device__ __forceinline__ bool scan_states(Shared& shared, const Part& part, const Memory& memory) {
  const int lane = threadIdx.x % WARP, column = threadIdx.x / WARP * TILE;
  float* recurrent = memory.recurrent_state + (int64(part.sequence.sequence.slot) * V_HEADS + part.head) *
                     (KEY_DIM * VALUE_DIM) + part.slice * SLICE + column;
  State state = {};
  if (part.from > 0 || part.sequence.sequence.context > 0) state.load(recurrent, part.scale);
#pragma unroll 1
  for (int chunk = part.from; chunk < part.to; ++chunk) {
    const Stage& stage = shared.stages[chunk % 2];
    Tile before[KEY_TILES], errors[ROW_TILES];
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n)
      before[n] = keep_tile(state.sums + 2 * n, &shared.state[column][TILE * n], KEY_PITCH);
    __syncthreads();
    read_state(errors, before, stage, part.scale);
    float deltas[2 * ROW_TILES][4] = {};
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
      for (int j = 0; j <= i; ++j) multiply_transposed(deltas + 2 * i, errors[j], stage.solve[triangle(i, j)][lane]);
      keep_tile(deltas + 2 * i, &shared.deltas[column][TILE * i], ROW_PITCH);
    }
    __syncthreads();
    advance_state(state, deltas, stage);
  }
  const bool finite = !__syncthreads_or(!state.is_finite());
  if (finite || part.scale < SMALLEST) state.store(recurrent, 1.f / part.scale);
  return finite;
}

// Rows of the chunk in C layout, over their RMS: a lane has two rows and stores its 16 values of each side by side.
__device__ __forceinline__ void store_outputs(const float (&sums)[2 * SLICE / TILE][4], const Part& part,
                                              const Memory& memory, int chunk) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float squares = 0.f;
#pragma unroll
    for (int n = 0; n < 2 * SLICE / TILE; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) squares += sums[n][2 * half + i] * sums[n][2 * half + i];
    squares += __shfl_xor_sync(FULL_MASK, squares, 1);
    squares += __shfl_xor_sync(FULL_MASK, squares, 2);
    const float mean = squares / SLICE + TINY, scale = rsqrtf(mean);
    const int place = (threadIdx.x / WARP - STATE_WARPS) * TILE + lane / 4 + 8 * half, row = chunk * ROWS + place;
    if (!part.sequence.is_new(row)) continue;
    uint32 words[2 * SLICE / TILE];
#pragma unroll
    for (int n = 0; n < 2 * SLICE / TILE; ++n)
      words[n] = pack_fp16(sums[n][2 * half] * scale, sums[n][2 * half + 1] * scale);
    auto* to = reinterpret_cast<uint4*>(memory.out + part.sequence.token(row) * VALUE_WIDTH + part.column());
    to[2 * (lane % 4)] = {words[0], words[1], words[2], words[3]};
    to[2 * (lane % 4) + 1] = {words[4], words[5], words[6], words[7]};
    if (lane % 4 == 0) memory.norms_of(part, chunk)[place] = mean * scale / part.scale;
  }
}

// The four warps of the outputs.
__device__ __forceinline__ bool scan_outputs(Shared& shared, const Part& part, const Memory& memory) {
  const int lane = threadIdx.x % WARP, tile = threadIdx.x / WARP - STATE_WARPS;
  Tile queries[KEY_TILES];
  const auto load_queries = [&](int chunk) {
    const Tile* from = memory.prepared.queries_of(part.place + chunk - part.from, part.key_head());
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) queries[n] = from[(tile * KEY_TILES + n) * WARP + lane];
  };
  copy_chunk(shared.stages[part.from % 2], part, memory, part.from);
  load_queries(part.from);
#pragma unroll 1
  for (int chunk = part.from; chunk < part.to; ++chunk) {
    const Stage& stage = shared.stages[chunk % 2];
    const Tile* from = memory.prepared.scores + memory.prepared.triangle_of(part.place + chunk - part.from, part.head) + lane;
    Tile scores[ROW_TILES];
#pragma unroll
    for (int j = 0; j < ROW_TILES; ++j) scores[j] = j <= tile ? from[triangle(tile, j) * WARP] : Tile{};
    wait_copies<0>();
    __syncthreads();
    if (chunk + 1 < part.to) copy_chunk(shared.stages[(chunk + 1) % 2], part, memory, chunk + 1);
    float sums[2 * SLICE / TILE][4] = {};
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
      for (int column = 0; column < SLICE / TILE; ++column)
        multiply_transposed(sums + 2 * column, queries[n], load_pairs(&shared.state[TILE * column][TILE * n], KEY_PITCH));
    if (chunk + 1 < part.to) load_queries(chunk + 1);
    const float* decays = stage.decays[0] + tile * TILE + lane / 4;
    const float factors[2] = {decays[0] * rsqrtf(float(KEY_DIM)), decays[8] * rsqrtf(float(KEY_DIM))};
#pragma unroll
    for (int n = 0; n < 2 * SLICE / TILE; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] *= factors[i / 2];
    __syncthreads();
#pragma unroll
    for (int j = 0; j < ROW_TILES; ++j) {
      if (j > tile) break;
#pragma unroll
      for (int column = 0; column < SLICE / TILE; ++column)
        multiply_transposed(sums + 2 * column, scores[j], load_pairs(&shared.deltas[TILE * column][TILE * j], ROW_PITCH));
    }
    store_outputs(sums, part, memory, chunk);
  }
  return !__syncthreads_or(false);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
scan(const ACTIVATION* conv_out, const ACTIVATION* draft_rows, float* recurrent_state, int* committed_len,
     const int* query_start_loc, const int* seq_lens, const int* slot_ids, const int* num_seqs, uint16* keys,
     Tile* queries, Pairs* solve, Tile* scores, float* decays, uint16* out, float* norms, int batch_size, int from_chunk,
     int window) {
  DYNAMIC_SHARED(Shared, memory);
  Shared& shared = *memory;
  wait_for_previous();
  start_next();
  const Batch batch = {query_start_loc, seq_lens, slot_ids, num_seqs, committed_len, batch_size};
  const Memory pointers = {conv_out, draft_rows, recurrent_state, {keys, queries, solve, scores, decays}, out, norms};
#pragma unroll 1
  for (int i = blockIdx.x;; i += gridDim.x) {
    Part part;
    if (!locate_chunks(from_chunk, from_chunk + window, i / (V_HEADS * SLICES), batch, part.sequence)) break;
    const LongSequence& sequence = part.sequence;
    part.head = i / SLICES % V_HEADS, part.slice = i % SLICES;
    part.from = max(from_chunk - sequence.first, 0);
    part.to = min(from_chunk + window - sequence.first, sequence.chunks());
    part.place = sequence.first + part.from - from_chunk;
    if (part.from >= part.to) continue;  // the window has nothing of it but a chunk that would hold more rows to replay
    if (part.head == 0 && part.slice == 0 && part.to == sequence.chunks() && threadIdx.x == 0) {
      int* lengths = committed_len + 2 * sequence.sequence.slot;
      const int context = sequence.sequence.context;
      store_length(lengths, *reinterpret_cast<const int2*>(lengths), context - sequence.pending, context,
                   context + sequence.sequence.length);
    }
    bool finite = false;
    for (part.scale = 1.f; !finite && part.scale >= SMALLEST * SMALLER; part.scale *= SMALLER) {
      finite = threadIdx.x / WARP < STATE_WARPS ? scan_states(shared, part, pointers) : scan_outputs(shared, part, pointers);
    }
  }
}
