// Tiles of up to QUERIES neighbouring rows of one sequence, which read the union of their selected groups together.
// Macros: RATIO (tokens of a group; 0: dense), QUERIES.
#pragma once
#include "q4e.cuh"

constexpr int UNIT = RATIO > 0 ? RATIO : 4;  // tokens of an entry of a union: a group; dense: any few
constexpr uint32 ALL_QUERIES = (1u << QUERIES) - 1;

struct Tile {
  int sequence, first_row, count;
  int position;     // of the first row in its sequence
  int num_entries;  // of its union; 0: nothing to do, or row by row
  int unused[3];

  __device__ __forceinline__ int last_position() const { return position + count - 1; }
};

// An entry of a union: a group, and a bit for each query of the tile that selected it.
__device__ __forceinline__ uint32 make_entry(int group, uint32 queries) { return uint32(group) << QUERIES | queries; }
__device__ __forceinline__ int group_of(uint32 entry) { return int(entry >> QUERIES); }
