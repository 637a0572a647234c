// SPDX-License-Identifier: Apache-2.0
// Combines attention states of disjoint key sets by their base-2 log-sum-exp, as
// mpfa.merge.merge_base2 does: weights 2^(lse - max), sums in the order of the states, multiply and
// add rounded separately.
//
// Two kernels with equal results. combine_states: a warp owns one (token, head). It turns the LSEs
// of up to kStates states into weights in shared memory first; then every lane streams its channels
// of eight states at a time, eight independent loads. combine_states_slices, for few rows of many
// states (decode of a long context): a thread block owns 32 channels of a (token, head); all its
// threads load, one warp sums.
#pragma once

#include "mpfa/core/sink.cuh"
#include "mpfa/plan/plan.h"
#include "mpfa/ptx/cvt.cuh"
#include "mpfa/ptx/pdl.cuh"
#include "mpfa/quant/codec.h"

namespace mpfa {

struct CombineParams {
  const void* o = nullptr;     // [rows, heads, D], strides in elements
  const float* lse = nullptr;  // [rows, heads]
  int64_t o_row = 0, o_head = 0;
  int64_t lse_row = 0, lse_head = 0;
  // States of token t: rows [indptr[t], indptr[t+1]) * states, or without indptr rows t, t +
  // tokens, ...
  const int32_t* indptr = nullptr;
  int32_t states = 1;  // states per partition (indptr) or all states (no indptr)
  int64_t num_tokens = 0;
  // Of a plan: tokens beyond its nnz_qo are left alone, since a captured launch keeps num_tokens.
  const PlanHeader* header = nullptr;
  int32_t num_heads = 0;
  void* out = nullptr;  // [tokens, heads, D]
  int64_t out_row = 0, out_head = 0;
  bool out_vector = false;  // rows are 16-byte aligned
  float* out_lse = nullptr;
  int64_t out_lse_row = 0, out_lse_head = 0;
  // Optional last steps of a split run: LSE += row_term * row_scale; a sink joins as one more
  // state.
  const float* row_term = nullptr;  // [tokens, heads]
  int64_t row_term_row = 0, row_term_head = 0;
  float row_scale = 0.0f;
  const float* sinks = nullptr;  // [heads], natural log
};

constexpr int kCombineWarps = 4;
constexpr int kStates = 256;  // weights in shared memory per warp; more states go in chunks
constexpr int kStreams = 8;

// Element types of states and results.
struct O32 {
  using Storage = float;
};
struct OBf16 {
  using Storage = uint16_t;
  static __device__ __forceinline__ float value(uint16_t x) { return quant::bf16_value(x); }
  static __device__ __forceinline__ uint16_t round(float x) { return ptx::cvt_rn_bf16(x); }
};
struct OFp16 {
  using Storage = uint16_t;
  static __device__ __forceinline__ float value(uint16_t x) { return ptx::cvt_f32_f16(x); }
  static __device__ __forceinline__ uint16_t round(float x) { return ptx::cvt_rn_f16(x); }
};

// kBytes (4, 8, 16 or 32) at p, aligned to the access.
template <int kBytes>
__device__ __forceinline__ void load_words(const void* p, uint32_t* w) {
  if constexpr (kBytes == 4) {
    w[0] = __ldg(static_cast<const uint32_t*>(p));
  } else if constexpr (kBytes == 8) {
    const uint2 a = __ldg(static_cast<const uint2*>(p));
    w[0] = a.x, w[1] = a.y;
  } else {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const uint4 a = __ldg(static_cast<const uint4*>(p) + i);
      w[4 * i] = a.x, w[4 * i + 1] = a.y, w[4 * i + 2] = a.z, w[4 * i + 3] = a.w;
    }
  }
}

template <class T, int kPer>
__device__ __forceinline__ void load_state(const typename T::Storage* p, float* x) {
  constexpr int kBytes = kPer * sizeof(typename T::Storage);
  uint32_t w[kBytes / 4];
  load_words<kBytes>(p, w);
  if constexpr (sizeof(typename T::Storage) == 4) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) x[i] = __uint_as_float(w[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      x[i] = T::value(static_cast<uint16_t>(w[i / 2] >> (16 * (i % 2))));
  }
}

template <class T, int kPer>
__device__ __forceinline__ void store_result(typename T::Storage* p, const float* x, bool vector) {
  constexpr int kBytes = kPer * sizeof(typename T::Storage);
  uint32_t w[kBytes / 4];
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) {
    if constexpr (sizeof(typename T::Storage) == 4) {
      w[i] = __float_as_uint(x[i]);
    } else {
      w[i] = T::round(x[2 * i]) | static_cast<uint32_t>(T::round(x[2 * i + 1])) << 16;
    }
  }
  if (!vector) {  // an unaligned view of the caller's
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if constexpr (sizeof(typename T::Storage) == 4) {
        p[i] = x[i];
      } else {
        p[i] = static_cast<uint16_t>(w[i / 2] >> (16 * (i % 2)));
      }
    }
  } else if constexpr (kBytes == 4) {
    *reinterpret_cast<uint32_t*>(p) = w[0];
  } else if constexpr (kBytes == 8) {
    *reinterpret_cast<uint2*>(p) = make_uint2(w[0], w[1]);
  } else {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      reinterpret_cast<uint4*>(p)[i] =
          make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]);
    }
  }
}

