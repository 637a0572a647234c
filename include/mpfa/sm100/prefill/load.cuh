// SPDX-License-Identifier: Apache-2.0
// The load role: two warps bring Q, K, V, scales and compensation slots into shared memory, in the
// layouts that the tensor cores read, from any page size and any strides.
//
// Whole K and V blocks are tensor copies, one per page (ragged: one), which complete on the block's
// barrier by bytes. Everything else (Q, a last block, pages of 1, linear scales, compensation
// slots) goes through cp.async and stores; such a unit is announced on its barrier a few units
// later, when its copies have landed and a proxy fence has handed them to the tensor cores.
#pragma once

#include <cstdint>

#include "mpfa/ptx/cp_async.cuh"
#include "mpfa/ptx/elect.cuh"
#include "mpfa/ptx/fence.cuh"
#include "mpfa/ptx/mbarrier.cuh"
#include "mpfa/ptx/smem.cuh"
#include "mpfa/ptx/tcgen05.cuh"
#include "mpfa/ptx/tma.cuh"
#include "mpfa/sm100/prefill/tile.cuh"

namespace mpfa::sm100::prefill {

#if defined(__CUDACC__) && MPFA_HAS_TCGEN05

// Byte offset of a 16-byte chunk inside a tile of 32-, 64- or 128-byte rows with the swizzle of
// that width: address bits 4.. are XORed with bits 7... Longer rows lie in panels of 128 bytes.
template <int RowBytes, int TileRows>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  constexpr int kPanelBytes = RowBytes < 128 ? RowBytes : 128;
  constexpr uint32_t kMask = kPanelBytes / 16 - 1;
  const uint32_t offset = row * kPanelBytes + chunk % (kPanelBytes / 16) * 16;
  const uint32_t panel = chunk / (kPanelBytes / 16) * (TileRows * kPanelBytes);
  return panel + (offset ^ ((offset >> 7 & kMask) << 4));
}

__device__ __forceinline__ uint32_t load_bf16_bits(const uint8_t* p) {
  return __ldg(reinterpret_cast<const uint16_t*>(p));
}

template <class C>
class LoadRole {
  using Layout = SharedLayout<C>;
  static constexpr int kAhead = 3;  // units in flight behind the one that is being issued
  static constexpr int kRowsPerLane = kKvBlock / 32;
  static constexpr uint32_t kFull = 0xffffffffu;

  // Key rows lane, lane + 32, ... of a block: page << shift | row of the page; ragged: the row of
  // the batch; -1: no such key.
  struct Rows {
    int32_t slot[kRowsPerLane];
  };

 public:
  __device__ __forceinline__ explicit LoadRole(const Context<C>& ctx)
      : ctx_(ctx),
        p_(ctx.params),
        warp_(ptx_warp() - kLoadFirstWarp),
        lane_(threadIdx.x % 32),
        page_shift_(p_.page_size == 0 ? 31 : 31 - __clz(p_.page_size)) {}

  __device__ __forceinline__ void run() {
    check_plan();
    TileWalk walk(p_);
    Tile tile;
    while (walk.next(&tile)) {
      if (tile.blocks > 0) run_tile(tile);
    }
    flush();
  }

 private:
  __device__ __forceinline__ static int ptx_warp() { return threadIdx.x / 32; }

  __device__ __forceinline__ void run_tile(const Tile& tile) {
#pragma unroll 1
    for (int r = 0; r < tile.stages; ++r) load_q(tile, r);
    // First key that the tile's first row sees; the rows below see none before it.
    const int32_t first_key = visible_keys(tile.mask, tile.q_begin + tile.pack.token(0)).begin;
#pragma unroll 1
    for (int32_t j = 0; j < tile.blocks; ++j) {
      const int32_t begin = tile.block_begin(j);
      const Rows rows = find_rows(tile, begin);
      // why: V rows behind the last key, or in pages that a window has left, may hold NaN, which
      // 0 * V would spread, so these blocks are copied row by row with zero fill; pages of 1 are
      // too small for a tensor copy.
      const bool whole = begin + kKvBlock <= tile.kv_len && p_.page_size != 1;
      load_k(tile, rows, whole);
      load_v(rows, whole && begin >= first_key, first_key - begin);
    }
  }

