// SPDX-License-Identifier: Apache-2.0
// Means of ragged tokens per request, head and channel (paper equation 7). One pass over the data:
// each CTA sums a slice of a request for some columns, a second launch adds the slices in order.
//
// Sums are kept as an unevaluated pair of fp32 (error-free additions), because fp64 runs at 1/64
// rate on the consumer chips. Slices and order depend on the shapes alone, so results repeat.
//
// Only the additions to `low` round. Among b values they err by at most b^2/2 * 2^-48 * sum(|x|),
// so a slice folds its pair into an outer one every kFold tokens; an outer addition errs by at most
// 2^-46 * sum(|x|).
#pragma once

#include "mpfa/quant/io.cuh"

namespace mpfa::quant {

struct Fp32 {};

// high + low.
struct PairSum {
  float high = 0.0f;
  float low = 0.0f;

  // Error of fp32(a + b), exact; `sum` becomes that.
  static MPFA_INLINE float two_sum(float a, float b, float& sum) {
    sum = add_rn(a, b);
    const float part = add_rn(sum, -a);
    return add_rn(add_rn(a, -add_rn(sum, -part)), add_rn(b, -part));
  }
  MPFA_INLINE void add(float x) {
    const float error = two_sum(high, x, high);
    low = add_rn(low, error);
  }
  // Leaves |low| <= ulp(high)/2.
  MPFA_INLINE void add(const PairSum& other) {
    const float error = two_sum(high, other.high, high);
    low = add_rn(add_rn(low, error), other.low);
    low = two_sum(high, low, high);
  }
};

struct StatsParams {
  const uint8_t* x = nullptr;  // [T, heads, D], last dimension contiguous
  int64_t token = 0;           // byte strides
  int64_t head = 0;
  const int32_t* indptr = nullptr;  // [num_requests + 1]
  int32_t num_requests = 0;
  int32_t columns = 0;  // heads * D
  int32_t dim_shift = 0;
  int32_t slices = 0;
  bool vector = false;
  float2* partial = nullptr;  // [num_requests, slices, columns]
  float* mean = nullptr;      // [num_requests, columns]
};

constexpr int kStatsThreads = 128;
constexpr int kFold = 64;  // tokens; a multiple of the loads in flight

template <class In>
struct StatsLoad {  // 8 values of 16 bits
  static constexpr int kValues = 8;
  static __device__ __forceinline__ void load(const uint8_t* p, bool vector, float* x) {
    uint32_t w[4];
    if (vector) {
      const uint4 a = ptx::ld_nc_stream_v4(p);
      w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
    } else {
      const uint16_t* e = reinterpret_cast<const uint16_t*>(p);
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = __ldg(e + 2 * i) | __ldg(e + 2 * i + 1) << 16;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) In::unpack(w[i], x[2 * i], x[2 * i + 1]);
  }
};

template <>
struct StatsLoad<Fp32> {
  static constexpr int kValues = 4;
  static __device__ __forceinline__ void load(const uint8_t* p, bool vector, float* x) {
    const float* e = reinterpret_cast<const float*>(p);
    if (vector) {
      const float4 a = load_mean4(e);
      x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) x[i] = __ldg(e + i);
    }
  }
};

// Grid: (column groups, slices, requests).
template <class In>
__global__ void __launch_bounds__(kStatsThreads)
    stats_partial(const __grid_constant__ StatsParams p) {
  using Load = StatsLoad<In>;
  constexpr int kValues = Load::kValues;
  constexpr int kElement = sizeof(uint4) / kValues;
  constexpr int kAhead = 8;  // independent loads in flight
  const int column = (blockIdx.x * kStatsThreads + threadIdx.x) * kValues;
  if (column >= p.columns) return;
  const int request = blockIdx.z;
  const int begin = __ldg(p.indptr + request);
  const int64_t length = __ldg(p.indptr + request + 1) - begin;
  const int first = begin + static_cast<int>(length * blockIdx.y / p.slices);
  const int last = begin + static_cast<int>(length * (blockIdx.y + 1) / p.slices);
  const uint8_t* source =
      p.x + (column >> p.dim_shift) * p.head + (column & ((1 << p.dim_shift) - 1)) * kElement;
  // The outer pairs of a thread: used every kFold tokens only, in registers they would cost a CTA.
  __shared__ float2 outer[kValues][kStatsThreads];
#pragma unroll
  for (int j = 0; j < kValues; ++j) outer[j][threadIdx.x] = make_float2(0.0f, 0.0f);
  PairSum sums[kValues];
  for (int base = first; base < last; base += kAhead) {
    float x[kAhead][kValues];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int j = 0; j < kValues; ++j) x[i][j] = 0.0f;
      if (base + i < last) Load::load(source + (base + i) * p.token, p.vector, x[i]);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int j = 0; j < kValues; ++j) sums[j].add(x[i][j]);
    }
    if ((base - first) % kFold == kFold - kAhead || base + kAhead >= last) {
#pragma unroll
      for (int j = 0; j < kValues; ++j) {
        const float2 before = outer[j][threadIdx.x];
        PairSum total{before.x, before.y};
        total.add(sums[j]);
        outer[j][threadIdx.x] = make_float2(total.high, total.low);
        sums[j] = PairSum();
      }
    }
  }
  float2* out =
      p.partial + (static_cast<int64_t>(request) * p.slices + blockIdx.y) * p.columns + column;
#pragma unroll
  for (int j = 0; j < kValues; ++j) out[j] = outer[j][threadIdx.x];
}

// Grid: (columns / threads, requests). A request without tokens has mean 0.
static __global__ void __launch_bounds__(kStatsThreads)
    stats_finish(const __grid_constant__ StatsParams p) {
  const int column = blockIdx.x * kStatsThreads + threadIdx.x;
  if (column >= p.columns) return;
  const int request = blockIdx.y;
  const int length = __ldg(p.indptr + request + 1) - __ldg(p.indptr + request);
  const float2* in = p.partial + static_cast<int64_t>(request) * p.slices * p.columns + column;
  PairSum sum;
  for (int i = 0; i < p.slices; ++i) {
    const float2 part = in[static_cast<int64_t>(i) * p.columns];
    PairSum other;
    other.high = part.x;
    other.low = part.y;
    sum.add(other);
  }
  // One division in fp64 for each result: the quotient is then rounded once.
  const double total = static_cast<double>(sum.high) + static_cast<double>(sum.low);
  p.mean[static_cast<int64_t>(request) * p.columns + column] =
      length > 0 ? static_cast<float>(total / length) : 0.0f;
}

// Slices of every request: about 256 tokens of an average one, a function of the shapes alone.
inline int stats_slices(int64_t num_tokens, int64_t num_requests) {
  const int64_t average = num_requests > 0 ? num_tokens / num_requests : 0;
  const int64_t slices = (average + 255) / 256;
  return static_cast<int>(slices < 1 ? 1 : slices > 256 ? 256 : slices);
}

}  // namespace mpfa::quant
