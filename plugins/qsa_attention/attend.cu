// Attention of one query row and the (up to 16) query heads of one key head over one of gridDim.y parts of the row's list
// of tokens, on tensor cores. Tiles of the cache are copied ahead into a ring in shared memory, each lane what it needs
// itself, so that only scores pass between warps: a warp computes the scores of 8 of a tile's 32 tokens for all heads, and
// then 64 columns of the output over all tokens.
// Macros: HEAD_DIM (a multiple of 8), HQ, HKV, RATIO, PAGE, CACHE: bf16 or e4m3, HALF, MROPE_HEIGHT, MROPE_WIDTH (see
// heads.cuh), STAGES (tiles of the ring), IS_SPLIT: whether `merge` follows, PREPARED: whether `prepare` has made the
// queries and written the cache. If not, each block norms and rotates its queries and the keys of the step's new tokens
// itself, and the last block of a row and key head writes the row's key and value to the cache.
#include "qsa_attention/heads.cuh"
#include "qsa_attention/tile.cuh"

constexpr int GROUP = HQ / HKV, MAX_HEADS = 16, HEADS = GROUP < MAX_HEADS ? GROUP : MAX_HEADS;
constexpr int HEAD_TILES = ceil_div(GROUP, MAX_HEADS);
constexpr int64 QKV_WIDTH = int64(2 * HQ + 2 * HKV) * HEAD_DIM;

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
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j) {  // both sides agree on which columns a lane has; their order is no matter to a sum
    const uint4 upper = q[j][min(g, HEADS - 1)][t], lower = q[j][min(g + 8, HEADS - 1)][t];
    const Piece key = keys[j][lane];
    const uint32 a0[4] = {upper.x, lower.x, upper.y, lower.y}, a1[4] = {upper.z, lower.z, upper.w, lower.w};
    const uint32 b0[2] = {key.columns(0), key.columns(1)}, b1[2] = {key.columns(2), key.columns(3)};
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

// What a block needs to make queries and new keys.
struct NewTokens {
  const bf16* qkv;
  const float *k_gain, *inv_freq;
  const int* positions;
  int num_tokens, token, kv_head;  // `token`: the row of the query
  float eps;

  // The key of row `row`, normed and rotated. A whole warp.
  __device__ __forceinline__ void make_key(HeadColumns& key, int row) const {
    HeadColumns gain;
    Rotation rotation;
    key.load(qkv + row * QKV_WIDTH + int64(2 * HQ + kv_head) * HEAD_DIM);
    gain.load(k_gain);
    rotation.load_frequencies(inv_freq);
    rotation.load_positions(positions, num_tokens, row);
    rotation.turn();
    norm_and_rotate(key, gain, rotation, eps);
  }
  __device__ __forceinline__ const bf16* value(int row) const {
    return qkv + row * QKV_WIDTH + int64(2 * HQ + HKV + kv_head) * HEAD_DIM;
  }

  // Puts the entries in `mask` into the tile: row `first + entry's token` of the step, `entry_token` of this lane's entry.
  __device__ __forceinline__ void put(WarpTile& tile, uint32 mask, int first, int entry_token) const {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    __syncwarp();  // the tile before may have been read by other lanes
#pragma unroll 1
    for (; mask != 0; mask &= mask - 1) {
      const int entry = __ffs(int(mask)) - 1, row = first + __shfl_sync(FULL_MASK, entry_token, entry);
      if (entry / 8 == warp) {
        HeadColumns key;
        make_key(key, row);
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
          const int column = column_of_lane(e);  // zeros behind HEAD_DIM
          if (column < 32 * CHUNKS) store_eight(tile.key(entry, column / 8), key.values[e]);
        }
      }
#pragma unroll
      for (int s = 0; s < SLABS; ++s) {
        const int column = 64 * (s * WARPS + warp) + 8 * lane;
        float eight[8];
        if (lane >= 8 || column >= HEAD_DIM) continue;
        load_eight(eight, value(row) + column);
        store_eight(tile.value(entry, s, lane), eight);
      }
    }
  }
  // Writes the key and the value of the query's row to the cache, at `at`.
  __device__ __forceinline__ void write(CACHE* at) const {
    HeadColumns columns;
    if (threadIdx.x / WARP == 0) {
      make_key(columns, token);
      columns.store(at);
    } else if (threadIdx.x / WARP == 1) {
      columns.load(value(token));
      columns.store(at + int64(PAGE) * (HKV * HEAD_DIM));
    }
  }
};

// Eight neighbouring columns of an output row, gated.
__device__ __forceinline__ void store_gated(float values[8], const bf16* gates, bf16* out) {
  float gate[8];
  load_eight(gate, gates);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] *= sigmoid(gate[i]);
  store_eight(out, values);
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

