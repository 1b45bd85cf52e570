// What `attend` and `attend_float` share: the list of the tokens that one query reads, and where they are in the cache.
// Macros: HEAD_DIM, RATIO (tokens of a group; 0: dense), PAGE (tokens of a page).
#pragma once
#include "qsa_attention/parts.cuh"

constexpr int TILE = WARP;  // entries of the list that a block takes at once, one a lane
constexpr int GROUP_TOKENS = RATIO > 0 ? RATIO : 1;

struct CacheEntry {
  int token;  // -1: none
  int page;

  // The row of its key in the cache, of HKV heads; that of its value is PAGE rows further on. -1: none.
  __device__ __forceinline__ int row() const { return token < 0 ? -1 : page * 2 * PAGE + token % PAGE; }
};

// Walks over every `num_walks`-th tile of the list of a query, from tile `first` on; a lane has one entry of each tile.
// Entries are RATIO tokens of the tail, then RATIO of each selected group; dense: tokens 0 to that of the query. Groups
// are -1 behind the last selected one, so that a tile without an entry ends the walk. The loads that find an entry
// (group, then page) are under way while the tiles in front of it are worked on.
struct TileWalk {
  const int* groups;  // selected groups of the query
  const int* pages;   // of its sequence
  int num_groups, position;
  int index, step;       // entry of this lane in the current tile; entries from tile to tile
  CacheEntry now, next;  // entries `index`, `index + step`
  int group;             // of entry `index + 2 * step`

  __device__ __forceinline__ TileWalk(const int* selected, int count, int first, int num_walks)
      : groups(selected), num_groups(count), index(first * TILE + int(threadIdx.x % WARP)), step(num_walks * TILE) {
    now.token = load_group(index);  // groups until `start`
    next.token = load_group(index + step);
    group = load_group(index + 2 * step);
  }
  // For a row of padding the list is empty.
  __device__ __forceinline__ void start(const TokenPlace& place, const int* block_table, int max_blocks) {
    pages = block_table + int64(place.sequence) * max_blocks;
    position = place.sequence < 0 ? -1 : place.position;
    now = entry(index, now.token);
    next = entry(index + step, next.token);
  }
  __device__ __forceinline__ bool has_tile() const { return __any_sync(FULL_MASK, now.token >= 0); }
  __device__ __forceinline__ void advance() {
    now = next;
    index += step;
    next = entry(index + step, group);
    group = load_group(index + 2 * step);
  }

 private:
  __device__ __forceinline__ int load_group(int at) const {
    const int slot = at / GROUP_TOKENS - 1;
    return RATIO > 0 && slot >= 0 && slot < num_groups ? groups[slot] : -1;
  }
  __device__ __forceinline__ CacheEntry entry(int at, int of_group) const {
    int token = at;
    if (RATIO > 0) {
      if (at < GROUP_TOKENS) of_group = (position + 1) / GROUP_TOKENS;  // the tail
      token = of_group < 0 ? -1 : of_group * GROUP_TOKENS + at % GROUP_TOKENS;
    }
    if (token > position) token = -1;
    return {token, token < 0 ? 0 : pages[token / PAGE]};
  }
};
