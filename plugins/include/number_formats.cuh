// Number formats: bf16, fp16, E4M3, and E2M1 with block scales. A part of q4e.cuh, which includes it.
#pragma once

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
