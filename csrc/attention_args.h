// SPDX-License-Identifier: Apache-2.0
// The one signature of all attention modules and its checks: tvm-ffi tensors in, AttentionParams
// out. mpfa/backends/launch.py is the caller; narrow types arrive as uint8 views, None = absent.
//
// A module writes `void launch(const AttentionTensors& t)`, calls make_attention(t, format), adds
// what its kernel needs and ends with MPFA_EXPORT_ATTENTION(launch).
#pragma once

#include <cmath>

#include "check.h"
#include "mpfa/core/attention.h"

namespace mpfa::bind {

struct AttentionTensors {
  const TensorView& q;
  const TensorView& q_scale;
  const OptionalTensor& a_comp;
  const OptionalTensor& row_term;
  const TensorView& k;
  const TensorView& k_scale;
  const TensorView& v;
  const OptionalTensor& v_scale;
  const OptionalTensor& aux_delta;
  const OptionalTensor& aux_channels;
  const TensorView& header;
  const TensorView& qo_indptr;
  const TensorView& kv_indptr;
  const TensorView& kv_len;
  const OptionalTensor& kv_indices;
  const TensorView& items;
  const TensorView& worker_indptr;
  const TensorView& v_block_indptr;
  const TensorView& partial_o;
  const TensorView& partial_lse;
  const TensorView& out;
  const TensorView& lse;
  const OptionalTensor& sinks;
  double sm_scale;
  double logits_soft_cap;
  int64_t window_left;
  bool causal;
  int64_t num_workers;
};

template <void (*kLaunch)(const AttentionTensors&)>
void run_attention(const TensorView& q, const TensorView& q_scale, const OptionalTensor& a_comp,
                   const OptionalTensor& row_term, const TensorView& k, const TensorView& k_scale,
                   const TensorView& v, const OptionalTensor& v_scale,
                   const OptionalTensor& aux_delta, const OptionalTensor& aux_channels,
                   const TensorView& header, const TensorView& qo_indptr,
                   const TensorView& kv_indptr, const TensorView& kv_len,
                   const OptionalTensor& kv_indices, const TensorView& items,
                   const TensorView& worker_indptr, const TensorView& v_block_indptr,
                   const TensorView& partial_o, const TensorView& partial_lse,
                   const TensorView& out, const TensorView& lse, const OptionalTensor& sinks,
                   double sm_scale, double logits_soft_cap, int64_t window_left, bool causal,
                   int64_t num_workers) {
  kLaunch({q,
           q_scale,
           a_comp,
           row_term,
           k,
           k_scale,
           v,
           v_scale,
           aux_delta,
           aux_channels,
           header,
           qo_indptr,
           kv_indptr,
           kv_len,
           kv_indices,
           items,
           worker_indptr,
           v_block_indptr,
           partial_o,
           partial_lse,
           out,
           lse,
           sinks,
           sm_scale,
           logits_soft_cap,
           window_left,
           causal,
           num_workers});
}

#define MPFA_EXPORT_ATTENTION(launch) \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, (mpfa::bind::run_attention<launch>))

enum class KvFormat { kMxfp8, kQk4pv8 };
// Whether q holds codes with scales, or bf16/fp16 values that the kernel itself centres and rounds.
enum class QueryForm { kCodes, kValues };

// Sizes of the tensors, for tensor maps and grids. The number of query tokens and pages *in use*
// is the plan's business and may be smaller.
struct Attention {
  Call call;
  AttentionParams params;
  bool paged = false;
  int64_t query_tokens = 0;  // rows of q, out and lse
  int64_t num_pages = 0;     // paged
  int64_t kv_tokens = 0;     // ragged: rows of k and v
  int64_t v_scale_rows = 0;  // ragged MXFP8
  int64_t partial_rows = 0;
};

inline TokenOperand token_operand(const Call& call, const char* name, const TensorView& t,
                                  int64_t tokens, int64_t heads, int64_t last) {
  call.same_device(name, t);
  check_bytes(name, t);
  check_shape(name, t, {tokens, heads, last});
  return {bytes(t), byte_stride(t, 0), byte_stride(t, 1)};
}

// Paged [pages, heads, rows, last], ragged [rows, heads, last].
inline KvOperand kv_operand(const Call& call, const char* name, const TensorView& t, bool paged,
                            int64_t pages, int64_t rows, int64_t heads, int64_t last) {
  call.same_device(name, t);
  if (paged) {
    check_shape(name, t, {pages, heads, rows, last});
    return {bytes(t), byte_stride(t, 0), byte_stride(t, 1), byte_stride(t, 2)};
  }
  check_shape(name, t, {rows, heads, last});
  return {bytes(t), 0, byte_stride(t, 1), byte_stride(t, 0)};
}

// Every address that a kernel forms from `t` is a multiple of `alignment` bytes (bulk copies and
// vector loads; docs/formats.md lists who asks for what).
inline void require_aligned(const char* name, const TensorView& t, int64_t alignment) {
  if (t.numel() == 0 || is_aligned(t, alignment)) return;
  std::string strides;
  for (int i = 0; i < t.ndim(); ++i) {
    strides += (i ? ", " : "") + std::to_string(byte_stride(t, i));
  }
  TVM_FFI_THROW(ValueError) << name << ": must be aligned to " << alignment
                            << " bytes in every row, got an address of "
                            << reinterpret_cast<uintptr_t>(t.data_ptr()) % alignment << " modulo "
                            << alignment << " and strides of [" << strides << "] bytes for shape "
                            << shape_text(t);
}

template <class T>
inline const T* index_view(const Call& call, const char* name, const TensorView& t,
                           int64_t at_least) {
  call.same_device(name, t);
  require(is_dtype(t, kDLInt, 32) && t.ndim() == 1, name, t, "int32 [n]");
  check_contiguous(name, t);
  require_value(t.numel() >= at_least, name, t.numel(),
                "at least " + std::to_string(at_least) + " entries");
  return static_cast<const T*>(t.data_ptr());
}

inline void set_plan(const Call& call, const AttentionTensors& t, PlanView* plan) {
  constexpr int64_t kItemInts = sizeof(WorkItem) / sizeof(int32_t);
  plan->header = index_view<PlanHeader>(call, "header", t.header, sizeof(PlanHeader) / 4);
  plan->qo_indptr = index_view<int32_t>(call, "qo_indptr", t.qo_indptr, 1);
  const int64_t batch = t.qo_indptr.numel() - 1;
  plan->kv_indptr = index_view<int32_t>(call, "kv_indptr", t.kv_indptr, batch + 1);
  plan->kv_len = index_view<int32_t>(call, "kv_len", t.kv_len, batch);
  plan->kv_indices = nullptr;
  if (t.kv_indices.has_value()) {
    plan->kv_indices = index_view<int32_t>(call, "kv_indices", t.kv_indices.value(), 0);
  }
  plan->items = index_view<WorkItem>(call, "items", t.items, 0);
  require_value(t.items.numel() % kItemInts == 0, "items", t.items.numel(), "whole items of 8");
  require(reinterpret_cast<uintptr_t>(t.items.data_ptr()) % 16 == 0 || t.items.numel() == 0,
          "items", t.items, "16-byte aligned");
  require_value(t.num_workers >= 1 && t.num_workers <= 0x7fffffff, "num_workers", t.num_workers,
                "1..2^31-1");
  plan->worker_indptr =
      index_view<int32_t>(call, "worker_indptr", t.worker_indptr, t.num_workers + 1);
  plan->v_block_indptr = index_view<int32_t>(call, "v_block_indptr", t.v_block_indptr, batch + 1);
}

inline void set_query(const Call& call, const AttentionTensors& t, KvFormat format,
                      int64_t head_dim, AttentionParams* p) {
  const int64_t tokens = t.q.size(0), heads = t.q.size(1);
  const bool mx = format == KvFormat::kMxfp8;
  p->q = token_operand(call, "q", t.q, tokens, heads, mx ? head_dim : head_dim / 2);
  p->q_scale =
      token_operand(call, "q_scale", t.q_scale, tokens, heads, mx ? head_dim / 32 : head_dim / 16);
  if (t.a_comp.has_value()) {
    const TensorView& a = t.a_comp.value();
    call.same_device("a_comp", a);
    require(!mx && is_bf16(a), "a_comp", a, mx ? "None with mxfp8" : "bfloat16");
    check_shape("a_comp", a, {tokens, heads, -1});
    p->comp_slots = static_cast<int32_t>(a.size(2));
    require_value(p->comp_slots == 16, "a_comp slots", p->comp_slots, "16");
    p->a_comp = {bytes(a), byte_stride(a, 0), byte_stride(a, 1)};
  }
  if (t.row_term.has_value()) {
    const TensorView& r = t.row_term.value();
    call.same_device("row_term", r);
    require(!mx && is_fp32(r) && r.ndim() == 2 && r.size(0) == tokens && r.size(1) == heads,
            "row_term", r, mx ? "None with mxfp8" : "float32 [tokens, query heads]");
    p->row_term = {bytes(r), byte_stride(r, 0), byte_stride(r, 1)};
  }
}

// bf16 or fp16 [tokens, query heads, D]; q_scale, a_comp and row_term are not read.
inline void set_query_values(const Call& call, const AttentionTensors& t, int64_t head_dim,
                             AttentionParams* p) {
  require(is_bf16(t.q) || is_fp16(t.q), "q", t.q, "bfloat16 or float16");
  check_shape("q", t.q, {-1, -1, head_dim});
  p->q = {bytes(t.q), byte_stride(t.q, 0), byte_stride(t.q, 1)};
}

inline void set_kv(const AttentionTensors& t, KvFormat format, int64_t head_dim, QueryForm form,
                   Attention* a) {
  const Call& call = a->call;
  AttentionParams& p = a->params;
  const bool mx = format == KvFormat::kMxfp8;
  for (const auto& [name, view] : {std::pair<const char*, const TensorView*>{"k", &t.k},
                                   {"k_scale", &t.k_scale},
                                   {"v", &t.v}}) {
    check_bytes(name, *view);
  }
  const int64_t heads = t.v.size(1);
  const int64_t rows = a->paged ? t.v.size(2) : t.v.size(0);
  const int64_t pages = a->paged ? t.v.size(0) : 0;
  a->num_pages = pages;
  a->kv_tokens = a->paged ? 0 : rows;
  p.page_size = a->paged ? static_cast<int32_t>(rows) : 0;
  if (a->paged) log2_exact("page_size", rows, mx ? 32 : 1, 128);
  const auto operand = [&](const char* name, const TensorView& view, int64_t n, int64_t last) {
    return kv_operand(call, name, view, a->paged, pages, n, heads, last);
  };
  p.v = operand("v", t.v, rows, head_dim);
  p.k = operand("k", t.k, rows, mx ? head_dim : head_dim / 2);
  if (mx) {
    p.k_scale = operand("k_scale", t.k_scale, rows, head_dim / 32);
  } else if (a->paged && rows == 128) {
    p.k_scale = operand("k_scale", t.k_scale, head_dim / 64, 512);
  } else {
    p.k_scale = operand("k_scale", t.k_scale, rows, head_dim / 16);
  }
  if (t.v_scale.has_value() != mx) {
    TVM_FFI_THROW(ValueError) << "v_scale: must be " << (mx ? "given with" : "None without")
                              << " mxfp8";
  }
  if (mx) {
    const TensorView& s = t.v_scale.value();
    check_bytes("v_scale", s);
    a->v_scale_rows = a->paged ? 0 : s.size(0);
    p.v_scale = operand("v_scale", s, a->paged ? rows / 32 : s.size(0), head_dim);
    const bool aux = t.aux_delta.has_value() || t.aux_channels.has_value();
    require_value(!aux, "aux_delta and aux_channels given", aux, "0 with mxfp8");
    return;
  }
  if (t.aux_delta.has_value()) {
    const TensorView& d = t.aux_delta.value();
    call.same_device("aux_delta", d);
    require(is_bf16(d), "aux_delta", d, "bfloat16");
    if (a->paged) {
      p.aux_delta = operand("aux_delta", d, p.group_size, rows);
    } else {
      check_shape("aux_delta", d, {p.num_qo_heads, rows});
      p.aux_delta = {bytes(d), 0, p.group_size * byte_stride(d, 0), byte_stride(d, 0)};
    }
  }
  if (t.aux_channels.has_value()) {
    const TensorView& c = t.aux_channels.value();
    require(is_bf16(c), "aux_channels", c, "bfloat16");
    p.aux_channels = operand("aux_channels", c, rows, -1);
    p.channels = static_cast<int32_t>(c.size(c.ndim() - 1));
  }
  if (form == QueryForm::kValues) return;
  const int64_t slots = p.channels + (t.aux_delta.has_value() ? 1 : 0);
  require_value(slots <= p.comp_slots && (slots > 0) == t.a_comp.has_value(), "a_comp slots",
                p.comp_slots, "16 with compensated K, absent without");
}

inline void set_outputs(const Call& call, const AttentionTensors& t, int64_t head_dim,
                        Attention* a) {
  AttentionParams& p = a->params;
  const int64_t heads = p.num_qo_heads;
  call.same_device("out", t.out);
  check_shape("out", t.out, {a->query_tokens, heads, head_dim});
  require(is_bf16(t.out) || is_fp16(t.out) || is_fp32(t.out), "out", t.out,
          "bfloat16, float16 or float32");
  p.out = bytes(t.out);
  p.out_token = byte_stride(t.out, 0);
  p.out_head = byte_stride(t.out, 1);
  p.out_type = is_bf16(t.out) ? OutType::kBf16 : is_fp16(t.out) ? OutType::kFp16 : OutType::kFp32;
  call.same_device("lse", t.lse);
  require(is_fp32(t.lse) && t.lse.ndim() == 2 && t.lse.size(0) == a->query_tokens &&
              t.lse.size(1) == heads,
          "lse", t.lse, "float32 [tokens, query heads]");
  p.lse = static_cast<float*>(t.lse.data_ptr());
  p.lse_token = t.lse.stride(0);
  p.lse_head = t.lse.stride(1);
  call.same_device("partial_o", t.partial_o);
  call.same_device("partial_lse", t.partial_lse);
  require(is_fp32(t.partial_o), "partial_o", t.partial_o, "float32");
  require(is_fp32(t.partial_lse), "partial_lse", t.partial_lse, "float32");
  a->partial_rows = t.partial_lse.size(0);
  check_shape("partial_o", t.partial_o, {a->partial_rows, heads, head_dim});
  check_shape("partial_lse", t.partial_lse, {a->partial_rows, heads});
  check_contiguous("partial_o", t.partial_o);
  check_contiguous("partial_lse", t.partial_lse);
  p.partial_o = static_cast<float*>(t.partial_o.data_ptr());
  p.partial_lse = static_cast<float*>(t.partial_lse.data_ptr());
  if (t.sinks.has_value()) {
    const TensorView& s = t.sinks.value();
    call.same_device("sinks", s);
    require(is_fp32(s), "sinks", s, "float32");
    check_shape("sinks", s, {heads});
    p.sinks = static_cast<const float*>(s.data_ptr());
  }
}

// Checks everything that a kernel reads without looking, except values on the device. `head_dim`
// is the module's own.
inline Attention make_attention(const AttentionTensors& t, KvFormat format, int64_t head_dim,
                                QueryForm form = QueryForm::kCodes) {
  Attention a{Call(t.q), {}};
  AttentionParams& p = a.params;
  a.paged = t.kv_indices.has_value();
  require(t.q.ndim() == 3, "q", t.q, "of shape [tokens, query heads, bytes]");
  require(t.v.ndim() == (a.paged ? 4 : 3), "v", t.v,
          a.paged ? "of shape [pages, KV heads, page_size, head_dim]"
                  : "of shape [tokens, KV heads, head_dim]");
  require(t.v.size(t.v.ndim() - 1) == head_dim, "v", t.v,
          "of head_dim " + std::to_string(head_dim) + ", the one that this module was built for");
  require_value(t.q.size(0) < (int64_t{1} << 31), "q tokens", t.q.size(0), "below 2^31");
  a.query_tokens = t.q.size(0);
  p.num_qo_heads = static_cast<int32_t>(t.q.size(1));
  p.num_kv_heads = static_cast<int32_t>(t.v.size(1));
  require_value(p.num_kv_heads >= 1 && p.num_kv_heads <= 65535, "KV heads", p.num_kv_heads,
                "1..65535");
  require_value(p.num_qo_heads % p.num_kv_heads == 0 && p.num_qo_heads > 0, "query heads",
                p.num_qo_heads, "a multiple of " + std::to_string(p.num_kv_heads) + " KV heads");
  p.group_size = p.num_qo_heads / p.num_kv_heads;
  set_plan(a.call, t, &p.plan);
  if (form == QueryForm::kCodes) {
    set_query(a.call, t, format, head_dim, &p);
  } else {
    set_query_values(a.call, t, head_dim, &p);
  }
  set_kv(t, format, head_dim, form, &a);
  set_outputs(a.call, t, head_dim, &a);
  require_value(t.window_left >= -1 && t.window_left <= 0x7fffffff, "window_left", t.window_left,
                "-1..2^31-1");
  p.window_left = static_cast<int32_t>(t.window_left);
  p.causal = t.causal ? 1 : 0;
  p.num_workers = static_cast<int32_t>(t.num_workers);
  p.sm_scale = static_cast<float>(t.sm_scale);
  p.sm_scale_log2 = static_cast<float>(t.sm_scale * 1.4426950408889634);
  p.logits_soft_cap = static_cast<float>(t.logits_soft_cap);
  if (!(p.sm_scale > 0.0f && std::isfinite(p.sm_scale))) {
    TVM_FFI_THROW(ValueError) << "sm_scale: must be finite and > 0, got " << t.sm_scale;
  }
  if (!(p.logits_soft_cap >= 0.0f && std::isfinite(p.logits_soft_cap))) {
    TVM_FFI_THROW(ValueError) << "logits_soft_cap: must be finite and >= 0, got "
                              << t.logits_soft_cap;
  }
  if (p.logits_soft_cap > 0.0f) {
    p.soft_cap_ratio = static_cast<float>(t.sm_scale / t.logits_soft_cap);
  }
  return a;
}

}  // namespace mpfa::bind
