// SPDX-License-Identifier: Apache-2.0
// tvm-ffi binding of the mxfp8 writer. Shapes as in docs/formats.md; mpfa/backends/cuda.py calls
// it.
#include "mpfa/quant/mxfp8.cuh"
#include "quant_args.h"

namespace {

using namespace mpfa::bind;
using namespace mpfa::quant;

constexpr int kScaleBlock = 32;

void launch(const Call& call, Mxfp8Params& p, bool bf16, bool has_kv, int64_t v_rows, bool pdl) {
  const int64_t ctas = plan_mxfp8(p, has_kv, v_rows);
  if (ctas == 0) return;
  call.launch(bf16 ? quant_mxfp8<Bf16> : quant_mxfp8<Fp16>, linear_grid("tokens x heads", ctas),
              kThreads, p, pdl);
}

void set_query(const Call& call, Mxfp8Params& p, const TensorView& q, const OptionalTensor& out,
               const OptionalTensor& scale, int64_t dim) {
  const int64_t tokens = p.map.num_tokens, heads = q.size(1);
  p.num_qo_heads = static_cast<int32_t>(heads);
  p.q = token_view(call, "q", q, tokens, heads, dim);
  if (!out.has_value() || !scale.has_value()) {
    TVM_FFI_THROW(ValueError) << "q_out: q_out and q_scale are required with q, got None";
  }
  p.q_out = dense_output<uint8_t>(call, "q_out", out.value(), {tokens, heads, dim});
  p.q_scale =
      dense_output<uint8_t>(call, "q_scale", scale.value(), {tokens, heads, dim / kScaleBlock});
  p.head_blocks = p.kv_blocks + p.num_qo_heads;
}

void set_inputs(const Call& call, Mxfp8Params& p, const TensorView& k, const TensorView& v) {
  p.map.num_tokens = token_count("k", k);
  p.block_shift = block_shift_of(k.size(2));
  p.num_kv_heads = p.kv_blocks = p.head_blocks = static_cast<int32_t>(k.size(1));
  p.k = token_view(call, "k", k, p.map.num_tokens, k.size(1), k.size(2));
  p.v = token_view(call, "v", v, p.map.num_tokens, k.size(1), k.size(2));
  require(v.dtype().code == k.dtype().code, "v", v, "of the dtype of k");
}

void append(const TensorView& k, const TensorView& v, const OptionalTensor& q,
            const TensorView& slot_mapping, const TensorView& k_pages, const TensorView& k_scale,
            const TensorView& v_pages, const TensorView& v_scale, const TensorView& v_tail,
            const OptionalTensor& q_out, const OptionalTensor& q_scale, bool pdl) {
  const Call call(k);
  Mxfp8Params p;
  set_inputs(call, p, k, v);
  const int64_t heads = k.size(1), dim = k.size(2);
  require(v_pages.ndim() == 4, "v_pages", v_pages, "of shape [P, Hkv, page_size, D]");
  const int64_t pages = v_pages.size(0), page_size = v_pages.size(2);
  require_value(page_size % kVBlock == 0, "page_size", page_size, "32, 64 or 128");
  set_slots(call, slot_mapping, pages, page_size, &p.map);
  for (const auto& [name, t] : {std::pair<const char*, const TensorView*>{"k_pages", &k_pages},
                                {"k_scale", &k_scale},
                                {"v_pages", &v_pages},
                                {"v_scale", &v_scale}}) {
    check_bytes(name, *t);
  }
  require(is_bf16(v_tail), "v_tail", v_tail, "bfloat16");
  p.k_out = page_view(call, "k_pages", k_pages, pages, heads, page_size, dim, 16);
  p.k_scale = page_view(call, "k_scale", k_scale, pages, heads, page_size, dim / kScaleBlock, 1);
  p.v_out = page_view(call, "v_pages", v_pages, pages, heads, page_size, dim, 8);
  p.v_scale = page_view(call, "v_scale", v_scale, pages, heads, page_size / kVBlock, dim, 8);
  p.v_tail = page_view(call, "v_tail", v_tail, pages, heads, kVBlock, dim, 16);
  if (q.has_value()) {
    require(q.value().dtype().code == k.dtype().code, "q", q.value(), "of the dtype of k");
    set_query(call, p, q.value(), q_out, q_scale, dim);
  }
  launch(call, p, is_bf16(k), true, 0, pdl);
}

void quantize_kv(const TensorView& k, const TensorView& v, const TensorView& indptr,
                 const TensorView& v_row_starts, const TensorView& k_out, const TensorView& k_scale,
                 const TensorView& v_out, const TensorView& v_scale, bool pdl) {
  const Call call(k);
  Mxfp8Params p;
  set_inputs(call, p, k, v);
  const int64_t tokens = p.map.num_tokens, heads = k.size(1), dim = k.size(2);
  p.map.num_slots = tokens;
  require(indptr.ndim() == 1 && indptr.size(0) >= 1, "indptr", indptr, "of shape [B+1]");
  p.num_requests = static_cast<int32_t>(indptr.size(0) - 1);
  p.v_indptr = int32_view(call, "indptr", indptr, indptr.size(0));
  p.v_row_starts = int32_view(call, "v_row_starts", v_row_starts, indptr.size(0));
  check_bytes("k_out", k_out);
  check_bytes("k_scale", k_scale);
  check_bytes("v_out", v_out);
  check_bytes("v_scale", v_scale);
  p.k_out = ragged_view(call, "k_out", k_out, tokens, heads, dim, 16);
  p.k_scale = ragged_view(call, "k_scale", k_scale, tokens, heads, dim / kScaleBlock, 1);
  p.v_out = ragged_view(call, "v_out", v_out, tokens, heads, dim, 8);
  p.v_scale = ragged_view(call, "v_scale", v_scale, -1, heads, dim, 8);
  launch(call, p, is_bf16(k), true, v_scale.size(0), pdl);
}

void quantize_query(const TensorView& q, const TensorView& q_out, const TensorView& q_scale,
                    bool pdl) {
  const Call call(q);
  Mxfp8Params p;
  p.map.num_tokens = token_count("q", q);
  p.block_shift = block_shift_of(q.size(2));
  set_query(call, p, q, q_out, q_scale, q.size(2));
  launch(call, p, is_bf16(q), false, 0, pdl);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(append, append);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_kv, quantize_kv);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_query, quantize_query);
