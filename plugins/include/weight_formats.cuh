// Weights as the A operand of mma_16x8x16: 16 rows by a step of K, from global memory to bf16 in registers.
//
// With g = lane / 4 and t = lane % 4, a lane loads 16 bytes of two rows a step, and the four lanes of a row 64 bytes in a
// row. Which k an mma sees where is free as long as both operands agree, so a lane multiplies what it loaded: every 8
// elements, "a group", make two mmas. The B operand of lane (g, t) is token g at the lane's own k, 16 bytes a group,
// which `arrange` brings into the order of the format's words.
//
// A format has
//   STEP, GROUPS           elements of K that a warp multiplies a step; groups of 8 that a lane loads of a row
//   UNIT                   what the sums have to be multiplied by
//   HAS_SUM_SCALES         whether a fragment's product is scaled before it is added up (`scales`), as FP8 blocks are
//   Rows, locate           where the lane loads from: its element `k` of rows `low` (g) and `high` (g + 8)
//   Fragment, load         one step of it, `offset` elements further on; zeros where not `valid`
//   decode                 one group of a fragment as the A operands of two mmas
//   SLOT_BYTES, copy, read the same by way of shared memory: `copy` starts to fill a warp's slot, `read` is behind
//                          `wait_copies` and a barrier of the warp
//   copy_values, copy_scales, read_tile
//                          and with the block scales of a whole tile, 8 * HALVES rows by COLUMNS, in one place of
//                          `scale_bytes`, which THREADS threads start to fill together: fewer and larger requests
//                          With HALVES = 1 all of these know the rows `low` only, and the others count as zero.
//   arrange                8 activations as the B operands of those
//   place                  where `arrange` puts element 0 <= i < 8
//   value                  one element, without UNIT
// Rows start at multiples of 16 bytes, so K is a multiple of 8 * GROUPS. No load is by `__ldg`, see `load_streaming`.
#pragma once
#include "q4e.cuh"

__device__ __forceinline__ uint4 load_weight(const uint8* from, bool valid) {
  return valid ? load_streaming(from) : make_uint4(0, 0, 0, 0);
}

constexpr int CODE_BYTES = 1024;  // of a slot: 16 bytes of two rows for every lane, which fetches what it will read

template <int HALVES>
__device__ __forceinline__ void copy_codes(uint8* slot, const uint8* const (&rows)[2], int offset, bool valid) {
#pragma unroll
  for (int i = 0; i < HALVES; ++i) copy_async_16(slot + 512 * i + 16 * (threadIdx.x % WARP), rows[i] + offset, valid);
}
template <int HALVES>
__device__ __forceinline__ void read_codes(const uint8* slot, uint4 (&codes)[2]) {
#pragma unroll
  for (int i = 0; i < HALVES; ++i) codes[i] = reinterpret_cast<const uint4*>(slot)[WARP * i + threadIdx.x % WARP];
}

// Words (0, 4), (1, 5), (2, 6), (3, 7): the order of `e2m1_words`.
__device__ __forceinline__ uint4 pair_with_fourth(uint4 x) {
  return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
                    __byte_perm(x.y, x.w, 0x7632));
}
// Words (0, 2), (1, 3), (4, 6), (5, 7).
__device__ __forceinline__ uint4 pair_with_second(uint4 x) {
  return make_uint4(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x5410),
                    __byte_perm(x.z, x.w, 0x7632));
}

