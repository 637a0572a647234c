// SPDX-License-Identifier: Apache-2.0
// Two load warps: blocks of 128 keys into the ring, V with the scales of K by one, K with Delta and
// channels by the other. K and V come by TMA, one box per page, and channels by one bulk copy per
// page; the rest, of which a page may hold as little as 32 bytes in a row, by cp.async on the same
// barrier.
//
// why two: a block has up to 16 boxes, and a warp gets an issue slot every nine cycles or so beside
// the consumers. One warp took longer for a block of 16-token pages than memory does.
#pragma once

#include "mpfa/ptx/address.cuh"
#include "mpfa/ptx/cp_async.cuh"
#include "mpfa/ptx/cp_async_mbarrier.cuh"
#include "mpfa/ptx/elect.cuh"
#include "mpfa/ptx/mbarrier.cuh"
#include "mpfa/ptx/tma.cuh"
#include "mpfa/sm90/decode/item.cuh"

namespace mpfa::sm90::decode {

#if defined(__CUDACC__)

constexpr int kMaxPieces = 8;  // pages of a block

// Pages of a pass's request. why a clamp: a block that the request does not fill takes its last
// page again, so that every block lands the same bytes; the surplus keys are masked.
struct PageTable {
  const int32_t* pages;
  int32_t last;

  __device__ PageTable(const PlanView& plan, const Tile& tile)
      : pages(plan.kv_indices + tile.first_page), last(tile.last_page) {}
  __device__ int32_t page(int32_t index) const { return __ldg(pages + min(index, last)); }
};

template <class C>
struct Loader {
  using S = Smem<C>;
  using B = Barriers<C>;

  const Params& p;
  const uint32_t smem;
  const int32_t kv_head, lane;
  RingState<C::kStages> ring;

  __device__ uint32_t full() const { return smem + S::kBarriers + 8 * (B::kFull + ring.index); }
  __device__ void wait_empty() const {
    ptx::mbarrier_wait(smem + S::kBarriers + 8 * (B::kEmpty + ring.index), ring.phase ^ 1);
  }
  __device__ int32_t pieces() const { return kBlock >> p.page_shift; }
  // Token `row` of a block: which of the block's pages, and where in it.
  __device__ int32_t piece(int32_t row) const { return row >> p.page_shift; }
  __device__ uint32_t row_in_page(int32_t row) const { return row & ((1 << p.page_shift) - 1); }
  __device__ const uint8_t* head_of(const CacheOperand& o) const {
    return o.data + kv_head * o.head;
  }

  // Pages of block b, the same in every lane.
  __device__ void read_pages(const PageTable& table, int32_t b, int32_t (&page)[kMaxPieces]) const {
#pragma unroll
    for (int32_t i = 0; i < kMaxPieces; ++i) {
      if (i < pieces()) page[i] = table.page(b * pieces() + i);
    }
  }

  // One box per page. `bytes`: all that the caller has under way on the barrier, boxes included.
  __device__ void copy_boxes(const TensorMap& map, uint32_t to, uint32_t bytes, uint32_t row_bytes,
                             const int32_t (&page)[kMaxPieces]) const {
    if (ptx::elect_one()) {
      ptx::mbarrier_arrive_expect_tx(full(), bytes);
#pragma unroll
      for (int32_t i = 0; i < kMaxPieces; ++i) {
        if (i < pieces()) {
          ptx::tensor_load_4d(to + (i << p.page_shift) * row_bytes, &map, full(), 0, 0, kv_head,
                              page[i]);
        }
      }
    }
    __syncwarp();
  }

