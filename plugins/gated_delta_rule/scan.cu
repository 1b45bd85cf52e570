// The scan over the chunks of a turn: a block has SLICE columns of the state of a value head of a sequence, in registers.
//
// Four warps advance the state, 16 columns each, without a word to each other: the state is kept transposed, as sums of
// tensor cores [columns, keys], which as they are become operands of the next product, and so do the deltas. Four more
// compute the outputs, 16 rows of the chunk each, from the state and the deltas that the first leave in shared memory.
//
// Values are taken as they are as long as they fit fp16; if the state is not finite behind the turn, it is repeated with
// all values, on which everything depends linearly, made smaller.
#include "q4e.cuh"
#include "gated_delta_rule/scan_outputs.cuh"
#include "gated_delta_rule/scan_states.cuh"

static_assert(sizeof(Shared) == SHARED_BYTES && SHARED_BYTES % 16 == 0, "the launcher asks for another size");

// Part `i` of chunks `from` to `to` - 1, by a warp. Empty: the turn has nothing of the sequence but a chunk that would hold
// more rows to replay. Less than that: there is no such part.
__device__ __forceinline__ void find_part(Part& part, int i, int from, int to, const Batch& batch) {
  LongSequence sequence = {};
  const bool exists = locate_chunks(from, to, i / (V_HEADS * SLICES), batch, sequence);
  const int first = max(from - sequence.first, 0), last = min(to - sequence.first, sequence.chunks());
  if (threadIdx.x == 0)
    part = {sequence, i / SLICES % V_HEADS, i % SLICES, exists ? first : 1, exists ? max(last, first) : 0,
            sequence.first + first - from};
}

extern "C" __global__ void __launch_bounds__(BLOCK)
scan(const ACTIVATION* conv_out, const ACTIVATION* draft_rows, float* recurrent_state, int* committed_len,
     const int* query_start_loc, const int* seq_lens, const int* slot_ids, const int* num_seqs, uint16* keys,
     Tile* queries, Pairs* solve, Tile* scores, float* decays, uint16* out, float* norms, int batch_size, int from_chunk,
     int window) {
  DYNAMIC_SHARED(Shared, memory);
  Shared& shared = *memory;
  const Batch batch = {query_start_loc, seq_lens, slot_ids, num_seqs, committed_len, batch_size};
  const Memory pointers = {conv_out, draft_rows, recurrent_state, {keys, queries, solve, scores, decays}, out, norms};
  Part& part = shared.part;
#pragma unroll 1
  for (int i = blockIdx.x;; i += gridDim.x) {
    // What it reads was there before the op, or is a length that another scan may as well have written already.
    if (threadIdx.x < WARP) find_part(part, i, from_chunk, from_chunk + window, batch);
    if (i == blockIdx.x) {
      wait_for_previous();
      start_next();
    }
    __syncthreads();
    if (part.from > part.to) break;
    if (part.from == part.to) {
      __syncthreads();
      continue;
    }
    if (threadIdx.x == 0 && part.head == 0 && part.slice == 0 && part.to == part.sequence.chunks()) {
      int* lengths = committed_len + 2 * part.sequence.sequence.slot;
      const int context = part.sequence.sequence.context;
      store_length(lengths, *reinterpret_cast<const int2*>(lengths), context - part.sequence.pending, context,
                   context + part.sequence.sequence.length);
    }
    bool finite = false;
#pragma unroll 1
    for (float scale = 1.f; !finite && scale >= SMALLEST * SMALLER; scale *= SMALLER)
      finite = threadIdx.x / WARP < STATE_WARPS ? scan_states(shared, pointers, scale) : scan_outputs(shared, pointers, scale);
  }
}
