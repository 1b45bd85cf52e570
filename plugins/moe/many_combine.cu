// The weighted sum of the outputs of a token's experts, which stand by expert: of the HIDDEN elements, `count`, a multiple of
// 4, from `first_output` on. Four a thread. EXPERTS, CHOICES.
#include "moe/routing.cuh"
#include "vector.cuh"

constexpr int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
many_combine(const float* outputs, const float* weights, const int* positions, const float* logits,
             const int* query_start_loc, const int* num_seqs, bf16* out, int first_output, int count,
             int first_token, int tokens) {
  const int column = (blockIdx.x * THREADS + threadIdx.x) * 4, token = blockIdx.y;
  wait_for_previous();
  start_next();
  if (column >= count || token >= real_tokens(query_start_loc, num_seqs, first_token, tokens)) return;
  Vector<float, 4> terms[CHOICES];
#pragma unroll
  for (int i = 0; i < CHOICES; ++i)
    terms[i] = load_vector<4>(outputs + int64(positions[token * CHOICES + i]) * count + column);
  const Vector<float, 4> shared = load_vector<4>(outputs + (int64(tokens) * CHOICES + token) * count + column);
  const float gate = sigmoid(logits[int64(token) * LOGITS_PITCH + EXPERTS]);
  float sums[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) sums[j] = gate * shared.items[j];
#pragma unroll
  for (int i = 0; i < CHOICES; ++i) {
    const float weight = weights[token * CHOICES + i];
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[j] += weight * terms[i].items[j];
  }
  store_vector(out + int64(first_token + token) * HIDDEN + first_output + column, sums);
}
