// Runs CUDA kernels on the CPU, for tests: the threads of a block are fibers that take turns at barriers and at
// operations of a warp; blocks run one after another. Threads run in the order of their index or, with `reversed`, against
// it: a kernel whose result depends on that lacks a barrier.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __shared__ static
#define __constant__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct uint2 { unsigned x, y; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
struct int2 { int x, y; };
struct __align__(16) int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
struct dim3 { unsigned x, y, z; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

constexpr int WARP_SIZE = 32;
constexpr size_t STACK_BYTES = 128 * 1024;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  dim3 thread;
  int index;
  bool done;
  unsigned long waits_for_block, waits_for_warp;  // how many barriers it has come to
};
struct Warp {
  int alive, arrived;
  unsigned long generation;
  uint64_t slots[2][WARP_SIZE][8];  // two sets by turns: a lane may come to the next exchange before another has read
};
struct Barrier {
  int arrived;
  unsigned long generation;
};
struct Block {
  Barrier barriers[16];  // of `arrive_at` and `wait_at`
  dim3 index, size, grid;
  int alive, arrived;
  unsigned long generation;
  int votes;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<char> shared;
};

inline Block block;
inline Fiber* current;
inline ucontext_t scheduler;
inline void (*entry)(void*);
inline void* entry_args;

inline void yield() { swapcontext(&current->context, &scheduler); }

template <typename Group>
void arrive(Group& group) {
  unsigned long generation = group.generation;
  if (++group.arrived == group.alive) {
    group.arrived = 0;
    ++group.generation;
  }
  while (group.generation == generation) yield();
}

template <typename Group>
void leave(Group& group) {
  if (--group.alive > 0 && group.arrived == group.alive) {
    group.arrived = 0;
    ++group.generation;
  }
}

inline void arrive_at(int id, int threads) {
  Barrier& barrier = block.barriers[id];
  if (++barrier.arrived == threads) barrier = {0, barrier.generation + 1};
}
inline void wait_at(int id, int threads) {
  const unsigned long generation = block.barriers[id].generation;
  arrive_at(id, threads);
  while (block.barriers[id].generation == generation) yield();
}

inline Warp& warp() { return block.warps[current->index / WARP_SIZE]; }
inline int lane() { return current->index % WARP_SIZE; }
inline void* dynamic_shared() { return block.shared.data(); }

// Every lane of the warp puts in `value` and gets what all put in.
template <typename T>
std::pair<uint64_t (*)[8], T> exchange(const T& value) {
  static_assert(sizeof(T) <= 64, "an exchange is of at most 64 bytes");
  Warp& w = warp();
  auto slots = w.slots[w.generation % 2];
  std::memcpy(slots[lane()], &value, sizeof(T));
  arrive(w);
  return {slots, value};
}
template <typename T>
T from_lane(uint64_t (*slots)[8], int lane) {
  T value;
  std::memcpy(&value, slots[lane], sizeof(T));
  return value;
}

