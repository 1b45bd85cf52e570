// Attention of a tile of neighbouring rows and the query heads of one key head over the union of what the rows read: a
// warp has 16 of the tile's queries times heads, with their outputs and queries in registers; keys and values pass
// through shared memory, 32 tokens at a time, which all warps share. Each query masks what it did not select.
// Macros: HEAD_DIM (a multiple of 16, up to 256), HQ, HKV, RATIO, PAGE, WARPS, QUERIES, MAX_ENTRIES, CACHE: bf16 or
// e4m3, IS_FP8.
#include "qsa_attention/tiles.cuh"

constexpr int THREADS = WARPS * WARP, ROWS = 16;  // of a warp
constexpr int GROUP = HQ / HKV;
constexpr int KEYS = WARP;                        // of a chunk, one a lane
constexpr int STEPS = HEAD_DIM / 16;              // of k in the product with keys
constexpr int PIECES = ceil_div(STEPS * 2, 8) * 8;  // of 16 bytes, in a row of keys or values in shared memory
constexpr int BLOCKS = KEYS / 8;                  // of eight keys
constexpr float LAG = 8.f;  // by which scores times `score_scale`, powers of two, may exceed the reference of the softmax
static_assert(GROUP * QUERIES <= ROWS * WARPS && HEAD_DIM % 16 == 0 && HEAD_DIM <= 256 && KEYS % UNIT == 0, "see launch.py");

constexpr bool IS_WIDE = sizeof(CACHE) == 2;  // FP8 is copied as it is, and widened in shared memory
constexpr int STAGES = IS_WIDE ? 3 : 2;
constexpr int COPY_PIECES = HEAD_DIM * sizeof(CACHE) / 16;  // of a key
constexpr int COPIES = ceil_div(KEYS * COPY_PIECES, THREADS);

using Rows = uint4[2][KEYS][PIECES];        // keys and values of a chunk in bf16, pieces in the order of `swizzled`
using Codes = uint4[2][KEYS][COPY_PIECES];  // the same in FP8
struct Shared {
  Tile tile;
  int2 readers[WARPS * ROWS];  // of each row the query in the tile and the last token that it may read, -1: none
  Rows rows[STAGES];
  uint32 entries[4][KEYS];  // of each key of four chunks
#if IS_FP8
  Codes codes[2];
#endif
};

// Eight rows of the same piece are in different banks.
__device__ __forceinline__ int swizzled(int row, int piece) { return piece ^ (row & 7); }

// Finds the keys of a chunk, one a lane: an entry, then its page. What does not change is read from memory each time,
// and takes no registers.
struct Finder {
  const Tile* tile;
  const uint32* all_entries;
  const int* block_table;
  int max_blocks;

  __device__ __forceinline__ uint32 entry(int chunk) const {
    const int i = chunk * (KEYS / UNIT) + threadIdx.x % WARP / UNIT;
    if (i >= tile->num_entries) return 0;
    return RATIO == 0 ? make_entry(i, ALL_QUERIES) : __ldcg(all_entries + int64(blockIdx.x / HKV) * MAX_ENTRIES + i);
  }
  // Entries are 0 where there are none: a token that no query reads.
  __device__ __forceinline__ int token(uint32 entry) const {
    const int token = group_of(entry) * UNIT + threadIdx.x % WARP % UNIT;
    return (entry & ALL_QUERIES) != 0 && token <= tile->last_position() ? token : -1;
  }
  __device__ __forceinline__ int page(uint32 entry) const {
    const int at = token(entry);
    return at < 0 ? 0 : block_table[int64(tile->sequence) * max_blocks + at / PAGE];
  }
  // The row of the cache that holds the key; -1: none.
  __device__ __forceinline__ int row(uint32 entry, int page) const {
    const int at = token(entry);
    return at < 0 ? -1 : page * 2 * PAGE + at % PAGE;
  }
};

// Which 16 bytes of a chunk's keys a thread copies, COPIES times.
struct CopyItem {
  int key, piece;
  bool exists;

