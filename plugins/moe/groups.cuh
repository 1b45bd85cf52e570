// Groups of tokens that share a read of an expert, and their rows. Macros: those of routing.cuh, GROUP: tokens of a
// group at most, a multiple of 8; ROUTED, SHARED: formats; INNER, SHARED_INNER: hidden elements of a routed and of
// the shared expert.
#pragma once
#include "moe/routing.cuh"
#include "moe/tiles.cuh"

constexpr int N = GROUP / 8;
constexpr int HIDDEN_PITCH = INNER > SHARED_INNER ? INNER : SHARED_INNER;

template <typename A, typename B>
constexpr bool is_same = false;
template <typename A>
constexpr bool is_same<A, A> = true;
// Whether the mmas of a single tile take turns with two sums; NVFP4 beside another format lacks registers for that.
constexpr bool TURNS = is_same<ROUTED, SHARED> || !is_same<ROUTED, Nvfp4>;
// Whether one piece of code serves the routed experts and the shared one.
constexpr bool ALIKE = is_same<ROUTED, SHARED> && INNER == SHARED_INNER && ROUTED_TILES == SHARED_TILES &&
                       ROUTED_AHEAD == SHARED_AHEAD;

// What `route` found; `order` is null where entries follow one another.
struct Group {
  int expert, first, count;
  const int* order;

  // Of token `column` of the group; behind the last token, of the first.
  __device__ __forceinline__ int entry(int column) const {
    int index = first + (column < count ? column : 0);
    return order ? __ldcg(order + index) : index;
  }
};

// What `route` made, and what it says about the rows from `first_token` on.
struct Lists {
  const int* order;
  const int4* items;
  const int *num_items, *query_start_loc, *num_seqs;
  int first_token, tokens;

  // Group `index` of the routed experts, or of the shared one; without tokens if there is none.
  __device__ __forceinline__ Group group(bool is_shared, int index) const {
    if (is_shared) {
      const int left = real_tokens(query_start_loc, num_seqs, first_token, tokens) - index * GROUP;
      return {0, tokens * CHOICES + index * GROUP, max(0, min(GROUP, left)), nullptr};
    }
    const int count = __ldcg(num_items);
    const int4 item = __ldcg(items + index);  // of any value behind the last
    return {item.x, item.y, index < count ? item.z : 0, order};
  }
};