inline uint16_t bf16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
inline float bf16_value(uint32_t bits) {
  bits = (bits & 0xffffu) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint16_t fp16_bits(float x) {
  _Float16 half = _Float16(x);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
inline float fp16_value(uint32_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return float(half);
}

// VALUE gives that of an operand from its bits.
template <float (*VALUE)(uint32_t) = bf16_value>
void mma_16x8x16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
  struct Fragments { uint32_t a[4], b[2]; } mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  auto slots = exchange(mine).first;
  for (int i = 0; i < 4; ++i) {
    int row = lane() / 4 + 8 * (i / 2), column = 2 * (lane() % 4) + i % 2;
    for (int k = 0; k < 16; ++k) {
      auto left = from_lane<Fragments>(slots, row % 8 * 4 + k % 8 / 2);
      auto right = from_lane<Fragments>(slots, column * 4 + k % 8 / 2);
      uint32_t x = left.a[row / 8 + 2 * (k / 8)] >> (16 * (k % 2)), y = right.b[k / 8] >> (16 * (k % 2));
      c[i] += VALUE(x) * VALUE(y);
    }
  }
}

inline float e2m1_value(uint32_t code) {
  const float magnitudes[8] = {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
  return code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
}
inline float ue4m3_value(uint32_t code) {
  if ((code & 0x7f) == 0x7f) return NAN;
  return std::ldexp(code >> 3 & 15 ? 8.f + (code & 7) : float(code & 7), std::max(int(code >> 3 & 15), 1) - 10);
}
// The layout of mma.m16n8k64 with .scale_vec::4X in the PTX ISA, byte and thread selectors zero.
inline void mma_block_scaled_16x8x64(float c[4], const uint32_t a[4], const uint32_t b[2], uint32_t scale_a, uint32_t scale_b) {
  struct Fragments { uint32_t a[4], b[2], scale_a, scale_b; } mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, scale_a, scale_b};
  auto slots = exchange(mine).first;
  for (int i = 0; i < 4; ++i) {
    int row = lane() / 4 + 8 * (i / 2), column = 2 * (lane() % 4) + i % 2;
    uint32_t row_scales = from_lane<Fragments>(slots, row % 8 * 4 + row / 8).scale_a;
    uint32_t column_scales = from_lane<Fragments>(slots, column * 4).scale_b;
    for (int k = 0; k < 64; k += 8) {
      auto left = from_lane<Fragments>(slots, row % 8 * 4 + k % 32 / 8);
      auto right = from_lane<Fragments>(slots, column * 4 + k % 32 / 8);
      float sum = 0.f;
      for (int j = 0; j < 8; ++j)
        sum += e2m1_value(left.a[row / 8 + 2 * (k / 32)] >> (4 * j)) * e2m1_value(right.b[k / 32] >> (4 * j));
      c[i] += sum * ue4m3_value(row_scales >> (8 * (k / 16))) * ue4m3_value(column_scales >> (8 * (k / 16)));
    }
  }
}

inline void run_fiber() {
  entry(entry_args);
  current->done = true;
  leave(warp());
  leave(block);
  yield();
}

// A pointer to the arguments, each in a cell of its own, becomes a call of the kernel.
template <typename... Args, size_t... I>
void call(void (*kernel)(Args...), void** args, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<std::remove_reference_t<Args>>*>(args[I])...);
}
template <typename... Args>
void invoke(void (*kernel)(Args...), void** args) {
  call(kernel, args, std::index_sequence_for<Args...>{});
}

// Returns 0, or 1 if the threads of a block wait for each other for ever.
inline int launch(void (*body)(void*), void* args, dim3 grid, int threads, size_t shared_bytes, bool reversed) {
  entry = body, entry_args = args;
  block.size = {unsigned(threads), 1, 1}, block.grid = grid;
  block.fibers.resize(threads);
  for (Fiber& fiber : block.fibers) fiber.stack.resize(STACK_BYTES);
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        block.index = {x, y, z}, block.alive = threads, block.arrived = 0, block.generation = 0, block.votes = 0;
        std::fill(std::begin(block.barriers), std::end(block.barriers), Barrier{});
        block.shared.assign(shared_bytes + 16, char(0xff));  // NaN
        block.warps.assign((threads + WARP_SIZE - 1) / WARP_SIZE, Warp{});
        for (int i = 0; i < threads; ++i) {
          Fiber& fiber = block.fibers[i];
          ++block.warps[i / WARP_SIZE].alive;
          fiber.thread = {unsigned(i), 0, 0}, fiber.index = i, fiber.done = false;
          getcontext(&fiber.context);
          fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
          fiber.context.uc_link = nullptr;
          makecontext(&fiber.context, run_fiber, 0);
        }
        for (unsigned long idle = 0; block.alive > 0;) {
          unsigned long before = block.generation;
          int alive = block.alive;
          for (const Warp& w : block.warps) before += w.generation;
          for (const Barrier& barrier : block.barriers) before += barrier.generation;
          for (int i = 0; i < threads; ++i) {
            Fiber& fiber = block.fibers[reversed ? threads - 1 - i : i];
            if (fiber.done) continue;
            current = &fiber;
            swapcontext(&scheduler, &fiber.context);
          }
          unsigned long after = block.generation;
          for (const Warp& w : block.warps) after += w.generation;
          for (const Barrier& barrier : block.barriers) after += barrier.generation;
          idle = after == before && alive == block.alive ? idle + 1 : 0;
          if (idle > 2) return 1;
        }
      }
  return 0;
}

}  // namespace emulator

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::block.index)
#define blockDim (emulator::block.size)
#define gridDim (emulator::block.grid)