  __device__ __forceinline__ CopyItem(int i, uint32 thread) {
    if constexpr (THREADS % COPY_PIECES == 0 && KEYS * COPY_PIECES % THREADS == 0) {  // a piece, and keys of a fixed distance
      key = i * (THREADS / COPY_PIECES) + thread / COPY_PIECES, piece = thread % COPY_PIECES, exists = true;
    } else {
      const uint32 item = i * THREADS + thread;
      key = item / COPY_PIECES % KEYS, piece = item % COPY_PIECES, exists = item < KEYS * COPY_PIECES;
    }
  }
};

// Starts the copies of a chunk whose lanes' rows are given: zeros for what is not there, so that no NaN gets in through 0 * NaN.
template <int WIDTH>
__device__ __forceinline__ void copy_chunk(uint4 (*to)[KEYS][WIDTH], const CACHE* cache, int row) {
  const uint32 thread = made_anew(threadIdx.x);
#pragma unroll
  for (int i = 0; i < COPIES; ++i) {
    const CopyItem item(i, thread);
    const int from = __shfl_sync(FULL_MASK, row, item.key);
    if (!item.exists) continue;
    const CACHE* key = cache + int64(max(from, 0)) * (HKV * HEAD_DIM) + item.piece * int(16 / sizeof(CACHE));
    const int place = IS_WIDE ? swizzled(item.key, item.piece) : item.piece;
    copy_async_16(&to[0][item.key][place], key, from >= 0);
    copy_async_16(&to[1][item.key][place], key + PAGE * HKV * HEAD_DIM, from >= 0);
  }
}

// FP8 in shared memory to bf16, each thread what it copied itself.
__device__ __forceinline__ void widen(const Codes& codes, Rows& rows) {
  const uint32 thread = made_anew(threadIdx.x);
#pragma unroll
  for (int i = 0; i < COPIES; ++i) {
    const CopyItem item(i, thread);
    if (!item.exists) continue;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const uint4 bytes = codes[side][item.key][item.piece];
      const uint32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
      uint32 wide[8];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        wide[2 * j] = e4m3_pair_to_bf16(__byte_perm(words[j], 0, 0x1100));
        wide[2 * j + 1] = e4m3_pair_to_bf16(__byte_perm(words[j], 0, 0x3322));
      }
      uint4* to = rows[side][item.key];
      to[swizzled(item.key, 2 * item.piece)] = {wide[0], wide[1], wide[2], wide[3]};
      to[swizzled(item.key, 2 * item.piece + 1)] = {wide[4], wide[5], wide[6], wide[7]};
    }
  }
}

// What a warp has of the tile: rows g and g + 8 of its 16 (`half` 0 and 1), a query and a head each.
struct WarpRows {
  uint32 queries[STEPS][4];  // A operands
  float out[2 * STEPS][4];
  float reference[2], sum[2];  // of the softmax, in units of the scores; the sum is of this lane's keys

  static __device__ __forceinline__ int row(int half) {
    const int thread = made_anew(threadIdx.x);
    return thread / WARP * ROWS + thread % WARP / 4 + 8 * half;
  }

