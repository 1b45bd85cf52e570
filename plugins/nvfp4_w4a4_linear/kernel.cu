// Activations [T, K] in NVFP4, a thread for a block of 16. ACTIVATION: bf16 or float.
#include "q4e.cuh"

constexpr int THREADS = 128, BLOCK = 16;

// To the nearest E2M1 magnitude, a tie to the even code: steps of 1/2 below 2, of 1 below 4, of 2 up to 6.
__device__ __forceinline__ float round_magnitude(float x) {
  const float step = x < 2.f ? 0.5f : x < 4.f ? 1.f : 2.f;
  return fminf(rintf(x / step) * step, 6.f);
}

struct Block {
  float values[BLOCK];  // of x
  float magnitudes[BLOCK];
  e4m3 scale;
  bool has_nan;
};

__device__ __forceinline__ Block round_block(const ACTIVATION* x, float input_scale) {
  Block block;
  float largest = 0.f;
  block.has_nan = false;
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) {
    block.values[i] = to_float(x[i]);
    largest = fmaxf(largest, fabsf(block.values[i]));
    block.has_nan |= block.values[i] != block.values[i];
  }
  block.scale = from_float<e4m3>(largest / (6.f * input_scale));
  const float divisor = to_float(block.scale) * input_scale;
#pragma unroll
  for (int i = 0; i < BLOCK; ++i)
    block.magnitudes[i] = divisor > 0.f ? round_magnitude(fabsf(block.values[i]) / divisor) : 0.f;
  return block;
}

// As the numbers that are left of them, code times block scale, in bf16, which is exact.
extern "C" __global__ void __launch_bounds__(THREADS)
round_activations(const ACTIVATION* x, bf16* rounded, float input_scale, int blocks) {
  wait_for_previous();
  start_next();
  const int index = blockIdx.x * THREADS + threadIdx.x;
  if (index >= blocks) return;
  const Block block = round_block(x + int64(index) * BLOCK, input_scale);
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) {
    const float magnitude = block.has_nan ? bits_to_float(0x7fc00000u) : block.magnitudes[i] * to_float(block.scale);
    rounded[int64(index) * BLOCK + i] = from_float<bf16>(block.values[i] < 0.f ? -magnitude : magnitude);
  }
}

// As codes, the first in the low nibble, and block scales.
extern "C" __global__ void __launch_bounds__(THREADS)
quantize_activations(const ACTIVATION* x, uint2* codes, e4m3* scales, float input_scale, int blocks) {
  wait_for_previous();
  start_next();
  const int index = blockIdx.x * THREADS + threadIdx.x;
  if (index >= blocks) return;
  const Block block = round_block(x + int64(index) * BLOCK, input_scale);
  uint32 words[2] = {};
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) {
    const uint32 halves = uint32(2.f * block.magnitudes[i]);  // 0, 1, 2, 3, 4, 6, 8, 12
    const uint32 code = halves < 4 ? halves : halves < 8 ? halves / 2 + 2 : halves / 4 + 4;
    words[i / 8] |= (code | (block.values[i] < 0.f ? 8u : 0u)) << (i % 8 * 4);
  }
  codes[index] = make_uint2(words[0], words[1]);
  scales[index] = block.has_nan ? e4m3{0x7f} : block.scale;
}
