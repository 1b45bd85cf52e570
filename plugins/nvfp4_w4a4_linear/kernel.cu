// Activations [T, K] as the numbers that NVFP4 leaves of them, code times block scale, in bf16, which is exact. A thread
// for a block of 16. ACTIVATION: bf16 or float.
#include "q4e.cuh"

constexpr int THREADS = 128, BLOCK = 16;

// To the nearest E2M1 magnitude, a tie to the even code: steps of 1/2 below 2, of 1 below 4, of 2 up to 6.
__device__ __forceinline__ float round_magnitude(float x) {
  const float step = x < 2.f ? 0.5f : x < 4.f ? 1.f : 2.f;
  return fminf(rintf(x / step) * step, 6.f);
}

extern "C" __global__ void __launch_bounds__(THREADS)
round_activations(const ACTIVATION* x, bf16* rounded, float input_scale, int blocks) {
  wait_for_previous();
  start_next();
  const int block = blockIdx.x * THREADS + threadIdx.x;
  if (block >= blocks) return;
  x += int64(block) * BLOCK, rounded += int64(block) * BLOCK;
  float values[BLOCK], largest = 0.f;
  bool has_nan = false;
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) {
    values[i] = to_float(x[i]);
    largest = fmaxf(largest, fabsf(values[i]));
    has_nan |= values[i] != values[i];
  }
  const float scale = to_float(from_float<e4m3>(largest / (6.f * input_scale))), divisor = scale * input_scale;
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) {
    float magnitude = divisor > 0.f ? round_magnitude(fabsf(values[i]) / divisor) * scale : 0.f;
    if (has_nan) magnitude = bits_to_float(0x7fc00000u);
    rounded[i] = from_float<bf16>(values[i] < 0.f ? -magnitude : magnitude);
  }
}
