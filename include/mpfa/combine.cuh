// SPDX-License-Identifier: Apache-2.0
// Combines attention states of disjoint key sets by their base-2 log-sum-exp, as
// mpfa.merge.merge_base2 does: weights 2^(lse - max), sums in the order of the states, multiply and
// add rounded separately.
//
// A warp owns one (token, head). It turns the LSEs of up to kStates states into weights in shared
// memory first; then every lane streams its channels of eight states at a time, eight independent
// loads.
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

  int64_t first = token, step = p.num_tokens;
  int count = p.states;
  if (p.indptr != nullptr) {
    if (p.header != nullptr && token >= __ldg(&p.header->nnz_qo)) return;
    const int begin = __ldg(p.indptr + token);
    count = (__ldg(p.indptr + token + 1) - begin) * p.states;
    first = static_cast<int64_t>(begin) * p.states;
    step = 1;
  }
  if (count <= 0) return;  // the token has one partition, which wrote the output itself
  const float* lse = p.lse + first * p.lse_row + head * p.lse_head;
  const int64_t lse_step = step * p.lse_row;

  float top = -INFINITY;
  for (int i = lane; i < count; i += 32) top = fmaxf(top, __ldg(lse + i * lse_step));
#pragma unroll
  for (int m = 16; m > 0; m /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, m));
  const float anchor = top == -INFINITY ? 0.0f : top;

  const InT* o = static_cast<const InT*>(p.o) + first * p.o_row + head * p.o_head + lane * kPer;
  const int64_t o_step = step * p.o_row;
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

  // why == and not >: a NaN among the states makes the total NaN, and must reach the output.
  const bool empty = total == 0.0f;
  float merged = empty ? -INFINITY : __fadd_rn(anchor, log2f(total));
  if (p.row_term != nullptr) {
    const float term = __ldg(p.row_term + token * p.row_term_row + head * p.row_term_head);
    merged = __fadd_rn(merged, __fmul_rn(p.row_scale, term));
  }
  float keep = 1.0f;
  if (p.sinks != nullptr) {
    const SinkResult joined = join_sink(merged, __ldg(p.sinks + head));
    merged = joined.lse;
    keep = joined.keep;
  }
  using OutT = typename Out::Storage;
  OutT* out = static_cast<OutT*>(p.out) + token * p.out_row + head * p.out_head + lane * kPer;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const float y = empty ? 0.0f : __fdiv_rn(acc[i], total);
    acc[i] = p.sinks != nullptr ? __fmul_rn(y, keep) : y;
  }
  store_result<Out, kPer>(out, acc, p.out_vector);
  if (lane == 0 && p.out_lse != nullptr) {
    p.out_lse[token * p.out_lse_row + head * p.out_lse_head] = merged;
  }
}

}  // namespace mpfa
