// SPDX-License-Identifier: Apache-2.0
// SM90 split-KV decode over a paged qk4pv8 cache. Two warps stream blocks of 128 keys into a ring;
// the others take slices of 16 keys, widen codes to fp16 in registers and keep a softmax state
// each; they meet only at the end of a work item. docs/kernels/sm90_decode.md.
#pragma once

#include "mpfa/ptx/elect.cuh"
#include "mpfa/ptx/opaque.cuh"
#include "mpfa/ptx/pdl.cuh"
#include "mpfa/ptx/prefetch.cuh"
#include "mpfa/ptx/smem.cuh"
#include "mpfa/sm90/decode/epilogue.cuh"
#include "mpfa/sm90/decode/load.cuh"

namespace mpfa::sm90::decode {

#if defined(__CUDACC__)

template <class C>
struct Consumer {
  using S = Smem<C>;
  using B = Barriers<C>;

  const Params& p;
  uint8_t* base;
  const uint32_t smem;
  const int32_t kv_head, warp;

  __device__ Tables<C>& tables() const { return *reinterpret_cast<Tables<C>*>(base + S::kTables); }

  // All but Delta's, which depend on the pass.
  __device__ LaneOffsets<C> lane_offsets(int32_t g, int32_t t) const {
    const int32_t row = warp * kSlice + g, first = t * C::kLaneBlocks;
    LaneOffsets<C> at;
    at.k = C::template swizzled<C::kRowK>(row, t * (C::kRowK / 4));
    at.v = C::template swizzled<C::kRowV>(warp * kSlice + 2 * t, g * C::kLaneDims);
    at.scale = p.scale_layout == ScaleLayout::kAtoms
                   ? first / 4 * 512 + row % 32 * 16 + row / 32 * 4 + first % 4
                   : row * C::kRowScale + first;
    // why: ptxas would compute them again in every block.
    at.k = ptx::opaque(at.k), at.v = ptx::opaque(at.v), at.scale = ptx::opaque(at.scale);
    return at;
  }

  __device__ void set_delta_rows(const Tile& tile, int32_t g, int32_t t, LaneOffsets<C>& at) const {
    const int32_t first_head = tile.template first_delta_head<C>();
#pragma unroll
    for (int n = 0; n < C::kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int32_t row = min(tile.pass * C::kColumns + 8 * n + 2 * t + c, tile.packing.rows - 1);
        at.delta[n][c] = ((row % tile.packing.heads - first_head) * kBlock + warp * kSlice + g) * 2;
      }
    }
  }

  template <Path kPath>
  __device__ void run_block(const Step<C, kPath>& step, const Tile& tile, bool edge,
                            int32_t block_begin, uint32_t stage, State<C>& state) const {
    constexpr uint32_t kStep = C::kWarps * kSlice;
    const uint32_t side = S::kSide + stage * p.side_bytes;
    const uint32_t scale_step =
        p.scale_layout == ScaleLayout::kAtoms ? kStep / 32 * 4 : kStep * C::kRowScale;
#pragma unroll 1
    for (uint32_t i = 0; i < kSlices / C::kWarps; ++i) {
      const int32_t row = warp * kSlice + i * kStep, first_key = block_begin + row;
      if (kPath == Path::kAny && edge &&
          (first_key + kSlice <= tile.outer.begin || first_key >= tile.outer.end)) {
        continue;
      }
      const Slice slice = {S::kK + stage * C::kBytesK + i * kStep * C::kRowK,
                           S::kV + stage * C::kBytesV + i * kStep * C::kRowV,
                           S::kScale + stage * C::kBytesScale + i * scale_step,
                           side + i * kStep * 2,
                           side + C::delta_bytes(p.delta_heads) + row * 2 * p.a.channels};
      step.run(slice, tile, edge, first_key, state);
    }
  }

  // The pass's query, when it is not the one that is there.
  __device__ void load_query(const Tile& tile, int32_t lane, Query<C>& q,
                             LaneOffsets<C>& at) const {
    uint8_t* fragments = base + S::kQuery;
    sync_consumers<C>();  // every warp has read the columns before
    for (int32_t column = warp; column < C::kColumns; column += C::kWarps) {
      load_column<C>(p, tile, kv_head, column, tables(), fragments);
    }
    sync_consumers<C>();
    q.load(reinterpret_cast<const uint2*>(fragments), tables(), lane);
    set_delta_rows(tile, lane / 4, lane % 4, at);
  }

  template <Path kPath>
  __device__ Step<C, kPath> step(const Query<C>& q, const LaneOffsets<C>& at, int32_t lane) const {
    return {p,        base,     q,       at, reinterpret_cast<const uint2*>(base + S::kQuery),
            tables(), lane / 4, lane % 4};
  }

