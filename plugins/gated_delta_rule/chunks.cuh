// The chunked gated delta rule of long sequences: its chunks, and what its kernels hand to each other.
//
// The rows of a sequence (first those to replay, then the new ones) are cut into chunks of ROWS. The chunks of all long
// sequences are numbered through; a turn of the kernels handles some of them. In a chunk, with G_j the decay from its start
// to row j, S its state before and D_ij = G_i / G_j:
//     A_ij = beta_i D_ij k_i.k_j (j < i)        solve  = (1 + A)^-1 diag(beta)
//     delta = solve (V - G (K S))               scores = D_ij q_i.k_j (j <= i)
//     O     = G (Q S) + scores delta            S'     = G_last S + (G_last / G K)^T delta
// Decays are exp2 of differences that are not positive, all within a chunk. `prepare` has a block for each chunk and key head,
// `scan` for each sequence, value head and slice of columns; `finish` is the norm over all columns of a head, and its gate.
// While one turn is scanned, on as many multiprocessors as that has blocks, the next is prepared on the others and the one
// before it finished; what they hand to each other stays in the L2 cache for the most part.
//
// Operands of tensor cores are fp16: keys, queries, solve, scores and decays are at most 1, as |1 - beta k k^T| <= 1. Values,
// state and deltas are not bounded, see scan.cu.
//
// Macros of all: K_HEADS, V_HEADS, KEY_DIM, VALUE_DIM; DRAFTS: half of the ring's rows; LONGEST: rows of a sequence that is
// not long.
#pragma once
#include "gated_delta_rule/layout.cuh"
#include "packed_sequence.cuh"
#include "vector.cuh"

constexpr int ROWS = 64, TILE = 16, ROW_TILES = ROWS / TILE, KEY_TILES = KEY_DIM / TILE;
constexpr int SLICE = 64, SLICES = VALUE_DIM / SLICE;  // columns of the state that a block of the scan has
constexpr int TRIANGLE = ROW_TILES * (ROW_TILES + 1) / 2;
constexpr int PAD = 8;  // values behind a row in shared memory, so that those of eight rows are in different banks

// Where tile (i, j <= i) of a lower triangle is.
__device__ __forceinline__ constexpr int triangle(int i, int j) { return i * (i + 1) / 2 + j; }

// What a lane has of 16 x 16 values: an A operand.
using Tile = uint4;
// The two B operands, x y and z w, of the transpose of 16 x 16 values: a Tile with y and z exchanged. Each of them has to be
// a pair of registers, so it is loaded as such.
struct Pairs {
  Tile tile;
};

// What `prepare` leaves for the scan. Tiles are operands in the order of a warp's lanes.
struct Prepared {
  uint16* keys;   // [chunks, K_HEADS, ROWS, KEY_DIM], normalized
  Tile* queries;  // [chunks, K_HEADS, ROW_TILES, KEY_TILES, WARP], normalized, not scaled
  Pairs* solve;   // [chunks, V_HEADS, TRIANGLE, WARP]
  Tile* scores;   // [chunks, V_HEADS, TRIANGLE, WARP]
  float* decays;  // [chunks, V_HEADS, 2, ROWS]: G_j; G_last / G_j

  __device__ __forceinline__ uint16* keys_of(int place, int key_head) const {
    return keys + (int64(place) * K_HEADS + key_head) * (ROWS * KEY_DIM);
  }
  __device__ __forceinline__ Tile* queries_of(int place, int key_head) const {
    return queries + (int64(place) * K_HEADS + key_head) * (ROW_TILES * KEY_TILES * WARP);
  }
  __device__ __forceinline__ int64 triangle_of(int place, int head) const {
    return (int64(place) * V_HEADS + head) * (TRIANGLE * WARP);
  }
  __device__ __forceinline__ float* decays_of(int place, int head) const {
    return decays + (int64(place) * V_HEADS + head) * (2 * ROWS);
  }
};

struct Batch {
  const int *query_start_loc, *seq_lens, *slot_ids, *num_seqs, *committed_len;
  int size;

  __device__ __forceinline__ PackedSequence sequence(int i) const {
    return locate_sequence(i, query_start_loc, seq_lens, slot_ids, num_seqs);
  }
};

// A long sequence of the step.
struct LongSequence {
  PackedSequence sequence;
  int pending;   // rows to replay
  int first;     // its first chunk

  __device__ __forceinline__ int rows() const { return pending + sequence.length; }
  __device__ __forceinline__ int chunks() const { return ceil_div(rows(), ROWS); }
  // The row of the step that is row `row` of the sequence.
  __device__ __forceinline__ int64 token(int row) const { return sequence.start + row - pending; }
  __device__ __forceinline__ bool is_new(int row) const { return row >= pending && row < rows(); }
  // In `draft_rows`, for a row to replay.
  __device__ __forceinline__ int64 draft(int row) const {
    const uint32 position = sequence.context - pending + row;
    return (int64(sequence.slot) * (2 * DRAFTS) + position % (2 * DRAFTS)) * DRAFT_WIDTH;
  }
};