__device__ __forceinline__ uint32 word_of(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Four words of each row, in the order of `arrange`, as the A operands of two mmas.
template <int HALVES>
__device__ __forceinline__ void interleave_rows(const uint32 (&words)[HALVES][4], uint32 a[2][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[i / 2][i % 2 * 2] = words[0][i];
    a[i / 2][i % 2 * 2 + 1] = HALVES == 2 ? words[HALVES - 1][i] : 0;
  }
}

// `nvfp4_scale` of two scales that may be negative, the codes in bytes 0 and 2, each in a half of the word.
__device__ __forceinline__ uint32 nvfp4_scale_pair(uint32 codes) {
  return multiply_bf16(e4m3_pair_to_bf16(codes), 0x7a807a80u);  // 2^118
}

// E2M1 codes [N, K/2], two a byte, and an E4M3 scale for 16 of them [N, K/16].
struct Nvfp4 {
  static constexpr int STEP = 128, GROUPS = 4, SLOT_BYTES = CODE_BYTES + 128;
  static constexpr float UNIT = NVFP4_UNIT;
  static constexpr bool HAS_SUM_SCALES = false;
  struct Rows {
    const uint8 *codes[2], *scales[2];
  };
  struct Fragment {
    uint4 codes[2];
    uint32 scales[2];  // of the two blocks that a lane has of a row, in the low bytes
  };

  static __device__ __forceinline__ Rows locate(const void* codes, const void* scales, int columns, int low, int high, int k) {
    const int64 first = int64(low) * columns + k, apart = int64(high - low) * columns;  // known where `high - low` is
    const uint8 *low_codes = static_cast<const uint8*>(codes) + first / 2;
    const uint8 *low_scales = static_cast<const uint8*>(scales) + first / 16;
    return {{low_codes, low_codes + apart / 2}, {low_scales, low_scales + apart / 16}};
  }
  template <int HALVES = 2>
  static __device__ __forceinline__ Fragment load(const Rows& rows, int offset, bool valid) {
    Fragment fragment;
#pragma unroll
    for (int i = 0; i < HALVES; ++i) {
      fragment.codes[i] = load_weight(rows.codes[i] + offset / 2, valid);
      fragment.scales[i] = valid ? *reinterpret_cast<const uint16*>(rows.scales[i] + offset / 16) : 0;
    }
    return fragment;
  }
  // A step's scales of a row, 8 bytes, are fetched by one lane. K is a multiple of STEP, so that they are aligned.
  template <int HALVES = 2>
  static __device__ __forceinline__ void copy(uint8* slot, const Rows& rows, int offset, bool valid) {
    copy_codes<HALVES>(slot, rows.codes, offset / 2, valid);
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const uint8* scales = (t ? rows.scales[HALVES - 1] - 2 : rows.scales[0]) + offset / 16;
    if (t < HALVES && valid) copy_async_8(slot + CODE_BYTES + 64 * t + 8 * g, scales);
  }
  template <int HALVES = 2>
  static __device__ __forceinline__ Fragment read(const uint8* slot) {
    Fragment fragment;
    read_codes<HALVES>(slot, fragment.codes);
    const uint16* scales = reinterpret_cast<const uint16*>(slot + CODE_BYTES) + threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < HALVES; ++i) fragment.scales[i] = scales[32 * i];
    return fragment;
  }
  template <int HALVES>
  static __device__ __forceinline__ void copy_values(uint8* slot, const Rows& rows, int offset, bool valid) {
    copy_codes<HALVES>(slot, rows.codes, offset / 2, valid);
  }
  // An odd number of 16 bytes, so that 8 rows lie in different banks.
  static __device__ __forceinline__ constexpr int scale_pitch(int columns) { return (columns / 256 | 1) * 16; }
  static __device__ __forceinline__ constexpr int scale_bytes(int halves, int columns) {
    return 8 * halves * scale_pitch(columns);
  }
  template <int HALVES, int COLUMNS, int THREADS>
  static __device__ __forceinline__ void copy_scales(uint8* to, const void* scales, int first_row, int rows,
                                                     int first_column, int columns, int thread) {
    constexpr int PIECES = COLUMNS / STEP;
#pragma unroll
    for (int i = thread; i < 8 * HALVES * PIECES; i += THREADS) {
      const int row = i / PIECES, piece = i % PIECES, column = first_column + piece * STEP;
      const int64 from = int64(min(first_row + row, rows - 1)) * (uint32(columns) / 16) + uint32(column) / 16;
      if (column < columns)
        copy_async_8(to + row * scale_pitch(COLUMNS) + 8 * piece, static_cast<const uint8*>(scales) + from);
    }
  }
  template <int HALVES, int COLUMNS>
  static __device__ __forceinline__ Fragment read_tile(const uint8* slot, const uint8* scales, int step) {
    Fragment fragment;
    read_codes<HALVES>(slot, fragment.codes);
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < HALVES; ++i) {
      const uint8* from = scales + (8 * i + g) * scale_pitch(COLUMNS) + 2 * t;
      fragment.scales[i] = *reinterpret_cast<const uint16*>(from + 8 * step);
    }
    return fragment;
  }
  template <int HALVES = 2>
  static __device__ __forceinline__ void decode(const Fragment& fragment, int group, uint32 a[2][4]) {
    uint32 words[HALVES][4];
#pragma unroll
    for (int i = 0; i < HALVES; ++i) {
      const uint32 scales = nvfp4_scale_pair(__byte_perm(fragment.scales[i], 0, 0x4140));  // once for all groups
      const uint32 scale = __byte_perm(scales, 0, group < 2 ? 0x1010 : 0x3232);
      e2m1_words(word_of(fragment.codes[i], group), words[i]);
#pragma unroll
      for (int w = 0; w < 4; ++w) words[i][w] = multiply_bf16(words[i][w], scale);
    }
    interleave_rows(words, a);
  }
  static __device__ __forceinline__ uint4 arrange(uint4 x) { return pair_with_fourth(x); }
  static __device__ __forceinline__ int place(int i) { return 2 * (i & 3) + (i >> 2); }
  static __device__ __forceinline__ float value(const void* codes, const void* scales, int columns, int row, int k) {
    int64 index = int64(row) * columns + k;
    uint32 code = uint32(static_cast<const uint8*>(codes)[index / 2]) >> (4 * (k % 2)) & 15u;
    return e2m1_value(code) * to_float(static_cast<const e4m3*>(scales)[index / 16]);
  }
};

