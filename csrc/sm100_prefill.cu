// SPDX-License-Identifier: Apache-2.0
// tvm-ffi binding of the SM100 prefill kernel, one head dimension per module.
#include "attention_args.h"
#include "mpfa/sm100/prefill/kernel.cuh"
#include "tensor_map.h"

#ifndef MPFA_HEAD_DIM
#error "MPFA_HEAD_DIM: head dimension of the module, 64 or 128"
#endif

namespace {

using namespace mpfa;
using namespace mpfa::bind;

// cp.async reads 16 bytes of K, V and Q rows, 4 bytes of scales; bulk stores write whole rows.
void check_alignment(const AttentionTensors& t, const Attention& a) {
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

void launch(const AttentionTensors& t) {
  const Attention a = make_attention(t, KvFormat::kQk4pv8, MPFA_HEAD_DIM);
  check_alignment(t, a);
  const int64_t box = a.paged ? a.params.page_size : 128;
  const sm100::prefill::PrefillParams params = {kv_map("k", a.params.k, a, MPFA_HEAD_DIM / 2, box),
                                                kv_map("v", a.params.v, a, MPFA_HEAD_DIM, box),
                                                a.params};
  const auto kernel = sm100::prefill::mpfa_sm100_prefill<MPFA_HEAD_DIM>;
  constexpr int kShared = sm100::prefill::dynamic_shared_bytes<MPFA_HEAD_DIM>;
  allow_shared_memory(kernel, kShared);
  const dim3 grid(static_cast<unsigned>(a.params.num_workers),
                  static_cast<unsigned>(a.params.num_kv_heads));
  a.call.launch(kernel, grid, sm100::prefill::kThreads, params, false, kShared);
}

}  // namespace

MPFA_EXPORT_ATTENTION(launch);
