// SPDX-License-Identifier: Apache-2.0
// tvm-ffi modules of the SM100 prefill kernel with the other precision assignments of the paper's
// Figure 3, for comparison; head_dim 128. The arguments are those of all attention modules, but for
//   -DMPFA_SM100_PV=16  v uint8 [..., 2 D], the bytes of bf16; any page size, or ragged
//   -DMPFA_SM100_PV=4   v uint8 [pages, KV heads, D, 64], V^T of 128 tokens as e2m1, the earlier
//                       token in the low bits; v_scale uint8 [pages, KV heads, 2, 512], e4m3 per
//                       channel and 16 tokens: atom token/64, byte (d%32)*16 + (d/32)*4 +
//                       (token%64)/16, never NaN
#include <algorithm>
#include <vector>

#include "sm100_prefill_args.h"

namespace {

using namespace mpfa;
using namespace mpfa::bind;
using sm100::prefill::Pv;

constexpr int kHeadDim = 128;
#if MPFA_SM100_PV == 16
constexpr Pv kPv = Pv::kBf16;
constexpr int64_t kVRowBytes = 2 * kHeadDim;
#elif MPFA_SM100_PV == 4
constexpr Pv kPv = Pv::kNvfp4;
constexpr int64_t kVRowBytes = 64;
#else
#error "MPFA_SM100_PV: bits of P and V, 16 or 4"
#endif

// V with rows of head_dim bytes, as make_attention checks it: same address and strides.
struct ByteRows {
  std::vector<int64_t> shape, strides;
  DLTensor tensor;

  explicit ByteRows(const TensorView& v) {
    check_bytes("v", v);
    const int last = v.ndim() - 1;
    require(last >= 2 && v.size(last) == kVRowBytes, "v", v,
            "of rows of " + std::to_string(kVRowBytes) + " bytes");
    require(kPv == Pv::kBf16 || (last == 3 && v.size(2) == kHeadDim), "v", v,
            "of shape [pages, KV heads, 128, 64]");
    for (int i = 0; i <= last; ++i) {
      shape.push_back(i < last ? v.size(i) : kHeadDim);
      strides.push_back(v.stride(i));
    }
    tensor = {v.data_ptr(), v.device(), v.ndim(), v.dtype(), shape.data(), strides.data(), 0};
  }
};

void launch(const AttentionTensors& t) {
  ByteRows rows(t.v);
  const TensorView v(&rows.tensor);
  const OptionalTensor none;
  const AttentionTensors bytes = {t.q,
                                  t.q_scale,
                                  t.a_comp,
                                  t.row_term,
                                  t.k,
                                  t.k_scale,
                                  v,
                                  none,
                                  t.aux_delta,
                                  t.aux_channels,
                                  t.header,
                                  t.qo_indptr,
                                  t.kv_indptr,
                                  t.kv_len,
                                  t.kv_indices,
                                  t.items,
                                  t.worker_indptr,
                                  t.v_block_indptr,
                                  t.partial_o,
                                  t.partial_lse,
                                  t.out,
                                  t.lse,
                                  t.sinks,
                                  t.sm_scale,
                                  t.logits_soft_cap,
                                  t.window_left,
                                  t.causal,
                                  t.num_workers};
  Attention a = make_attention(bytes, KvFormat::kQk4pv8, kHeadDim);
  check_alignment(t, a);
  if (t.v_scale.has_value() != (kPv == Pv::kNvfp4)) {
    TVM_FFI_THROW(ValueError) << "v_scale: must be given with NVFP4 V only";
  }
  if (kPv == Pv::kNvfp4) {
    require_value(a.params.page_size == 128, "page_size", a.params.page_size, "128 with NVFP4 V");
    const TensorView& s = t.v_scale.value();
    check_bytes("v_scale", s);
    require_aligned("v_scale", s, 16);
    require(s.stride(2) == 512, "v_scale", s, "two atoms of 512 bytes next to each other");
    a.params.v_scale =
        kv_operand(a.call, "v_scale", s, true, a.num_pages, 2, a.params.num_kv_heads, 512);
  }
  constexpr int64_t kUnitRows = sm100::prefill::Config<kHeadDim, kPv>::kVRows;
  constexpr int64_t kPanelBytes = sm100::prefill::Config<kHeadDim, kPv>::kVPanelBytes;
  const int64_t box = a.paged ? std::min<int64_t>(a.params.page_size, kUnitRows) : kUnitRows;
  launch_prefill<kHeadDim, kPv>(a, kv_map("v", a.params.v, a, kVRowBytes, box, kPanelBytes));
}

}  // namespace

MPFA_EXPORT_ATTENTION(launch);