inline void __syncthreads() { emulator::arrive(emulator::block); }
inline void __syncwarp(unsigned = 0) { emulator::arrive(emulator::warp()); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline int vote(int predicate) {  // how many threads of the block say yes
  emulator::block.votes += predicate != 0;
  emulator::arrive(emulator::block);
  int votes = emulator::block.votes;
  emulator::arrive(emulator::block);
  emulator::block.votes = 0;
  emulator::arrive(emulator::block);
  return votes;
}
inline int __syncthreads_count(int predicate) { return vote(predicate); }
inline int __syncthreads_or(int predicate) { return vote(predicate) > 0; }
inline int __syncthreads_and(int predicate) { return vote(!predicate) == 0; }

template <typename T>
T __shfl_sync(unsigned, T value, int from, int width = 32) {
  auto slots = emulator::exchange(value).first;
  return emulator::from_lane<T>(slots, emulator::lane() / width * width + (from & (width - 1)));
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
  auto slots = emulator::exchange(value).first;
  int from = emulator::lane() ^ mask;
  return from / width > emulator::lane() / width ? value : emulator::from_lane<T>(slots, from);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned by, int width = 32) {
  auto slots = emulator::exchange(value).first;
  int place = emulator::lane() % width;
  return place < int(by) ? value : emulator::from_lane<T>(slots, emulator::lane() - int(by));
}
template <typename T>
T __shfl_down_sync(unsigned, T value, unsigned by, int width = 32) {
  auto slots = emulator::exchange(value).first;
  int place = emulator::lane() % width;
  return place + int(by) >= width ? value : emulator::from_lane<T>(slots, emulator::lane() + int(by));
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  auto slots = emulator::exchange(predicate != 0).first;
  unsigned votes = 0;
  int warp_start = emulator::current->index / 32 * 32;
  for (int lane = 0; lane < 32 && warp_start + lane < int(blockDim.x); ++lane)
    votes |= unsigned(emulator::from_lane<bool>(slots, lane)) << lane;
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
template <typename T>
unsigned __match_any_sync(unsigned, T value) {
  auto slots = emulator::exchange(value).first;
  unsigned same = 0;
  for (int lane = 0; lane < 32; ++lane) same |= unsigned(emulator::from_lane<T>(slots, lane) == value) << lane;
  return same;
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  auto slots = emulator::exchange(value).first;
  unsigned sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += emulator::from_lane<unsigned>(slots, lane);
  return sum;
}

inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  auto slots = emulator::exchange(value).first;
  for (int lane = 0; lane < 32; ++lane) value = std::min(value, emulator::from_lane<unsigned>(slots, lane));
  return value;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  auto slots = emulator::exchange(value).first;
  for (int lane = 0; lane < 32; ++lane) value = std::max(value, emulator::from_lane<unsigned>(slots, lane));
  return value;
}

template <typename T>
T atomicAdd(T* to, T value) { T old = *to; *to = old + value; return old; }
template <typename T>
T atomicMax(T* to, T value) { T old = *to; *to = old > value ? old : value; return old; }
template <typename T>
T atomicMin(T* to, T value) { T old = *to; *to = old < value ? old : value; return old; }
template <typename T>
T atomicOr(T* to, T value) { T old = *to; *to = old | value; return old; }
template <typename T>
T atomicExch(T* to, T value) { T old = *to; *to = value; return old; }
template <typename T>
T atomicCAS(T* to, T compare, T value) { T old = *to; if (old == compare) *to = value; return old; }
inline unsigned atomicInc(unsigned* to, unsigned limit) { unsigned old = *to; *to = old >= limit ? 0 : old + 1; return old; }

template <typename T> T __ldg(const T* from) { return *from; }
template <typename T> T __ldcg(const T* from) { return *from; }
template <typename T> T __ldcs(const T* from) { return *from; }
template <typename T> void __stcs(T* to, T value) { *to = value; }
template <typename T> void __stcg(T* to, T value) { *to = value; }
inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { return __uint_as_float(unsigned(x)); }
inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) { unsigned y = 0; for (int i = 0; i < 32; ++i) y |= (x >> i & 1u) << (31 - i); return y; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  uint64_t bytes = uint64_t(y) << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= unsigned(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return out;
}
inline unsigned __umulhi(unsigned x, unsigned y) { return unsigned(uint64_t(x) * y >> 32); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline void __trap() { std::abort(); }
template <typename T> T min(T x, T y) { return x < y ? x : y; }
template <typename T> T max(T x, T y) { return x > y ? x : y; }
