// Index queries, pooled group keys and the rings of raw keys: every task is a warp's.
// Macros: ACTIVATION (bf16 or float), HEADS (query heads), DIM, HALF (rotated pairs), RATIO (tokens of a group),
// PAGE (groups of a page), RING (rows of a ring), MROPE_HEIGHT and MROPE_WIDTH (frequencies below them may follow
// that axis).
#include "q4e.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int WIDTH = (HEADS + 1) * DIM;  // of a row of index_qk
constexpr int PAIRS = ceil_div(HALF, WARP);
constexpr int RESTS = ceil_div(DIM - 2 * HALF, WARP);

template <bool CONDITION, typename A, typename B>
struct Select {
  using Type = A;
};
template <typename A, typename B>
struct Select<false, A, B> {
  using Type = B;
};

// A lane's part of a head: rotated pairs (i, i + HALF) with i = lane, lane + 32, ..., and dims that pass unrotated.
struct Part {
  float first[PAIRS], second[PAIRS], rest[RESTS > 0 ? RESTS : 1];
};

// Calls `visit(value, dim)` for each of the lane's values.
template <typename Visit>
__device__ __forceinline__ void for_each(Part& part, Visit visit) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int dim = i * WARP + lane;
    if (dim < HALF) {
      visit(part.first[i], dim);
      visit(part.second[i], dim + HALF);
    }
  }
#pragma unroll
  for (int i = 0; i < RESTS; ++i) {
    const int dim = 2 * HALF + i * WARP + lane;
    if (dim < DIM) visit(part.rest[i], dim);
  }
}

// Norm, gain and rotation. `position(axis)` is the token's position; `inv_freq` the lane's frequencies.
template <typename Position>
__device__ __forceinline__ void norm_and_rotate(Part& part, Part& gain, const float inv_freq[PAIRS], float eps,
                                                Position position) {
  float sine[PAIRS], cosine[PAIRS], squares = 0.f;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i)
    sine_cosine(float(position(mrope_axis<MROPE_HEIGHT, MROPE_WIDTH>(i * WARP + threadIdx.x % WARP))) * inv_freq[i], &sine[i], &cosine[i]);
  for_each(part, [&](float& value, int) { squares += value * value; });
  const float scale = rsqrtf(warp_sum(squares) / DIM + eps);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const float first = part.first[i] * scale * gain.first[i], second = part.second[i] * scale * gain.second[i];
    part.first[i] = first * cosine[i] - second * sine[i];
    part.second[i] = second * cosine[i] + first * sine[i];
  }
#pragma unroll
  for (int i = 0; i < RESTS; ++i) part.rest[i] *= scale * gain.rest[i];
}

struct Operands {
  const ACTIVATION* index_qk;
  const int* positions;
  ACTIVATION *index_k_cache, *index_k_ring;
  int* index_position_ring;
  const int *query_start_loc, *seq_lens, *slot_ids, *block_table, *num_seqs;
  ACTIVATION* index_q;
  int num_tokens, batch_size, max_blocks;
  float eps;

  __device__ const ACTIVATION* key(int token) const { return index_qk + int64(token) * WIDTH + HEADS * DIM; }
};

__device__ __forceinline__ void make_query(const Operands& x, int token, int head, Part& gain, const float* inv_freq) {
  const ACTIVATION* from = x.index_qk + int64(token) * WIDTH + head * DIM;
  Part part = {};
  for_each(part, [&](float& value, int dim) { value = to_float(from[dim]); });
  norm_and_rotate(part, gain, inv_freq, x.eps, [&](int axis) { return x.positions[axis * x.num_tokens + token]; });
  ACTIVATION* to = x.index_q + (int64(token) * HEADS + head) * DIM;
  for_each(part, [&](float value, int dim) { to[dim] = from_float<ACTIVATION>(value); });
}

// The key of the group that ends at `position`, of the raw keys `key(i)`, i < RATIO, into the cache.
template <typename Key, typename Position>
__device__ __forceinline__ void make_key(const Operands& x, int sequence, int position, Part& gain,
                                         const float* inv_freq, Key key, Position first_position) {
  const int group = position / RATIO;
  const int page = x.block_table[int64(sequence) * x.max_blocks + group / PAGE];
  Part part = {};
#pragma unroll
  for (int i = 0; i < RATIO; ++i) {
    const ACTIVATION* from = key(i);
    for_each(part, [&](float& sum, int dim) { sum += to_float(from[dim]); });
  }
  for_each(part, [](float& value, int) { value = round_to<ACTIVATION>(value / RATIO); });
  norm_and_rotate(part, gain, inv_freq, x.eps, first_position);
  ACTIVATION* to = x.index_k_cache + (int64(page) * PAGE + group % PAGE) * DIM;
  for_each(part, [&](float value, int dim) { to[dim] = from_float<ACTIVATION>(value); });
}

