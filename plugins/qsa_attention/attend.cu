// Attention of one query row and the (up to 16) query heads of one key head over every gridDim.y-th tile of the row's
// tokens, on tensor cores. Keys and values go from the cache to registers in the layout that the products want, with no
// shared memory between; only scores pass through it. A warp computes the scores of 8 of a tile's 32 tokens for all
// heads, and then 64 columns of the output over all tokens.
// Macros: HEAD_DIM (a multiple of 8), HQ, HKV, RATIO, PAGE, CACHE: bf16 or e4m3, IS_SPLIT: whether `merge`
// follows, BESIDE_TILES: whether `attend_tiles` is in front, and memory says which rows are in a tile.
#include "qsa_attention/selection.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP, HEADS = 16;
constexpr int GROUP = HQ / HKV, HEAD_TILES = ceil_div(GROUP, HEADS);
constexpr int CHUNKS = ceil_div(HEAD_DIM, 32);                  // of a key: 4 lanes with 8 columns each
constexpr int SLABS = ceil_div(ceil_div(HEAD_DIM, 64), WARPS);  // of a value, a warp: 8 lanes with 8 columns each
constexpr int STEPS = TILE / 16;                                // of the product with the values
// Both strides let a warp's accesses of 16 and of 8 bytes hit all banks.
constexpr int Q_STRIDE = 4 * CHUNKS + (CHUNKS % 2 ? 0 : 4);  // of uint4
constexpr int SCORE_STRIDE = TILE + 8;

// Eight neighbouring columns of a key or value.
template <typename T>
struct Chunk;
template <>
struct Chunk<bf16> {
  uint4 bits;
  __device__ __forceinline__ uint32 word(int i) const {
    return i == 0 ? bits.x : i == 1 ? bits.y : i == 2 ? bits.z : bits.w;
  }
  // Columns 2i and 2i + 1, as two bf16.
  __device__ __forceinline__ uint32 columns(int i) const { return word(i); }
  // Column i of this and of `other`.
  __device__ __forceinline__ uint32 column(int i, const Chunk& other) const {
    return __byte_perm(word(i / 2), other.word(i / 2), i % 2 ? 0x7632 : 0x5410);
  }
};
template <>
struct Chunk<e4m3> {
  uint2 bits;
  __device__ __forceinline__ uint32 word(int i) const { return i == 0 ? bits.x : bits.y; }
  __device__ __forceinline__ uint32 columns(int i) const {
    return e4m3_pair_to_bf16(__byte_perm(word(i / 2), 0, i % 2 ? 0x3322 : 0x1100));
  }
  __device__ __forceinline__ uint32 column(int i, const Chunk& other) const {
    return e4m3_pair_to_bf16(__byte_perm(word(i / 4), other.word(i / 4), 0x4400 + 0x1111 * (i % 4)));
  }
};

// Past L1: the cache's newest rows were written by the kernel before this one. Zeros where there is nothing to read, so
// that what pages hold behind a sequence's last token (NaN, maybe) cannot get in through 0 * NaN.
__device__ __forceinline__ Chunk<bf16> load_chunk(const bf16* from, bool valid) {
  return {valid ? __ldcg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0)};
}
__device__ __forceinline__ Chunk<e4m3> load_chunk(const e4m3* from, bool valid) {
  return {valid ? __ldcg(reinterpret_cast<const uint2*>(from)) : make_uint2(0, 0)};
}

struct Tile {
  Chunk<CACHE> keys[CHUNKS];              // of token 8 * warp + lane / 4
  Chunk<CACHE> values[SLABS][STEPS][4];  // of tokens 16 * step + 2 * (lane % 4) + {0, 1, 8, 9}

  // `row`: the cache row of the lane's entry; `cache` is that of the key head.
  __device__ __forceinline__ void load_keys(const CACHE* cache, int row) {
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const int key_row = __shfl_sync(FULL_MASK, row, 8 * warp + g);
    const CACHE* from = cache + int64(key_row) * (HKV * HEAD_DIM) + 8 * t;
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) keys[j] = load_chunk(from + 32 * j, key_row >= 0 && 32 * j + 8 * t < HEAD_DIM);
  }
  __device__ __forceinline__ void load_values(const CACHE* cache, int row) {
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int value_row = __shfl_sync(FULL_MASK, row, 16 * step + 2 * t + i % 2 + 8 * (i / 2));
        const CACHE* from = cache + int64(value_row + PAGE) * (HKV * HEAD_DIM);
#pragma unroll
        for (int s = 0; s < SLABS; ++s) {
          const int column = 64 * (s * WARPS + warp) + 8 * g;
          values[s][step][i] = load_chunk(from + column, value_row >= 0 && column < HEAD_DIM);
        }
      }
  }
};

