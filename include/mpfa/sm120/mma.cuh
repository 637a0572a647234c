// SPDX-License-Identifier: Apache-2.0
// The MMA warps: S = Q K^T, softmax, O += P V for 16 rows each, both products block-scaled.
#pragma once

#include "mpfa/core/ring.cuh"
#include "mpfa/ptx/elect.cuh"
#include "mpfa/ptx/ldmatrix.cuh"
#include "mpfa/ptx/mbarrier.cuh"
#include "mpfa/ptx/mma_sm120.cuh"
#include "mpfa/ptx/smem.cuh"
#include "mpfa/sm120/config.h"
#include "mpfa/sm120/epilogue.cuh"
#include "mpfa/sm120/softmax.cuh"

namespace mpfa::sm120 {

#if defined(__CUDACC__)

// Q of 16 rows as A operands, one per 32 channels, and the scales of row g + 8 (t & 1).
template <class C>
struct QueryFragments {
  uint32_t a[C::kChannelBlocks][4];
  uint32_t scale;
};

template <class C>
__device__ __forceinline__ void load_query(QueryFragments<C>& q, const AttentionParams& p,
                                           const TileRow (&rows)[2], int t) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint8_t* row = p.q.row(rows[r].token, rows[r].head) + 4 * t;
#pragma unroll
    for (int kb = 0; kb < C::kChannelBlocks; ++kb) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t* at = reinterpret_cast<const uint32_t*>(row + 32 * kb + 16 * half);
        q.a[kb][r + 2 * half] = rows[r].valid ? __ldg(at) : 0;
      }
    }
  }
  const TileRow mine = (t & 1) ? rows[1] : rows[0];
  q.scale = 0x7f7f7f7f;
  if (mine.valid) {
    q.scale =
        __ldg(reinterpret_cast<const typename C::KeyScale*>(p.q_scale.row(mine.token, mine.head)));
  }
}

// Which keys a warp's rows see: each of a lane's two rows, some row, and every row. Warps without a
// row see none.
struct WarpKeys {
  RowKeys rows;
  KeyRange some;
  KeyRange every;
};

__device__ __forceinline__ WarpKeys warp_keys(const TileRows& tile, const TileRow (&rows)[2],
                                              int first_row, int num_rows) {
  WarpKeys keys = {{}, {0, 0}, {0, 0}};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const KeyRange range = visible_keys(tile.mask, rows[r].request_token);
    const bool any = rows[r].valid && range.end > range.begin;
    keys.rows.begin[r] = range.begin;
    keys.rows.count[r] = any ? range.end - range.begin : 0;
  }
  if (first_row < tile.packing.rows) {
    const int last_row = min(first_row + num_rows, tile.packing.rows) - 1;
    const int32_t first = tile.q_begin + tile.packing.token(first_row);
    const int32_t last = tile.q_begin + tile.packing.token(last_row);
    keys.some = {visible_keys(tile.mask, first).begin, visible_keys(tile.mask, last).end};
    keys.every = keys_visible_to_all(tile.mask, first, last);
  }
  return keys;
}

template <class C>
struct MmaWarp {
  const Params& p;
  SharedMemory<C>& shared;
  const int warp;
  const int lane;
  const int kv_head;
  RingState<C::kStages> ring;
  QueryFragments<C> q;
  RowState state;
  float o[C::kOutTiles][4];

