// Index scores of many rows: blocks take tiles of 64 rows of one sequence, each with a part of its groups. A warp holds
// the queries of eight rows in registers; keys pass through shared memory, which all warps share. A row's scores are
// left as bits, in the order of their values, and behind them the best one of every 16 groups.
// Macros: HEADS (up to 4), DIM (a multiple of 16), RATIO, PAGE (groups of a page), COUNT (groups to select).
#include "qsa_select/turn.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP, ROWS = 8;  // of a warp
constexpr int GROUPS = 16;                                  // of an item, which share a best score
constexpr int ITEMS = 4, CHUNK = ITEMS * GROUPS;            // of a stage
constexpr int STAGES = 3;
constexpr int STEPS = DIM / 16, PIECES = ceil_div(DIM / 8, 8) * 8;
constexpr int HEAD_PAIRS = ceil_div(HEADS, 2);
static_assert(HEADS <= 4 && DIM % 16 == 0, "see launch.py");

struct RowTile {
  int sequence, first_row, count, position;

  __device__ __forceinline__ int visible(int row) const { return (position + row + 1) / RATIO; }
};

// Tile `index` of those of a turn, in the order of their sequences; sequence -1: none. `total` becomes their number.
__device__ __forceinline__ RowTile locate_tile(int index, const Turn& turn, const int* query_start_loc,
                                               const int* seq_lens, const int* num_seqs, int batch_size, int& total) {
  constexpr int TILE = ROWS * WARPS;
  const int lane = threadIdx.x % WARP, real = *num_seqs;
  RowTile tile = {-1, 0, 0, 0};
  total = 0;
  for (int first = 0; first < batch_size; first += WARP) {
    const int sequence = first + lane;
    const bool exists = sequence < batch_size;
    const int begin = exists ? query_start_loc[sequence] : 0, end = exists ? query_start_loc[sequence + 1] : 0;
    const int length = exists ? seq_lens[sequence] : 0;
    const int start = max(begin, turn.first_row);
    const int rows = sequence < real ? max(min(end, turn.end_row()) - start, 0) : 0, tiles = ceil_div(rows, TILE);
    const int sum = warp_prefix(tiles);
    const int own = total + sum - tiles, skipped = (index - own) * TILE;
    const uint32 owners = __ballot_sync(FULL_MASK, own <= index && index < own + tiles);
    total += __shfl_sync(FULL_MASK, sum, WARP - 1);
    if (owners == 0) continue;
    const int owner = __ffs(int(owners)) - 1;
    tile.sequence = first + owner;
    tile.first_row = __shfl_sync(FULL_MASK, start + skipped, owner);
    tile.count = __shfl_sync(FULL_MASK, min(rows - skipped, TILE), owner);
    tile.position = __shfl_sync(FULL_MASK, length - (end - start) + skipped, owner);
  }
  return tile;
}

// Into how many parts the groups of each tile go: one round of blocks, or for many tiles two, which come out more even.
__device__ __forceinline__ int parts_of_tiles(int tiles, int blocks) {
  return max(1, (16 * tiles <= blocks ? blocks / 2 : blocks) / max(tiles, 1));
}

// Groups of an item are in the order in which a lane has four of them side by side: column c of product j is group
// 4 (c / 2) + 2 j + c % 2. Rows of a column's eight groups have different banks.
__device__ __forceinline__ int group_of_column(int product, int column) { return column / 2 * 4 + 2 * product + column % 2; }
__device__ __forceinline__ int swizzled(int group, int piece) { return piece ^ ((group >> 1 & 6) | (group & 1)); }

using Keys = uint4[CHUNK][PIECES];

__device__ __forceinline__ void copy_keys(Keys& to, const bf16* cache, const int* pages, uint32 first_group,
                                          uint32 max_blocks) {
  // Rows of a thread are a multiple of 16 apart, which leaves their places in memory a constant apart.
  constexpr uint32 PIECES_OF_ROW = DIM / 8, ROWS_AT_ONCE = THREADS / PIECES_OF_ROW / 16 * 16;
  const uint32 thread = made_anew(threadIdx.x), row = thread / PIECES_OF_ROW, piece = thread % PIECES_OF_ROW;
  uint4* place = &to[row % CHUNK][swizzled(row, piece)];
#pragma unroll
  for (uint32 i = 0; i < CHUNK; i += ROWS_AT_ONCE) {
    if (THREADS % (ROWS_AT_ONCE * PIECES_OF_ROW) != 0 && row >= ROWS_AT_ONCE) continue;
    if (CHUNK % ROWS_AT_ONCE != 0 && i + row >= CHUNK) continue;
    const uint32 group = first_group + i + row;
    const int page = max(pages[min(group / PAGE, max_blocks - 1)], 0);  // behind the last group: any
    copy_async_16(place + i * PIECES, cache + (int64(page) * PAGE + group % PAGE) * DIM + piece * 8);
  }
}

// Row g of a warp's eight: row g of product p is its head 2p, row g + 8 the next.
struct Queries {
  uint32 operands[STEPS][HEAD_PAIRS][4];