extern "C" __global__ void __launch_bounds__(THREADS, 4)
attend(const bf16* qkv, const bf16* q, const float* q_gain, const float* k_gain, const int* positions,
       const float* inv_freq, const int* selected_groups, CACHE* kv_cache, const int* query_start_loc,
       const int* seq_lens, const int* block_table, const int* num_seqs, float* partial_out, float2* partial_sums,
       bf16* out, int num_tokens, int num_groups, int batch_size, int max_blocks, float eps, float score_scale) {
  DYNAMIC_SHARED(Shared, everything);
  Shared& shared = *everything;
  const int token = blockIdx.x / (HKV * HEAD_TILES), unit = blockIdx.x % (HKV * HEAD_TILES);
  const int kv_head = unit / HEAD_TILES, first_head = kv_head * GROUP + unit % HEAD_TILES * MAX_HEADS;
  const int count = min(MAX_HEADS, (kv_head + 1) * GROUP - first_head);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  CACHE* cache = kv_cache + kv_head * HEAD_DIM;
  constexpr int ROUNDS = ceil_div(HEADS, WARPS);  // of a warp over its heads

  HeadColumns gain;
  PackedHead packed[ROUNDS];
  Rotation rotation;
  if (!PREPARED) gain.load(q_gain), rotation.load_frequencies(inv_freq);
  wait_for_previous();
  start_next();
  TokenList list(selected_groups + int64(token) * num_groups, num_groups, blockIdx.y, gridDim.y);
  int groups[STAGES + 2];  // of the lane's entries in the first tiles
#pragma unroll
  for (int i = 0; i < STAGES + 2; ++i) groups[i] = list.group(i * TILE + lane);
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int head = first_head + min(i * WARPS + warp, count - 1);
    packed[i].load(PREPARED ? q + (int64(token) * HQ + head) * HEAD_DIM : qkv + token * QKV_WIDTH + 2 * head * HEAD_DIM);
  }
  if (!PREPARED) rotation.load_positions(positions, num_tokens, token);
  const TokenPlace place = locate_token(token, query_start_loc, seq_lens, num_seqs, batch_size);
  if (place.sequence < 0) return;
  list.start(place, block_table, max_blocks);

  // Tokens from `first_new` on are not read from the cache: other blocks may be writing them.
  const int first_new = PREPARED ? place.position + 1 : place.context;
  const NewTokens new_tokens = {qkv, k_gain, inv_freq, positions, num_tokens, token, kv_head, eps};
  const auto source = [&](const CacheEntry& entry) { return entry.token >= first_new ? NEW : entry.row(); };
  CacheEntry ahead[STAGES + 1];  // of the tiles in the ring and, last, of the one to be copied next
#pragma unroll
  for (int i = 0; i < STAGES + 1; ++i) ahead[i] = list.entry(i * TILE + lane, groups[i]);
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    WarpTile& tile = shared.ring[i][warp];
    const int row = source(ahead[i]);
    tile.copy_keys(cache, row);
    commit_copies();
    tile.copy_values(cache, row);
    commit_copies();
  }
  const auto put_new = [&](WarpTile& tile, const CacheEntry& entry) {
    const uint32 mask = PREPARED ? 0 : __ballot_sync(FULL_MASK, entry.token >= first_new);
    if (mask != 0) new_tokens.put(tile, mask, token - place.position, entry.token);
  };
  if (!PREPARED) rotation.turn();
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    HeadColumns columns = packed[i].unpack();
    if (!PREPARED) norm_and_rotate(columns, gain, rotation, eps);
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
      const int chunk = column_of_lane(e) / 8, head = i * WARPS + warp;
      if (head < HEADS && chunk < 4 * CHUNKS)
        store_eight(reinterpret_cast<bf16*>(&shared.queries[chunk / 4][head][chunk % 4]), columns.values[e]);
    }
  }
#pragma unroll
  for (int i = 0; i < STAGES; ++i) put_new(shared.ring[i][warp], ahead[i]);
  if (!PREPARED && blockIdx.y == gridDim.y - 1 && unit % HEAD_TILES == 0) {
    const int page = block_table[int64(place.sequence) * max_blocks + place.position / PAGE];
    new_tokens.write(cache + (int64(page) * 2 * PAGE + place.position % PAGE) * (HKV * HEAD_DIM));
  }
  __syncthreads();

  Accumulator total;
  int group = groups[STAGES + 1];  // of the entry behind those in `ahead`
#pragma unroll 1
  for (int i = 0; true; ++i) {
    WarpTile& tile = shared.ring[i % STAGES][warp];
    float tile_scores[4];
    wait_copies<2 * STAGES - 1>();
    __syncwarp();
    score(tile_scores, shared.queries, tile.keys);
    const uint32 exists = __ballot_sync(FULL_MASK, ahead[0].token >= 0) >> (8 * warp + 2 * t);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (g + 8 * half < HEADS)
        *shared.score(i % 2, g + 8 * half, 8 * warp + 2 * t) = {
            exists & 1 ? tile_scores[2 * half] * score_scale : negative_infinity(),
            exists & 2 ? tile_scores[2 * half + 1] * score_scale : negative_infinity()};
    const int row = source(ahead[STAGES]);
    const bool has_more = __any_sync(FULL_MASK, row != NONE);
    if (has_more) tile.copy_keys(cache, row);
    commit_copies();
    __syncthreads();  // one a tile: a buffer is written again behind the barrier of the tile between
    uint32 weights[STEPS][4];
    total.weigh(shared, i % 2, weights);
    wait_copies<2 * STAGES - 1>();
    __syncwarp();
    total.add(weights, tile);
    __syncwarp();
    if (has_more) tile.copy_values(cache, row);
    commit_copies();
    if (has_more) put_new(tile, ahead[STAGES]);
#pragma unroll
    for (int j = 0; j < STAGES; ++j) ahead[j] = ahead[j + 1];
    if (!__any_sync(FULL_MASK, ahead[0].token >= 0)) break;
    ahead[STAGES] = list.entry((i + STAGES + 1) * TILE + lane, group);
    group = list.group((i + STAGES + 2) * TILE + lane);
  }
  wait_copies<0>();
  store(total, int64(token) * HQ + first_head, count, partial_out, partial_sums,
        qkv + int64(token) * QKV_WIDTH + (2 * first_head + 1) * HEAD_DIM, out);
}
