// SPDX-License-Identifier: Apache-2.0
// What every role of the SM100 decode kernel sees.
#pragma once

#include "mpfa/ptx/mbarrier.cuh"
#include "mpfa/ptx/smem.cuh"
#include "mpfa/sm100/decode/config.cuh"

namespace mpfa::sm100::decode {

template <int D>
struct Context {
  using C = Config<D>;
  using S = Smem<D>;
  using B = Barriers<D>;

  const Params& p;
  uint8_t* base;  // dynamic shared memory, 1024-byte aligned
  uint32_t smem;  // its shared address
  uint32_t tmem;  // first Tensor Memory column
  int32_t kv_head;

  __device__ uint32_t bar(uint32_t index) const { return smem + S::kBarriers + 8 * index; }
  __device__ SoftmaxState& state() const {
    return *reinterpret_cast<SoftmaxState*>(base + S::kState);
  }
  // Offsets in shared memory.
  __device__ uint32_t delta(uint32_t stage) const {
    return S::kComp + S::comp_bytes(p.a.channels) + stage * S::delta_bytes(p.delta_heads);
  }
  __device__ uint32_t channels(uint32_t stage) const {
    return delta(C::kStages) + stage * S::channel_bytes(p.a.channels);
  }
};

// Steps of an item; blocks are walked from the last to the first.
__device__ __forceinline__ int32_t num_blocks(const WorkItem& item) {
  return (item.kv_end - item.kv_begin + kBlock - 1) / kBlock;
}

// Calls body(item) for each item of this worker that holds work.
template <class Body>
__device__ __forceinline__ void for_each_item(const PlanView& plan, Body&& body) {
  const int32_t end = __ldg(plan.worker_indptr + blockIdx.x + 1);
  for (int32_t i = __ldg(plan.worker_indptr + blockIdx.x); i < end; ++i) {
    const WorkItem item = load_item(plan.items, i);
    if (item.request >= 0) body(item);
  }
}

}  // namespace mpfa::sm100::decode