// Scores of head rows g and g + 8 against tokens 2t, 2t + 1 of the warp's eight, as `mma_16x8x16` lays them out.
__device__ __forceinline__ void score(float scores[4], const uint4 (*q)[Q_STRIDE], const Chunk<CACHE> keys[CHUNKS]) {
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
  float sums[4][4] = {};  // four chains of products
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j) {  // both sides agree on which columns a lane has; their order is no matter to a sum
    const uint4 upper = q[g][4 * j + t], lower = q[g + 8][4 * j + t];
    const uint32 a0[4] = {upper.x, lower.x, upper.y, lower.y}, a1[4] = {upper.z, lower.z, upper.w, lower.w};
    const uint32 b0[2] = {keys[j].columns(0), keys[j].columns(1)}, b1[2] = {keys[j].columns(2), keys[j].columns(3)};
    mma_16x8x16(sums[j % 2], a0, b0);
    mma_16x8x16(sums[j % 2 + 2], a1, b1);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) scores[i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 1));
  return fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(FULL_MASK, x, 1);
  return x + __shfl_xor_sync(FULL_MASK, x, 2);
}

// The softmax so far of head rows g and g + 8 (`half` 0 and 1), in powers of two.
struct Accumulator {
  float maximum[2] = {negative_infinity(), negative_infinity()};
  float sum[2] = {0.f, 0.f};  // of this lane's tokens
  float out[SLABS][8][4] = {};  // columns 64 * slab + 16 t + i and + 8 + i of n-tile i

  __device__ __forceinline__ void add(const float (*scores)[SCORE_STRIDE], const Tile& tile) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    uint32 weights[STEPS][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 s[STEPS][2];
      float best = maximum[half];
#pragma unroll
      for (int i = 0; i < 2 * STEPS; ++i) {
        s[i / 2][i % 2] = *reinterpret_cast<const float2*>(&scores[g + 8 * half][8 * i + 2 * t]);
        best = fmaxf(best, fmaxf(s[i / 2][i % 2].x, s[i / 2][i % 2].y));
      }
      best = quad_max(best);
      const float base = best == negative_infinity() ? 0.f : best, correction = exp2_approx(maximum[half] - base);
      maximum[half] = best;
      sum[half] *= correction;
#pragma unroll
      for (int i = 0; i < 2 * STEPS; ++i) {
        const uint32 pair = pack_bf16(exp2_approx(s[i / 2][i % 2].x - base), exp2_approx(s[i / 2][i % 2].y - base));
        weights[i / 2][half + 2 * (i % 2)] = pair;
        sum[half] += low_bf16(pair) + high_bf16(pair);  // of the rounded weights, as the product below has them
      }
#pragma unroll
      for (int s = 0; s < SLABS; ++s)
#pragma unroll
        for (int i = 0; i < 8; ++i) out[s][i][2 * half] *= correction, out[s][i][2 * half + 1] *= correction;
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int s = 0; s < SLABS; ++s) {
        const auto& v = tile.values[s][step];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const uint32 b[2] = {v[0].column(i, v[1]), v[2].column(i, v[3])};
          mma_16x8x16(out[s][i], weights[step], b);
        }
      }
  }
};

// The first `count` query heads at `q` into shared memory, zeros behind them and behind HEAD_DIM.
__device__ __forceinline__ void load_queries(uint4 (*shared)[Q_STRIDE], const bf16* q, int count) {
  constexpr int ITEMS = HEADS * 4 * CHUNKS, LOADS = ceil_div(ITEMS, THREADS);
  Chunk<bf16> loaded[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int item = i * THREADS + threadIdx.x, head = item / (4 * CHUNKS), column = item % (4 * CHUNKS) * 8;
    loaded[i] = load_chunk(q + head * HEAD_DIM + column, head < count && column < HEAD_DIM);
  }
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int item = i * THREADS + threadIdx.x;
    if (ITEMS % THREADS == 0 || item < ITEMS) shared[item / (4 * CHUNKS)][item % (4 * CHUNKS)] = loaded[i].bits;
  }
}

