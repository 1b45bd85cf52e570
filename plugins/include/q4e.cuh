// What the kernels share: number formats, warp and block reductions, tensor-core and copy instructions, the packed batch.
//
// No CUDA header is included, so that NVRTC needs none. Every instruction that C++ cannot spell stands here, or in the
// parts that this includes, behind a function with a second body for Q4E_EMULATE, which tests compile for the CPU; kernels
// themselves hold no PTX.
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

#include "number_formats.cuh"

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

// Sum over the lanes up to this one; also of packed integers.
template <typename T>
__device__ __forceinline__ T warp_prefix(T x) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int lanes = 1; lanes < WARP; lanes *= 2) {
    const T before = __shfl_up_sync(FULL_MASK, x, lanes);
    x += lane >= lanes ? before : T(0);
  }
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

#include "memory.cuh"

#include "tensor_cores.cuh"

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