// The states of a (token, head).
struct StateRows {
  int count;             // <= 0: nothing to merge
  const float* lse;      // of the first state
  int64_t lse_step;      // elements to the next one
  int64_t first, o_row;  // row of the first state; rows in p.o to the next one
};

__device__ __forceinline__ StateRows state_rows(const CombineParams& p, int64_t token, int head) {
  int64_t first = token, step = p.num_tokens;
  int count = p.states;
  if (p.indptr != nullptr) {
    if (p.header != nullptr && token >= __ldg(&p.header->nnz_qo)) return {};
    const int begin = __ldg(p.indptr + token);
    count = (__ldg(p.indptr + token + 1) - begin) * p.states;
    first = static_cast<int64_t>(begin) * p.states;
    step = 1;
  }
  return {count, p.lse + first * p.lse_row + head * p.lse_head, step * p.lse_row, first, step};
}

// Merged LSE with the optional last steps; `keep` becomes what a sink leaves of the output.
__device__ __forceinline__ float finish_lse(const CombineParams& p, int64_t token, int head,
                                            float anchor, float total, float* keep) {
  // why == and not >: a NaN among the states makes the total NaN, and must reach the output.
  float merged = total == 0.0f ? -INFINITY : __fadd_rn(anchor, log2f(total));
  if (p.row_term != nullptr) {
    const float term = __ldg(p.row_term + token * p.row_term_row + head * p.row_term_head);
    merged = __fadd_rn(merged, __fmul_rn(p.row_scale, term));
  }
  *keep = 1.0f;
  if (p.sinks != nullptr) {
    const SinkResult joined = join_sink(merged, __ldg(p.sinks + head));
    merged = joined.lse;
    *keep = joined.keep;
  }
  return merged;
}

__device__ __forceinline__ float finish_value(const CombineParams& p, float sum, float total,
                                              float keep) {
  const float y = total == 0.0f ? 0.0f : __fdiv_rn(sum, total);
  return p.sinks != nullptr ? __fmul_rn(y, keep) : y;
}

template <class In, class Out, int kDim>
__global__ void __launch_bounds__(kCombineWarps * 32)
    combine_states(const __grid_constant__ CombineParams p) {
  using InT = typename In::Storage;
  constexpr int kPer = kDim / 32;
  __shared__ float weights[kCombineWarps][kStates];
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x / 32;
  const int64_t job = static_cast<int64_t>(blockIdx.x) * kCombineWarps + warp;
  ptx::grid_dependency_wait();
  if (job >= p.num_tokens * p.num_heads) return;
  const int64_t token = job / p.num_heads;
  const int head = static_cast<int>(job % p.num_heads);
  const StateRows rows = state_rows(p, token, head);
  const int count = rows.count;
  if (count <= 0) return;  // the token has one partition, which wrote the output itself
  const float* lse = rows.lse;
  const int64_t lse_step = rows.lse_step;

  float top = -INFINITY;
  for (int i = lane; i < count; i += 32) top = fmaxf(top, __ldg(lse + i * lse_step));
#pragma unroll
  for (int m = 16; m > 0; m /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, m));
  const float anchor = top == -INFINITY ? 0.0f : top;

  const InT* o =
      static_cast<const InT*>(p.o) + rows.first * p.o_row + head * p.o_head + lane * kPer;
  const int64_t o_step = rows.o_row * p.o_row;
  float acc[kPer] = {};
  float total = 0.0f;
  for (int chunk = 0; chunk < count; chunk += kStates) {
    const int n = count - chunk < kStates ? count - chunk : kStates;
    __syncwarp();
    for (int i = lane; i < n; i += 32) {
      weights[warp][i] = exp2f(__ldg(lse + (chunk + i) * lse_step) - anchor);
    }
    __syncwarp();
    for (int base = 0; base < n; base += kStreams) {
      float x[kStreams][kPer];
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        // A state of weight 0 is not read: it may never have been written.
        if (base + s < n && weights[warp][base + s] > 0.0f) {
          load_state<In, kPer>(o + (chunk + base + s) * o_step, x[s]);
        } else {
#pragma unroll
          for (int i = 0; i < kPer; ++i) x[s][i] = 0.0f;
        }
      }
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        if (base + s >= n) break;
        const float w = weights[warp][base + s];
        total = __fadd_rn(total, w);
#pragma unroll
        for (int i = 0; i < kPer; ++i) acc[i] = __fadd_rn(acc[i], __fmul_rn(w, x[s][i]));
      }
    }
  }
  ptx::grid_launch_dependents();

  float keep;
  const float merged = finish_lse(p, token, head, anchor, total, &keep);
  using OutT = typename Out::Storage;
  OutT* out = static_cast<OutT*>(p.out) + token * p.out_row + head * p.out_head + lane * kPer;
