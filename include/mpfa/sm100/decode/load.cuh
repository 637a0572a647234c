// SPDX-License-Identifier: Apache-2.0
// Load warp: keys with their scales, Delta and channels through one ring, values through another.
#pragma once

#include "mpfa/ptx/elect.cuh"
#include "mpfa/ptx/fence.cuh"
#include "mpfa/ptx/tma.cuh"
#include "mpfa/sm100/decode/context.cuh"

namespace mpfa::sm100::decode {

constexpr uint32_t kFullWarp = 0xffffffffu;

// Scales of a page with fewer than 128 tokens lie linearly, D/16 bytes a token; an atom holds, for
// lane l, the 4-byte groups of rows l, l+32, l+64 and l+96 (mpfa/reference/layout.py).
template <int D>
struct ScaleRows {
  uint32_t word[Config<D>::kAtoms][4];

  __device__ void load(const Context<D>& c, int32_t my_page, int32_t lane) {
    const KvOperand& s = c.p.a.k_scale;
    const int32_t page_size = c.p.a.page_size;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int32_t row = lane + 32 * q;
      const int32_t page = __shfl_sync(kFullWarp, my_page, row / page_size);
      const uint8_t* from = s.at(page, c.kv_head, row % page_size);
#pragma unroll
      for (int a = 0; a < Config<D>::kAtoms; ++a) {
        word[a][q] = __ldg(reinterpret_cast<const uint32_t*>(from) + a);
      }
    }
  }
  __device__ void store(uint32_t atoms, int32_t lane) const {
#pragma unroll
    for (int a = 0; a < Config<D>::kAtoms; ++a) {
      ptx::st_shared_v4(atoms + a * Config<D>::kAtomBytes + lane * 16,
                        make_uint4(word[a][0], word[a][1], word[a][2], word[a][3]));
    }
  }
};

template <int D>
__device__ __forceinline__ void load_keys(const Context<D>& c, const WorkItem& item,
                                          int32_t my_page, const RowPacking& packing,
                                          RingState<Config<D>::kStages>& ring, int32_t lane) {
  using C = Config<D>;
  using S = Smem<D>;
  const AttentionParams& a = c.p.a;
  const int32_t page_size = a.page_size, pieces = kBlock / page_size;
  const bool atoms_stored = page_size == kBlock;
  const int32_t delta_heads = c.p.delta_heads > 0 ? packing.heads : 0;
  const uint32_t full = c.bar(kKeysFull + ring.index);
  const uint32_t scales = c.smem + S::kScaleK + ring.index * C::kBytesScale;

  ScaleRows<D> rows;
  if (!atoms_stored) rows.load(c, my_page, lane);
  ptx::mbarrier_wait(c.bar(Barriers<D>::kKeysEmpty + ring.index), ring.phase ^ 1);
  if (!atoms_stored) {
    rows.store(scales, lane);
    ptx::fence_proxy_async_shared();
  }
  __syncwarp();
  if (lane == 0) {
    ptx::mbarrier_arrive_expect_tx(full, C::kBytesK + (atoms_stored ? C::kBytesScale : 0) +
                                             S::delta_bytes(delta_heads) + kBlock * 2 * a.channels);
  }
  __syncwarp();
  if (lane < pieces) {
    const uint32_t first = lane * page_size;
    ptx::tensor_load_4d(c.smem + S::kK + ring.index * C::kBytesK + first * C::kRowQK, &c.p.map_k,
                        full, 0, 0, c.kv_head, my_page);
    if (a.channels > 0) {
      ptx::bulk_load(c.smem + c.channels(ring.index) + first * a.channels * 2,
                     a.aux_channels.at(my_page, c.kv_head, 0), page_size * a.channels * 2, full);
    }
  }
  if (atoms_stored && lane < C::kAtoms) {
    ptx::bulk_load(scales + lane * C::kAtomBytes, a.k_scale.at(my_page, c.kv_head, lane),
                   C::kAtomBytes, full);
  }
  const int32_t copies = delta_heads * pieces;
  for (int32_t first = 0; first < copies; first += 32) {
    const int32_t i = first + lane, piece = i % pieces, head = i / pieces;
    const int32_t page = __shfl_sync(kFullWarp, my_page, piece);
    if (i < copies) {
      ptx::bulk_load(c.smem + c.delta(ring.index) + (head * kBlock + piece * page_size) * 2,
                     a.aux_delta.at(page, c.kv_head, packing.first_head + head), page_size * 2,
                     full);
    }
  }
  __syncwarp();
  ring.advance();
}

template <int D>
__device__ __forceinline__ void load_values(const Context<D>& c, int32_t my_page,
                                            RingState<Config<D>::kStages>& ring, int32_t lane) {
  using C = Config<D>;
  const int32_t page_size = c.p.a.page_size, pieces = kBlock / page_size;
  const uint32_t full = c.bar(Barriers<D>::kValuesFull + ring.index);
  ptx::mbarrier_wait(c.bar(Barriers<D>::kValuesEmpty + ring.index), ring.phase ^ 1);
  if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, C::kBytesV);
  __syncwarp();
  if (lane < pieces) {
    ptx::tensor_load_4d(
        c.smem + Smem<D>::kV + ring.index * C::kBytesV + lane * page_size * C::kRowV, &c.p.map_v,
        full, 0, 0, c.kv_head, my_page);
  }
  __syncwarp();
  ring.advance();
}

template <int D>
__device__ __forceinline__ void load_loop(const Context<D>& c) {
  const AttentionParams& a = c.p.a;
  const int32_t lane = threadIdx.x & 31;
  const int32_t heads_per_group = __ldg(&a.plan.header->heads_per_group);
  RingState<Config<D>::kStages> keys, values;
  for_each_item(a.plan, [&](const WorkItem& item) {
    const RowPacking packing = row_packing(item, heads_per_group, a.group_size);
    const int32_t page_begin = __ldg(a.plan.kv_indptr + item.request);
    const int32_t page_last = __ldg(a.plan.kv_indptr + item.request + 1) - 1;
    const int32_t pieces = kBlock / a.page_size;
    for (int32_t b = num_blocks(item) - 1; b >= 0; --b) {
      // why: a block that the request does not fill takes its last page again, so that every block
      // lands the same bytes; the surplus keys are masked.
      // Lanes beyond the pieces hold the first page.
      const int32_t page =
          page_begin + item.kv_begin / a.page_size + b * pieces + (lane < pieces ? lane : 0);
      const int32_t my_page = __ldg(a.plan.kv_indices + min(page, page_last));
      load_keys<D>(c, item, my_page, packing, keys, lane);
      load_values<D>(c, my_page, values, lane);
    }
  });
}

}  // namespace mpfa::sm100::decode