  __device__ __forceinline__ void start(const Tile& tile, const bf16* q, int kv_head) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = WarpRows::row(half), query = row / GROUP;
      const int64 token = tile.first_row + (query < tile.count ? query : 0);
      const bf16* from = q + (token * HQ + kv_head * GROUP + row % GROUP) * HEAD_DIM + 2 * t;
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          queries[step][half + 2 * i] = __ldcg(reinterpret_cast<const uint32*>(from + 16 * step + 8 * i));
      reference[half] = negative_infinity(), sum[half] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i][j] = 0.f;
  }

  // scores[b]: of keys 8 b + 2t, + 1, as `mma_16x8x16` leaves them.
  __device__ __forceinline__ void score(const uint4 (*keys)[PIECES], float scores[BLOCKS][4]) const {
    const int lane = made_anew(threadIdx.x % WARP), row = lane / 16 * 8 + lane % 8, side = lane / 8 % 2;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[b][i] = 0.f;
    // Steps whose pieces are 8 apart share an address but for a constant.
#pragma unroll
    for (int first = 0; first < min(STEPS, 4); ++first) {
      const uint4* from = &keys[row][swizzled(row, 2 * first + side)];
#pragma unroll
      for (int step = first; step < STEPS; step += 4)
#pragma unroll
        for (int pair = 0; pair < BLOCKS / 2; ++pair) {
          uint32 b[4];
          load_matrices(b, from + 16 * pair * PIECES + 2 * (step - first));
          mma_16x8x16(scores[2 * pair], queries[step], b);
          mma_16x8x16(scores[2 * pair + 1], queries[step], b + 2);
        }
    }
  }

  // Scores become weights; `entries` are those of the keys.
  __device__ __forceinline__ void weigh(float scores[BLOCKS][4], const uint32* entries, const int2* readers,
                                        float score_scale) {
    const int t = threadIdx.x % 4;
    const int2 reader[2] = {readers[row(0)], readers[row(1)]};
    float best[2] = {negative_infinity(), negative_infinity()};
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      const uint32 entry = entries[8 * b + 2 * t];
      const int token = group_of(entry) * UNIT + (8 * b + 2 * t) % UNIT;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int last = entry >> reader[half].x & 1 ? reader[half].y : -1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[b][2 * half + i];
          score = token + i <= last ? score : negative_infinity();
          best[half] = fmaxf(best[half], score);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      best[half] = fmaxf(best[half], __shfl_xor_sync(FULL_MASK, best[half], 1));
      best[half] = fmaxf(best[half], __shfl_xor_sync(FULL_MASK, best[half], 2));
    }
    bool lags = false;  // false for -inf - -inf
#pragma unroll
    for (int half = 0; half < 2; ++half) lags |= (best[half] - reference[half]) * score_scale > LAG;
    if (__any_sync(FULL_MASK, lags)) raise_references(best, score_scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float base = reference[half] == negative_infinity() ? 0.f : reference[half] * score_scale;
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int i = 0; i < 2; ++i) scores[b][2 * half + i] = exp2_approx(scores[b][2 * half + i] * score_scale - base);
    }
  }

  __device__ __forceinline__ void raise_references(const float best[2], float score_scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float raised = fmaxf(reference[half], best[half]);
      const float correction = reference[half] == negative_infinity() ? 0.f : exp2_approx((reference[half] - raised) * score_scale);
      reference[half] = raised;
      sum[half] *= correction;
#pragma unroll
      for (int i = 0; i < 2 * STEPS; ++i) out[i][2 * half] *= correction, out[i][2 * half + 1] *= correction;
    }
  }

  __device__ __forceinline__ void add(const float weights[BLOCKS][4], const uint4 (*values)[PIECES]) {
    const int lane = made_anew(threadIdx.x % WARP), row = lane % 16, side = lane / 16;
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
      uint32 a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int block = 2 * step + i / 2, half = i % 2;
        a[i] = pack_bf16(weights[block][2 * half], weights[block][2 * half + 1]);
        sum[half] += low_bf16(a[i]) + high_bf16(a[i]);  // of the rounded weights, as the product has them
      }