// E4M3 weights [N, K] with a float32 scale for 128 x 128 of them [ceil(N/128), ceil(K/128)].
struct Fp8Blocks {
  static constexpr int STEP = 64, GROUPS = 2, BLOCK = 128, SLOT_BYTES = CODE_BYTES + 16;
  static constexpr float UNIT = 1.f;
  static constexpr bool HAS_SUM_SCALES = true;
  struct Rows {
    const uint8* codes[2];
    const float* scales[2];
    int k, last_block;
  };
  struct Fragment {
    uint4 codes[2];
    float scales[2];
  };

  static __device__ __forceinline__ Rows locate(const void* codes, const void* scales, int columns, int low, int high, int k) {
    Rows rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int row = i ? high : low;
      rows.codes[i] = static_cast<const uint8*>(codes) + int64(row) * columns + k;
      rows.scales[i] = static_cast<const float*>(scales) + int64(row / BLOCK) * ceil_div(columns, BLOCK);
    }
    rows.k = k, rows.last_block = (columns - 1) / BLOCK;
    return rows;
  }
  // The scales also in lanes whose codes are beyond K: they hold sums of the others.
  template <int HALVES = 2>
  static __device__ __forceinline__ Fragment load(const Rows& rows, int offset, bool valid) {
    Fragment fragment;
#pragma unroll
    for (int i = 0; i < HALVES; ++i) {
      fragment.codes[i] = load_weight(rows.codes[i] + offset, valid);
      fragment.scales[i] = rows.scales[i][min((rows.k + offset) / BLOCK, rows.last_block)];
    }
    return fragment;
  }
  // One scale does for all rows, which are 16 of the same block.
  template <int HALVES = 2>
  static __device__ __forceinline__ void copy(uint8* slot, const Rows& rows, int offset, bool valid) {
    copy_codes<HALVES>(slot, rows.codes, offset, valid);
    if (threadIdx.x % WARP == 0) copy_async_4(slot + CODE_BYTES, rows.scales[0] + min((rows.k + offset) / BLOCK, rows.last_block));
  }
  template <int HALVES = 2>
  static __device__ __forceinline__ Fragment read(const uint8* slot) {
    Fragment fragment;
    read_codes<HALVES>(slot, fragment.codes);
    fragment.scales[0] = fragment.scales[1] = *reinterpret_cast<const float*>(slot + CODE_BYTES);
    return fragment;
  }
  template <int HALVES>
  static __device__ __forceinline__ void copy_values(uint8* slot, const Rows& rows, int offset, bool valid) {
    copy_codes<HALVES>(slot, rows.codes, offset, valid);
  }
  static __device__ __forceinline__ constexpr int scale_bytes(int, int columns) { return ceil_div(columns, BLOCK * 4) * 16; }
  // All rows of a tile are of the same blocks.
  template <int HALVES, int COLUMNS, int THREADS>
  static __device__ __forceinline__ void copy_scales(uint8* to, const void* scales, int first_row, int rows,
                                                     int first_column, int columns, int thread) {
    const int blocks = ceil_div(columns, BLOCK), row_block = min(first_row, rows - 1) / BLOCK;
    const float* from = static_cast<const float*>(scales) + int64(row_block) * blocks;
#pragma unroll
    for (int i = thread; i < COLUMNS / BLOCK; i += THREADS)
      copy_async_4(to + 4 * i, from + min(first_column / BLOCK + i, blocks - 1));
  }
  template <int HALVES, int COLUMNS>
  static __device__ __forceinline__ Fragment read_tile(const uint8* slot, const uint8* scales, int step) {
    Fragment fragment;
    read_codes<HALVES>(slot, fragment.codes);
    fragment.scales[0] = fragment.scales[1] = reinterpret_cast<const float*>(scales)[step * STEP / BLOCK];
    return fragment;
  }
  template <int HALVES = 2>
  static __device__ __forceinline__ void decode(const Fragment& fragment, int group, uint32 a[2][4]) {
    uint32 words[HALVES][4];
#pragma unroll
    for (int i = 0; i < HALVES; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32 codes = word_of(fragment.codes[i], 2 * group + half);
        words[i][2 * half] = e4m3_pair_to_bf16(codes);
        words[i][2 * half + 1] = e4m3_pair_to_bf16(codes >> 8);
      }
    }
    interleave_rows(words, a);
  }
  static __device__ __forceinline__ uint4 arrange(uint4 x) { return pair_with_second(x); }
  static __device__ __forceinline__ int place(int i) { return (i & 4) + 2 * (i & 1) + (i >> 1 & 1); }
  static __device__ __forceinline__ float value(const void* codes, const void* scales, int columns, int row, int k) {
    float scale = static_cast<const float*>(scales)[int64(row / BLOCK) * ceil_div(columns, BLOCK) + k / BLOCK];
    return to_float(static_cast<const e4m3*>(codes)[int64(row) * columns + k]) * scale;
  }
};

