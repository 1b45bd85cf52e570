// Tiles of tokens of one expert. Macros: those of routing.cuh; HIDDEN; ROUTED, SHARED: formats; INNER, SHARED_INNER: hidden
// elements of a routed and of the shared expert; TOKEN_TILES: at most so many times 8 tokens a tile; ROW_TILES: 16 rows
// each, of a warp; ROUTED_STAGES, SHARED_STAGES: DEPTH of many_tile.cuh.
#pragma once
#include "moe/many_tile.cuh"
#include "moe/routing.cuh"

constexpr int TILE_TOKENS = 8 * TOKEN_TILES;
constexpr int HIDDEN_PITCH = INNER > SHARED_INNER ? INNER : SHARED_INNER;
constexpr bool ALIKE = is_same<ROUTED, SHARED> && INNER == SHARED_INNER;

// Positions are rows of the hidden vectors and of the experts' outputs: those of an expert follow one another, those of
// the shared expert come behind all others, in the order of tokens.
struct Tile {
  int expert, first, count;  // count: 0 if there is no such tile
};

// What `route` and `place` made, and what it says about the rows from `first_token` on.
struct Lists {
  const int4* tiles;
  const int *num_tiles, *query_start_loc, *num_seqs;
  int first_token, tokens;

  __device__ __forceinline__ Tile tile(bool is_shared, int index) const {
    if (is_shared) {
      const int left = real_tokens(query_start_loc, num_seqs, first_token, tokens) - index * TILE_TOKENS;
      return {0, tokens * CHOICES + index * TILE_TOKENS, max(0, min(TILE_TOKENS, left))};
    }
    if (index >= *num_tiles) return {0, 0, 0};
    const int4 tile = tiles[index];
    return {tile.x, tile.y, tile.z};
  }
};

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
