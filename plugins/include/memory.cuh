// Loads, prefetches and asynchronous copies. A part of q4e.cuh, which includes it.
#pragma once

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
