// Products of tensor cores, and their operands from shared memory. A part of q4e.cuh, which includes it.
#pragma once

// c[16 x 8] += a[16 x 16] b[16 x 8], bf16 with float32 sums, one warp. With g = lane / 4 and t = lane % 4:
// a[0], a[1], a[2], a[3] hold columns 2t, 2t + 1 of row g, of row g + 8, and columns 2t + 8, 2t + 9 of row g, of g + 8;
// b[0], b[1] hold rows 2t, 2t + 1 and 2t + 8, 2t + 9 of column g;
// c[0..1] are row g, columns 2t, 2t + 1; c[2..3] are row g + 8.
__device__ __forceinline__ void mma_16x8x16(float c[4], const uint32 a[4], const uint32 b[2]) {
#ifdef Q4E_EMULATE
  emulator::mma_16x8x16(c, a, b);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// The same of fp16 operands.
__device__ __forceinline__ void mma_16x8x16_fp16(float c[4], const uint32 a[4], uint32 b_low, uint32 b_high) {
#ifdef Q4E_EMULATE
  const uint32 b[2] = {b_low, b_high};
  emulator::mma_16x8x16<emulator::fp16_value>(c, a, b);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
#endif
}

// c[16 x 8] += a[16 x 64] b[64 x 8] of E2M1 codes, each 16 of K times an E4M3 scale without a sign, one warp; from SM120 on.
// A register has 8 codes, the first in the lowest nibble. a[0], a[1], a[2], a[3] hold columns 8t .. 8t + 7 of row g, of row
// g + 8, and columns 32 + 8t .. of row g, of g + 8; b[0], b[1] rows 8t .. and 32 + 8t .. of column g; c as of mma_16x8x16.
// Four scales in a register, of the first 16 of K in the lowest byte: `scale_a` of row g + t % 2 * 8, `scale_b` of column g.
#if defined(Q4E_EMULATE) || __CUDA_ARCH__ >= 1200
__device__ __forceinline__ void mma_block_scaled_16x8x64(float c[4], const uint32 a[4], const uint32 b[2], uint32 scale_a,
                                                         uint32 scale_b) {
#ifdef Q4E_EMULATE
  emulator::mma_block_scaled_16x8x64(c, a, b, scale_a, scale_b);
#else
  asm volatile(
      "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%12, %12}, {%11}, {%12, %12};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b), "h"(uint16(0)));
#endif
}
#endif

// Four 8 x 8 matrices of 16-bit values in shared memory: lane 8 i + r has the address of row r, 16 bytes, of matrix i.
// values[i] are columns 2t, 2t + 1 of row g of matrix i: A or B operands of `mma_16x8x16`.
__device__ __forceinline__ void load_matrices(uint32 values[4], const void* row) {
#ifdef Q4E_EMULATE
  const auto rows = emulator::exchange(row).first;
  const int lane = threadIdx.x % WARP;
  for (int i = 0; i < 4; ++i)
    values[i] = static_cast<const uint32*>(emulator::from_lane<const void*>(rows, 8 * i + lane / 4))[lane % 4];
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(uint32(__cvta_generic_to_shared(row)))
               : "memory");
#endif
}
// The same of the transposed matrices: values[i] are rows 2t, 2t + 1 of column g of matrix i.
__device__ __forceinline__ void load_matrices_transposed(uint32 values[4], const void* row) {
#ifdef Q4E_EMULATE
  const auto rows = emulator::exchange(row).first;
  const int lane = threadIdx.x % WARP;
  for (int i = 0; i < 4; ++i) {
    values[i] = 0;
    for (int half = 0; half < 2; ++half) {
      const auto from = emulator::from_lane<const void*>(rows, 8 * i + lane % 4 * 2 + half);
      values[i] |= uint32(static_cast<const uint16*>(from)[lane / 4]) << 16 * half;
    }
  }
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(uint32(__cvta_generic_to_shared(row)))
               : "memory");
#endif
}