  // A plan for another kernel: rows or slots would be dropped in silence.
  __device__ __forceinline__ void check_plan() const {
    const int heads = __ldg(&p_.plan.header->heads_per_group);
    const bool rows_fit = __ldg(&p_.plan.header->q_tile_tokens) * heads <= kTileRows;
    const bool slots_fit = p_.aux_delta.data == nullptr || heads + p_.channels <= kCompSlots;
    if (!rows_fit || !slots_fit || (kElementwiseDelta && p_.channels > 0)) __trap();
  }

  // ---- announcing -------------------------------------------------------------------------------

  // What this warp has copied and stored so far is visible to the tensor cores.
  __device__ __forceinline__ void hand_over() {
    ptx::fence_proxy_async_shared();
    __syncwarp();
  }

  __device__ __forceinline__ void publish(uint32_t bar) {
    if (bar != 0 && lane_ == 0) ptx::mbarrier_arrive(bar);
  }

  // The copies of a unit are issued: it takes its place in the queue, behind the oldest, which
  // leaves. invariant: only here and in flush() does a place become free, and both announce it; a
  // unit that is dropped in silence is an arrival that its barrier waits for for ever.
  __device__ __forceinline__ void enqueue(uint32_t bar) {
    retire_oldest();
    ptx::cp_async_commit_group();
#pragma unroll
    for (int i = 0; i + 1 < kAhead; ++i) pending_[i] = pending_[i + 1];
    pending_[kAhead - 1] = bar;
  }

  // The groups in flight are the units queued, so all but the youngest kAhead - 1 have landed. A
  // place may be empty: after flush(), or of a unit whose copies are announced by bytes.
  __device__ __forceinline__ void retire_oldest() {
    ptx::cp_async_wait_group<kAhead - 1>();
    hand_over();
    publish(pending_[0]);
  }

