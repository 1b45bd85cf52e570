// From a finished product to the outputs.
#pragma once
#include "q4e.cuh"

// `sum` is row `row` of the product for `token`; the rows behind the first `rank` are inject weights.
template <typename T>
__device__ __forceinline__ void store_projection(float sum, int64 token, int row, int rank, int streams, T* lowrank,
                                                 T* inject) {
  float logit = sum / streams;
  if (row < rank)
    lowrank[token * rank + row] = from_float<T>(silu(logit));
  else
    inject[token * streams + row - rank] = from_float<T>(2.f * sigmoid(logit));
}
