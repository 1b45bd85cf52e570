// What the kernels share: number formats, warp and block reductions, tensor-core and copy instructions, the packed batch.
//
// No CUDA header is included, so that NVRTC needs none. Every instruction that C++ cannot spell stands here behind a
// function with a second body for Q4E_EMULATE, which tests compile for the CPU; kernels themselves hold no PTX.
#pragma once

#ifdef Q4E_EMULATE
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(emulator::dynamic_shared())
#else
#define DYNAMIC_SHARED(type, name)                       \
  extern __shared__ __align__(16) unsigned char q4e_shared[]; \
  type* name = reinterpret_cast<type*>(q4e_shared)
#endif

using int64 = long long;
using uint64 = unsigned long long;
using uint32 = unsigned int;
using uint16 = unsigned short;
using uint8 = unsigned char;

constexpr unsigned FULL_MASK = 0xffffffffu;
constexpr int WARP = 32;

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ float negative_infinity() { return __int_as_float(int(0xff800000u)); }

// --- number formats ---------------------------------------------------------------------------------------------

struct bf16 {
  uint16 bits;
};
struct e4m3 {
  uint8 bits;
};

__device__ __forceinline__ float bits_to_float(uint32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return bits_to_float(uint32(x.bits) << 16); }
// The low and the high of two packed bf16.
__device__ __forceinline__ float low_bf16(uint32 pair) { return bits_to_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32 pair) { return bits_to_float(pair & 0xffff0000u); }

// Two floats rounded to bf16, nearest even; `low` in the low half.
__device__ __forceinline__ uint32 pack_bf16(float low, float high) {
#ifdef Q4E_EMULATE
  return emulator::bf16_bits(low) | uint32(emulator::bf16_bits(high)) << 16;
#else
  uint32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}

// The same of fp16, for operands that are bounded: eight times as exact as bf16. Above 65504 it is infinity.
__device__ __forceinline__ uint32 pack_fp16(float low, float high) {
#ifdef Q4E_EMULATE
  return emulator::fp16_bits(low) | uint32(emulator::fp16_bits(high)) << 16;
#else
  uint32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}
__device__ __forceinline__ float2 unpack_fp16(uint32 pair) {
#ifdef Q4E_EMULATE
  return {emulator::fp16_value(pair), emulator::fp16_value(pair >> 16)};
#else
  float2 values;
  asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(values.x), "=f"(values.y)
      : "r"(pair));
  return values;
#endif
}

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) { return {uint16(pack_bf16(x, 0.f))}; }

// `x` as it is after being stored as a T.
template <typename T>
__device__ __forceinline__ float round_to(float x) { return to_float(from_float<T>(x)); }

// E4M3 has the bits of an fp16 whose exponent bias is 8 too small: widened by shifting, corrected by 2^8. Exact for all
// finite codes. A NaN code (0x7f, 0xff) becomes +-480.
__device__ __forceinline__ float to_float(e4m3 x) {
  uint32 magnitude = x.bits & 0x7fu;
  float value = bits_to_float(magnitude << 20) * bits_to_float((127u + 120u) << 23);  // f32: bias 127 against 7
  return (x.bits & 0x80u) ? -value : value;
}

// Nearest even, saturating at 448; NaN stays NaN.
template <>
__device__ __forceinline__ e4m3 from_float<e4m3>(float x) {
  uint32 bits = __float_as_uint(x);
  uint32 sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {uint8(sign | 0x7fu)};
  if (magnitude >= 0x43e00000u) return {uint8(sign | 0x7eu)};  // 448 and above
  if (magnitude < 0x3c800000u) {                               // below 2^-6: steps of 2^-9
    // Adding 2^14 leaves exactly the multiples of 2^-9, rounded to even.
    uint32 steps = __float_as_uint(bits_to_float(magnitude) + 16384.f) - 0x46800000u;
    return {uint8(sign | steps)};
  }
  uint32 rounded = magnitude + 0x7ffffu + (magnitude >> 20 & 1u);
  return {uint8(sign | ((rounded - (120u << 23)) >> 20))};
}

