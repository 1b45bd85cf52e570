// Weights as the A operand of mma_16x8x16, from memory to registers in stages of GEMM_K columns, for gemm.cuh.
//
// The four lanes t that share a row have 16 columns of a stage each, 16t .. 16t + 15: two groups of 8, each of which makes
// two mmas. Which k an mma sees is free as long as both operands agree: its B operand is 16 bytes of an activation at the
// lane's own k, with two neighbours in a register, and so are the weights here.
//
// A format has
//   UNIT            what the sums have to be multiplied by
//   HAS_SUM_SCALES  whether sums over BLOCK columns have a scale, `sum_scale`
//   MULTIPLE        of K, so that rows start at multiples of what is loaded at once
//   Loaded, load    what a lane has of a row in a stage, zeros beyond K; no load is by `__ldg`, see `load_streaming`
//   Fragment, ready the same when it is going to be decoded
//   decode          of one group of it, columns 2 * word and 2 * word + 1 in bf16
#pragma once
#include "weight_formats.cuh"

constexpr int GEMM_K = 64;

struct GemmNvfp4 {
  static constexpr int MULTIPLE = GEMM_K;
  static constexpr float UNIT = NVFP4_UNIT;
  static constexpr bool HAS_SUM_SCALES = false;
  struct Loaded {
    uint2 codes;
    uint32 scale;
  };
  struct Fragment {
    uint2 codes;
    uint32 scale;  // in both halves
  };

  template <bool HAS_TAIL>
  static __device__ __forceinline__ Loaded load(const void* values, const void* scales, uint32 row, int columns, int stage) {
    const uint64 at = (uint64(row) * (uint32(columns) / GEMM_K) + stage) * 4 + threadIdx.x % 4;  // blocks of 16
    return {static_cast<const uint2*>(values)[at], static_cast<const uint8*>(scales)[at]};
  }
  static __device__ __forceinline__ Fragment ready(const Loaded& loaded) {
    return {loaded.codes, nvfp4_scale_pair(loaded.scale | loaded.scale << 16)};
  }
  static __device__ __forceinline__ uint32 decode(const Fragment& fragment, int group, int word) {
    return multiply_bf16(e2m1_pair(group ? fragment.codes.y : fragment.codes.x, word), fragment.scale);
  }
};

struct GemmFp8Blocks {
  static constexpr int MULTIPLE = 16, BLOCK = Fp8Blocks::BLOCK;
  static constexpr float UNIT = 1.f;
  static constexpr bool HAS_SUM_SCALES = true;
  using Loaded = uint4;
  using Fragment = uint4;

  template <bool HAS_TAIL>
  static __device__ __forceinline__ Loaded load(const void* values, const void*, uint32 row, int columns, int stage) {
    const int k = stage * GEMM_K + threadIdx.x % 4 * 16;
    const uint8* from = static_cast<const uint8*>(values) + uint64(row) * columns + k;
    return !HAS_TAIL || k < columns ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  }
  static __device__ __forceinline__ Fragment ready(const Loaded& loaded) { return loaded; }
  static __device__ __forceinline__ uint32 decode(const Fragment& fragment, int group, int word) {
    return e4m3_pair_to_bf16(__byte_perm(word_of(fragment, 2 * group + word / 2), 0, word % 2 ? 0x0302 : 0x0100));
  }
  static __device__ __forceinline__ float sum_scale(const void* scales, int columns, int row, int k) {
    return static_cast<const float*>(scales)[int64(row / BLOCK) * ceil_div(columns, BLOCK) + k / BLOCK];
  }
};

struct GemmBf16 {
  static constexpr int MULTIPLE = 8;
  static constexpr float UNIT = 1.f;
  static constexpr bool HAS_SUM_SCALES = false;
  struct Loaded {
    uint4 groups[2];
  };
  using Fragment = Loaded;

  template <bool HAS_TAIL>
  static __device__ __forceinline__ Loaded load(const void* values, const void*, uint32 row, int columns, int stage) {
    const int k = stage * GEMM_K + threadIdx.x % 4 * 16;
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const bf16*>(values) + uint64(row) * columns + k);
    Loaded loaded;
#pragma unroll
    for (int i = 0; i < 2; ++i) loaded.groups[i] = !HAS_TAIL || k + 8 * i < columns ? from[i] : make_uint4(0, 0, 0, 0);
    return loaded;
  }
  static __device__ __forceinline__ Fragment ready(const Loaded& loaded) { return loaded; }
  static __device__ __forceinline__ uint32 decode(const Fragment& fragment, int group, int word) {
    return word_of(fragment.groups[group], word);
  }
};