// Eight neighbouring columns of an output row, gated.
__device__ __forceinline__ void store_gated(const float values[8], const bf16* gates, bf16* out) {
  const Chunk<bf16> gate = load_chunk(gates, true);
  uint32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = pack_bf16(values[2 * i] * sigmoid(low_bf16(gate.word(i))),
                         values[2 * i + 1] * sigmoid(high_bf16(gate.word(i))));
  *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Results of the block for `count` heads from `head` on: a part of each, or the outputs themselves.
__device__ __forceinline__ void store(const Accumulator& total, int64 head, int count, float* partial_out,
                                      float2* partial_sums, const bf16* gates, bf16* out) {
  const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(total.sum[half]), scale = sum > 0.f ? 1.f / sum : 0.f;
    const int row = g + 8 * half;
    if (row >= count) continue;
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
      const int first = 64 * (slab * WARPS + warp);
      if (first >= HEAD_DIM) continue;
#if IS_SPLIT
      const int64 part = (head + row) * gridDim.y + blockIdx.y;
      if (first == 0 && t == 0) partial_sums[part] = {total.maximum[half], sum};
      float2* to = reinterpret_cast<float2*>(partial_out + part * PART_WIDTH + first) + t;
#pragma unroll
      for (int i = 0; i < 8; ++i) to[4 * i] = {total.out[slab][i][2 * half], total.out[slab][i][2 * half + 1]};
#else
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int column = first + 16 * t + 8 * side;
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = total.out[slab][i][2 * half + side] * scale;
        if (column < HEAD_DIM)
          store_gated(values, gates + 2 * row * HEAD_DIM + column, out + (head + row) * HEAD_DIM + column);
      }
#endif
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
attend(const bf16* q, const bf16* qkv, const int* selected_groups, const CACHE* kv_cache, const int* query_start_loc,
       const int* seq_lens, const int* block_table, const int* num_seqs, float* partial_out, float2* partial_sums,
       bf16* out, const uint8* is_in_tile, int num_groups, int batch_size, int max_blocks, float score_scale) {
  __shared__ uint4 queries[HEADS][Q_STRIDE];
  __shared__ __align__(16) float scores[2][HEADS][SCORE_STRIDE];
  const int token = blockIdx.x / (HKV * HEAD_TILES), unit = blockIdx.x % (HKV * HEAD_TILES);
  const int kv_head = unit / HEAD_TILES, first_head = kv_head * GROUP + unit % HEAD_TILES * HEADS;
  const int count = min(HEADS, (kv_head + 1) * GROUP - first_head);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const CACHE* cache = kv_cache + kv_head * HEAD_DIM;
#if BESIDE_TILES
  if (is_in_tile[token]) {
    wait_for_previous();
    return;
  }
#endif

  // `prepare` started this kernel when all before `prepare` was done. So in front of the wait all may be read but
  // the rows of the step's new tokens.
  TileWalk walk(selected_groups + int64(token) * num_groups, num_groups, blockIdx.y, gridDim.y);
  const TokenPlace place = locate_token(token, query_start_loc, seq_lens, num_seqs, batch_size);
  walk.start(place, block_table, max_blocks);
  Tile tile;
  const bool is_new = __any_sync(FULL_MASK, walk.now.token >= place.context);
  if (!is_new) tile.load_keys(cache, walk.now.row()), tile.load_values(cache, walk.now.row());
  if (!BESIDE_TILES) wait_for_previous();  // `attend_tiles` starts this kernel when all is there
  start_next();
  if (place.sequence < 0) {
    if (BESIDE_TILES) wait_for_previous();
    return;
  }
  if (is_new) tile.load_keys(cache, walk.now.row()), tile.load_values(cache, walk.now.row());

  load_queries(queries, q + (int64(token) * HQ + first_head) * HEAD_DIM, count);
  __syncthreads();
  Accumulator total;
  bool has_tile = walk.has_tile();
  for (int buffer = 0; has_tile; buffer ^= 1) {
    float tile_scores[4];
    score(tile_scores, queries, tile.keys);
    const int row = walk.now.row(), column = 8 * warp + 2 * t;
    const bool even = __shfl_sync(FULL_MASK, row, column) >= 0, odd = __shfl_sync(FULL_MASK, row, column + 1) >= 0;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(&scores[buffer][g + 8 * half][column]) = {
          even ? tile_scores[2 * half] * score_scale : negative_infinity(),
          odd ? tile_scores[2 * half + 1] * score_scale : negative_infinity()};
    walk.advance();
    has_tile = walk.has_tile();
    if (has_tile) tile.load_keys(cache, walk.now.row());
    __syncthreads();  // one a tile: a buffer is written again behind the barrier of the tile between
    total.add(scores[buffer], tile);
    if (has_tile) tile.load_values(cache, walk.now.row());
  }
  if (BESIDE_TILES) wait_for_previous();
  store(total, int64(token) * HQ + first_head, count, partial_out, partial_sums,
        qkv + int64(token) * (2 * HQ + 2 * HKV) * HEAD_DIM + (2 * first_head + 1) * HEAD_DIM, out);
}