// Weights in bf16 [N, K]; no scales.
struct Bf16 {
  static constexpr int STEP = 32, GROUPS = 1, SLOT_BYTES = CODE_BYTES;
  static constexpr float UNIT = 1.f;
  static constexpr bool HAS_SUM_SCALES = false;
  struct Rows {
    const uint8* values[2];
  };
  struct Fragment {
    uint4 values[2];
  };

  static __device__ __forceinline__ Rows locate(const void* values, const void*, int columns, int low, int high, int k) {
    const uint8* low_values = static_cast<const uint8*>(values) + 2 * (int64(low) * columns + k);
    return {{low_values, low_values + 2 * int64(high - low) * columns}};
  }
  template <int HALVES = 2>
  static __device__ __forceinline__ Fragment load(const Rows& rows, int offset, bool valid) {
    Fragment fragment;
#pragma unroll
    for (int i = 0; i < HALVES; ++i) fragment.values[i] = load_weight(rows.values[i] + 2 * offset, valid);
    return fragment;
  }
  template <int HALVES = 2>
  static __device__ __forceinline__ void copy(uint8* slot, const Rows& rows, int offset, bool valid) {
    copy_codes<HALVES>(slot, rows.values, 2 * offset, valid);
  }
  template <int HALVES = 2>
  static __device__ __forceinline__ Fragment read(const uint8* slot) {
    Fragment fragment;
    read_codes<HALVES>(slot, fragment.values);
    return fragment;
  }
  template <int HALVES>
  static __device__ __forceinline__ void copy_values(uint8* slot, const Rows& rows, int offset, bool valid) {
    copy_codes<HALVES>(slot, rows.values, 2 * offset, valid);
  }
  static __device__ __forceinline__ constexpr int scale_bytes(int, int) { return 0; }
  template <int HALVES, int COLUMNS, int THREADS>
  static __device__ __forceinline__ void copy_scales(uint8*, const void*, int, int, int, int, int) {}
  template <int HALVES, int COLUMNS>
  static __device__ __forceinline__ Fragment read_tile(const uint8* slot, const uint8*, int) {
    Fragment fragment;
    read_codes<HALVES>(slot, fragment.values);
    return fragment;
  }
  template <int HALVES = 2>
  static __device__ __forceinline__ void decode(const Fragment& fragment, int, uint32 a[2][4]) {
    uint32 words[HALVES][4];
#pragma unroll
    for (int i = 0; i < HALVES; ++i) {
      const uint4 v = fragment.values[i];
      words[i][0] = v.x, words[i][1] = v.y, words[i][2] = v.z, words[i][3] = v.w;
    }
    interleave_rows(words, a);
  }
  static __device__ __forceinline__ uint4 arrange(uint4 x) { return x; }
  static __device__ __forceinline__ int place(int i) { return i; }
  static __device__ __forceinline__ float value(const void* values, const void*, int columns, int row, int k) {
    return to_float(static_cast<const bf16*>(values)[int64(row) * columns + k]);
  }
};
