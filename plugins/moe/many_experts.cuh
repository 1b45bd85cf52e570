// Tiles of tokens of one expert, and a block's share of them. Macros: those of routing.cuh and WARPS; HIDDEN; ROUTED,
// SHARED: formats; INNER, SHARED_INNER: hidden elements of a routed and of the shared expert; TOKEN_TILES: at most so many
// times 8 tokens a tile, TILES_APART of them apart from the next smaller code; ROUTED_ROW_TILES, SHARED_ROW_TILES,
// ROUTED_STAGES, SHARED_STAGES: M and DEPTH of many_tile.cuh.
#pragma once
#include "moe/many_tile.cuh"
#include "moe/routing.cuh"

constexpr int TILE_TOKENS = 8 * TOKEN_TILES;
constexpr int HIDDEN_PITCH = INNER > SHARED_INNER ? INNER : SHARED_INNER;
constexpr bool ALIKE = is_same<ROUTED, SHARED> && INNER == SHARED_INNER && ROUTED_ROW_TILES == SHARED_ROW_TILES;
// What a tile costs beside its tokens, in tokens.
constexpr int TILE_COST = 16;

// Positions are rows of the hidden vectors and of the experts' outputs: those of an expert follow one another, those of
// the shared expert come behind all others, in the order of tokens.
struct Tile {
  int expert, first, count;
};

// What `route` and `place` made, and what it says about the rows from `first_token` on.
struct Lists {
  const int4* tiles;
  const int *num_tiles, *query_start_loc, *num_seqs;
  int first_token, tokens;
};

// Calls `run(is_shared, tile, first part, number of parts)` for a block's share of the work, which is all tiles of the
// shared expert, then those of the routed ones, with so many parts of rows each. It is weighed by tokens, and a part belongs
// to the block in whose share its first token is.
template <typename Run>
__device__ __forceinline__ void run_share(const Lists& lists, int routed_parts, int shared_parts, const Run& run) {
  __shared__ int found;
  const int real = real_tokens(lists.query_start_loc, lists.num_seqs, lists.first_token, lists.tokens);
  const int shared_tiles = ceil_div(real, TILE_TOKENS), routed_tiles = *lists.num_tiles;
  const int routed_place = shared_parts * (real + TILE_COST * shared_tiles);
  const uint32 all = routed_place + routed_parts * (real * CHOICES + TILE_COST * routed_tiles);
  const int begin = all * blockIdx.x / gridDim.x, end = all * (blockIdx.x + 1) / gridDim.x;  // of 32 bits, see the launcher
  if (begin == end) return;
  const auto place_of = [&](int index, int first) ALWAYS_INLINE { return routed_place + routed_parts * (first + TILE_COST * index); };
  for (int index = threadIdx.x; index < routed_tiles; index += THREADS) {
    const int4 tile = lists.tiles[index];
    const int place = place_of(index, tile.y), next = place + routed_parts * (tile.z + TILE_COST);
    if (place <= begin && begin < next) found = index;
  }
  __syncthreads();
  const int whole = shared_parts * (TILE_TOKENS + TILE_COST);
  int index = begin < routed_place ? begin / whole : shared_tiles + found;
  for (; index < shared_tiles + routed_tiles; ++index) {
    const bool is_shared = index < shared_tiles;
    Tile tile = {0, lists.tokens * CHOICES + index * TILE_TOKENS, min(TILE_TOKENS, real - index * TILE_TOKENS)};
    int place = index * whole;
    if (!is_shared) {
      const int4 listed = lists.tiles[index - shared_tiles];
      tile = {listed.x, listed.y, listed.z};
      place = place_of(index - shared_tiles, tile.first);
    }
    if (place >= end) break;
    const int weight = tile.count + TILE_COST, most = is_shared ? shared_parts : routed_parts;
    const int first = ceil_div(max(begin - place, 0), weight), last = min(most, ceil_div(end - place, weight));
    if (first < last) run(is_shared, tile, first, last - first);
  }
}

// Calls `run` with the smallest number of token tiles that is enough for `count` tokens, as an integer constant.
template <int VALUE>
struct Constant {
  static constexpr int value = VALUE;
};
template <int N, typename Run>
__device__ __forceinline__ void with_token_tiles(int count, const Run& run) {
  constexpr int LESS = N - TILES_APART;
  if constexpr (LESS > 0) {
    if (count <= 8 * LESS) {
      with_token_tiles<LESS>(count, run);
      return;
    }
  }
  run(Constant<N>());
}