  __device__ void run() {
    const int32_t lane = threadIdx.x % 32;
    // With more columns there are no registers for the versions of a step.
    const bool plain = C::kTiles == 1 && p.a.logits_soft_cap == 0.0f;
    Query<C> q;
    LaneOffsets<C> at = lane_offsets(lane / 4, lane % 4);
    const uint32_t barriers = smem + S::kBarriers;
    RingState<C::kStages> ring;
    RingState<kTileSlots> tiles;
    int64_t loaded = -1;  // which query rows q holds
    while (true) {
      ptx::mbarrier_wait(barriers + 8 * (B::kTileFull + tiles.index), tiles.phase);
      const Tile& tile = tables().tile[tiles.index];
      if (tile.item.request < 0) break;
      const int64_t rows =
          (static_cast<int64_t>(tile.first_token) << 32) + (tile.item.head_group << 8) + tile.pass;
      if (rows != loaded) load_query(tile, lane, q, at);
      loaded = rows;
      State<C> state;
      state.clear();
      const int32_t end = tile.end_block();
      // Blocks of which every column sees every key.
      const int32_t whole_begin = (tile.inner.begin + kBlock - 1) / kBlock;
      const int32_t whole_end = tile.inner.end / kBlock;
      for (int32_t b = tile.first_block(); b < end; ++b) {
        ptx::mbarrier_wait(barriers + 8 * (B::kFull + ring.index), ring.phase);
        const bool edge = b < whole_begin || b >= whole_end;
        const auto run = [&](const auto& step, bool hidden) {
          run_block(step, tile, hidden, b * kBlock, ring.index, state);
        };
        if (C::kTiles > 1 || !plain || edge) {
          run(step<Path::kAny>(q, at, lane), edge);
        } else if (p.a.channels > 0) {
          run(step<Path::kPlainChannels>(q, at, lane), false);
        } else if (p.delta_heads > 0) {
          run(step<Path::kPlainDelta>(q, at, lane), false);
        } else {
          run(step<Path::kPlain>(q, at, lane), false);
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(barriers + 8 * (B::kEmpty + ring.index));
        ring.advance();
      }
      const int32_t columns = min(tile.packing.rows - tile.pass * C::kColumns, C::kColumns);
      float* merge = reinterpret_cast<float*>(base + S::kMerge);
      Epilogue<C>{p,    tile,     tables(), tables().statistics[tiles.index % 2], merge, columns,
                  warp, lane / 4, lane % 4}
          .run(state);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barriers + 8 * (B::kTileEmpty + tiles.index));
      tiles.advance();
    }
  }
};

// The plan's tables into the L2, by all threads of the grid together. why: the load warps reach the
// first byte of K through four dependent loads, each of which would go to memory.
__device__ __forceinline__ void prefetch_plan(const Params& p) {
  constexpr int32_t kLine = 128;
  const int32_t threads = gridDim.x * gridDim.y * blockDim.x;
  const int32_t first = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kPlanRanges; ++i) {
    for (int32_t at = first; at * kLine < p.plan[i].bytes; at += threads) {
      ptx::prefetch_l2(static_cast<const uint8_t*>(p.plan[i].data) + at * kLine);
    }
  }
}

template <int D, int Tiles>
__global__ void __launch_bounds__(Config<D, Tiles>::kThreads, Config<D, Tiles>::kCtasPerSm)
    sm90_decode(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  using C = Config<D, Tiles>;
  using S = Smem<C>;
  using B = Barriers<C>;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  const uint32_t smem = ptx::smem_address(dynamic);
  const int32_t warp = ptx::uniform_warp_index(), kv_head = blockIdx.y;
  if (smem % 1024 != 0) __trap();  // the swizzle patterns would be off
  if (warp == C::kWarps && ptx::elect_one()) {
    for (uint32_t i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(smem + S::kBarriers + 8 * (B::kFull + i), B::kFullArrivals);
      ptx::mbarrier_init(smem + S::kBarriers + 8 * (B::kEmpty + i), C::kWarps);
    }
    for (uint32_t i = 0; i < kTileSlots; ++i) {
      ptx::mbarrier_init(smem + S::kBarriers + 8 * (B::kTileFull + i), 1);
      ptx::mbarrier_init(smem + S::kBarriers + 8 * (B::kTileEmpty + i), C::kWarps);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&p.map_k);
    ptx::prefetch_tensor_map(&p.map_v);
  }
  __syncthreads();
  ptx::grid_dependency_wait();
  // The next grid waits for the end of this one by itself; this lets its blocks be there.
  ptx::grid_launch_dependents();
  if (warp < C::kWarps) {
    prefetch_plan(p);
    Consumer<C>{p, dynamic, smem, kv_head, warp}.run();
    return;
  }
  const int32_t lane = threadIdx.x % 32;
  Loader<C> loader{p, smem, kv_head, lane, {}};
  if (warp == C::kWarps) {
    for_each_pass<C>(p.a, [&](const Tile& tile) { load_keys<C>(loader, tile); });
    return;
  }
  Tables<C>& tables = *reinterpret_cast<Tables<C>*>(dynamic + S::kTables);
  TileWriter<C> writer{tables, smem + S::kBarriers, {}};
  for_each_pass<C>(p.a, [&](const Tile& tile) {
    writer.write(tile, lane);
    prefetch_query<C>(p, tile, kv_head);
    load_values<C>(loader, tile);
  });
  Tile none = {};
  none.item.request = -1;
  writer.write(none, lane);
#endif
}

#endif  // __CUDACC__

}  // namespace mpfa::sm90::decode
