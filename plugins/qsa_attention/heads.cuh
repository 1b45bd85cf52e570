// Norm and rotation of a head by a warp, of which a lane has eight neighbouring columns of each 256.
// Macros: HEAD_DIM (a multiple of 8), HALF (half of the rotated dims, which are at most 256), MROPE_HEIGHT and
// MROPE_WIDTH (see `mrope_axis`).
#pragma once
#include "q4e.cuh"

constexpr int EIGHTS = ceil_div(HEAD_DIM, 8 * WARP);
static_assert(HEAD_DIM % 8 == 0 && 2 * HALF <= 8 * WARP && 2 * HALF <= HEAD_DIM, "see launch.py");

// Made anew: where it is used inside a loop, what follows from it takes no registers outside.
__device__ __forceinline__ int column_of_lane(int eighth) {
  return 8 * (WARP * eighth + made_anew(int(threadIdx.x % WARP))); }

__device__ __forceinline__ void load_eight(float to[8], const float* from) {
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = from[i];
}
__device__ __forceinline__ void unpack_eight(float to[8], const uint4& bits) {
  const uint32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) to[2 * i] = low_bf16(words[i]), to[2 * i + 1] = high_bf16(words[i]);
}
__device__ __forceinline__ void load_eight(float to[8], const bf16* from) {
  unpack_eight(to, *reinterpret_cast<const uint4*>(from));
}

__device__ __forceinline__ void store_eight(float* to, const float from[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = from[i];
}
__device__ __forceinline__ void store_eight(bf16* to, const float from[8]) {
  *reinterpret_cast<uint4*>(to) = make_uint4(pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]),
                                             pack_bf16(from[4], from[5]), pack_bf16(from[6], from[7]));
}
__device__ __forceinline__ void store_eight(e4m3* to, const float from[8]) {
  uint32 words[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) words[i / 4] |= uint32(from_float<e4m3>(from[i]).bits) << (8 * (i % 4));
  *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
}

// The lane's columns of a head; zeros behind HEAD_DIM.
struct HeadColumns {
  float values[EIGHTS][8];

  template <typename T>
  __device__ __forceinline__ void load(const T* head) {
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
      const int column = column_of_lane(e);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[e][i] = 0.f;
      if (column < HEAD_DIM) load_eight(values[e], head + column);
    }
  }
  template <typename T>
  __device__ __forceinline__ void store(T* head) const {
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
      const int column = column_of_lane(e);
      if (column < HEAD_DIM) store_eight(head + column, values[e]);
    }
  }
};

// The same of BF16, in the registers of a load that is under way.
struct PackedHead {
  uint4 bits[EIGHTS];

  __device__ __forceinline__ void load(const bf16* head) {
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
      const int column = column_of_lane(e);
      bits[e] = column < HEAD_DIM ? *reinterpret_cast<const uint4*>(head + column) : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ HeadColumns unpack() const {
    HeadColumns columns;
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) unpack_eight(columns.values[e], bits[e]);
    return columns;
  }
};

// Sines and cosines of the lane's columns among the rotated ones of a token.
struct Rotation {
  float frequencies[8], sines[8], cosines[8];
  int positions[3];

  __device__ __forceinline__ void load_frequencies(const float* inv_freq) {
    const int column = column_of_lane(0);
#pragma unroll
    for (int i = 0; i < 8; ++i) frequencies[i] = column + i < 2 * HALF ? inv_freq[(column + i) % HALF] : 0.f;
  }
  __device__ __forceinline__ void load_positions(const int* all, int num_tokens, int token) {
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) positions[axis] = all[axis * num_tokens + token];
  }
  __device__ __forceinline__ void turn() {
    const int column = column_of_lane(0);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int axis = mrope_axis<MROPE_HEIGHT, MROPE_WIDTH>((column + i) % HALF);
      const int position = axis == 0 ? positions[0] : axis == 1 ? positions[1] : positions[2];
      sines[i] = 0.f, cosines[i] = 1.f;
      if (column + i < 2 * HALF) sine_cosine(float(position) * frequencies[i], &sines[i], &cosines[i]);
    }
  }
};

// `head` normed by `gain` and rotated, in place. A whole warp.
__device__ __forceinline__ void norm_and_rotate(HeadColumns& head, const HeadColumns& gain, const Rotation& rotation,
                                                float eps) {
  float squares = 0.f;
#pragma unroll
  for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += head.values[e][i] * head.values[e][i];
  const float scale = rsqrtf(warp_sum(squares) / HEAD_DIM + eps);
#pragma unroll
  for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
    for (int i = 0; i < 8; ++i) head.values[e][i] = head.values[e][i] * scale * gain.values[e][i];

  const int column = column_of_lane(0), lane = column / 8;
  float partners[8];  // the first HALF columns turn with the second
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float above = __shfl_sync(FULL_MASK, head.values[0][(i + HALF) % 8], lane + (i + HALF) / 8);
    const float below = __shfl_sync(FULL_MASK, head.values[0][(i + 8 - HALF % 8) % 8], lane - (HALF + 7 - i) / 8);
    partners[i] = column + i < HALF ? -above : below;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    head.values[0][i] = head.values[0][i] * rotation.cosines[i] + partners[i] * rotation.sines[i];
}
