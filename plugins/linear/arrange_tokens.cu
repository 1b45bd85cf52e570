// Tokens [T, K] as many_tokens.cu reads them, 16 bytes a unit: [tile of TOKENS tokens, step, group, token, lane of a row].
// Zeros for what lies beyond the last token or column. A thread moves what a lane of a row multiplies in a step.
// FORMAT: of weight_formats.cuh, whose order the activations get.
#include "q4e.cuh"
#include "weight_formats.cuh"

constexpr int THREADS = 256, GROUPS = FORMAT::GROUPS;

extern "C" __global__ void __launch_bounds__(THREADS)
arrange_tokens(const bf16* x, uint4* arranged, int tokens, int columns, int units) {
  wait_for_previous();
  start_next();
  const int steps = ceil_div(columns, FORMAT::STEP);
  for (int unit = blockIdx.x * THREADS + threadIdx.x; unit < units; unit += gridDim.x * THREADS) {
    const int t = unit % 4, place = unit / 4 % TOKENS, step = unit / (4 * TOKENS) % steps;
    const int64 tile = unit / (4 * TOKENS) / steps;
    const int64 token = tile * TOKENS + place;
    const int k = step * FORMAT::STEP + t * 8 * GROUPS;
    const bf16* from = x + token * columns + k;
    uint4* to = arranged + ((tile * steps + step) * GROUPS * TOKENS + place) * 4 + t;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      const bool exists = token < tokens && k + 8 * group < columns;
      const uint4 values = exists ? reinterpret_cast<const uint4*>(from)[group] : make_uint4(0, 0, 0, 0);
      to[group * TOKENS * 4] = FORMAT::arrange(values);
    }
  }
}
