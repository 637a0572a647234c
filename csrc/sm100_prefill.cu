// SPDX-License-Identifier: Apache-2.0
// tvm-ffi binding of the SM100 prefill kernel, one head dimension per module.
#include <iomanip>

#include "sm100_prefill_args.h"

#ifndef MPFA_HEAD_DIM
#error "MPFA_HEAD_DIM: head dimension of the module, 64 or 128"
#endif

namespace {

using namespace mpfa;
using namespace mpfa::bind;

// why: beyond this no useful score stays inside the range that the kernel's exponents have
// (docs/kernels/sm100_prefill.md, "Exponents"); under a soft cap sm_scale is no factor of them.
constexpr double kLargestScale = 1e3;

void launch(const AttentionTensors& t) {
  if (t.logits_soft_cap == 0.0 && t.sm_scale > kLargestScale) {
    TVM_FFI_THROW(ValueError) << "sm_scale: must be at most " << kLargestScale
                              << " in the SM100 prefill kernel, where rows whose |sm_scale q.k| "
                                 "reaches 1.16e7 are NaN; scale q instead; got "
                              << std::setprecision(17) << t.sm_scale;
  }
  const Attention a = make_attention(t, KvFormat::kQk4pv8, MPFA_HEAD_DIM);
  check_alignment(t, a);
  const int64_t box = a.paged ? a.params.page_size : 128;
  launch_prefill<MPFA_HEAD_DIM, sm100::prefill::Pv::kE4m3>(
      a, kv_map("v", a.params.v, a, MPFA_HEAD_DIM, box));
}

}  // namespace

MPFA_EXPORT_ATTENTION(launch);
