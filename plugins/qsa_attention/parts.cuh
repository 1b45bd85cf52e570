// How the splits of an output row are left for `merge`. Macro: HEAD_DIM.
#pragma once
#include "q4e.cuh"

// A part has its columns in the order in which tensor cores leave them: in each slab, column 8 n + i is at 8 i + n.
constexpr int SLAB = 64, PART_WIDTH = ceil_div(HEAD_DIM, SLAB) * SLAB;

__device__ __forceinline__ int part_place(int column) {
  return column / SLAB * SLAB + column % 8 * 8 + column % SLAB / 8;
}
