// SPDX-License-Identifier: Apache-2.0
// tvm-ffi binding of the state merge.
#include "check.h"
#include "mpfa/combine.cuh"

namespace {

using namespace mpfa;
using namespace mpfa::bind;

using Kernel = void (*)(const CombineParams);

// Up to this many (token, head) pairs a thread block takes 32 channels of one.
constexpr int64_t kFewJobs = 512;

template <class In, class Out>
Kernel for_dim(int64_t dim) {
  require_value(dim == 64 || dim == 128 || dim == 256, "head_dim", dim, "64, 128 or 256");
  return dim == 64    ? combine_states<In, Out, 64>
         : dim == 128 ? combine_states<In, Out, 128>
                      : combine_states<In, Out, 256>;
}

template <class Out>
Kernel slices_for_dim(int64_t dim) {
  require_value(dim == 64 || dim == 128 || dim == 256, "head_dim", dim, "64, 128 or 256");
  return dim == 64    ? combine_states_slices<Out, 64>
         : dim == 128 ? combine_states_slices<Out, 128>
                      : combine_states_slices<Out, 256>;
}

void launch(const Call& call, Kernel kernel, const CombineParams& p, bool pdl) {
  const int64_t ctas = (p.num_tokens * p.num_heads + kCombineWarps - 1) / kCombineWarps;
  if (ctas == 0) return;
  require_value(ctas <= 0x7fffffff, "tokens x heads", ctas, "at most 2^31-1 blocks");
  call.launch(kernel, dim3(static_cast<unsigned>(ctas)), kCombineWarps * 32, p, pdl);
}

// fp32 states.
template <class Out>
void launch_partials(const Call& call, const CombineParams& p, int64_t dim, bool pdl) {
  const int64_t jobs = p.num_tokens * p.num_heads;
  if (jobs == 0 || jobs > kFewJobs) return launch(call, for_dim<O32, Out>(dim), p, pdl);
  const dim3 grid(static_cast<unsigned>(jobs * (dim / 32)));
  call.launch(slices_for_dim<Out>(dim), grid, kSliceThreads, p, pdl);
}

void set_output(const Call& call, CombineParams& p, const TensorView& out,
                const OptionalTensor& out_lse, int64_t heads, int64_t dim) {
  call.same_device("out", out);
  check_shape("out", out, {-1, heads, dim});
  p.num_tokens = out.size(0);
  p.num_heads = static_cast<int32_t>(heads);
  p.out = out.data_ptr();
  p.out_row = out.stride(0);
  p.out_head = out.stride(1);
  p.out_vector = is_aligned(out, 16);
  if (out_lse.has_value()) {
    const TensorView& t = out_lse.value();
    call.same_device("lse_out", t);
    require(is_fp32(t) && t.ndim() == 2 && t.size(0) == p.num_tokens && t.size(1) == heads,
            "lse_out", t, "float32 [tokens, heads]");
    p.out_lse = static_cast<float*>(t.data_ptr());
    p.out_lse_row = t.stride(0);
    p.out_lse_head = t.stride(1);
  }
}

struct SplitStates {
  const TensorView& o;       // fp32 [rows, H, D]
  const TensorView& lse;     // fp32 [rows, H]
  const TensorView& indptr;  // int32 [>= tokens+1], counts partitions
  int64_t states;            // rows of each partition
  const PlanHeader* header;  // of the plan that wrote indptr, or null
};

void combine(const Call& call, const SplitStates& split, const TensorView& out,
             const OptionalTensor& out_lse, const OptionalTensor& row_term, double row_scale,
             const OptionalTensor& sinks, bool pdl) {
  const auto& [o, lse, indptr, states, header] = split;
  require(o.ndim() == 3 && is_fp32(o), "o", o, "float32 [rows, heads, head_dim]");
  const int64_t rows = o.size(0), heads = o.size(1), dim = o.size(2);
  CombineParams p;
  set_output(call, p, out, out_lse, heads, dim);
  call.same_device("o", o);
  check_shape("o", o, {rows, heads, dim});
  require(is_aligned(o, 16), "o", o, "aligned to 16 bytes in every row");
  call.same_device("lse", lse);
  require(is_fp32(lse) && lse.ndim() == 2 && lse.size(0) == rows && lse.size(1) == heads, "lse",
          lse, "float32 [rows, heads] like o");
  call.same_device("merge_indptr", indptr);
  require(is_dtype(indptr, kDLInt, 32), "merge_indptr", indptr, "int32");
  check_contiguous("merge_indptr", indptr);
  require(indptr.ndim() == 1 && indptr.numel() > p.num_tokens, "merge_indptr", indptr,
          "of one entry more than out has tokens");
  p.header = header;
  require_value(states >= 1 && states <= 64, "states", states, "1..64");
  p.o = o.data_ptr();
  p.o_row = o.stride(0);
  p.o_head = o.stride(1);
  p.lse = static_cast<const float*>(lse.data_ptr());
  p.lse_row = lse.stride(0);
  p.lse_head = lse.stride(1);
  p.indptr = static_cast<const int32_t*>(indptr.data_ptr());
  p.states = static_cast<int32_t>(states);
  if (row_term.has_value()) {
    const TensorView& t = row_term.value();
    call.same_device("row_term", t);
    require(is_fp32(t), "row_term", t, "float32");
    require(t.ndim() == 2 && t.size(0) == p.num_tokens && t.size(1) == heads, "row_term", t,
            "of shape [tokens, heads] like out");
    p.row_term = static_cast<const float*>(t.data_ptr());
    p.row_term_row = t.stride(0);
    p.row_term_head = t.stride(1);
    p.row_scale = static_cast<float>(row_scale);
  }
  if (sinks.has_value()) {
    call.same_device("sinks", sinks.value());
    require(is_fp32(sinks.value()), "sinks", sinks.value(), "float32");
    check_shape("sinks", sinks.value(), {heads});
    p.sinks = static_cast<const float*>(sinks.value().data_ptr());
  }
  if (is_fp32(out)) {
    launch_partials<O32>(call, p, dim, pdl);
  } else if (is_bf16(out)) {
    launch_partials<OBf16>(call, p, dim, pdl);
  } else {
    require(is_fp16(out), "out", out, "float32, bfloat16 or float16");
    launch_partials<OFp16>(call, p, dim, pdl);
  }
}

// `states` rows for each partition; tokens without partitions are left alone.
void combine_partials(const TensorView& o, const TensorView& lse, const TensorView& indptr,
                      int64_t states, const TensorView& out, const OptionalTensor& out_lse,
                      const OptionalTensor& row_term, double row_scale, const OptionalTensor& sinks,
                      bool pdl) {
  check_shape("merge_indptr", indptr, {out.size(0) + 1});
  combine(Call(out), {o, lse, indptr, states, nullptr}, out, out_lse, row_term, row_scale, sinks,
          pdl);
}

// Last step of a planned run, for the rows that an attention kernel left in the partial buffers.
// Tokens beyond the plan's own and those with one partition are left alone. row_term fp32
// [tokens, H] enters the LSE unless a soft cap put it into the scores.
void run(const TensorView& partial_o, const TensorView& partial_lse, const TensorView& header,
         const TensorView& merge_indptr, const OptionalTensor& row_term, const TensorView& out,
         const TensorView& lse, const OptionalTensor& sinks, double sm_scale,
         double logits_soft_cap, bool pdl) {
  const Call call(out);
  call.same_device("header", header);
  require(is_dtype(header, kDLInt, 32) && header.numel() >= int64_t{sizeof(PlanHeader) / 4},
          "header", header, "int32, a whole plan header");
  check_contiguous("header", header);
  if (partial_lse.size(0) == 0) return;  // a plan that never splits
  const bool dropped = row_term.has_value() && logits_soft_cap == 0.0;
  combine(
      call,
      {partial_o, partial_lse, merge_indptr, 1, static_cast<const PlanHeader*>(header.data_ptr())},
      out, lse, dropped ? row_term : OptionalTensor(), sm_scale * 1.4426950408889634, sinks, pdl);
}

// v [n, S, H, D] and lse fp32 [n, S, H], base 2; out of v's dtype.
void merge_states(const TensorView& v, const TensorView& lse, const TensorView& out,
                  const TensorView& out_lse, bool pdl) {
  const Call call(v);
  require(v.ndim() == 4 && v.size(0) >= 1, "v", v, "of shape [n, S, H, D], n >= 1");
  const int64_t tokens = v.size(1), heads = v.size(2), dim = v.size(3);
  check_shape("v", v, {-1, tokens, heads, dim});
  CombineParams p;
  set_output(call, p, out, out_lse, heads, dim);
  require(p.num_tokens == tokens, "out", out, "of shape [S, H, D] like v");
  require(out.dtype().code == v.dtype().code && out.dtype().bits == v.dtype().bits, "out", out,
          "of the dtype of v");
  call.same_device("lse", lse);
  require(is_fp32(lse) && lse.ndim() == 3 && lse.size(0) == v.size(0) && lse.size(1) == tokens &&
              lse.size(2) == heads,
          "lse", lse, "float32 [n, S, H] like v");
  check_contiguous("v", v);
  check_contiguous("lse", lse);
  require(is_aligned(v, 16), "v", v, "16-byte aligned");
  p.o = v.data_ptr();
  p.o_row = v.stride(1);
  p.o_head = v.stride(2);
  p.lse = static_cast<const float*>(lse.data_ptr());
  p.lse_row = lse.stride(1);
  p.lse_head = lse.stride(2);
  p.states = static_cast<int32_t>(v.size(0));
  const Kernel kernel = is_fp32(v)   ? for_dim<O32, O32>(dim)
                        : is_bf16(v) ? for_dim<OBf16, OBf16>(dim)
                        : is_fp16(v) ? for_dim<OFp16, OFp16>(dim)
                                     : nullptr;
  require(kernel != nullptr, "v", v, "float32, bfloat16 or float16");
  launch(call, kernel, p, pdl);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(combine_partials, combine_partials);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge_states, merge_states);
