// Norm and rotation of the query and key heads, one warp a head of a token: queries go to `q`, keys and values to the
// cache.
// Macros: HEAD_DIM, HQ, HKV, HALF, MROPE_HEIGHT, MROPE_WIDTH (see heads.cuh), PAGE (tokens of a page), ACTIVATION: bf16 or
// float, CACHE: bf16, float or e4m3.
#include "qsa_attention/heads.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int HEADS = HQ + 2 * HKV;  // query heads | key heads | value heads
constexpr int64 QKV_WIDTH = int64(2 * HQ + 2 * HKV) * HEAD_DIM;

extern "C" __global__ void __launch_bounds__(THREADS)
prepare(const ACTIVATION* qkv, const float* q_gain, const float* k_gain, const int* positions, const float* inv_freq,
        CACHE* kv_cache, const int* query_start_loc, const int* seq_lens, const int* block_table, const int* num_seqs,
        ACTIVATION* q, int num_tokens, int batch_size, int max_blocks, float eps) {
  const int64 unit = int64(blockIdx.x) * WARPS + threadIdx.x / WARP;
  const int token = int(unit / HEADS), head = int(unit % HEADS);
  const bool is_query = head < HQ, is_value = head >= HQ + HKV;
  HeadColumns gain, columns;
  Rotation rotation;
  gain.load(is_query ? q_gain : k_gain);
  rotation.load_frequencies(inv_freq);
  wait_for_previous();
  start_next();  // behind the wait: the kernels behind this one rely on it that all work before it is done
  if (token >= num_tokens) return;

  columns.load(qkv + token * QKV_WIDTH + int64(is_query ? 2 * head : HQ + head) * HEAD_DIM);
  rotation.load_positions(positions, num_tokens, token);
  const TokenPlace place = locate_token(token, query_start_loc, seq_lens, num_seqs, batch_size);
  if (place.sequence < 0) return;
  const int page = is_query ? 0 : block_table[int64(place.sequence) * max_blocks + place.position / PAGE];
  rotation.turn();
  if (!is_value) norm_and_rotate(columns, gain, rotation, eps);
  const int64 cache_row = (int64(page) * 2 + is_value) * PAGE + place.position % PAGE;
  if (is_query)
    columns.store(q + (int64(token) * HQ + head) * HEAD_DIM);
  else
    columns.store(kv_cache + (cache_row * HKV + (head - HQ) % HKV) * HEAD_DIM);
}
