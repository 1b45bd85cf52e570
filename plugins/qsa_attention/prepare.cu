// Norm and rotation of the query and key heads, one warp a head of a token: queries go to `q`, keys and values to the
// cache.
// Macros: HEAD_DIM, HQ, HKV, HALF (half of the rotated dims), MROPE_HEIGHT and MROPE_WIDTH (see `mrope_axis`), PAGE
// (tokens of a page), ACTIVATION: bf16 or float, CACHE: bf16, float or e4m3.
#include "q4e.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int HEADS = HQ + 2 * HKV;  // query heads | key heads | value heads
constexpr int ITEMS = ceil_div(HEAD_DIM, WARP), ROTATED_ITEMS = ceil_div(2 * HALF, WARP);
constexpr int64 QKV_WIDTH = int64(2 * HQ + 2 * HKV) * HEAD_DIM;

extern "C" __global__ void __launch_bounds__(THREADS)
prepare(const ACTIVATION* qkv, const float* q_gain, const float* k_gain, const int* positions, const float* inv_freq,
        CACHE* kv_cache, const int* query_start_loc, const int* seq_lens, const int* block_table, const int* num_seqs,
        ACTIVATION* q, int num_tokens, int batch_size, int max_blocks, float eps) {
  __shared__ float normed[WARPS][HEAD_DIM];
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int64 unit = int64(blockIdx.x) * WARPS + warp;
  const int token = int(unit / HEADS), head = int(unit % HEADS);
  const bool is_query = head < HQ, is_value = head >= HQ + HKV;
  const float* gain = is_query ? q_gain : k_gain;
  float gains[ITEMS], values[ITEMS], frequencies[ROTATED_ITEMS], sines[ROTATED_ITEMS], cosines[ROTATED_ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) gains[i] = i * WARP + lane < HEAD_DIM ? gain[i * WARP + lane] : 0.f;
#pragma unroll
  for (int i = 0; i < ROTATED_ITEMS; ++i) {
    const int d = i * WARP + lane;
    frequencies[i] = d < 2 * HALF ? inv_freq[d % HALF] : 0.f;
  }
  wait_for_previous();
  start_next();  // behind the wait: `attend` relies on it that all work before this kernel is done when it starts
  if (token >= num_tokens) return;

  const ACTIVATION* row = qkv + token * QKV_WIDTH + int64(is_query ? 2 * head : HQ + head) * HEAD_DIM;
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int d = i * WARP + lane;
    values[i] = d < HEAD_DIM ? to_float(row[d]) : 0.f;
    squares += values[i] * values[i];
  }
  int rope_positions[ROTATED_ITEMS];
#pragma unroll
  for (int i = 0; i < ROTATED_ITEMS; ++i)
    rope_positions[i] = positions[mrope_axis<MROPE_HEIGHT, MROPE_WIDTH>((i * WARP + lane) % HALF) * num_tokens + token];
  const TokenPlace place = locate_token(token, query_start_loc, seq_lens, num_seqs, batch_size);
  if (place.sequence < 0) return;
  const int page = is_query ? 0 : block_table[int64(place.sequence) * max_blocks + place.position / PAGE];

#pragma unroll
  for (int i = 0; i < ROTATED_ITEMS; ++i)
    sine_cosine(float(rope_positions[i]) * frequencies[i], &sines[i], &cosines[i]);
  const float scale = rsqrtf(warp_sum(squares) / HEAD_DIM + eps);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i)
    if (i * WARP + lane < HEAD_DIM) normed[warp][i * WARP + lane] = values[i] * scale * gains[i];
  __syncwarp();
  const int64 cache_row = (int64(page) * 2 + is_value) * PAGE + place.position % PAGE;
  CACHE* cached = kv_cache + (cache_row * HKV + (head - HQ) % HKV) * HEAD_DIM;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int d = i * WARP + lane;
    if (d >= HEAD_DIM) continue;
    if (is_value) {
      cached[d] = from_float<CACHE>(values[i]);
      continue;
    }
    float value = normed[warp][d];
    if (i < ROTATED_ITEMS && d < 2 * HALF)  // the first HALF dims turn with the second
      value = value * cosines[i] + (d < HALF ? -normed[warp][d + HALF] : normed[warp][d - HALF]) * sines[i];
    if (is_query)
      q[(int64(token) * HQ + head) * HEAD_DIM + d] = from_float<ACTIVATION>(value);
    else
      cached[d] = from_float<CACHE>(value);
  }
}
