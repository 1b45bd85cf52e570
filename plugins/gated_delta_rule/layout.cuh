// The layout of rows and the meaning of `committed_len`, for both kernels of the gated delta rule.
// Macros: K_HEADS, V_HEADS, KEY_DIM, VALUE_DIM.
#pragma once

constexpr int KEY_WIDTH = K_HEADS * KEY_DIM, VALUE_WIDTH = V_HEADS * VALUE_DIM;
constexpr int CONV_WIDTH = 2 * KEY_WIDTH + VALUE_WIDTH, DRAFT_WIDTH = KEY_WIDTH + VALUE_WIDTH + 2 * V_HEADS;
constexpr int REPEATS = V_HEADS / K_HEADS;  // value heads of a key head
constexpr float L2_EPS = 1e-6f;

// How many tokens the state holds: the larger of the latest two lengths that is not beyond the context.
__device__ __forceinline__ int held_length(int2 lengths, int context) {
  return max(lengths.x <= context ? lengths.x : 0, lengths.y <= context ? lengths.y : 0);
}

// Over the older length. It is beyond the context, so blocks that have yet to read the two are not misled.
__device__ __forceinline__ void store_length(int* committed_len, int2 lengths, int held, int context, int length) {
  if (context == 0)
    *reinterpret_cast<int2*>(committed_len) = make_int2(length, 0);
  else
    committed_len[lengths.x == held ? 1 : 0] = length;
}