// The sequence number `rank` of those that have a number in [from, to) for their chunks; found by a whole warp. Chunks are
// numbered as if every sequence with context had as many rows to replay as can be. False: there is none.
__device__ __forceinline__ bool locate_chunks(int from, int to, int rank, const Batch& batch, LongSequence& found) {
  const int lane = threadIdx.x % WARP;
  int before = 0;
#pragma unroll 1
  for (int start = 0; start < batch.size; start += WARP) {
    PackedSequence sequence = {};
    if (start + lane < batch.size) sequence = batch.sequence(start + lane);
    const int replayed = sequence.context > 0 ? DRAFTS - 1 : 0;
    const int count = sequence.length > LONGEST ? ceil_div(sequence.length + replayed, ROWS) : 0;
    const int end = before + warp_prefix(count);
    uint32 owners = __ballot_sync(FULL_MASK, count > 0 && end > from && end - count < to);
    if (rank < __popc(owners)) {
      for (; rank > 0; --rank) owners &= owners - 1;
      const int owner = __ffs(int(owners)) - 1;
      found.sequence = batch.sequence(start + owner);
      found.first = __shfl_sync(FULL_MASK, end - count, owner);
      const int2 lengths = *reinterpret_cast<const int2*>(batch.committed_len + 2 * found.sequence.slot);
      const int context = found.sequence.context;
      found.pending = context > 0 ? min(context - held_length(lengths, context), DRAFTS - 1) : 0;
      return true;
    }
    rank -= __popc(owners);
    before = __shfl_sync(FULL_MASK, end, WARP - 1);
  }
  return false;
}

// The new rows of a chunk, [from, to), and the row of the step that its row 0 is; as `prepare` leaves it to `finish`.
struct __align__(16) ChunkRows {
  int token, from, to, unused;
};

__device__ __forceinline__ ChunkRows load_chunk_rows(const ChunkRows* from) {
  const int4 words = __ldcg(reinterpret_cast<const int4*>(from));
  return {words.x, words.y, words.z, 0};
}

// Eight values that nothing reads again: they are the first to leave the L2 cache.
__device__ __forceinline__ Packed<ACTIVATION, 8> load_once(const ACTIVATION* from) {
  const uint4 words = __ldcs(reinterpret_cast<const uint4*>(from));
  return {{words.x, words.y, words.z, words.w}};
}

// A tile from the sums of two products side by side.
__device__ __forceinline__ Tile pack_tile(const float (*sums)[4]) {
  return {pack_fp16(sums[0][0], sums[0][1]), pack_fp16(sums[0][2], sums[0][3]), pack_fp16(sums[1][0], sums[1][1]),
          pack_fp16(sums[1][2], sums[1][3])};
}

__device__ __forceinline__ Pairs as_pairs(const Tile& tile) { return {{tile.x, tile.z, tile.y, tile.w}}; }

// sums[16 x 16] += a b^T
__device__ __forceinline__ void multiply_transposed(float (*sums)[4], const Tile& a, const Pairs& b) {
  const uint32 words[4] = {a.x, a.y, a.z, a.w};
  mma_16x8x16_fp16(sums[0], words, b.tile.x, b.tile.y);
  mma_16x8x16_fp16(sums[1], words, b.tile.z, b.tile.w);
}

// Values in shared memory, rows `pitch` apart, from `first` on: as they are or their transpose.
template <bool IS_TRANSPOSED>
__device__ __forceinline__ Tile load_matrices_of(const uint16* first, int pitch, bool rows_first) {
  const int lane = threadIdx.x % WARP, low = lane % 16, high = lane / 16 * 8;
  const int row = rows_first ? low : high + lane % 8, column = rows_first ? high : low / 8 * 8;
  uint32 words[4];
  if constexpr (IS_TRANSPOSED)
    load_matrices_transposed(words, first + row * pitch + column);
  else
    load_matrices(words, first + row * pitch + column);
  return {words[0], words[1], words[2], words[3]};
}
__device__ __forceinline__ Tile load_tile(const uint16* first, int pitch) {
  return load_matrices_of<false>(first, pitch, true);
}
__device__ __forceinline__ Tile load_tile_transposed(const uint16* first, int pitch) {
  return load_matrices_of<true>(first, pitch, false);
}
__device__ __forceinline__ Pairs load_pairs(const uint16* first, int pitch) {
  return {load_matrices_of<false>(first, pitch, false)};
}
__device__ __forceinline__ Pairs load_pairs_transposed(const uint16* first, int pitch) {
  return {load_matrices_of<true>(first, pitch, true)};
}
