// Index scores on tensor cores.
#include "qsa_select/score.cuh"

// Tensor cores: keys are the rows of the product and heads of query rows its columns. A lane reads 16 bytes of a key
// at a time, which serve as both halves of two steps of k; queries are laid out in the same order, so sums are over
// the same k.
struct TensorCores {
  static constexpr int COLUMNS = HEADS <= 2 ? 2 : HEADS <= 4 ? 4 : 8;  // of a row, the last ones zero
  static constexpr int LANES = COLUMNS / 2;                            // that hold sums of the same row
  static constexpr int CHUNKS = ceil_div(DIM, 32);
  static constexpr int FRAGMENTS = TILE_ROWS * COLUMNS / 8 * CHUNKS * WARP;
  static_assert(HEADS <= 8 && DIM % 8 == 0 && TILE_ROWS * COLUMNS % 8 == 0, "see launch.py");

  struct Tile {
    int low_page, high_page;
    uint4 low[CHUNKS], high[CHUNKS];  // of groups lane / 4 and lane / 4 + 8
  };

  __device__ static void find(Tile& tile, const Keys& keys, int item) {
    const int group = item * GROUPS + threadIdx.x % WARP / 4;
    tile.low_page = keys.page_of(group);
    tile.high_page = PAGE % GROUPS == 0 ? tile.low_page : keys.page_of(group + 8);
  }

  __device__ static void load(Tile& tile, const Keys& keys, int item) {
    const int group = item * GROUPS + threadIdx.x % WARP / 4, column = threadIdx.x % 4 * 8;
    const ACTIVATION* low = keys.in_page(tile.low_page, group) + column;
    const ACTIVATION* high = keys.in_page(tile.high_page, group + 8) + column;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const bool exists = DIM % 32 == 0 || i * 32 + column < DIM;
      tile.low[i] = exists ? load_streaming_written(low + i * 32) : uint4{0, 0, 0, 0};
      tile.high[i] = exists ? load_streaming_written(high + i * 32) : uint4{0, 0, 0, 0};
    }
  }

  // Fragment [product of 8 columns][chunk][lane]: 16 bytes of the query head that is column lane / 4.
  __device__ static void stage(uint4* queries, const Operands& x, const Rows& rows) {
    const int used = ceil_div(rows.count * COLUMNS, 8) * CHUNKS * WARP;
    for (int i = threadIdx.x; i < used; i += BLOCK_THREADS) {
      const int column = i / (WARP * CHUNKS) * 8 + i % WARP / 4, k = i / WARP % CHUNKS * 32 + i % 4 * 8;
      const int row = column / COLUMNS, head = column % COLUMNS;
      const bool exists = row < rows.count && head < HEADS && k < DIM;
      const ACTIVATION* from = x.index_q + (int64(rows.first + row) * HEADS + head) * DIM + k;
      queries[i] = exists ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
    }
  }

  __device__ static void score(const Tile& tile, const Keys&, const uint4* queries, const Operands& x,
                               const Rows& rows, int item) {
    const int lane = threadIdx.x % WARP;
    for (int product = 0; product < ceil_div(rows.count * COLUMNS, 8); ++product) {
      float even[4] = {}, odd[4] = {};
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) {
        const uint4 q = queries[(product * CHUNKS + i) * WARP + lane], low = tile.low[i], high = tile.high[i];
        const uint32 first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
        const uint32 first_q[2] = {q.x, q.y}, second_q[2] = {q.z, q.w};
        mma_16x8x16(even, first, first_q);
        mma_16x8x16(odd, second, second_q);
      }
      uint32 bits[2], best = 0;
      const int row = product * (8 / COLUMNS) + lane % 4 / LANES, group = item * GROUPS + lane / 4;
      const int visible = rows.visible(row);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = fmaxf(even[2 * i] + odd[2 * i], 0.f) + fmaxf(even[2 * i + 1] + odd[2 * i + 1], 0.f);
#pragma unroll
        for (int lanes = 1; lanes < LANES; lanes *= 2) sum += __shfl_xor_sync(FULL_MASK, sum, lanes);
        bits[i] = ordered_bits(sum);
        if (group + 8 * i < visible) best = max(best, bits[i]);
      }
#pragma unroll
      for (int lanes = 4; lanes < WARP; lanes *= 2) best = max(best, __shfl_xor_sync(FULL_MASK, best, lanes));
      if (row >= rows.count) continue;
      uint32* scores = x.scores_of(rows.first + row);
      const int writer = lane % LANES;  // of the lanes with the same sums
      if (LANES == 1 || writer == 0) scores[group] = bits[0];
      if (LANES == 1 || writer == 1) scores[group + 8] = bits[1];
      if (lane < 4 && writer == 0) scores[x.max_items * GROUPS + item] = best;
    }
  }
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
score_bf16(const ACTIVATION* index_q, const ACTIVATION* index_k_cache, const int* query_start_loc, const int* seq_lens,
           const int* block_table, const int* num_seqs, uint32* scores, int first_row, int num_rows, int row_stride,
           int max_items, int max_blocks, int batch_size) {
  DYNAMIC_SHARED(uint4, queries);
  score_share<TensorCores>({index_q, index_k_cache, query_start_loc, seq_lens, block_table, num_seqs, scores, first_row,
                            num_rows, row_stride, max_items, max_blocks, batch_size},
                           queries);
}
