// Weights as the A operand of mma_16x8x16, in stages of HALVES times GEMM_K columns in shared memory, for gemm.cuh.
//
// The four lanes t that share a row have 16 columns of a half each, 16t .. 16t + 15: two groups of 8, each of which makes
// two mmas. Which k an mma sees is free as long as both operands agree: its B operand is 16 bytes of an activation at the
// lane's own k, with two neighbours in a register, and so are the weights here.
//
// A format has
//   HALVES                  1 or 2
//   ROW_BYTES, SCALE_BYTES  of a row in a stage
//   UNIT                    what the sums have to be multiplied by
//   HAS_SUM_SCALES          whether sums over BLOCK columns have a scale, `sum_scale`
//   place                   where piece `piece` of 16 bytes of a row lies, so that reads meet no bank twice
//   Fragment, read          what a lane (g, t) has of half a row, of the row 8i + g of a warp
//   decode                  of one group of it, columns 2 * word and 2 * word + 1 in bf16
#pragma once
#include "weight_formats.cuh"

constexpr int GEMM_K = 64;

struct GemmNvfp4 {
  static constexpr int HALVES = 2, ROW_BYTES = GEMM_K, SCALE_BYTES = GEMM_K / 8;  // so that a request is of whole sectors
  static constexpr float UNIT = NVFP4_UNIT;
  static constexpr bool HAS_SUM_SCALES = false;
  struct Fragment {
    uint2 codes;
    uint32 scale;  // in both halves
  };

  static __device__ __forceinline__ int place(int row, int piece) { return 16 * (piece ^ row / 2 % 2 * 2); }
  static __device__ __forceinline__ Fragment read(const uint8* row, const uint8* scales, int g, int t, int half) {
    const uint32 scale = scales[4 * half + t];
    return {*reinterpret_cast<const uint2*>(row + 32 * (half ^ g / 2 % 2) + 8 * t), nvfp4_scale_pair(scale | scale << 16)};
  }
  static __device__ __forceinline__ uint32 decode(const Fragment& fragment, int group, int word) {
    return multiply_bf16(e2m1_pair(group ? fragment.codes.y : fragment.codes.x, word), fragment.scale);
  }
};

struct GemmFp8Blocks {
  static constexpr int HALVES = 1, ROW_BYTES = GEMM_K, SCALE_BYTES = 0, BLOCK = Fp8Blocks::BLOCK;
  static constexpr float UNIT = 1.f;
  static constexpr bool HAS_SUM_SCALES = true;
  struct Fragment {
    uint4 codes;
  };

  static __device__ __forceinline__ int place(int, int piece) { return 16 * piece; }
  static __device__ __forceinline__ Fragment read(const uint8* row, const uint8*, int, int t, int) {
    return {*reinterpret_cast<const uint4*>(row + 16 * t)};
  }
  static __device__ __forceinline__ uint32 decode(const Fragment& fragment, int group, int word) {
    return e4m3_pair_to_bf16(__byte_perm(word_of(fragment.codes, 2 * group + word / 2), 0, word % 2 ? 0x0302 : 0x0100));
  }
  static __device__ __forceinline__ float sum_scale(const void* scales, int columns, int row, int k) {
    return static_cast<const float*>(scales)[int64(row / BLOCK) * ceil_div(columns, BLOCK) + k / BLOCK];
  }
};

struct GemmBf16 {
  static constexpr int HALVES = 1, ROW_BYTES = 2 * GEMM_K, SCALE_BYTES = 0;
  static constexpr float UNIT = 1.f;
  static constexpr bool HAS_SUM_SCALES = false;
  struct Fragment {
    uint4 values[2];
  };

  static __device__ __forceinline__ int place(int row, int piece) { return 16 * (piece ^ row % 2); }
  static __device__ __forceinline__ Fragment read(const uint8* row, const uint8*, int g, int t, int) {
    const uint4* pieces = reinterpret_cast<const uint4*>(row) + 2 * t;
    return {{pieces[g % 2], pieces[1 ^ g % 2]}};
  }
  static __device__ __forceinline__ uint32 decode(const Fragment& fragment, int group, int word) {
    return word_of(fragment.values[group], word);
  }
};