#pragma unroll
  for (int i = 0; i < kPer; ++i) acc[i] = finish_value(p, acc[i], total, keep);
  store_result<Out, kPer>(out, acc, p.out_vector);
  if (lane == 0 && p.out_lse != nullptr) {
    p.out_lse[token * p.out_lse_row + head * p.out_lse_head] = merged;
  }
}

constexpr int kSliceThreads = 128;
constexpr int kSliceStates = kSliceThreads;  // a chunk: one weight per thread
constexpr int kSliceVectors = 8;             // of four channels

// fp32 states; blocks of 32 channels follow each other, then heads, then tokens.
template <class Out, int kDim>
__global__ void __launch_bounds__(kSliceThreads)
    combine_states_slices(const __grid_constant__ CombineParams p) {
  __shared__ float weights[kSliceStates];
  __shared__ float tops[kSliceThreads / 32];
  __shared__ float4 values[kSliceStates][kSliceVectors];
  constexpr int kSlices = kDim / 32;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
  const int slice = static_cast<int>(blockIdx.x % kSlices);
  const int64_t job = blockIdx.x / kSlices;
  const int64_t token = job / p.num_heads;
  const int head = static_cast<int>(job % p.num_heads);
  // invariant: kernels that write partial rows of a plan let this one start only after their own
  // grid_dependency_wait, so the plan is there; the rows are not.
  if (p.header == nullptr) ptx::grid_dependency_wait();
  const StateRows rows = state_rows(p, token, head);
  // why before any return: the grid after this one counts on the end of this one only.
  if (p.header != nullptr) ptx::grid_dependency_wait();
  if (rows.count <= 0) return;  // the token has one partition, which wrote the output itself

  const int vector = thread % kSliceVectors, first_state = thread / kSliceVectors;
  constexpr int kStep = kSliceThreads / kSliceVectors;
  const float* o = static_cast<const float*>(p.o) + rows.first * p.o_row + head * p.o_head +
                   slice * 32 + vector * 4;
  const int64_t o_step = rows.o_row * p.o_row;
  const auto load_chunk = [&](int chunk, float4(&x)[kSliceStates / kStep]) {
#pragma unroll
    for (int i = 0; i < kSliceStates / kStep; ++i) {
      const int state = chunk + first_state + i * kStep;
      x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (state < rows.count) x[i] = __ldg(reinterpret_cast<const float4*>(o + state * o_step));
    }
  };
  // why ahead of the weights: one latency instead of two.
  const float mine = thread < rows.count ? __ldg(rows.lse + thread * rows.lse_step) : -INFINITY;
  float4 x[kSliceStates / kStep];
  load_chunk(0, x);
  float top = mine;
  for (int i = thread + kSliceThreads; i < rows.count; i += kSliceThreads) {
    top = fmaxf(top, __ldg(rows.lse + i * rows.lse_step));
  }
#pragma unroll
  for (int m = 16; m > 0; m /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, m));
  if (lane == 0) tops[warp] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kSliceThreads / 32; ++w) top = fmaxf(top, tops[w]);
  const float anchor = top == -INFINITY ? 0.0f : top;

  float acc = 0.0f, total = 0.0f;
  for (int chunk = 0; chunk < rows.count; chunk += kSliceStates) {
    if (chunk > 0) load_chunk(chunk, x);
    float lse = mine;
    if (chunk > 0) {
      const int state = chunk + thread;
      lse = state < rows.count ? __ldg(rows.lse + state * rows.lse_step) : -INFINITY;
    }
    weights[thread] = exp2f(lse - anchor);
    __syncthreads();
    // why all threads multiply: one warp adds, in the order of the states, and every instruction of
    // its loop counts.
#pragma unroll
    for (int i = 0; i < kSliceStates / kStep; ++i) {
      const int state = first_state + i * kStep;
      const float w = weights[state];
      // A state of weight 0 may never have been written.
      const auto part = [&](float y) { return __fmul_rn(w, w > 0.0f ? y : 0.0f); };
      values[state][vector] = make_float4(part(x[i].x), part(x[i].y), part(x[i].z), part(x[i].w));
    }
    __syncthreads();
    if (warp == 0) {
      const float* column = &values[0][0].x + lane;
      const int n = min(rows.count - chunk, kSliceStates);
#pragma unroll 16
      for (int s = 0; s < n; ++s) {
        total = __fadd_rn(total, weights[s]);
        acc = __fadd_rn(acc, column[s * kSliceVectors * 4]);
      }
    }
    __syncthreads();
  }
  ptx::grid_launch_dependents();

  if (warp != 0) return;
  float keep;
  const float merged = finish_lse(p, token, head, anchor, total, &keep);
  using OutT = typename Out::Storage;
  OutT* out = static_cast<OutT*>(p.out) + token * p.out_row + head * p.out_head + slice * 32 + lane;
  const float y = finish_value(p, acc, total, keep);
  if constexpr (sizeof(OutT) == 4) {
    *out = y;
  } else {
    *out = Out::round(y);
  }
  if (slice == 0 && lane == 0 && p.out_lse != nullptr) {
    p.out_lse[token * p.out_lse_row + head * p.out_lse_head] = merged;
  }
}

}  // namespace mpfa
