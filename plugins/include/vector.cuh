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
