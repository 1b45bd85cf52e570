// The gates of a token's streams, and N of a value.
// STREAMS, HIDDEN: of the stack; TAPS, DILATION: of the convolution; RING: rows of the state; ACTIVATION: bf16 or float.
#pragma once
#include "q4e.cuh"
#include "vector.cuh"

constexpr int WIDTH = STREAMS * HIDDEN, HISTORY = (TAPS - 1) * DILATION;
constexpr float GATE_FLOOR = 1e-6f;

struct __align__(8) Gate {
  float gate;   // G = gate * value
  float scale;  // N = scale * value * gain
};

// From the sums of squares of query, key and value, and of query * key * both gains.
__device__ __forceinline__ Gate gate_of(const float4& sums, float eps) {
  const float norms = rsqrtf(sums.x / HIDDEN + eps) * rsqrtf(sums.y / HIDDEN + eps);
  const float score = sums.w * norms * rsqrtf(float(HIDDEN));
  const float root = sqrtf(fmaxf(fabsf(score), GATE_FLOOR));
  const float gate = sigmoid(score > 0.f ? root : score < 0.f ? -root : 0.f);
  return {gate, gate * rsqrtf(gate * gate * sums.z / HIDDEN + eps)};
}

__device__ __forceinline__ float normed(ACTIVATION value, float scale, float gain) {
  return round_to<ACTIVATION>(to_float(value) * scale * gain);
}
