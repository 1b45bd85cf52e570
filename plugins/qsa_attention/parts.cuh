// How the splits of an output row are left for `merge`. Macro: HEAD_DIM.
#pragma once
#include "q4e.cuh"

// A part has its columns in the order in which tensor cores leave them: in each 64, column 8 n + i is at 8 i + n.
constexpr int PART_WIDTH = ceil_div(HEAD_DIM, 64) * 64;

__device__ __forceinline__ int part_place(int column) { return column / 64 * 64 + column % 8 * 8 + column % 64 / 8; }
