// SPDX-License-Identifier: Apache-2.0
// Start of an item: the softmax warps write Q as a swizzled operand, its scales as atoms, and the
// per-column tables.
#pragma once

#include "mpfa/ptx/fence.cuh"
#include "mpfa/sm100/decode/context.cuh"

namespace mpfa::sm100::decode {

// An item as the softmax warps need it.
struct Tile {
  RowPacking packing;
  MaskParams mask;
  int32_t first_token;  // of the batch
  KeyRange inner;       // keys that every column sees
  KeyRange outer;       // keys that some column sees
};

template <int D>
__device__ __forceinline__ Tile make_tile(const Context<D>& c, const WorkItem& item,
                                          int32_t heads_per_group) {
  const AttentionParams& a = c.p.a;
  const int32_t q_begin = __ldg(a.plan.qo_indptr + item.request);
  const int32_t qo_len = __ldg(a.plan.qo_indptr + item.request + 1) - q_begin;
  Tile t;
  t.packing = row_packing(item, heads_per_group, a.group_size);
  if (t.packing.rows > kMaxColumns) __trap();  // a plan made for another kernel
  t.mask = {__ldg(a.plan.kv_len + item.request) - qo_len, item.kv_begin, item.kv_end, a.window_left,
            a.causal != 0};
  t.first_token = q_begin + item.q_begin;
  const int32_t last = item.q_begin + item.q_len - 1;
  t.inner = keys_visible_to_all(t.mask, item.q_begin, last);
  t.outer = {visible_keys(t.mask, item.q_begin).begin, visible_keys(t.mask, last).end};
  return t;
}

template <int D>
__device__ __forceinline__ int32_t query_head(const Context<D>& c, const RowPacking& packing,
                                              int32_t column) {
  return c.kv_head * c.p.a.group_size + packing.head(column);
}

// Padding columns are zero in both operands; their results are never stored.
template <int D>
__device__ __forceinline__ void write_query(const Context<D>& c, const Tile& t, int32_t thread) {
  using C = Config<D>;
  using S = Smem<D>;
  constexpr int kPieces = C::kRowQK / 16;
  constexpr uint32_t kPattern = C::kRowQK / 16 - 1;  // 128-byte rows of the swizzle pattern
  const AttentionParams& a = c.p.a;
  for (int32_t i = thread; i < kMaxColumns * kPieces; i += kSoftmaxThreads) {
    const int32_t column = i / kPieces, piece = i % kPieces;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (column < t.packing.rows) {
      const uint8_t* row =
          a.q.row(t.first_token + t.packing.token(column), query_head(c, t.packing, column));
      value = __ldg(reinterpret_cast<const uint4*>(row) + piece);
    }
    const uint32_t at = S::kQ + column * C::kRowQK + piece * 16;
    ptx::st_shared_v4(c.smem + (at ^ ((at >> 7 & kPattern) << 4)), value);
  }
  if (thread < kMaxColumns) {
    const uint8_t* row = nullptr;
    if (thread < t.packing.rows) {
      row =
          a.q_scale.row(t.first_token + t.packing.token(thread), query_head(c, t.packing, thread));
    }
#pragma unroll
    for (int i = 0; i < C::kAtoms; ++i) {
      const uint32_t word = row == nullptr ? 0u : __ldg(reinterpret_cast<const uint32_t*>(row) + i);
      ptx::st_shared_u32(
          c.smem + S::kScaleQ + i * C::kAtomBytes + thread % 32 * 16 + thread / 32 * 4, word);
    }
  }
}

// Channel values of Q as the B operand of the compensation MMA; unused slots are zero.
template <int D>
__device__ __forceinline__ void write_query_channels(const Context<D>& c, const Tile& t,
                                                     int32_t thread) {
  const AttentionParams& a = c.p.a;
  // Slot 0 of a_comp is the one-hot factor of Delta where there is one.
  const int32_t first_slot = c.p.delta_heads > 0 ? 1 : 0;
  const int32_t column = thread / 2, half = thread % 2;
  uint32_t word[4] = {};
  if (column < t.packing.rows) {
    const uint16_t* slots = reinterpret_cast<const uint16_t*>(
        a.a_comp.row(t.first_token + t.packing.token(column), query_head(c, t.packing, column)));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int32_t channel = 8 * half + i;
      const uint32_t value = channel < a.channels ? __ldg(slots + first_slot + channel) : 0;
      word[i / 2] |= value << (i % 2 * 16);
    }
  }
  ptx::st_shared_v4(c.smem + Smem<D>::kComp + slots_offset(column, half),
                    make_uint4(word[0], word[1], word[2], word[3]));
}

template <int D>
__device__ __forceinline__ void write_tables(const Context<D>& c, const WorkItem& item,
                                             const Tile& t, int32_t thread) {
  const AttentionParams& a = c.p.a;
  SoftmaxState& s = c.state();
  if (thread < kMaxColumns) {
    const bool used = thread < t.packing.rows;
    const int32_t i = used ? t.packing.token(thread) : 0;
    s.keys[thread] = used ? visible_keys(t.mask, item.q_begin + i) : KeyRange{0, 0};
    s.head[thread] = used ? t.packing.head(thread) - t.packing.first_head : 0;
    float row_term = 0.0f;
    if (used && a.row_term.data != nullptr) {
      row_term = __ldg(reinterpret_cast<const float*>(
          a.row_term.row(t.first_token + i, query_head(c, t.packing, thread))));
    }
    s.row_term[thread] = row_term;
  }
  for (int32_t i = thread; i < kSoftmaxWarps * kMaxColumns; i += kSoftmaxThreads) {
    s.running[0][i] = -INFINITY;
    s.total[0][i] = 0.0f;
  }
}

}  // namespace mpfa::sm100::decode
