// What the warps of the scan (scan.cu) share: a block's part of the work, and its shared memory.
#pragma once
#include "gated_delta_rule/chunks.cuh"

constexpr int STATE_WARPS = SLICE / TILE, WARPS = STATE_WARPS + ROW_TILES, BLOCK = WARPS * WARP;
constexpr int KEY_PITCH = KEY_DIM + PAD, ROW_PITCH = ROWS + PAD, SLICE_PITCH = SLICE + PAD;
// Barriers: the state is in shared memory, and the copies of the chunk before are no longer read; the deltas are; the outputs
// need neither, and the next chunk's copies have come.
constexpr int STATE_THERE = 1, DELTAS_THERE = 2, NEXT_MAY_COME = 3;

// The part of the work that a block has at a time. It is in shared memory, as registers are scarce.
struct Part {
  LongSequence sequence;
  int head, slice;
  int from, to;  // chunks of the sequence; none: there is no such part
  int place;     // of the first of them in the turn

  __device__ __forceinline__ int key_head() const { return head / REPEATS; }
  __device__ __forceinline__ int column() const { return head * VALUE_DIM + slice * SLICE; }
};

// What a chunk brings along.
struct Stage {
  uint16 keys[ROWS][KEY_PITCH];
  Pairs solve[TRIANGLE][WARP];
  ACTIVATION values[ROWS][SLICE_PITCH];
  float decays[2][ROWS];
};
struct Shared {
  Stage stages[2];
  uint16 state[SLICE][KEY_PITCH];   // in front of the chunk, transposed
  uint16 deltas[SLICE][ROW_PITCH];  // transposed
  Part part;
};

struct Memory {
  const ACTIVATION *conv_out, *draft_rows;
  float* recurrent_state;
  Prepared prepared;
  uint16* out;   // a row's columns of a slice over their RMS, in the order of `Outputs::store`
  float* norms;  // [chunks, V_HEADS, SLICES, ROWS]: that RMS
};