  // Calls load(b) for each block of the pass, and prefetch(table, b) one block ahead of it.
  template <class Prefetch, class Load>
  __device__ void for_each_block(const Tile& tile, Prefetch&& prefetch, Load&& load) {
    const int32_t end = tile.end_block();
    if (tile.first_block() >= end) return;
    const PageTable table(p.a.plan, tile);
    prefetch(table, tile.first_block());
    for (int32_t b = tile.first_block(); b < end; ++b) {
      wait_empty();
      load(b);
      ptx::cp_async_mbarrier_arrive(full());
      ring.advance();
      if (b + 1 < end) prefetch(table, b + 1);
    }
  }
};

// V and the scales of K.
template <class C>
__device__ __forceinline__ void load_values(Loader<C>& loader, const Tile& tile) {
  using S = Smem<C>;
  const Params& p = loader.p;
  constexpr int kChunks = C::kBytesScale / 16 / 32;  // 16-byte chunks of a lane
  const bool atoms = p.scale_layout == ScaleLayout::kAtoms;
  int32_t page[kMaxPieces], scale_page[kChunks];
  const uint8_t* scales = loader.head_of(p.k_scale);
  const auto row_of = [&](int32_t chunk) {
    return (chunk * 32 + loader.lane) * 16 / static_cast<int32_t>(C::kRowScale);
  };
  loader.for_each_block(
      tile,
      [&](const PageTable& table, int32_t b) {
        loader.read_pages(table, b, page);
#pragma unroll
        for (int32_t i = 0; i < kChunks; ++i) {
          scale_page[i] = table.page(b * loader.pieces() + loader.piece(row_of(i)));
        }
      },
      [&](int32_t b) {
        loader.copy_boxes(p.map_v, loader.smem + S::kV + loader.ring.index * C::kBytesV, C::kBytesV,
                          C::kRowV, page);
        const uint32_t to = loader.smem + S::kScale + loader.ring.index * C::kBytesScale;
        if (p.scale_layout == ScaleLayout::kStrided) {
          const PageTable table(p.a.plan, tile);
          constexpr int kWordsOfRow = C::kRowScale / 4;
#pragma unroll 1
          for (int32_t i = loader.lane; i < kBlock * kWordsOfRow; i += 32) {
            const int32_t row = i / kWordsOfRow;
            const int32_t from = table.page(b * loader.pieces() + loader.piece(row));
            ptx::cp_async<4>(to + 4 * i, ptx::advance(ptx::advance(scales, from, p.k_scale.page),
                                                      loader.row_in_page(row), p.k_scale.row) +
                                             i % kWordsOfRow * 4);
          }
          return;
        }
#pragma unroll
        for (int32_t i = 0; i < kChunks; ++i) {
          const uint32_t offset = atoms ? i * p.k_scale.row + loader.lane * 16
                                        : loader.row_in_page(row_of(i)) * C::kRowScale;
          ptx::cp_async<16>(to + (i * 32 + loader.lane) * 16,
                            ptx::advance(scales, scale_page[i], p.k_scale.page) + offset);
        }
      });
}

// K, Delta and channels.
template <class C>
__device__ __forceinline__ void load_keys(Loader<C>& loader, const Tile& tile) {
  using S = Smem<C>;
  const Params& p = loader.p;
  int32_t page[kMaxPieces], delta_page = 0;
  // Delta: lanes 0..15 copy 8 tokens each of even heads, lanes 16..31 of odd ones.
  const int32_t delta_row = loader.lane % 16 * 8;
  const int32_t first_head = tile.packing.first_head + tile.template first_delta_head<C>();
  const int32_t heads = tile.template delta_heads<C>();
  const uint8_t* delta = loader.head_of(p.delta) + loader.row_in_page(delta_row) * 2;
  const uint8_t* channels = loader.head_of(p.channels);
  const uint32_t page_channels = p.a.channels * 2 << p.page_shift;  // bytes, dense in a page
  loader.for_each_block(
      tile,
      [&](const PageTable& table, int32_t b) {
        loader.read_pages(table, b, page);
        if (p.delta_heads > 0) {
          delta_page = table.page(b * loader.pieces() + loader.piece(delta_row));
        }
      },
      [&](int32_t b) {
        loader.copy_boxes(p.map_k, loader.smem + S::kK + loader.ring.index * C::kBytesK,
                          C::kBytesK + kBlock * 2 * p.a.channels, C::kRowK, page);
        const uint32_t side = loader.smem + S::kSide + loader.ring.index * p.side_bytes;
        if (p.delta_heads > 0) {
          const uint8_t* from = ptx::advance(delta, delta_page, p.delta.page);
          for (int32_t head = loader.lane / 16; head < heads; head += 2) {
            ptx::cp_async<16>(side + head * kBlock * 2 + delta_row * 2,
                              ptx::advance(from, first_head + head, p.delta.row));
          }
        }
        if (p.a.channels > 0 && ptx::elect_one()) {
          uint32_t to = side + C::delta_bytes(p.delta_heads);
#pragma unroll
          for (int32_t i = 0; i < kMaxPieces; ++i) {
            if (i < loader.pieces()) {
              ptx::bulk_load(to, ptx::advance(channels, page[i], p.channels.page), page_channels,
                             loader.full());
              to += page_channels;
            }
          }
        }
        __syncwarp();
      });
}

// Hands the tiles to the consumers, which would wait for the plan's entries otherwise.
template <class C>
struct TileWriter {
  using B = Barriers<C>;

  Tables<C>& tables;
  const uint32_t barriers;
  RingState<kTileSlots> ring;

  __device__ void write(const Tile& tile, int32_t lane) {
    ptx::mbarrier_wait(barriers + 8 * (B::kTileEmpty + ring.index), ring.phase ^ 1);
    if (lane == 0) {
      tables.tile[ring.index] = tile;
      ptx::mbarrier_arrive(barriers + 8 * (B::kTileFull + ring.index));
    }
    __syncwarp();
    ring.advance();
  }
};

#endif  // __CUDACC__

}  // namespace mpfa::sm90::decode