#pragma unroll
      for (int first = 0; first < min(STEPS, 4); ++first) {
        const uint4* from = &values[row][swizzled(row, 2 * first + side)] + 16 * step * PIECES;
#pragma unroll
        for (int pair = first; pair < STEPS; pair += 4) {
          uint32 b[4];
          load_matrices_transposed(b, from + 2 * (pair - first));
          mma_16x8x16(out[2 * pair], a, b);
          mma_16x8x16(out[2 * pair + 1], a, b + 2);
        }
      }
    }
  }

  __device__ __forceinline__ void store(const Tile& tile, const bf16* qkv, bf16* to, int kv_head) const {
    const int t = made_anew(threadIdx.x) % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[half];
      total += __shfl_xor_sync(FULL_MASK, total, 1);
      total += __shfl_xor_sync(FULL_MASK, total, 2);
      const int row = WarpRows::row(half), query = row / GROUP, head = kv_head * GROUP + row % GROUP;
      if (query >= tile.count) continue;
      const float scale = total > 0.f ? 1.f / total : 0.f;
      const int64 token = tile.first_row + query;
      const bf16* gates = qkv + (token * (2 * HQ + 2 * HKV) + 2 * head + 1) * HEAD_DIM + 2 * t;
      bf16* at = to + (token * HQ + head) * HEAD_DIM + 2 * t;
#pragma unroll
      for (int i = 0; i < 2 * STEPS; ++i) {
        const uint32 gate = __ldcg(reinterpret_cast<const uint32*>(gates + 8 * i));
        *reinterpret_cast<uint32*>(at + 8 * i) = pack_bf16(out[i][2 * half] * scale * sigmoid(low_bf16(gate)),
                                                           out[i][2 * half + 1] * scale * sigmoid(high_bf16(gate)));
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPS)
attend_tiles(const bf16* q, const bf16* qkv, const CACHE* kv_cache, const int* block_table, const Tile* tiles,
             const uint32* all_entries, bf16* out, int max_blocks, float score_scale) {
  DYNAMIC_SHARED(Shared, shared);
  wait_for_previous();
  start_next();
  const int kv_head = blockIdx.x % HKV;
  if (threadIdx.x == 0) shared->tile = tiles[blockIdx.x / HKV];
  __syncthreads();
  const Tile& tile = shared->tile;
  if (tile.num_entries == 0) return;
  if (threadIdx.x < WARPS * ROWS) {
    const int query = threadIdx.x / GROUP;
    shared->readers[threadIdx.x] = {min(query, QUERIES - 1), query < tile.count ? tile.position + query : -1};
  }
  const CACHE* cache = kv_cache + kv_head * HEAD_DIM;
  const Finder finder = {&tile, all_entries, block_table, max_blocks};
  auto copy = [&](int chunk, int row) {
#if IS_FP8
    copy_chunk(shared->codes[chunk % 2], cache, row);
#else
    copy_chunk(shared->rows[chunk % STAGES], cache, row);
#endif
    commit_copies();
  };
  auto find_page = [&](int chunk, uint32 entry) {
    if (threadIdx.x < KEYS) shared->entries[chunk % 4][threadIdx.x] = entry;
    return finder.page(entry);
  };
  const uint32 entries[3] = {finder.entry(0), finder.entry(1), finder.entry(2)};
  int page = find_page(2, entries[2]);  // of the chunk to be copied next
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk) copy(chunk, finder.row(entries[chunk], find_page(chunk, entries[chunk])));
  WarpRows rows;
  rows.start(tile, q, kv_head);
#pragma unroll 1
  for (int chunk = 0; chunk * (KEYS / UNIT) < tile.num_entries; ++chunk) {
    wait_copies<1>();
#if IS_FP8
    widen(shared->codes[chunk % 2], shared->rows[chunk % STAGES]);
#endif
    __syncthreads();
    copy(chunk + 2, finder.row(shared->entries[(chunk + 2) % 4][threadIdx.x % WARP], page));
    const uint32 entry = finder.entry(chunk + 3);
    const Rows& now = shared->rows[chunk % STAGES];
    const bool has_rows = int(threadIdx.x) / WARP * ROWS < tile.count * GROUP;
    float scores[BLOCKS][4];
    if (has_rows) rows.score(now[0], scores);
    page = find_page(chunk + 3, entry);
    if (!has_rows) continue;
    rows.weigh(scores, shared->entries[chunk % 4], shared->readers, score_scale);
    rows.add(scores, now[1]);
  }
  rows.store(tile, qkv, out, made_anew(kv_head));
}