// NVFP4 weights in registers, for tensor cores. Eight E2M1 codes (a 32-bit word, element 0 in the lowest nibble) become
// four words of two bf16 each: word i holds elements i and i + 4 (low and high half), times 2^-126, which is where their
// bits land. `nvfp4_scale` gives a block's scale, times 2^118, in both halves, and `multiply_bf16` their exact product:
// weight / (global scale * NVFP4_UNIT). The constant belongs into the scale that multiplies the sum.
constexpr float NVFP4_UNIT = 256.f;

// A multiplication by 2^a + 2^b places the sign and the magnitude of two nibbles at once, and not on the busy ALU pipe.
__device__ __forceinline__ void e2m1_words(uint32 codes, uint32 words[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32 half = i ? codes >> 8 : codes;  // element 2i in bits 0-3, 2i + 1 in 4-7, 2i + 4 and 2i + 5 16 bits above
    words[2 * i] = (half & 0x000f000fu) * 0x1040u & 0x81c081c0u;
    words[2 * i + 1] = (half & 0x00f000f0u) * 0x0104u & 0x81c081c0u;
  }
}

// Bytes of (a, b), counted from the lowest of a, by the four lowest nibbles of `selector`; a nibble of 8 more gives the
// byte's sign eight times.
__device__ __forceinline__ uint32 permute_bytes(uint32 a, uint32 b, uint32 selector) {
#ifdef Q4E_EMULATE
  uint32 result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32 place = selector >> (4 * i) & 15u, byte = uint32((uint64(b) << 32 | a) >> (8 * (place & 7u))) & 0xffu;
    result |= (place & 8u ? byte & 0x80u ? 0xffu : 0u : byte) << (8 * i);
  }
  return result;
#else
  uint32 result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
#endif
}

// The same of elements 2i and 2i + 1, as neighbours lie in an activation. Without a sign in a byte there are zeros for the gaps.
__device__ __forceinline__ uint32 e2m1_pair(uint32 codes, int i) {
  const uint32 even = codes & 0x0f0f0f0fu, odd = codes >> 4 & 0x0f0f0f0fu;
  return permute_bytes(even, odd, 0x8480u + 0x0101u * i) * 0x1040u & 0x81c081c0u;
}

__device__ __forceinline__ float e2m1_value(uint32 code) {
  uint32 bits = (code & 8u) << 28 | (code & 7u) << 22;  // times 2^-126
  return bits_to_float(bits) * 0x1p126f;
}

// The scale times 2^118 as two equal bf16; `scale` is not negative, as no NVFP4 block scale is.
__device__ __forceinline__ uint32 nvfp4_scale(e4m3 scale) {
  float value = bits_to_float(uint32(scale.bits) << 20) * 0x1p127f * 0x1p111f;  // its bits are the value times 2^-120
  uint32 high = __float_as_uint(value);                                        // four significant bits: exact in bf16
  return (high & 0xffff0000u) | high >> 16;
}

// Two bf16 products, rounded to nearest even.
__device__ __forceinline__ uint32 multiply_bf16(uint32 a, uint32 b) {
#ifdef Q4E_EMULATE
  return pack_bf16(low_bf16(a) * low_bf16(b), high_bf16(a) * high_bf16(b));
#else
  uint32 product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));  // + -0
  return product;
#endif
}

// The E4M3 codes in bytes 0 and 2 of `codes` as two bf16, exactly; bytes 1 and 3 are ignored. Their bits are put where
// bf16 has them, which makes the values 2^-120 of what they are. A NaN code becomes +-480.
__device__ __forceinline__ uint32 e4m3_pair_to_bf16(uint32 codes) {
  return multiply_bf16((codes & 0x00800080u) << 8 | (codes & 0x007f007fu) << 4, 0x7b807b80u);
}

// a * b + c of two bf16 each, rounded once.
__device__ __forceinline__ uint32 multiply_add_bf16(uint32 a, uint32 b, uint32 c) {
#ifdef Q4E_EMULATE
  return pack_bf16(low_bf16(a) * low_bf16(b) + low_bf16(c), high_bf16(a) * high_bf16(b) + high_bf16(c));
#else
  uint32 sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
#endif
}

