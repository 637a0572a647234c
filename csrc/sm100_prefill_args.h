// SPDX-License-Identifier: Apache-2.0
// Checks and launch that all builds of the SM100 prefill kernel share.
#pragma once

#include "attention_args.h"
#include "mpfa/sm100/prefill/kernel.cuh"
#include "tensor_map.h"

namespace mpfa::bind {

// cp.async reads 16 bytes of K, V and Q rows, 4 bytes of scales; bulk stores write whole rows.
inline void check_alignment(const AttentionTensors& t, const Attention& a) {
  require_aligned("q", t.q, 16);
  require_aligned("q_scale", t.q_scale, 4);
  require_aligned("k", t.k, 16);
  require_aligned("k_scale", t.k_scale, a.params.page_size == 128 ? 16 : 4);
  require_aligned("v", t.v, 16);
  require_aligned("out", t.out, 16);
  require_aligned("partial_o", t.partial_o, 16);
  const int64_t tokens = a.paged ? a.num_pages * a.params.page_size : a.kv_tokens;
  require_value(tokens < (int64_t{1} << 31), "tokens of k and v", tokens, "below 2^31");
}

// Behind check_alignment.
template <int kHeadDim, sm100::prefill::Pv kPv>
void launch_prefill(const Attention& a, const TensorMap& v_map) {
  const int64_t box = a.paged ? a.params.page_size : 128;
  const sm100::prefill::PrefillParams params = {kv_map("k", a.params.k, a, kHeadDim / 2, box),
                                                v_map, a.params};
  const auto kernel = sm100::prefill::mpfa_sm100_prefill<kHeadDim, kPv>;
  constexpr int kShared = sm100::prefill::dynamic_shared_bytes<kHeadDim, kPv>;
  allow_shared_memory(kernel, kShared);
  const dim3 grid(static_cast<unsigned>(a.params.num_workers),
                  static_cast<unsigned>(a.params.num_kv_heads));
  a.call.launch(kernel, grid, sm100::prefill::kThreads, params, false, kShared);
}

}  // namespace mpfa::bind