  __device__ __forceinline__ void flush() {
    ptx::cp_async_wait_group<0>();
    hand_over();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      publish(pending_[i]);
      pending_[i] = 0;
    }
  }

  // why: the consumer may need a unit that is still queued here before it frees this one.
  __device__ __forceinline__ void wait_empty(uint32_t bar, uint32_t parity) {
    if (__all_sync(kFull, ptx::mbarrier_try_wait(bar, parity))) return;
    flush();
    ptx::mbarrier_wait(bar, parity);
  }

  __device__ __forceinline__ uint32_t acquire_slot() {
    wait_empty(ctx_.bar(Layout::empty, ring_ % kRingSlots), (ring_ / kRingSlots & 1) ^ 1);
    return ctx_.at(Layout::ring) + ring_ % kRingSlots * C::kSlotBytes;
  }

  // `arrived`: this warp has arrived already, its copies complete on the barrier by bytes. The
  // queue moves on all the same.
  __device__ __forceinline__ void slot_issued(bool arrived) {
    enqueue(arrived ? 0 : ctx_.bar(Layout::full, ring_ % kRingSlots));
    ++ring_;
  }

  // ---- rows -------------------------------------------------------------------------------------

  __device__ __forceinline__ Rows find_rows(const Tile& tile, int32_t begin) const {
    const int32_t base = __ldg(p_.plan.kv_indptr + tile.request);
    Rows rows;
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int32_t token = begin + 32 * i + lane_;
      int32_t slot = -1;
      if (token < tile.kv_len) {
        if (p_.page_size == 0) {
          slot = base + token;
        } else {
          const int32_t page = __ldg(p_.plan.kv_indices + base + (token >> page_shift_));
          slot = page << page_shift_ | (token & (p_.page_size - 1));
        }
      }
      rows.slot[i] = slot;
    }
    return rows;
  }

  __device__ __forceinline__ int32_t page_of(int32_t slot) const {
    return static_cast<uint32_t>(slot) >> page_shift_;
  }
  __device__ __forceinline__ int32_t row_of(int32_t slot) const {
    return slot & ((1u << page_shift_) - 1);
  }

  // Copies a tile of rows; both warps share it, a row is RowBytes / 16 neighbouring lanes.
  template <int RowBytes, int TileRows, class Source>
  __device__ __forceinline__ void copy_rows(uint32_t to, const Source& source) {
    constexpr int kChunks = RowBytes / 16;
    constexpr int kRowsPerPass = kLoadWarps * 32 / kChunks;
    const int chunk = lane_ % kChunks;
#pragma unroll 1
    for (int row = warp_ * (32 / kChunks) + lane_ / kChunks; row < TileRows; row += kRowsPerPass) {
      // Nothing is read for an absent row, but the address must be one.
      const uint8_t* from = source(row);
      const bool valid = from != nullptr;
      ptx::cp_async_zfill<16>(to + swizzled<RowBytes, TileRows>(row, chunk),
                              valid ? from + 16 * chunk : p_.v.data, valid ? 16 : 0);
    }
  }

  // Rows [first, first + TileRows) of a block; those below `hidden` become zero.
  template <int RowBytes, int TileRows>
  __device__ __forceinline__ void copy_kv(uint32_t to, const KvOperand& t, const Rows& rows,
                                          int first, int32_t hidden) {
    copy_rows<RowBytes, TileRows>(to, [&](int tile_row) -> const uint8_t* {
      const int row = first + tile_row;
      const int32_t slot = __shfl_sync(kFull, pick(rows, row / 32), row % 32);
      if (slot < 0 || row < hidden) return nullptr;
      return t.at(page_of(slot), ctx_.kv_head, row_of(slot));
    });
  }

  // The same without gaps by tensor copies, one for each page and panel; the elected thread of the
  // first load warp.
  template <int RowBytes, int TileRows>
  __device__ __forceinline__ void tensor_copy(uint32_t to, const TensorMap* map, uint32_t bar,
                                              const Rows& rows, int first) {
    constexpr int kPanelBytes = RowBytes < 128 ? RowBytes : 128;
    const int box = p_.page_size == 0 ? TileRows : min(p_.page_size, TileRows);
    for (int row = 0; row < TileRows; row += box) {
      const int32_t slot = __shfl_sync(kFull, pick(rows, (first + row) / 32), (first + row) % 32);
      if (ptx::elect_one()) {
#pragma unroll
        for (int panel = 0; panel < RowBytes / kPanelBytes; ++panel) {
          ptx::tensor_load_4d(to + (panel * TileRows + row) * kPanelBytes, map, bar,
                              panel * kPanelBytes, row_of(slot), ctx_.kv_head, page_of(slot));
        }
      }
    }
  }

  // The scales of row `row` of an atom tile: four bytes for each 64 channels.
  __device__ __forceinline__ void copy_scales(uint32_t to, int row, const uint8_t* from) {
#pragma unroll
    for (int a = 0; a < C::kScaleAtoms; ++a) {
      ptx::cp_async_zfill<4>(to + 512 * a + row % 32 * 16 + row / 32 * 4,
                             from != nullptr ? from + 4 * a : p_.k_scale.data,
                             from != nullptr ? 4 : 0);
    }
  }

  // ---- units ------------------------------------------------------------------------------------

  __device__ __forceinline__ void load_k(const Tile& tile, const Rows& rows, bool whole) {
    const uint32_t to = acquire_slot();
    const bool atoms = p_.page_size == kKvBlock;
    const bool compensated = p_.a_comp.data != nullptr;
    if (whole && warp_ == 0) {
      const uint32_t bar = ctx_.bar(Layout::full, ring_ % kRingSlots);
      if (ptx::elect_one()) {
        ptx::mbarrier_arrive_expect_tx(bar, C::kQkBytes + (atoms ? C::kScaleBytes : 0));
      }
      __syncwarp();
      tensor_copy<C::kQkRowBytes, kKvBlock>(to, &ctx_.k_map, bar, rows, 0);
      if (atoms && ptx::elect_one()) {
#pragma unroll
        for (int a = 0; a < C::kScaleAtoms; ++a) {
          ptx::bulk_load(to + C::kSlotScale + 512 * a,
                         p_.k_scale.at(page_of(rows.slot[0]), ctx_.kv_head, a), 512, bar);
        }
      }
      __syncwarp();
    } else if (!whole) {
      copy_kv<C::kQkRowBytes, kKvBlock>(to, p_.k, rows, 0, 0);
      if (atoms && warp_ < C::kScaleAtoms) {
        // Rows behind the last key hold anything; their scores are masked.
        ptx::cp_async<16>(
            to + C::kSlotScale + 512 * warp_ + 16 * lane_,
            p_.k_scale.at(page_of(__shfl_sync(kFull, rows.slot[0], 0)), ctx_.kv_head, warp_) +
                16 * lane_);
      }
    }
    // Generic copies: of the second warp alone beside tensor copies, else of both.
    const int first = whole ? 0 : warp_, step = whole ? 1 : kLoadWarps;
    if (!whole || warp_ == 1) {
#pragma unroll 1
      for (int group = first; group < kRowsPerLane; group += step) {
        const int row = 32 * group + lane_;
        const int32_t slot = pick(rows, group);
        if (!atoms) {
          copy_scales(
              to + C::kSlotScale, row,
              slot < 0 ? nullptr : p_.k_scale.at(page_of(slot), ctx_.kv_head, row_of(slot)));
        }
        if (compensated) store_key_slots(to + C::kSlotComp, tile, row, slot);
      }
    }
    slot_issued(whole && warp_ == 0);
  }

  // The value of a lane's row in a group that is not known at compile time, in registers.
  __device__ __forceinline__ static int32_t pick(const Rows& rows, int group) {
    int32_t slot = rows.slot[0];
#pragma unroll
    for (int i = 1; i < kRowsPerLane; ++i) slot = group == i ? rows.slot[i] : slot;
    return slot;
  }

  // `hidden`: rows in front of the first visible key.
  __device__ __forceinline__ void load_v(const Rows& rows, bool whole, int32_t hidden) {
    if constexpr (C::kVTransposed) {
      load_v_transposed(page_of(__shfl_sync(kFull, rows.slot[0], 0)));
    } else {
#pragma unroll
      for (int unit = 0; unit < C::P::kVUnits; ++unit) {
        const uint32_t to = acquire_slot();
        const int first = unit * C::kVRows;
        if (!whole) {
          copy_kv<C::kVRowBytes, C::kVRows>(to, p_.v, rows, first, hidden);
        } else if (warp_ == 0) {
          const uint32_t bar = ctx_.bar(Layout::full, ring_ % kRingSlots);
          if (ptx::elect_one()) ptx::mbarrier_arrive_expect_tx(bar, C::kVBytes);
          __syncwarp();
          tensor_copy<C::kVRowBytes, C::kVRows>(to, &ctx_.v_map, bar, rows, first);
        }
        slot_issued(whole && warp_ == 0);
      }
    }
  }

  // NVFP4: a page of 128 tokens as V^T with its scales. invariant: e2m1 has no NaN, and the writer
  // leaves no NaN among the scales of tokens that nobody sees.
  __device__ __forceinline__ void load_v_transposed(int32_t page) {
    const uint32_t to = acquire_slot();
    if (warp_ == 0) {
      const uint32_t bar = ctx_.bar(Layout::full, ring_ % kRingSlots);
      if (ptx::elect_one()) {
        ptx::mbarrier_arrive_expect_tx(bar, C::kSlotVBytes);
        ptx::tensor_load_4d(to, &ctx_.v_map, bar, 0, 0, ctx_.kv_head, page);
        ptx::bulk_load(to + C::kSlotVScale, p_.v_scale.at(page, ctx_.kv_head, 0), C::kPvScaleBytes,
                       bar);
      }
      __syncwarp();
    }
    slot_issued(warp_ == 0);
  }

  __device__ __forceinline__ void load_q(const Tile& tile, int stage) {
    wait_empty(ctx_.bar(Layout::q_empty, stage), (q_parity_ >> stage & 1) ^ 1);
    q_parity_ ^= 1u << stage;
    const auto row_of_tile = [&](const TokenOperand& t, int row) -> const uint8_t* {
      const int32_t tile_row = stage * kStageRows + row;
      if (tile_row >= tile.pack.rows) return nullptr;
      return t.row(tile.q_first + tile.pack.token(tile_row),
                   ctx_.kv_head * p_.group_size + tile.pack.head(tile_row));
    };
    copy_rows<C::kQkRowBytes, kStageRows>(ctx_.at(Layout::q) + stage * C::kQkBytes,
                                          [&](int row) { return row_of_tile(p_.q, row); });
#pragma unroll 1
    for (int group = warp_; group < kRowsPerLane; group += kLoadWarps) {
      const int row = 32 * group + lane_;
      copy_scales(ctx_.at(Layout::q_scale) + stage * C::kScaleBytes, row,
                  row_of_tile(p_.q_scale, row));
      if (p_.a_comp.data != nullptr) {
        store_query_slots(ctx_.at(Layout::a_comp) + stage * C::kCompBytes, tile, row,
                          stage * kStageRows + row, row_of_tile(p_.a_comp, row));
      }
    }
    enqueue(ctx_.bar(Layout::q_full, stage));
  }

  // ---- compensation slots: S += A_comp B_comp^T, 16 bf16 per row
  // --------------------------------- Slots 0..n-1 are Delta of the tile's n heads (A: one-hot),
  // the next c the outlier channels.

  __device__ __forceinline__ int delta_slots(const Tile& tile) const {
    return p_.aux_delta.data != nullptr ? tile.pack.heads : 0;
  }

  template <class Value>
  __device__ __forceinline__ static void store_slots(uint32_t to, int row, const Value& value) {
    // Core matrices of 8 rows x 8 slots; the two halves of a row are 128 bytes apart.
    const uint32_t at = to + row / 8 * 256 + row % 8 * 16;
    uint32_t w[kCompSlots / 2];
#pragma unroll
    for (int i = 0; i < kCompSlots / 2; ++i) w[i] = value(2 * i) | value(2 * i + 1) << 16;
    ptx::st_shared_v4(at, {w[0], w[1], w[2], w[3]});
    ptx::st_shared_v4(at + 128, {w[4], w[5], w[6], w[7]});
  }

  // B_comp. Zero for rows without a key: 0 * NaN would reach every score of the column.
  __device__ __forceinline__ void store_key_slots(uint32_t to, const Tile& tile, int row,
                                                  int32_t slot) {
    const int deltas = delta_slots(tile);
    const uint8_t *delta = nullptr, *channels = nullptr;
    if (slot >= 0) {
      const int32_t page = page_of(slot), in_page = row_of(slot);
      delta = p_.aux_delta.at(page, ctx_.kv_head, tile.pack.first_head) + 2 * in_page;
      channels = p_.aux_channels.at(page, ctx_.kv_head, in_page);
    }
    if constexpr (kElementwiseDelta) {
      // A row of 128 keys for each head.
      for (int k = 0; k < deltas; ++k) {
        const uint32_t bits = slot < 0 ? 0 : load_bf16_bits(delta + k * p_.aux_delta.row);
        *static_cast<uint16_t*>(__cvta_shared_to_generic(to + 2 * (k * kKvBlock + row))) =
            static_cast<uint16_t>(bits);
      }
      return;
    }
    store_slots(to, row, [&](int k) -> uint32_t {
      if (slot < 0) return 0;
      if (k < deltas) return load_bf16_bits(delta + k * p_.aux_delta.row);
      if (k - deltas < p_.channels) return load_bf16_bits(channels + 2 * (k - deltas));
      return 0;
    });
  }

  // A_comp as the query writer left it: 1 (with Delta), then the channels. Packed heads get a slot
  // each for Delta.
  __device__ __forceinline__ void store_query_slots(uint32_t to, const Tile& tile, int row,
                                                    int32_t tile_row, const uint8_t* from) {
    const int deltas = delta_slots(tile);
    const int first = p_.aux_delta.data != nullptr ? 1 : 0;
    const int mine = tile.pack.heads == 1 ? 0 : tile_row % tile.pack.heads;
    store_slots(to, row, [&](int k) -> uint32_t {
      if (from == nullptr) return 0;
      if (k < deltas) return k == mine ? load_bf16_bits(from) : 0;
      if (k - deltas < p_.channels) return load_bf16_bits(from + 2 * (first + k - deltas));
      return 0;
    });
  }

  const Context<C>& ctx_;
  const AttentionParams& p_;
  const int warp_;
  const int lane_;
  const int page_shift_;
  uint32_t ring_ = 0;
  uint32_t q_parity_ = 0;
  uint32_t pending_[kAhead] = {};
};

#endif

}  // namespace mpfa::sm100::prefill
