// down h of all experts of a step's one token, and their weighted sum. A block computes 8 elements of it. The upper
// and the lower half of a warp's tile of 16 rows are the same rows of two routed experts, each times its own hidden
// vector, or the two halves of the shared expert's rows; so there are enough equal blocks for all multiprocessors.
// HIDDEN; SHARED_WARPS: share the steps of the shared expert; ROUTED_TILES,
// SHARED_TILES: 1; ROUTED_AHEAD, SHARED_AHEAD: of `RowTiles`; and the macros of groups.cuh.
#include "moe/groups.cuh"

constexpr int ROWS = 8;
constexpr int ROUTED_WARPS = ceil_div(CHOICES, 2), WARPS = ROUTED_WARPS + SHARED_WARPS, THREADS = WARPS * WARP;
constexpr int SHARED_HALVES = SHARED_INNER % (2 * SHARED::STEP * SHARED_WARPS) == 0 ? 2 : 1;

// products[0][row] and products[1][row] = rows `low` and `high` of a matrix of COLUMNS elements, of which a lane has
// the one of number `lane / 4`, times `low_vector` and `high_vector`, COUNT steps from `step` on. Waits for the
// kernel before this.
template <typename Format, int COLUMNS, int COUNT, int AHEAD>
__device__ __forceinline__ void multiply(const Weights& weights, int low, int high, int step, float low_scale,
                                         float high_scale, const bf16* low_vector, const bf16* high_vector,
                                         float (&products)[2][ROWS]) {
  const int lane = threadIdx.x % WARP;
  RowTiles<Format, COLUMNS, 1, 16, COUNT, AHEAD> tiles(weights, low, high, step);
  wait_for_previous();
  start_next();
  const bf16* const tokens[1] = {lane / 4 % 2 ? high_vector : low_vector};  // even columns, odd columns
  float sums[1][1][4];
  tiles.template multiply<true, TURNS>(tokens, sums);
  if (lane % 4 == 0) {
    products[0][lane / 4] = sums[0][0][0] * low_scale;
    products[1][lane / 4] = sums[0][0][3] * high_scale;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
down_one(const void* values, const void* block_scales, const float* global_scales, const void* shared_values,
         const void* shared_block_scales, const float* shared_global_scales, const float* logits, const int* chosen,
         const float* weights, const bf16* hidden, bf16* out) {
  __shared__ float products[WARPS][2][ROWS];
  const int warp = threadIdx.x / WARP, row = blockIdx.x * ROWS + threadIdx.x % WARP / 4;
  if (warp < ROUTED_WARPS) {
    const Weights routed = {values, block_scales, global_scales};
    const int first = 2 * warp, second = min(first + 1, CHOICES - 1);
    // What gate_up wrote before it let this kernel start.
    const int low = __ldcg(chosen + first), high = __ldcg(chosen + second);
    multiply<ROUTED, INNER, INNER / ROUTED::STEP, ROUTED_AHEAD>(
        routed, low * HIDDEN + row, high * HIDDEN + row, 0, sum_scale<ROUTED>(routed, low),
        sum_scale<ROUTED>(routed, high), hidden + first * HIDDEN_PITCH, hidden + second * HIDDEN_PITCH, products[warp]);
  } else {
    constexpr int HALF = SHARED_INNER / SHARED_HALVES, STEPS = HALF / SHARED::STEP / SHARED_WARPS;
    static_assert(HALF % (SHARED::STEP * SHARED_WARPS) == 0, "as many steps for every warp");
    const Weights shared = {shared_values, shared_block_scales, shared_global_scales};
    const float scale = sum_scale<SHARED>(shared, 0);
    const bf16* vector = hidden + CHOICES * HIDDEN_PITCH;
    multiply<SHARED, HALF, STEPS, SHARED_AHEAD>(
        shared, row * SHARED_HALVES, row * SHARED_HALVES + SHARED_HALVES - 1, (warp - ROUTED_WARPS) * STEPS, scale,
        SHARED_HALVES == 2 ? scale : 0.f, vector, vector + SHARED_INNER - HALF, products[warp]);
  }
  __syncthreads();
  if (threadIdx.x >= ROWS) return;
  float of_shared = 0.f;
#pragma unroll
  for (int part = ROUTED_WARPS; part < WARPS; ++part)
    of_shared += products[part][0][threadIdx.x] + products[part][1][threadIdx.x];
  float sum = sigmoid(__ldcg(logits + EXPERTS)) * of_shared;
#pragma unroll
  for (int i = 0; i < CHOICES; ++i) sum += __ldcg(weights + i) * products[i / 2][i % 2][threadIdx.x];
  out[blockIdx.x * ROWS + threadIdx.x] = from_float<bf16>(sum);
}