// --- reductions -------------------------------------------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lane = WARP / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(FULL_MASK, x, lane);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lane = WARP / 2; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, lane));
  return x;
}

// Sum over the THREADS threads of the block, in an order that does not vary; every thread gets it.
template <int THREADS>
__device__ __forceinline__ float block_sum(float x) {
  static_assert(THREADS % WARP == 0, "whole warps");
  __shared__ float partial[THREADS / WARP];
  x = warp_sum(x);
  __syncthreads();  // of a call before this one
  if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = x;
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < THREADS / WARP; ++warp) sum += partial[warp];
  return sum;
}

// --- functions --------------------------------------------------------------------------------------------------

// 2^x by the instruction: two units in the last place, subnormal results are zero.
__device__ __forceinline__ float exp2_approx(float x) {
#ifdef Q4E_EMULATE
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
// To 5e-4 of its value, by one instruction.
__device__ __forceinline__ float tanh_approx(float x) {
#ifdef Q4E_EMULATE
  return tanhf(x);
#else
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
// log(1 + exp(x)), as torch: x itself above 20.
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

// Sine and cosine of an angle of up to 2^22 either way, to 1e-6: reduced to a half turn exactly but for one rounding.
__device__ __forceinline__ void sine_cosine(float angle, float* sine, float* cosine) {
  const float turns = rintf(angle * 0.15915494f);
  const float reduced = fmaf(turns, 1.7484555e-7f, fmaf(turns, -6.2831855f, angle));
  *sine = __sinf(reduced);
  *cosine = __cosf(reduced);
}

// --- registers --------------------------------------------------------------------------------------------------

// `x`, of which the compiler does not see where it comes from: what is made of it in a loop is made there each time, and
// takes no register outside.
__device__ __forceinline__ int made_anew(int x) {
#ifndef Q4E_EMULATE
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// The axis (0 temporal, 1 height, 2 width) that a frequency of interleaved MRoPE follows; HEIGHT_END and WIDTH_END are three
// times their entries of `mrope_section`.
template <int HEIGHT_END, int WIDTH_END>
__device__ __forceinline__ int mrope_axis(int frequency) {
  if (frequency % 3 == 1 && frequency < HEIGHT_END) return 1;
  return frequency % 3 == 2 && frequency < WIDTH_END ? 2 : 0;
}

// --- memory -----------------------------------------------------------------------------------------------------

// 16 bytes of data that is used once: kept out of L1. Not `.nc`: the compiler moves such a load, as any by `__ldg`, behind
// a `wait_for_previous` that follows it.
__device__ __forceinline__ uint4 load_streaming(const void* from) {
#ifdef Q4E_EMULATE
  return *static_cast<const uint4*>(from);
#else
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
#endif
}

// Asks for a line of memory to be brought into L2. Changes nothing, so it may come in front of `wait_for_previous`.
__device__ __forceinline__ void prefetch_l2(const void* address) {
#ifndef Q4E_EMULATE
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// The same for `bytes` in a row, a multiple of 16 from a multiple of 16 on; nothing below SM90.
__device__ __forceinline__ void prefetch_l2_bytes(const void* from, uint32 bytes) {
#if !defined(Q4E_EMULATE) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
#endif
}

// Asynchronous copy of 16 bytes from global to shared memory; `valid` false writes zeros and reads nothing.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, bool valid = true) {
#ifdef Q4E_EMULATE
  *static_cast<uint4*>(shared) = valid ? *static_cast<const uint4*>(global) : uint4{0, 0, 0, 0};
#else
  uint32 to = uint32(__cvta_generic_to_shared(shared));
  int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
#endif
}
// The same of 8 and of 4 bytes.
__device__ __forceinline__ void copy_async_8(void* shared, const void* global) {
#ifdef Q4E_EMULATE
  *static_cast<uint64*>(shared) = *static_cast<const uint64*>(global);
#else
  uint32 to = uint32(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(global) : "memory");
#endif
}
__device__ __forceinline__ void copy_async_4(void* shared, const void* global) {
#ifdef Q4E_EMULATE
  *static_cast<uint32*>(shared) = *static_cast<const uint32*>(global);
#else
  uint32 to = uint32(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
#endif
}
__device__ __forceinline__ void commit_copies() {
#ifndef Q4E_EMULATE
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most PENDING of this thread's committed groups are still under way. Other threads' copies need a barrier.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
#ifndef Q4E_EMULATE
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// --- tensor cores -----------------------------------------------------------------------------------------------

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

// --- barriers of some warps ---------------------------------------------------------------------------------------

// Barrier ID (1 to 15) of THREADS threads of the block, whole warps: `arrive_at` counts without waiting, `wait_at` counts and
// waits until all have. What the threads wrote to shared memory before is visible behind it.
template <int ID, int THREADS>
__device__ __forceinline__ void arrive_at() {
#ifdef Q4E_EMULATE
  emulator::arrive_at(ID, THREADS);
#else
  asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
#endif
}
template <int ID, int THREADS>
__device__ __forceinline__ void wait_at() {
#ifdef Q4E_EMULATE
  emulator::wait_at(ID, THREADS);
#else
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
#endif
}

// --- launches that overlap --------------------------------------------------------------------------------------

// A kernel may start while the one before it on the stream still runs: everything in front of `wait_for_previous` may
// touch only weights, which no kernel of a step writes. Every thread that touches anything else calls it first, and at
// least one thread of every block calls it. Below SM90 there is no overlap and nothing to wait for.
// Within one op a later kernel may also read, in front of its wait, what was there before the op: if every block of the
// kernel before it calls `start_next` behind its own wait, all that came before the op has ended by then.
__device__ __forceinline__ void wait_for_previous() {
#if !defined(Q4E_EMULATE) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel start once every block has called this or ended.
__device__ __forceinline__ void start_next() {
#if !defined(Q4E_EMULATE) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Counts one of `count` arrivals at `counter` and says whether it was the last, after which the counter is zero again. What
// threads of the block wrote before a barrier in front of this is visible behind the last arrival and a barrier after it.
__device__ __forceinline__ bool is_last_arrival(uint32* counter, int count) {
#ifdef Q4E_EMULATE
  return atomicInc(counter, uint32(count - 1)) == uint32(count - 1);
#else
  uint32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(count - 1) : "memory");
  return before == uint32(count - 1);
#endif
}

// True in every thread of the last of `num_blocks` blocks to come here, after which `counter` is zero again. What the
// other blocks wrote to global memory before they came is visible to it.
__device__ __forceinline__ bool is_last_block(uint32* counter, int num_blocks) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicInc(counter, uint32(num_blocks - 1)) == uint32(num_blocks - 1);
  __syncthreads();
  if (is_last) __threadfence();
  return is_last;
}

// --- the packed batch -------------------------------------------------------------------------------------------

struct TokenPlace {
  int sequence;  // -1: a row of padding
  int position;  // of the token in its sequence
  int context;   // tokens of the sequence before this step
};

// Where row `token` belongs, found by a whole warp in one round of loads for every 32 of the `batch_size` sequences.
__device__ __forceinline__ TokenPlace locate_token(int token, const int* query_start_loc, const int* seq_lens,
                                                   const int* num_seqs, int batch_size) {
  TokenPlace place = {-1, 0, 0};
  const int real = *num_seqs, lane = threadIdx.x % WARP;
  for (int first = 0; first < batch_size && place.sequence < 0; first += WARP) {
    const int sequence = first + lane;
    const bool exists = sequence < batch_size;
    const int start = exists ? query_start_loc[sequence] : 0, end = exists ? query_start_loc[sequence + 1] : 0;
    const int length = exists ? seq_lens[sequence] : 0;
    const uint32 owners = __ballot_sync(FULL_MASK, sequence < real && start <= token && token < end);
    if (owners == 0) continue;
    const int owner = __ffs(int(owners)) - 1;
    place.sequence = first + owner;
    place.position = __shfl_sync(FULL_MASK, length - (end - token), owner);
    place.context = __shfl_sync(FULL_MASK, length - (end - start), owner);
  }
  return place;
}
