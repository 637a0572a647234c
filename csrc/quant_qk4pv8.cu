// SPDX-License-Identifier: Apache-2.0
// tvm-ffi binding of the qk4pv8 writer. Shapes as in docs/formats.md; mpfa/backends/cuda.py calls
// it.
#include "mpfa/quant/qk4pv8.cuh"
#include "quant_args.h"

namespace {

using namespace mpfa::bind;
using namespace mpfa::quant;

constexpr int kDim = MPFA_HEAD_DIM;  // the module's head dimension
using Kernel = void (*)(const Qk4pv8Params);

template <class In, bool kMean, bool kFourOverSix>
Kernel kernel_of(const Qk4pv8Params& p) {
  // Unaligned views are rare: one kernel with and without outlier channels.
  if (!p.vector) return quant_qk4pv8<In, kDim, kMean, true, kFourOverSix, false>;
  return p.channels > 0 ? quant_qk4pv8<In, kDim, kMean, true, kFourOverSix, true>
                        : quant_qk4pv8<In, kDim, kMean, false, kFourOverSix, true>;
}

template <class In>
Kernel kernel_of(const Qk4pv8Params& p, bool four_over_six) {
  if (p.has_mean)
    return four_over_six ? kernel_of<In, true, true>(p) : kernel_of<In, true, false>(p);
  return four_over_six ? kernel_of<In, false, true>(p) : kernel_of<In, false, false>(p);
}

void launch(const Call& call, Qk4pv8Params& p, bool bf16, bool four_over_six, bool pdl) {
  if (p.map.num_tokens == 0) return;
  p.vector = (p.kv_blocks == 0 || (p.k.vector && p.v.vector && p.k_out.vector && p.v_out.vector)) &&
             (p.head_blocks == p.kv_blocks || p.q.vector);
  const Qk4pv8Launch plan = plan_qk4pv8(p, kDim, four_over_six);
  const Kernel kernel =
      bf16 ? kernel_of<Bf16>(p, four_over_six) : kernel_of<Fp16>(p, four_over_six);
  call.launch(kernel, dim3(plan.heads, plan.tiles), kRowThreads, p, pdl, plan.shared_bytes);
}

int64_t check_dim(const TensorView& t) {
  require_value(t.size(2) == kDim, "head_dim", t.size(2), std::to_string(kDim));
  return kDim;
}

void set_heads(Qk4pv8Params& p, int64_t num_qo_heads, int64_t num_kv_heads, bool has_kv,
               bool has_q) {
  require_value(num_kv_heads > 0 && num_qo_heads % num_kv_heads == 0, "num_qo_heads", num_qo_heads,
                "a multiple of the " + std::to_string(num_kv_heads) + " KV heads");
  p.num_kv_heads = static_cast<int32_t>(num_kv_heads);
  p.group_size = static_cast<int32_t>(num_qo_heads / num_kv_heads);
  p.kv_blocks = has_kv ? p.num_kv_heads : 0;
  p.head_blocks = p.kv_blocks + (has_q ? static_cast<int32_t>(num_qo_heads) : 0);
}

void set_stats(const Call& call, Qk4pv8Params& p, const OptionalTensor& q_mean,
               const OptionalTensor& k_mean, const OptionalTensor& channel_index,
               const OptionalTensor& rows, const OptionalTensor& indptr, int64_t dim) {
  const int64_t q_heads = static_cast<int64_t>(p.num_kv_heads) * p.group_size;
  p.has_mean = k_mean.has_value();
  if (p.has_mean) {
    if (!q_mean.has_value()) {
      TVM_FFI_THROW(ValueError) << "q_mean: must be given together with k_mean, got None";
    }
    int32_t q_rows = 0;
    p.k_mean = mean_view(call, "k_mean", k_mean.value(), p.num_kv_heads, dim, &p.map.num_rows);
    p.q_mean = mean_view(call, "q_mean", q_mean.value(), q_heads, dim, &q_rows);
    require_value(q_rows == p.map.num_rows, "q_mean", q_rows, "of as many rows as k_mean");
    // why: skipped tokens read row 0.
    require(p.map.num_rows > 0 || p.map.num_tokens == 0, "k_mean", k_mean.value(),
            "of at least one row (request) when there are tokens");
    p.per_request = k_mean.value().ndim() == 3;
    if (p.per_request) {
      if (rows.has_value()) {
        p.map.rows = int32_view(call, "batch_indices", rows.value(), p.map.num_tokens);
      } else if (indptr.has_value()) {
        p.map.indptr = int32_view(call, "indptr", indptr.value(), int64_t{p.map.num_rows} + 1);
      } else {
        TVM_FFI_THROW(ValueError)
            << "batch_indices: required with per-request statistics, got None";
      }
    }
  }
  if (channel_index.has_value()) {
    const TensorView& index = channel_index.value();
    call.same_device("channel_index", index);
    check_shape("channel_index", index, {p.num_kv_heads, -1});
    require(is_dtype(index, kDLInt, 32), "channel_index", index, "int32");
    p.channels = static_cast<int32_t>(index.size(1));
    require_value(p.channels <= kCompSlots - (p.has_mean ? 1 : 0), "channels", p.channels,
                  "at most 16, or 15 with means");
    p.channel_index = static_cast<const int32_t*>(index.data_ptr());
    p.channel_stride = index.stride(0);
  }
}

void set_query(const Call& call, Qk4pv8Params& p, const TensorView& q, const OptionalTensor& out,
               const OptionalTensor& scale, const OptionalTensor& a_comp,
               const OptionalTensor& row_term, int64_t dim) {
  const int64_t tokens = p.map.num_tokens;
  const int64_t heads = static_cast<int64_t>(p.num_kv_heads) * p.group_size;
  p.q = token_view(call, "q", q, tokens, heads, dim);
  if (!out.has_value() || !scale.has_value()) {
    TVM_FFI_THROW(ValueError) << "q_out: q_out and q_scale are required with q, got None";
  }
  p.q_out = dense_output<uint8_t>(call, "q_out", out.value(), {tokens, heads, dim / 2});
  p.q_scale = dense_output<uint8_t>(call, "q_scale", scale.value(), {tokens, heads, dim / kBlock});
  if (p.has_mean || p.channels > 0) {
    if (!a_comp.has_value()) TVM_FFI_THROW(ValueError) << "a_comp: required, got None";
    p.a_comp = dense_output<uint16_t>(call, "a_comp", a_comp.value(), {tokens, heads, kCompSlots});
  }
  if (p.has_mean) {
    if (!row_term.has_value()) TVM_FFI_THROW(ValueError) << "row_term: required, got None";
    p.row_term = dense_output<float>(call, "row_term", row_term.value(), {tokens, heads});
  }
}

void append(const TensorView& k, const TensorView& v, const OptionalTensor& q,
            const TensorView& slot_mapping, const OptionalTensor& batch_indices,
            const OptionalTensor& q_mean, const OptionalTensor& k_mean,
            const OptionalTensor& channel_index, const TensorView& k_pages,
            const TensorView& k_scale, const TensorView& v_pages, const OptionalTensor& aux_delta,
            const OptionalTensor& aux_channels, const OptionalTensor& q_out,
            const OptionalTensor& q_scale, const OptionalTensor& a_comp,
            const OptionalTensor& row_term, int64_t num_qo_heads, bool four_over_six, bool pdl) {
  const Call call(k);
  Qk4pv8Params p;
  p.map.num_tokens = token_count("k", k);
  const int64_t heads = k.size(1), dim = check_dim(k);
  set_heads(p, num_qo_heads, heads, true, q.has_value());
  p.k = token_view(call, "k", k, p.map.num_tokens, heads, dim);
  p.v = token_view(call, "v", v, p.map.num_tokens, heads, dim);
  require(v.dtype().code == k.dtype().code, "v", v, "of the dtype of k");
  require(v_pages.ndim() == 4, "v_pages", v_pages, "of shape [P, Hkv, page_size, D]");
  const int64_t pages = v_pages.size(0), page_size = v_pages.size(2);
  set_slots(call, slot_mapping, pages, page_size, &p.map);
  set_stats(call, p, q_mean, k_mean, channel_index, batch_indices, {}, dim);
  p.scale_atoms = page_size == 128;
  check_bytes("k_pages", k_pages);
  check_bytes("k_scale", k_scale);
  check_bytes("v_pages", v_pages);
  p.k_out = page_view(call, "k_pages", k_pages, pages, heads, page_size, dim / 2, 8);
  p.k_scale = p.scale_atoms
                  ? page_view(call, "k_scale", k_scale, pages, heads, dim / 64, 512, 1)
                  : page_view(call, "k_scale", k_scale, pages, heads, page_size, dim / kBlock, 1);
  p.v_out = page_view(call, "v_pages", v_pages, pages, heads, page_size, dim, 16);
  if (p.has_mean) {
    if (!aux_delta.has_value()) TVM_FFI_THROW(ValueError) << "aux_delta: required, got None";
    const TensorView& t = aux_delta.value();
    require(is_bf16(t), "aux_delta", t, "bfloat16");
    call.same_device("aux_delta", t);
    check_shape("aux_delta", t, {pages, heads, p.group_size, page_size});
    p.delta = {bytes(t), short_stride("aux_delta", t, 0), short_stride("aux_delta", t, 1),
               sizeof(uint16_t), false};
    p.delta_group = short_stride("aux_delta", t, 2);
  }
  if (p.channels > 0) {
    if (!aux_channels.has_value()) TVM_FFI_THROW(ValueError) << "aux_channels: required, got None";
    require(is_bf16(aux_channels.value()), "aux_channels", aux_channels.value(), "bfloat16");
    p.outliers = page_view(call, "aux_channels", aux_channels.value(), pages, heads, page_size,
                           p.channels, 2);
  }
  if (q.has_value()) {
    require(q.value().dtype().code == k.dtype().code, "q", q.value(), "of the dtype of k");
    set_query(call, p, q.value(), q_out, q_scale, a_comp, row_term, dim);
  }
  launch(call, p, is_bf16(k), four_over_six, pdl);
}

void quantize_kv(const TensorView& k, const TensorView& v, const OptionalTensor& indptr,
                 const OptionalTensor& q_mean, const OptionalTensor& k_mean,
                 const OptionalTensor& channel_index, const TensorView& k_out,
                 const TensorView& k_scale, const TensorView& v_out,
                 const OptionalTensor& aux_delta, const OptionalTensor& aux_channels,
                 int64_t num_qo_heads, bool four_over_six, bool pdl) {
  const Call call(k);
  Qk4pv8Params p;
  const int64_t tokens = p.map.num_tokens = token_count("k", k);
  const int64_t heads = k.size(1), dim = check_dim(k);
  p.map.num_slots = tokens;
  set_heads(p, num_qo_heads, heads, true, false);
  p.k = token_view(call, "k", k, tokens, heads, dim);
  p.v = token_view(call, "v", v, tokens, heads, dim);
  require(v.dtype().code == k.dtype().code, "v", v, "of the dtype of k");
  set_stats(call, p, q_mean, k_mean, channel_index, {}, indptr, dim);
  check_bytes("k_out", k_out);
  check_bytes("k_scale", k_scale);
  check_bytes("v_out", v_out);
  p.k_out = ragged_view(call, "k_out", k_out, tokens, heads, dim / 2, 8);
  p.k_scale = ragged_view(call, "k_scale", k_scale, tokens, heads, dim / kBlock, 1);
  p.v_out = ragged_view(call, "v_out", v_out, tokens, heads, dim, 16);
  if (p.has_mean) {
    if (!aux_delta.has_value()) TVM_FFI_THROW(ValueError) << "aux_delta: required, got None";
    const TensorView& t = aux_delta.value();
    require(is_bf16(t), "aux_delta", t, "bfloat16");
    call.same_device("aux_delta", t);
    check_shape("aux_delta", t, {num_qo_heads, tokens});
    p.delta_group = short_stride("aux_delta", t, 0);
    const int64_t head = int64_t{p.delta_group} * p.group_size;
    require_value(head < (int64_t{1} << 32), "aux_delta", head,
                  "laid out with less than 2^32 bytes between KV heads");
    p.delta = {bytes(t), 0, static_cast<uint32_t>(head), sizeof(uint16_t), false};
  }
  if (p.channels > 0) {
    if (!aux_channels.has_value()) TVM_FFI_THROW(ValueError) << "aux_channels: required, got None";
    require(is_bf16(aux_channels.value()), "aux_channels", aux_channels.value(), "bfloat16");
    p.outliers =
        ragged_view(call, "aux_channels", aux_channels.value(), tokens, heads, p.channels, 2);
  }
  launch(call, p, is_bf16(k), four_over_six, pdl);
}

void quantize_query(const TensorView& q, const OptionalTensor& batch_indices,
                    const OptionalTensor& indptr, const OptionalTensor& q_mean,
                    const OptionalTensor& k_mean, const OptionalTensor& channel_index,
                    const TensorView& q_out, const TensorView& q_scale,
                    const OptionalTensor& a_comp, const OptionalTensor& row_term,
                    int64_t num_kv_heads, bool four_over_six, bool pdl) {
  const Call call(q);
  Qk4pv8Params p;
  p.map.num_tokens = token_count("q", q);
  const int64_t dim = check_dim(q);
  set_heads(p, q.size(1), num_kv_heads, false, true);
  set_stats(call, p, q_mean, k_mean, channel_index, batch_indices, indptr, dim);
  set_query(call, p, q, q_out, q_scale, a_comp, row_term, dim);
  launch(call, p, is_bf16(q), four_over_six, pdl);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(append, append);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_kv, quantize_kv);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_query, quantize_query);