  __device__ __forceinline__ void load(const bf16* index_q, const RowTile& tile) {
    const int row = threadIdx.x / WARP * ROWS + threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const bf16* from = index_q + int64(tile.first_row + min(row, tile.count - 1)) * HEADS * DIM + 2 * t;
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int i = 0; i < 4 * HEAD_PAIRS; ++i) {
        const int head = i / 4 * 2 + i % 2;
        operands[step][i / 4][i % 4] =
            head < HEADS ? __ldcg(reinterpret_cast<const uint32*>(from + head * DIM + step * 16 + i % 4 / 2 * 8)) : 0;
      }
  }

  // Scores of row g for groups 4t to 4t + 3 of an item, as bits in the order of their values: at least zero, no NaN.
  __device__ __forceinline__ uint4 score(const uint4 (*keys)[PIECES]) const {
    const int lane = made_anew(threadIdx.x) % WARP;
    float sums[2][HEAD_PAIRS][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; step += 2)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int group = group_of_column(j, lane % 8);
        uint32 b[4];  // of this step and the next
        load_matrices(b, &keys[group][swizzled(group, min(2 * step + lane / 8, 2 * STEPS - 1))]);
#pragma unroll
        for (int pair = 0; pair < HEAD_PAIRS; ++pair) {
          mma_16x8x16(sums[j][pair], operands[step][pair], b);
          if (step + 1 < STEPS) mma_16x8x16(sums[j][pair], operands[step + 1 < STEPS ? step + 1 : 0][pair], b + 2);
        }
      }
    uint32 bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float heads[HEAD_PAIRS];
#pragma unroll
      for (int pair = 0; pair < HEAD_PAIRS; ++pair)
        heads[pair] = fmaxf(sums[i / 2][pair][i % 2], 0.f) + fmaxf(sums[i / 2][pair][i % 2 + 2], 0.f);
      const float total = HEAD_PAIRS == 1 ? heads[0] : heads[0] + heads[HEAD_PAIRS - 1];
      bits[i] = __float_as_uint(total) & 0x7fffffffu;
    }
    return {bits[0], bits[1], bits[2], bits[3]};
  }
};

// What a block works on; in shared memory, to keep registers for the products.
struct Work {
  Turn turn;
  RowTile tile;
  int begin, end;  // chunks of groups
};

// The part of a tile that is this block's; false if there is none.
__device__ __forceinline__ bool find_work(const Turn& turn, const int* query_start_loc, const int* seq_lens,
                                          const int* num_seqs, int batch_size, Work& work) {
  int tiles = 0, parts = 1, index = blockIdx.x;
  RowTile tile;
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {  // the first one counts the tiles
    tile = locate_tile(index, turn, query_start_loc, seq_lens, num_seqs, batch_size, tiles);
    parts = parts_of_tiles(tiles, gridDim.x);
    if (int(blockIdx.x) >= tiles * parts) return false;
    index = blockIdx.x % tiles;
  }
  const int groups = tile.visible(tile.count - 1), chunks = groups > COUNT ? ceil_div(groups, CHUNK) : 0;
  const int part = blockIdx.x / tiles;
  if (threadIdx.x == 0) work = {turn, tile, chunks * part / parts, chunks * (part + 1) / parts};
  __syncthreads();
  return true;
}

__device__ __forceinline__ void score_part(const Work& work, const bf16* index_q, const bf16* index_k_cache,
                                           const int* block_table, uint32* all_scores, int max_blocks, Keys* stages) {
  auto copy = [&](int chunk) {
    if (chunk < work.end)
      copy_keys(stages[chunk % STAGES], index_k_cache, block_table + int64(work.tile.sequence) * max_blocks,
                chunk * CHUNK, max_blocks);
    commit_copies();
  };
  if (work.begin == work.end) return;
  copy(work.begin);
  copy(work.begin + 1);
  Queries queries;
  queries.load(index_q, work.tile);
#pragma unroll 1
  for (int chunk = work.begin; chunk < work.end; ++chunk) {
    wait_copies<1>();
    __syncthreads();
    copy(chunk + 2);
    const int thread = made_anew(threadIdx.x), row = thread / WARP * ROWS + thread % WARP / 4, t = thread % 4;
    const int visible = row < work.tile.count ? work.tile.visible(row) : -1;
    uint32* scores = all_scores + int64(work.tile.first_row - work.turn.first_row + row) * work.turn.row_stride;
    uint32 best[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item = chunk * ITEMS + i, group = item * GROUPS + 4 * t;
      const uint4 bits = queries.score(&stages[chunk % STAGES][i * GROUPS]);
      best[i] = max(max(group < visible ? bits.x : 0, group + 1 < visible ? bits.y : 0),
                    max(group + 2 < visible ? bits.z : 0, group + 3 < visible ? bits.w : 0));
      best[i] = max(best[i], __shfl_xor_sync(FULL_MASK, best[i], 1));
      best[i] = max(best[i], __shfl_xor_sync(FULL_MASK, best[i], 2));
      if (visible >= 0 && item < work.turn.max_items) *reinterpret_cast<uint4*>(scores + group) = bits;
    }
    if (visible >= 0 && t == 0)
      *reinterpret_cast<uint4*>(scores + work.turn.max_items * GROUPS + chunk * ITEMS) = {best[0], best[1], best[2], best[3]};
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
score_tiles(const bf16* index_q, const bf16* index_k_cache, const int* query_start_loc, const int* seq_lens,
            const int* block_table, const int* num_seqs, uint32* scores, int index, int num_tokens, int capacity,
            int max_blocks, int batch_size) {
  DYNAMIC_SHARED(Keys, stages);
  __shared__ Work work;
  wait_for_previous();
  start_next();
  const Turn turn = find_turn(index, num_tokens, capacity, seq_lens, num_seqs, batch_size);
  if (find_work(turn, query_start_loc, seq_lens, num_seqs, batch_size, work))
    score_part(work, index_q, index_k_cache, block_table, scores, max_blocks, stages);
}
