// Index scores on tensor cores: keys are the rows of a product and heads of query rows its columns. A lane reads 16
// bytes of a key or a query at a time, which serve as both halves of two steps of k: sums are over the same k in
// either.
#include "qsa_select/score.cuh"

struct TensorCores {
  static constexpr int COLUMNS = HEADS <= 2 ? 2 : HEADS <= 4 ? 4 : 8;  // of a row, the last ones zero
  static constexpr int LANES = COLUMNS / 2;                            // that hold sums of the same row
  static constexpr int CHUNKS = ceil_div(DIM, 32);
  static_assert(HEADS <= 8 && DIM % 8 == 0, "see launch.py");

  int low_page, high_page;
  uint4 low[CHUNKS], high[CHUNKS];  // keys of groups lane / 4 and lane / 4 + 8 of an item
  uint4 queries[CHUNKS];            // of column lane / 4 of a product
  int products;                     // of 8 columns

  __device__ __forceinline__ void find(const Operands& x, const Share& share) {
    const int group = share.item * GROUPS + threadIdx.x % WARP / 4;
    low_page = x.page_of(share.sequence, group);
    high_page = PAGE % GROUPS == 0 ? low_page : x.page_of(share.sequence, group + 8);
  }

  __device__ __forceinline__ void load(const Operands& x, const Share& share) {
    const int group = share.item * GROUPS + threadIdx.x % WARP / 4, column = threadIdx.x % 4 * 8;
    const ACTIVATION* from_low = x.key(low_page, group) + column;
    const ACTIVATION* from_high = x.key(high_page, group + 8) + column;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const bool exists = DIM % 32 == 0 || i * 32 + column < DIM;
      low[i] = exists ? load_streaming(from_low + i * 32) : uint4{0, 0, 0, 0};
      high[i] = exists ? load_streaming(from_high + i * 32) : uint4{0, 0, 0, 0};
    }
  }

  __device__ __forceinline__ void start(const Operands& x, const Rows& rows) {
    products = ceil_div(rows.count * COLUMNS, 8);
    load_queries(x, rows, 0);
  }

  __device__ __forceinline__ void load_queries(const Operands& x, const Rows& rows, int product) {
    const int column = product * 8 + threadIdx.x % WARP / 4, k = threadIdx.x % 4 * 8;
    const int row = column / COLUMNS, head = column % COLUMNS;
    const bool exists = row < rows.count && head < HEADS;
    const ACTIVATION* from = x.index_q + (int64(rows.first + row) * HEADS + head) * DIM + k;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      queries[i] = exists && i * 32 + k < DIM ? *reinterpret_cast<const uint4*>(from + i * 32) : uint4{0, 0, 0, 0};
  }

  __device__ __forceinline__ void score(const Operands& x, const Rows& rows, int item) {
#pragma unroll 1
    for (int product = 0; product < products; ++product) {
      float even[4] = {}, odd[4] = {};
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) {
        const uint32 first[4] = {low[i].x, high[i].x, low[i].y, high[i].y}, first_q[2] = {queries[i].x, queries[i].y};
        const uint32 second[4] = {low[i].z, high[i].z, low[i].w, high[i].w}, second_q[2] = {queries[i].z, queries[i].w};
        mma_16x8x16(even, first, first_q);
        mma_16x8x16(odd, second, second_q);
      }
      if (products > 1) load_queries(x, rows, product + 1 < products ? product + 1 : 0);
      const float sums[4] = {even[0] + odd[0], even[1] + odd[1], even[2] + odd[2], even[3] + odd[3]};
      write(x, rows, item, product, sums);
    }
  }

  // `sums` of two columns of two groups, as `mma_16x8x16` leaves them.
  __device__ __forceinline__ void write(const Operands& x, const Rows& rows, int item, int product,
                                        const float sums[4]) {
    const int lane = threadIdx.x % WARP, group = item * GROUPS + lane / 4;
    const int row = product * (8 / COLUMNS) + lane % 4 / LANES, visible = rows.visible(row);
    uint32 bits[2], best = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = fmaxf(sums[2 * i], 0.f) + fmaxf(sums[2 * i + 1], 0.f);
#pragma unroll
      for (int lanes = 1; lanes < LANES; lanes *= 2) sum += __shfl_xor_sync(FULL_MASK, sum, lanes);
      bits[i] = ordered_bits(sum);
      if (group + 8 * i < visible) best = max(best, bits[i]);
    }
#pragma unroll
    for (int lanes = 4; lanes < WARP; lanes *= 2) best = max(best, __shfl_xor_sync(FULL_MASK, best, lanes));
    if (row >= rows.count) return;
    uint32* scores = x.scores_of(rows.first + row);
    const int writer = lane % LANES;  // of the lanes with the same sums
    if (LANES == 1 || writer == 0) scores[group] = bits[0];
    if (LANES == 1 || writer == 1) scores[group + 8] = bits[1];
    if (lane < 4 && writer == 0) scores[x.max_items * GROUPS + item] = best;
  }
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
score_bf16(const ACTIVATION* index_q, const ACTIVATION* index_k_cache, const int* query_start_loc, const int* seq_lens,
           const int* block_table, const int* num_seqs, uint32* scores, int first_row, int num_rows, int row_stride,
           int max_items, int max_blocks, int batch_size) {
  score_items<TensorCores>({index_q, index_k_cache, query_start_loc, seq_lens, block_table, num_seqs, scores,
                            first_row, num_rows, row_stride, max_items, max_blocks, batch_size});
}
