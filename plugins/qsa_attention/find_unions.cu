// The union of the groups that the rows of a tile read, ascending, with the rows of each; a block for each tile. A tile
// whose union is too long for its rows is left to `attend`, row by row.
// Macros: RATIO, QUERIES, NUM_GROUPS (selected groups of a row), MAX_ENTRIES (of a union), TILE_COST and ROW_COST (of a
// group for a tile and for a row).
#include "qsa_attention/tiles.cuh"

constexpr int WARPS = 16, THREADS = WARPS * WARP;
constexpr int CELLS = 16;  // of a thread at once: a byte for each group
static_assert(QUERIES <= 8, "a cell has a bit for each query");

// The tile of this block; without rows if there are fewer tiles.
__device__ __forceinline__ Tile locate_tile(int index, const int* query_start_loc, const int* seq_lens,
                                            const int* num_seqs, int batch_size) {
  const int lane = threadIdx.x % WARP, real = *num_seqs;
  Tile tile = {-1};
  int before = 0;
  for (int first = 0; first < batch_size && tile.sequence < 0; first += WARP) {
    const int sequence = first + lane;
    const bool exists = sequence < batch_size;
    const int start = exists ? query_start_loc[sequence] : 0, end = exists ? query_start_loc[sequence + 1] : 0;
    const int length = exists ? seq_lens[sequence] : 0;
    const int tiles = exists && sequence < real ? ceil_div(end - start, QUERIES) : 0;
    const int sum = warp_prefix(tiles);
    const int own = before + sum - tiles;  // index of the sequence's first tile
    const uint32 owners = __ballot_sync(FULL_MASK, own <= index && index < own + tiles);
    before += __shfl_sync(FULL_MASK, sum, WARP - 1);
    if (owners == 0) continue;
    const int owner = __ffs(int(owners)) - 1, skipped = (index - own) * QUERIES;
    tile.sequence = first + owner;
    tile.first_row = __shfl_sync(FULL_MASK, start + skipped, owner);
    tile.count = __shfl_sync(FULL_MASK, min(end - start - skipped, QUERIES), owner);
    tile.position = __shfl_sync(FULL_MASK, length - (end - start) + skipped, owner);
  }
  return tile;
}

// Marks the groups from `base` to `base + window` in the cells of the rows that read them: the selected ones, and those
// of the tails.
__device__ __forceinline__ void mark_groups(const Tile& tile, const int* selected_groups, int base, int window,
                                            uint32* cells) {
  auto mark = [&](int group, int query) {
    const uint32 place = uint32(group - base);
    if (group >= 0 && place < uint32(window)) atomicOr(&cells[place / 4], 1u << (query + place % 4 * 8));
  };
#pragma unroll 4
  for (int i = threadIdx.x; i < tile.count * NUM_GROUPS; i += THREADS)
    mark(selected_groups[int64(tile.first_row) * NUM_GROUPS + i], i / NUM_GROUPS);
  const int query = threadIdx.x;
  if (query < tile.count && (tile.position + query + 1) % UNIT != 0) mark((tile.position + query + 1) / UNIT, query);
}

struct Counts {
  int entries, readers;  // groups of a union, and groups of all of its rows
};

// Entries of the marked cells of a window, of which each warp has its part, behind those `before`.
__device__ __forceinline__ Counts collect(const uint32* cells, int base, int window, const Counts& before,
                                          uint32* entries) {
  __shared__ Counts of_warps[WARPS];
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int per_warp = ceil_div(window / CELLS, THREADS) * WARP;  // of uint4
  const uint4* quads = reinterpret_cast<const uint4*>(cells);
  auto load = [&](int i) {
    const int at = warp * per_warp + i + lane;
    return at < window / CELLS ? quads[at] : make_uint4(0, 0, 0, 0);
  };
  auto count_cells = [](const uint4& quad) {
    const uint32 words[4] = {quad.x, quad.y, quad.z, quad.w};
    int count = 0;
#pragma unroll
    for (int i = 0; i < CELLS; ++i) count += (words[i / 4] >> (i % 4 * 8) & 0xffu) != 0;
    return count;
  };
  uint32 count = 0, readers = 0;
#pragma unroll 1
  for (int i = 0; i < per_warp; i += WARP) {
    const uint4 quad = load(i);
    count += count_cells(quad);
    readers += __popc(quad.x) + __popc(quad.y) + __popc(quad.z) + __popc(quad.w);
  }
  count = __reduce_add_sync(FULL_MASK, count), readers = __reduce_add_sync(FULL_MASK, readers);
  if (lane == 0) of_warps[warp] = {int(count), int(readers)};
  __syncthreads();
  Counts total = before;
  int place = before.entries;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    if (i < warp) place += of_warps[i].entries;
    total.entries += of_warps[i].entries, total.readers += of_warps[i].readers;
  }
#pragma unroll 1
  for (int i = 0; i < per_warp; i += WARP) {
    const uint4 quad = load(i);
    const int own = count_cells(quad);
    const int sum = warp_prefix(own);
    int to = place + sum - own;
    const uint32 words[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
    for (int j = 0; j < CELLS; ++j) {
      const uint32 queries = words[j / 4] >> (j % 4 * 8) & 0xffu;
      if (queries == 0) continue;
      if (to < MAX_ENTRIES) entries[to] = make_entry(base + (warp * per_warp + i + lane) * CELLS + j, queries);
      ++to;
    }
    place += __shfl_sync(FULL_MASK, sum, WARP - 1);
  }
  return total;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
find_unions(const int* selected_groups, const int* query_start_loc, const int* seq_lens, const int* num_seqs,
            Tile* tiles, uint32* all_entries, uint8* is_in_tile, int batch_size, int window) {
  DYNAMIC_SHARED(uint32, cells);
  wait_for_previous();
  start_next();
  Tile tile = locate_tile(blockIdx.x, query_start_loc, seq_lens, num_seqs, batch_size);
  Counts counts = {0, 0};
#if RATIO > 0
  const int last_group = tile.sequence < 0 ? -1 : (tile.last_position() + 1) / UNIT;
#pragma unroll 1
  for (int base = 0; base <= last_group; base += window) {
    for (int i = threadIdx.x; i < window / CELLS; i += THREADS) reinterpret_cast<uint4*>(cells)[i] = {0, 0, 0, 0};
    __syncthreads();
    mark_groups(tile, selected_groups, base, window, cells);
    __syncthreads();
    counts = collect(cells, base, window, counts, all_entries + int64(blockIdx.x) * MAX_ENTRIES);
    __syncthreads();
  }
  const bool is_tile = counts.entries <= MAX_ENTRIES && counts.entries * TILE_COST <= counts.readers * ROW_COST;
#else
  counts.entries = tile.sequence < 0 ? 0 : ceil_div(tile.last_position() + 1, UNIT);
  const bool is_tile = true;
#endif
  if (threadIdx.x < tile.count && tile.sequence >= 0) is_in_tile[tile.first_row + threadIdx.x] = is_tile;
  tile.num_entries = is_tile ? counts.entries : 0;
  if (threadIdx.x == 0) tiles[blockIdx.x] = tile;
}
