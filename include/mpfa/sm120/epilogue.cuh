// SPDX-License-Identifier: Apache-2.0
// Rows of a tile: where a row comes from, and how its output is finished and stored.
#pragma once

#include "mpfa/core/mask.cuh"
#include "mpfa/core/sink.cuh"
#include "mpfa/core/work.cuh"
#include "mpfa/ptx/cvt.cuh"
#include "mpfa/ptx/math.cuh"
#include "mpfa/sm120/config.h"
#include "mpfa/sm120/softmax.cuh"

namespace mpfa::sm120 {

#if defined(__CUDACC__)

struct TileRow {
  bool valid;
  int32_t request_token;  // inside the request
  int32_t tile_token;     // inside the tile
  int32_t token;          // of the batch; 0 where not valid
  int32_t head;           // query head
};

struct TileRows {
  RowPacking packing;
  MaskParams mask;
  int32_t q_begin;
  int32_t batch_begin;  // token of the batch of the tile's first row
  int32_t group_size;

  __device__ __forceinline__ TileRows(const Params& p, const WorkItem& item) {
    const AttentionParams& a = p.attention;
    const PlanView& plan = a.plan;
    const int32_t start = __ldg(plan.qo_indptr + item.request);
    const int32_t qo_len = __ldg(plan.qo_indptr + item.request + 1) - start;
    packing = row_packing(item, __ldg(&plan.header->heads_per_group), a.group_size);
    mask = {__ldg(plan.kv_len + item.request) - qo_len, item.kv_begin, item.kv_end,
            __ldg(&plan.header->window_left), __ldg(&plan.header->causal) != 0};
    q_begin = item.q_begin;
    batch_begin = start + item.q_begin;
    group_size = a.group_size;
  }

  __device__ __forceinline__ TileRow row(int32_t index, int32_t kv_head) const {
    const bool valid = index < packing.rows;
    const int32_t i = valid ? packing.token(index) : 0;
    const int32_t h = valid ? packing.head(index) : 0;
    return {valid, q_begin + i, i, valid ? batch_begin + i : 0, kv_head * group_size + h};
  }
};

// Two neighbouring channels.
__device__ __forceinline__ void store_pair(uint8_t* row, OutType type, int channel, float x,
                                           float y) {
  if (type == OutType::kFp32) {
    *reinterpret_cast<float2*>(row + 4 * channel) = make_float2(x, y);
  } else {
    const uint32_t packed = type == OutType::kBf16 ? ptx::cvt_bf16x2(x, y) : ptx::cvt_f16x2(x, y);
    *reinterpret_cast<uint32_t*>(row + 2 * channel) = packed;
  }
}

// O / l and the LSE (base 2) of the warp's rows. A final item adds the sink; a partition writes its
// partial state as it is.
template <class C>
__device__ __forceinline__ void store_rows(const Params& p, const WorkItem& item,
                                           const TileRow (&rows)[2],
                                           const float (&o)[C::kOutTiles][4], const RowState& state,
                                           int t) {
  const AttentionParams& a = p.attention;
  const bool partial = item.partial_row >= 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(state.sum[r]);
    // invariant: all lanes take part in the reduction above, whatever rows they hold.
    if (!rows[r].valid) continue;
    const bool empty = sum == 0.0f;
    float factor = empty ? 0.0f : 1.0f / sum;
    float lse = empty ? -INFINITY : state.reference[r] + ptx::lg2(sum);
    if (!partial && a.sinks != nullptr) {
      const SinkResult joined = join_sink(lse, __ldg(a.sinks + rows[r].head));
      factor *= joined.keep;
      lse = joined.lse;
    }
    uint8_t* out;
    OutType type = OutType::kFp32;
    if (partial) {
      const int64_t at =
          (item.partial_row + static_cast<int64_t>(rows[r].tile_token) * item.partial_stride) *
              a.num_qo_heads +
          rows[r].head;
      out = reinterpret_cast<uint8_t*>(a.partial_o + at * C::kHeadDim);
      if (t == 0) a.partial_lse[at] = lse;
    } else {
      out = a.out + rows[r].token * a.out_token + rows[r].head * a.out_head;
      type = a.out_type;
      if (t == 0) a.lse[rows[r].token * a.lse_token + rows[r].head * a.lse_head] = lse;
    }
#pragma unroll
    for (int j = 0; j < C::kOutTiles; ++j) {
      store_pair(out, type, 8 * j + 2 * t, o[j][2 * r] * factor, o[j][2 * r + 1] * factor);
    }
  }
}

#endif  // __CUDACC__

}  // namespace mpfa::sm120
