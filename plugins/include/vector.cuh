// N values side by side in memory, which the compiler moves in instructions of up to 16 bytes.
#pragma once

// The largest power of two that divides `bytes`, at most 16.
constexpr int vector_alignment(int bytes) { return (bytes & -bytes) < 16 ? bytes & -bytes : 16; }

template <typename T, int N>
struct __align__(vector_alignment(sizeof(T) * N)) Vector {
  T items[N];
};

template <int N, typename T>
__device__ __forceinline__ Vector<T, N> load_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, N>*>(from);
}

// Rounds `values` to T.
template <typename T, int N>
__device__ __forceinline__ void store_vector(T* to, const float (&values)[N]) {
  Vector<T, N> rounded;
#pragma unroll
  for (int i = 0; i < N; ++i) rounded.items[i] = from_float<T>(values[i]);
  *reinterpret_cast<Vector<T, N>*>(to) = rounded;
}

// The same as 32-bit words, which stay packed in registers until an element is read.
template <typename T, int N>
struct __align__(vector_alignment(sizeof(T) * N)) Packed {
  uint32 words[sizeof(T) * N / 4];

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) return bits_to_float(words[i]);
    return i % 2 ? high_bf16(words[i / 2]) : low_bf16(words[i / 2]);
  }
};

template <int N, typename T>
__device__ __forceinline__ Packed<T, N> load_packed(const T* from) {
  return *reinterpret_cast<const Packed<T, N>*>(from);
}

// `values` rounded to T.
template <typename T, int N>
__device__ __forceinline__ Packed<T, N> pack(const float (&values)[N]) {
  Packed<T, N> packed;
#pragma unroll
  for (int i = 0; i < int(sizeof(T)) * N / 4; ++i) {
    if constexpr (sizeof(T) == 4)
      packed.words[i] = __float_as_uint(values[i]);
    else
      packed.words[i] = pack_bf16(values[2 * i], values[2 * i + 1]);
  }
  return packed;
}

template <typename T, int N>
__device__ __forceinline__ void store_packed(T* to, const Packed<T, N>& values) {
  *reinterpret_cast<Packed<T, N>*>(to) = values;
}
