// Attention of one query row and the (up to 16) query heads of one key head over one of gridDim.y parts of the row's list
// of tokens, on tensor cores. Tiles of the cache are copied ahead into a ring in shared memory, each lane what it needs
// itself, so that only scores pass between warps: a warp computes the scores of 8 of a tile's 32 tokens for all heads, and
// then 64 columns of the output over all tokens. Code is kept short, since a step finds it in no cache: copies are in one
// place of the loop, whose first turns only copy.
// Macros: HEAD_DIM (a multiple of 8), HQ, HKV, RATIO, PAGE, CACHE: bf16 or e4m3, STAGES (tiles of the ring), IS_SPLIT:
// whether `merge` follows, BESIDE_TILES: whether `attend_tiles` is in front, and which rows are in a tile is in memory.
#include "qsa_attention/tile.cuh"

constexpr int GROUP = HQ / HKV, MAX_HEADS = 16, HEADS = GROUP < MAX_HEADS ? GROUP : MAX_HEADS;
constexpr int HEAD_TILES = ceil_div(GROUP, MAX_HEADS);

struct Shared {
  WarpTile ring[STAGES][WARPS];
  uint4 queries[CHUNKS][HEADS][4];  // chunk 4 i + t of a head at [i][head][t]
  float scores[2][HEADS][TILE];

  // Of the tokens `column` and `column + 1`. Accesses of a warp to 8 heads hit all banks.
  __device__ __forceinline__ float2* score(int buffer, int head, int column) {
    return reinterpret_cast<float2*>(&scores[buffer][head][column ^ 8 * (head % 4)]);
  }
};

// Scores of head rows g and g + 8 against tokens 2t, 2t + 1 of the warp's eight, as `mma_16x8x16` lays them out. Rows that
// no head has are those of the last one.
__device__ __forceinline__ void score(float scores[4], const uint4 (*q)[HEADS][4], const Piece (*keys)[WARP]) {
  const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  float sums[4][4] = {};  // four chains of products
#pragma unroll 1
  for (int first = 0; first < CHUNKS; first += 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // both sides agree on which columns a lane has; their order is no matter to a sum
      const int j = first + i;
      if (CHUNKS % 4 != 0 && j >= CHUNKS) break;
      const uint4 upper = q[j][min(g, HEADS - 1)][t], lower = q[j][min(g + 8, HEADS - 1)][t];
      const Piece key = keys[j][lane];
      const uint32 a0[4] = {upper.x, lower.x, upper.y, lower.y}, a1[4] = {upper.z, lower.z, upper.w, lower.w};
      const uint32 b0[2] = {key.columns(0), key.columns(1)}, b1[2] = {key.columns(2), key.columns(3)};
      mma_16x8x16(sums[i % 2], a0, b0);
      mma_16x8x16(sums[i % 2 + 2], a1, b1);
    }
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

  // The weights of the tile's tokens, from their scores; what there is so far is brought to their maximum.
  __device__ __forceinline__ void weigh(Shared& shared, int buffer, uint32 weights[STEPS][4]) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 s[STEPS][2];
      float best = maximum[half];
#pragma unroll
      for (int i = 0; i < 2 * STEPS; ++i) {
        s[i / 2][i % 2] = *shared.score(buffer, min(g + 8 * half, HEADS - 1), 8 * i + 2 * t);
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
        sum[half] += low_bf16(pair) + high_bf16(pair);  // of the rounded weights, as the product has them
      }
#pragma unroll
      for (int s = 0; s < SLABS; ++s)
#pragma unroll
        for (int i = 0; i < 8; ++i) out[s][i][2 * half] *= correction, out[s][i][2 * half + 1] *= correction;
    }
  }
  __device__ __forceinline__ void add(const uint32 weights[STEPS][4], const WarpTile& tile) {
    const int lane = threadIdx.x % 4 * 8 + threadIdx.x % WARP / 4;
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int s = 0; s < SLABS; ++s) {
        const Piece v[4] = {tile.values[s][step][0][lane], tile.values[s][step][1][lane], tile.values[s][step][2][lane],
                            tile.values[s][step][3][lane]};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const uint32 b[2] = {v[0].column(i, v[1]), v[2].column(i, v[3])};
          mma_16x8x16(out[s][i], weights[step], b);
        }
      }
  }
};

// The first `count` query heads at `q`, the last one also for those behind it, and zeros behind HEAD_DIM.
__device__ __forceinline__ void load_queries(uint4 (*queries)[HEADS][4], const bf16* q, int count) {
  constexpr int ITEMS = CHUNKS * HEADS * 4, LOADS = ceil_div(ITEMS, THREADS);
  uint4 loaded[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int item = i * THREADS + threadIdx.x, head = item / (4 * CHUNKS), column = item % (4 * CHUNKS) * 8;
    loaded[i] = column < HEAD_DIM && item < ITEMS
                    ? __ldcg(reinterpret_cast<const uint4*>(q + min(head, count - 1) * HEAD_DIM + column))
                    : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int item = i * THREADS + threadIdx.x, head = item / (4 * CHUNKS), chunk = item % (4 * CHUNKS);
    if (item < ITEMS) queries[chunk / 4][head][chunk % 4] = loaded[i];
  }
}

