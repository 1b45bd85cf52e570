// Index scores in float32: a lane for each group, half a warp for every second row.
#include "qsa_select/score.cuh"

struct PlainSums {
  int page;
  const float* keys;

  __device__ __forceinline__ void find(const Operands& x, const Share& share) {
    page = x.page_of(share.sequence, share.item * GROUPS + threadIdx.x % GROUPS);
  }
  __device__ __forceinline__ void load(const Operands& x, const Share& share) {
    keys = x.key(page, share.item * GROUPS + threadIdx.x % GROUPS);
  }
  __device__ __forceinline__ void start(const Operands&, const Rows&) {}

  __device__ __forceinline__ void score(const Operands& x, const Rows& rows, int item) {
    const int group = item * GROUPS + threadIdx.x % GROUPS;
    for (int first = 0; first < rows.count; first += 2) {
      const int row = first + threadIdx.x % WARP / GROUPS;
      const bool exists = row < rows.count;
      const float* query = x.index_q + int64(rows.first + (exists ? row : 0)) * HEADS * DIM;
      float sum = 0.f;
      for (int head = 0; head < HEADS; ++head) {
        float product = 0.f;
        for (int i = 0; i < DIM; ++i) product += query[head * DIM + i] * keys[i];
        sum += fmaxf(product, 0.f);
      }
      uint32 best = group < rows.visible(row) ? ordered_bits(sum) : 0;
#pragma unroll
      for (int lanes = 1; lanes < GROUPS; lanes *= 2) best = max(best, __shfl_xor_sync(FULL_MASK, best, lanes));
      if (!exists) continue;
      x.scores_of(rows.first + row)[group] = ordered_bits(sum);
      if (threadIdx.x % GROUPS == 0) x.scores_of(rows.first + row)[x.max_items * GROUPS + item] = best;
    }
  }
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
score_f32(const ACTIVATION* index_q, const ACTIVATION* index_k_cache, const int* query_start_loc, const int* seq_lens,
          const int* block_table, const int* num_seqs, uint32* scores, int first_row, int num_rows, int row_stride,
          int max_items, int max_blocks, int batch_size) {
  score_items<PlainSums>({index_q, index_k_cache, query_start_loc, seq_lens, block_table, num_seqs, scores, first_row,
                          num_rows, row_stride, max_items, max_blocks, batch_size});
}
