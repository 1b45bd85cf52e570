// The weighted sum of the outputs of a token's experts. HIDDEN, EXPERTS, CHOICES; ACTIVATION: bf16 or float.
#include "moe/routing.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
combine(const float* outputs, const float* weights, const float* logits, const int* query_start_loc,
        const int* num_seqs, ACTIVATION* out, int first_token, int tokens) {
  const int column = blockIdx.x * THREADS + threadIdx.x, token = blockIdx.y;
  wait_for_previous();
  start_next();
  if (column >= HIDDEN) return;
  const int real = real_tokens(query_start_loc, num_seqs, first_token, tokens);
  float sum = sigmoid(logits[int64(token) * LOGITS_PITCH + EXPERTS]) *
              outputs[(int64(tokens) * CHOICES + token) * HIDDEN + column];
#pragma unroll
  for (int i = 0; i < CHOICES; ++i) {
    int entry = token * CHOICES + i;
    sum += weights[entry] * outputs[int64(entry) * HIDDEN + column];
  }
  if (token < real) out[int64(first_token + token) * HIDDEN + column] = from_float<ACTIVATION>(sum);
}