// Eight neighbouring columns of an output row, gated.
__device__ __forceinline__ void store_gated(const float values[8], const bf16* gates, bf16* out) {
  const Chunk<bf16> gate = {*reinterpret_cast<const uint4*>(gates)};
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

// Until `prepare` has made the step's queries, keys and values. `attend_tiles` starts this kernel when they are there.
__device__ __forceinline__ void wait_for_rows() {
  if (!BESIDE_TILES) wait_for_previous();
}

// Three blocks are meant for an SM90's multiprocessor; with registers for four, those of `merge` find room beside them.
extern "C" __global__ void __launch_bounds__(THREADS, IS_SPLIT ? 4 : 3)
attend(const bf16* q, const bf16* qkv, const int* selected_groups, const CACHE* kv_cache, const int* query_start_loc,
       const int* seq_lens, const int* block_table, const int* num_seqs, float* partial_out, float2* partial_sums,
       bf16* out, const uint8* is_in_tile, int num_groups, int batch_size, int max_blocks, float score_scale) {
  DYNAMIC_SHARED(Shared, everything);
  Shared& shared = *everything;
  const int token = blockIdx.x / (HKV * HEAD_TILES), unit = blockIdx.x % (HKV * HEAD_TILES);
  const int kv_head = unit / HEAD_TILES, first_head = kv_head * GROUP + unit % HEAD_TILES * MAX_HEADS;
  const int count = min(MAX_HEADS, (kv_head + 1) * GROUP - first_head);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const CACHE* cache = kv_cache + kv_head * HEAD_DIM;
  start_next();
#if BESIDE_TILES
  if (is_in_tile[token]) {
    wait_for_previous();
    return;
  }
#endif

  // `prepare` started this kernel when all before `prepare` was done. So in front of the wait all may be read but
  // the rows of the step's new tokens.
  TokenList list(selected_groups + int64(token) * num_groups, num_groups, blockIdx.y, gridDim.y);
  int groups[3];  // of the lane's entries in the next tiles
#pragma unroll
  for (int i = 0; i < 3; ++i) groups[i] = list.group(i * TILE + lane);
  const TokenPlace place = locate_token(token, query_start_loc, seq_lens, num_seqs, batch_size);
  list.start(place, block_table, max_blocks);
  CacheEntry next = list.entry(lane, groups[0]), after_next = list.entry(TILE + lane, groups[1]);
  int group = groups[2];
  uint32 exists[STAGES] = {};  // which entries the tiles in the ring have

  Accumulator total;
#pragma unroll 1
  for (int i = -STAGES; i <= 0 || exists[0] != 0; ++i) {  // the first tile may be an empty tail
    WarpTile& tile = shared.ring[(i + STAGES) % STAGES][warp];
    if (i == 0) {
      wait_for_rows();
      if (place.sequence < 0) break;
      load_queries(shared.queries, q + (int64(token) * HQ + first_head) * HEAD_DIM, count);
      __syncthreads();
    }
    if (i >= 0) {
      float tile_scores[4];
      wait_copies<2 * STAGES - 1>();
      __syncwarp();
      score(tile_scores, shared.queries, tile.keys);
      const uint32 pair = exists[0] >> (8 * warp + 2 * t);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (g + 8 * half < HEADS)
          *shared.score(i % 2, g + 8 * half, 8 * warp + 2 * t) = {
              pair & 1 ? tile_scores[2 * half] * score_scale : negative_infinity(),
              pair & 2 ? tile_scores[2 * half + 1] * score_scale : negative_infinity()};
      wait_copies<2 * STAGES - 2>();
      __syncthreads();  // one a tile: a buffer is written again behind the barrier of the tile between
      uint32 weights[STEPS][4];
      total.weigh(shared, i % 2, weights);
      total.add(weights, tile);
      __syncwarp();
    }
#pragma unroll
    for (int j = 0; j < STAGES - 1; ++j) exists[j] = exists[j + 1];
    exists[STAGES - 1] = __ballot_sync(FULL_MASK, next.token >= 0);
    if (exists[STAGES - 1] != 0) {
      if (__any_sync(FULL_MASK, next.token >= place.context)) wait_for_rows();
      tile.copy_keys(cache, next.row());
      commit_copies();
      tile.copy_values(cache, next.row());
    } else {
      commit_copies();
    }
    commit_copies();
    next = after_next;
    after_next = list.entry((i + STAGES + 2) * TILE + lane, group);
    group = list.group((i + STAGES + 3) * TILE + lane);
  }
  if (BESIDE_TILES) wait_for_previous();
  if (place.sequence < 0) return;
  store(total, int64(token) * HQ + first_head, count, partial_out, partial_sums,
        qkv + int64(token) * (2 * HQ + 2 * HKV) * HEAD_DIM + (2 * first_head + 1) * HEAD_DIM, out);
}