// A group whose tokens are all in this step, if it ends at `token`.
__device__ __forceinline__ void make_key_of_step(const Operands& x, int token, Part& gain, const float* inv_freq) {
  const TokenPlace place = locate_token(token, x.query_start_loc, x.seq_lens, x.num_seqs, x.batch_size);
  const int first = token - (RATIO - 1);
  const bool ends_group = place.sequence >= 0 && (place.position + 1) % RATIO == 0;
  if (!ends_group || place.position - (RATIO - 1) < place.context) return;
  make_key(
      x, place.sequence, place.position, gain, inv_freq, [&](int i) { return x.key(first + i); },
      [&](int axis) { return x.positions[axis * x.num_tokens + first]; });
}

// Copies the raw keys and positions of the tokens from `first` to `end`, at most RING, to the rows of a slot; the first
// one's index in its sequence is `position`. A warp's loads come in batches: it stores to what it might load from.
__device__ __forceinline__ void store_ring(const Operands& x, int64 slot_row, int first, int end, int position) {
  using Chunk = Select<DIM * sizeof(ACTIVATION) % sizeof(uint4) == 0, uint4, ACTIVATION>::Type;
  constexpr int CHUNKS = DIM * sizeof(ACTIVATION) / sizeof(Chunk), BATCH = 4;
  const int lane = threadIdx.x % WARP, total = (end - first) * CHUNKS;
  for (int start = lane; start < total; start += BATCH * WARP) {
    Chunk chunks[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int index = min(start + i * WARP, total - 1);
      chunks[i] = reinterpret_cast<const Chunk*>(x.key(first + index / CHUNKS))[index % CHUNKS];
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int index = start + i * WARP;
      const int64 row = slot_row + (position + index / CHUNKS) % RING;
      if (index < total) reinterpret_cast<Chunk*>(x.index_k_ring + row * DIM)[index % CHUNKS] = chunks[i];
    }
  }
  for (int index = lane; index < 3 * (end - first); index += WARP) {
    const int64 row = slot_row + (position + index / 3) % RING;
    x.index_position_ring[row * 3 + index % 3] = x.positions[index % 3 * x.num_tokens + first + index / 3];
  }
}

// The group that an earlier step began, if this one completes it, and then the newest rows into the rings: by one warp,
// so that no row of a ring is overwritten before it is read.
__device__ __forceinline__ void update_sequence(const Operands& x, int sequence, Part& gain, const float* inv_freq) {
  const int num_seqs = *x.num_seqs, start = x.query_start_loc[sequence], end = x.query_start_loc[sequence + 1];
  const int length = x.seq_lens[sequence], slot = x.slot_ids[sequence];
  // One condition on everything, so that the compiler puts no load behind a branch on another.
  if ((sequence >= num_seqs) | (end == start) | (length <= 0) | (slot < 0)) return;
  const int context = length - (end - start), first = context / RATIO * RATIO;
  const int64 slot_row = int64(slot) * RING;
  if (first < context && first + RATIO <= length)
    make_key(
        x, sequence, first + RATIO - 1, gain, inv_freq,
        [&](int i) {
          const int position = first + i;
          return position < context ? x.index_k_ring + (slot_row + position % RING) * DIM
                                    : x.key(start + position - context);
        },
        [&](int axis) { return x.index_position_ring[(slot_row + first % RING) * 3 + axis]; });
  __syncwarp();
  const int oldest = max(start, end - RING);
  store_ring(x, slot_row, oldest, end, context + oldest - start);
}

extern "C" __global__ void __launch_bounds__(THREADS)
qsa_indexer(const ACTIVATION* index_qk, const float* q_gain, const float* k_gain, const int* positions,
            const float* inv_freq, ACTIVATION* index_k_cache, ACTIVATION* index_k_ring, int* index_position_ring,
            const int* query_start_loc, const int* seq_lens, const int* slot_ids, const int* block_table,
            const int* num_seqs, ACTIVATION* index_q, int num_tokens, int batch_size, int max_blocks, float eps) {
  const Operands x = {index_qk, positions, index_k_cache, index_k_ring, index_position_ring, query_start_loc,
                      seq_lens, slot_ids,  block_table,   num_seqs,     index_q,             num_tokens,
                      batch_size, max_blocks, eps};
  // The sequences come first, since theirs is the longest chain; then a task for each head of each token, the
  // key's last.
  const int64 task = int64(blockIdx.x) * WARPS + threadIdx.x / WARP - batch_size;
  const int token = int(task / (HEADS + 1)), head = int(task % (HEADS + 1));
  const bool is_query = task >= 0 && head < HEADS;
  Part gain = {};
  for_each(gain, [&](float& value, int dim) { value = is_query ? q_gain[dim] : k_gain[dim]; });
  float frequencies[PAIRS];
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int frequency = i * WARP + threadIdx.x % WARP;
    frequencies[i] = frequency < HALF ? inv_freq[frequency] : 0.f;
  }
  wait_for_previous();
  start_next();
  if (task < 0)
    update_sequence(x, int(task + batch_size), gain, frequencies);
  else if (token < num_tokens && is_query)
    make_query(x, token, head, gain, frequencies);
  else if (token < num_tokens)
    make_key_of_step(x, token, gain, frequencies);
}
