// Loads and stores of 16 bytes of activations as floats. They come from kernels of the same step and are read from L2:
// a line in L1 may be older than the kernel before.
#pragma once
#include "q4e.cuh"

__device__ __forceinline__ void unpack(uint4 words, float values[8]) {
  const uint32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) values[2 * i] = low_bf16(pairs[i]), values[2 * i + 1] = high_bf16(pairs[i]);
}
__device__ __forceinline__ uint4 pack(const float values[8]) {
  return make_uint4(pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]), pack_bf16(values[4], values[5]),
                    pack_bf16(values[6], values[7]));
}

__device__ __forceinline__ void load_floats(const bf16* from, float (&values)[8]) {
  unpack(__ldcg(reinterpret_cast<const uint4*>(from)), values);
}
__device__ __forceinline__ void load_floats(const float* from, float (&values)[4]) {
  float4 v = __ldcg(reinterpret_cast<const float4*>(from));
  values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
}
template <typename T>
__device__ __forceinline__ void load_floats(const T* from, float (&values)[1]) {
  values[0] = to_float(*from);
}

__device__ __forceinline__ void store_floats(bf16* to, const float (&values)[8]) {
  __stcg(reinterpret_cast<uint4*>(to), pack(values));
}
__device__ __forceinline__ void store_floats(float* to, const float (&values)[4]) {
  __stcg(reinterpret_cast<float4*>(to), make_float4(values[0], values[1], values[2], values[3]));
}
template <typename T>
__device__ __forceinline__ void store_floats(T* to, const float (&values)[1]) {
  *to = from_float<T>(values[0]);
}

// COUNT floats of constants, as many as a vector of activations has: 8, 4 or 1.
template <int COUNT>
__device__ __forceinline__ void load_gain(const float* gain, float (&values)[COUNT]) {
  if constexpr (COUNT % 4 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      float4 v = *reinterpret_cast<const float4*>(gain + i);
      values[i] = v.x, values[i + 1] = v.y, values[i + 2] = v.z, values[i + 3] = v.w;
    }
  } else {
    values[0] = *gain;
  }
}

// Elements in 16 bytes of a row of `columns`, or 1 where rows are no whole number of them.
template <typename T>
__device__ constexpr int vector_of(int columns) {
  return columns % (16 / int(sizeof(T))) == 0 ? 16 / int(sizeof(T)) : 1;
}
