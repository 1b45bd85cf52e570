// What `attend` and `attend_float` share: the list of the tokens that one query reads, and where they are in the cache.
// Macros: HEAD_DIM, RATIO (tokens of a group; 0: dense), PAGE (tokens of a page).
#pragma once
#include "qsa_attention/parts.cuh"

constexpr int TILE = WARP;  // entries of the list that a block takes at once, one a lane
constexpr int UNIT = RATIO > 0 ? RATIO : TILE;  // entries that stay together

struct CacheEntry {
  int token;  // -1: none
  int page;

  // The row of its key in the cache, of HKV heads; that of its value is PAGE rows further on. -1: none.
  __device__ __forceinline__ int row() const { return token < 0 ? -1 : page * 2 * PAGE + token % PAGE; }
};

// The part of the list of a query that one of `splits` blocks has: every `splits`-th unit of it, from unit `split` on.
// Units are the tail, then the selected groups; dense: UNIT tokens each, from token 0 to that of the query. Groups are -1
// behind the last selected one, so that but for the tail the first tile without an entry ends the part. An entry is found
// in two steps, for the loads to be under way together: `group`, then `entry` of it.
struct TokenList {
  const int* groups;  // selected groups of the query
  int num_groups, split, splits;
  const int* pages;  // of its sequence
  int position;      // of the query; -1: a row of padding, whose list is empty

  __device__ __forceinline__ TokenList(const int* groups, int num_groups, int split, int splits)
      : groups(groups), num_groups(num_groups), split(split), splits(splits), pages(nullptr), position(-1) {}
  __device__ __forceinline__ void start(const TokenPlace& place, const int* block_table, int max_blocks) {
    pages = block_table + int64(place.sequence) * max_blocks;
    position = place.sequence < 0 ? -1 : place.position;
  }
  __device__ __forceinline__ int unit(int at) const { return split + at / UNIT * splits; }
  __device__ __forceinline__ int group(int at) const {
    const int slot = unit(at) - 1;
    return RATIO > 0 && slot >= 0 && slot < num_groups ? groups[slot] : -1;
  }
  // Entry `at` of the part; `group` is what the function of that name gave for it.
  __device__ __forceinline__ CacheEntry entry(int at, int group) const {
    if (RATIO == 0) group = unit(at);
    if (RATIO > 0 && unit(at) == 0) group = (position + 1) / UNIT;  // the tail
    const int token = group < 0 ? -1 : group * UNIT + at % UNIT;
    return token < 0 || token > position ? CacheEntry{-1, 0} : CacheEntry{token, pages[token / PAGE]};
  }
};