  // S of the stage's keys. Column g of n-tile j is the key that row g of the tile's ldmatrix reads:
  // odd tiles swap rows 0-3 and 4-7. Every 8-lane phase still reads 8 different rows mod 8, so the
  // swizzle keeps it free of bank conflicts.
  __device__ __forceinline__ void scores(float (&s)[C::kScoreTiles][4], uint32_t stage) {
    const int g = lane >> 2, t = lane & 3;
    const int matrix = lane >> 3, row = lane & 7;
    const uint32_t k = ptx::smem_address(shared.k[stage]);
    uint32_t address[2];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int r = row ^ (4 * odd);
      const int swizzle = (C::kHeadDim == 128 ? r : r >> 1) & C::kSwizzleMask;
      address[odd] = k + r * C::kHeadDim + ((matrix ^ swizzle) << 4);
    }
    const auto* scales = reinterpret_cast<const typename C::KeyScale*>(shared.k_scale[stage]);
    // Lane 4g + t serves column g of n-tile t in each group of four tiles.
    const int scale_key = 8 * t + (g ^ (4 * (t & 1)));
#pragma unroll
    for (int group = 0; group < C::kTokenBlocks; ++group) {
      const uint32_t sfb = scales[32 * group + scale_key];
      score_channels<0>(s, 4 * group, address, sfb);
      if constexpr (C::kChannelBlocks == 4) score_channels<1>(s, 4 * group, address, sfb);
    }
  }

  // 64 channels of four n-tiles from j on. why tiles inside channels: an accumulator is used again
  // after four MMAs (64 cycles), longer than the latency of one.
  template <int Half>
  __device__ __forceinline__ void score_channels(float (&s)[C::kScoreTiles][4], int j,
                                                 const uint32_t (&address)[2], uint32_t sfb) {
    uint32_t b[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Half 1: the next four 16-byte chunks, bit 2 of the chunk, a plain xor under the swizzle.
      ptx::ldmatrix_x4(b[i], (address[i & 1] ^ (64 * Half)) + 8 * (j + i) * C::kHeadDim);
    }
    if constexpr (Half == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[j + i][e] = 0.0f;
      }
    }
    score_step<2 * Half>(s, j, b, sfb);
    score_step<2 * Half + 1>(s, j, b, sfb);
  }

  template <int Block>
  __device__ __forceinline__ void score_step(float (&s)[C::kScoreTiles][4], int j,
                                             const uint32_t (&b)[4][4], uint32_t sfb) {
    constexpr int r = 2 * (Block & 1);
    const uint32_t (&a)[4] = q.a[Block];
    ptx::mma_mxf8<Block, 0, Block, 0>(s[j], a, b[0][r], b[0][r + 1], s[j], q.scale, sfb);
    ptx::mma_mxf8<Block, 0, Block, 1>(s[j + 1], a, b[1][r], b[1][r + 1], s[j + 1], q.scale, sfb);
    ptx::mma_mxf8<Block, 0, Block, 2>(s[j + 2], a, b[2][r], b[2][r + 1], s[j + 2], q.scale, sfb);
    ptx::mma_mxf8<Block, 0, Block, 3>(s[j + 3], a, b[3][r], b[3][r + 1], s[j + 3], q.scale, sfb);
  }

  // O += P V. V lies as [token][channel]; ldmatrix transposes it and reads, for slot k of the
  // MMA's 32, the token whose score sits in P's slot k.
  __device__ __forceinline__ void accumulate(const uint32_t (&a)[C::kTokenBlocks][4], uint32_t sfa,
                                             uint32_t stage) {
    const int g = lane >> 2, t = lane & 3;
    const uint32_t v = ptx::smem_address(shared.v[stage]);
    // Lanes 16h..16h+15 address slots 16h + 4u + 2a + e; that slot's score is in n-tile 2h + a.
    const int slot = lane & 15, u = slot >> 2, half = (slot >> 1) & 1, e = slot & 1;
    const int token = 16 * (lane >> 4) + 8 * half + ((2 * u + e) ^ (4 * half));
    const int swizzle = (C::kHeadDim == 128 ? token : token >> 1) & C::kSwizzleMask;
    const uint32_t address = v + token * C::kHeadDim + (swizzle << 4);
    const auto* scales = reinterpret_cast<const typename C::ValueScale*>(shared.v_scale[stage]);
    uint32_t sfb[C::kOutTiles / 4];
#pragma unroll
    for (int i = 0; i < C::kOutTiles / 4; ++i) sfb[i] = scales[32 * i + 8 * t + g];
    accumulate_block<0>(a[0], address, sfa, sfb);
    accumulate_block<1>(a[1], address, sfa, sfb);
    if constexpr (C::kTokenBlocks == 4) {
      accumulate_block<2>(a[2], address, sfa, sfb);
      accumulate_block<3>(a[3], address, sfa, sfb);
    }
  }

  template <int Block>
  __device__ __forceinline__ void accumulate_block(const uint32_t (&a)[4], uint32_t address,
                                                   uint32_t sfa,
                                                   const uint32_t (&sfb)[C::kOutTiles / 4]) {
#pragma unroll
    for (int c = 0; c < C::kHeadDim / 16; c += 2) {
      uint32_t b[4];
      ptx::ldmatrix_trans_b8_x2(b, (address ^ (c << 4)) + 32 * Block * C::kHeadDim);
      ptx::mma_mxf8<0, 0, Block, 0>(o[2 * c], a, b[0], b[2], o[2 * c], sfa, sfb[c / 2]);
      ptx::mma_mxf8<0, 0, Block, 1>(o[2 * c + 1], a, b[1], b[3], o[2 * c + 1], sfa, sfb[c / 2]);
      ptx::ldmatrix_trans_b8_x2(b, (address ^ ((c + 1) << 4)) + 32 * Block * C::kHeadDim);
      ptx::mma_mxf8<0, 0, Block, 2>(o[2 * c + 2], a, b[0], b[2], o[2 * c + 2], sfa, sfb[c / 2]);
      ptx::mma_mxf8<0, 0, Block, 3>(o[2 * c + 3], a, b[1], b[3], o[2 * c + 3], sfa, sfb[c / 2]);
    }
  }

  __device__ __forceinline__ void wait_stage(const RingState<C::kStages>& stage) {
    ptx::mbarrier_wait(ptx::smem_address(&shared.full[stage.index]), stage.phase);
  }

  __device__ __forceinline__ void release_stage() {
    __syncwarp();  // all lanes have read the stage
    if (lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&shared.empty[ring.index]));
    ring.advance();
  }

  // Softmax of a block's scores, O += P V, and its stage is free.
  __device__ __forceinline__ void finish_block(float (&s)[C::kScoreTiles][4], float lambda, int t) {
    const BlockScale scale = softmax_block<C>(s, state, lambda, t);
    uint32_t pa[C::kTokenBlocks][4];
    pack_p<C>(pa, s);
    rescale_output<C>(o, scale.alpha);
    accumulate(pa, scale.sfa, ring.index);
    release_stage();
  }

  // The item's KV blocks, last to first. Loads wait in the ring in the same order.
  __device__ __forceinline__ void attend(const WorkItem& item, const WarpKeys& keys, int t) {
    const AttentionParams& a = p.attention;
    const bool capped = a.logits_soft_cap > 0.0f;
    const float lambda = capped ? kLog2e : a.sm_scale_log2;
    const auto first_key = [&](int32_t block) { return item.kv_begin + block * C::kKvBlock; };
    const auto inside = [&](int32_t block, const KeyRange& range) {
      return first_key(block) >= range.begin && first_key(block) + C::kKvBlock <= range.end;
    };
    const auto plain = [&](int32_t block) { return !capped && inside(block, keys.every); };
    int32_t block = ceil_div(max(item.kv_end - item.kv_begin, 0), C::kKvBlock) - 1;
    for (; block >= 0; --block) {
      const int32_t first = first_key(block);
      wait_stage(ring);
      if (first >= keys.some.end || first + C::kKvBlock <= keys.some.begin) {
        release_stage();
        continue;
      }
      float s[C::kScoreTiles][4];
      scores(s, ring.index);
      if (plain(block)) {
        // One block further ahead with the MMAs: they fill the tensor pipe during the softmax.
        for (; block > 0 && plain(block - 1); --block) {
          RingState<C::kStages> next = ring;
          next.advance();
          wait_stage(next);
          float ahead[C::kScoreTiles][4];
          scores(ahead, next.index);
          finish_block(s, lambda, t);
#pragma unroll
          for (int j = 0; j < C::kScoreTiles; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[j][i] = ahead[j][i];
          }
        }
      } else {
        if (capped) cap_scores<C>(s, a.logits_soft_cap, a.soft_cap_ratio);
        if (!inside(block, keys.every)) mask_scores<C>(s, keys.rows, first, t);
      }
      finish_block(s, lambda, t);
    }
  }

  __device__ __forceinline__ void process_item(const WorkItem& item) {
    const int g = lane >> 2, t = lane & 3;
    const TileRows tile(p, item);
    const int first_row = C::kRowsPerWarp * warp;
    const TileRow rows[2] = {tile.row(first_row + g, kv_head),
                             tile.row(first_row + g + 8, kv_head)};
    load_query<C>(q, p.attention, rows, t);
    state.reset();
#pragma unroll
    for (int j = 0; j < C::kOutTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[j][i] = 0.0f;
    }
    attend(item, warp_keys(tile, rows, first_row, C::kRowsPerWarp), t);
    if (first_row < tile.packing.rows) store_rows<C>(p, item, rows, o, state, t);
  }

  __device__ __forceinline__ void run() {
    const PlanView& plan = p.attention.plan;
    const int32_t end = __ldg(plan.worker_indptr + blockIdx.x + 1);
    for (int32_t i = __ldg(plan.worker_indptr + blockIdx.x); i < end; ++i) {
      const WorkItem item = load_item(plan.items, i);
      if (item.request >= 0) process_item(item);
    }
  }
};

#endif  // __CUDACC__

}  // namespace mpfa::sm120
