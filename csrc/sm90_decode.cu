// SPDX-License-Identifier: Apache-2.0
// tvm-ffi module of the SM90 decode kernel for one head dimension. Its run() takes what the other
// attention modules take, and for a bf16/fp16 query the statistics in the place of its codes.
#include <algorithm>

#include "attention_args.h"
#include "mpfa/sm90/decode/kernel.cuh"
#include "tensor_map.h"

#ifndef MPFA_HEAD_DIM
#error "MPFA_HEAD_DIM: 64 or 128"
#endif

namespace {

using namespace mpfa::bind;
namespace decode = mpfa::sm90::decode;

constexpr int kHeadDim = MPFA_HEAD_DIM;

struct Statistics {
  const OptionalTensor& q_mean;         // fp32 [requests or nothing, query heads, D]
  const OptionalTensor& k_mean;         // fp32 [requests or nothing, KV heads, D]
  const OptionalTensor& channel_index;  // int32 [KV heads, channels]
};

decode::CacheOperand cache_operand(const char* name, const TensorView& t) {
  decode::CacheOperand o;
  o.data = bytes(t);
  o.page = short_stride(name, t, 0);
  o.head = byte_stride(t, 1);
  o.row = short_stride(name, t, 2);
  return o;
}

// [heads, D], or [requests, heads, D] for at least `requests` requests.
const float* mean_operand(const Call& call, const char* name, const TensorView& t, int64_t requests,
                          int64_t heads, int64_t* request_stride, int64_t* head_stride) {
  call.same_device(name, t);
  require(is_fp32(t), name, t, "float32");
  const int last = t.ndim() - 1;
  if (t.ndim() == 2) {
    check_shape(name, t, {heads, kHeadDim});
    *request_stride = 0;
  } else {
    check_shape(name, t, {-1, heads, kHeadDim});
    require_value(t.size(0) >= requests, name, t.size(0), "a row for each request");
    *request_stride = t.stride(0);
  }
  *head_stride = t.stride(last - 1);
  require_aligned(name, t, 16);
  return static_cast<const float*>(t.data_ptr());
}

void set_statistics(const AttentionTensors& t, const Statistics& s, const Attention& a,
                    decode::Params* p) {
  const bool mean = t.aux_delta.has_value(), channels = t.aux_channels.has_value();
  const auto given = [](bool x) { return std::string(x ? "given" : "None"); };
  if (s.q_mean.has_value() != mean || s.k_mean.has_value() != mean) {
    TVM_FFI_THROW(ValueError) << "q_mean, k_mean: must be given exactly when aux_delta is, got "
                              << given(s.q_mean.has_value()) << ", " << given(s.k_mean.has_value());
  }
  if (s.channel_index.has_value() != channels) {
    TVM_FFI_THROW(ValueError) << "channel_index: must be given exactly when aux_channels is, got "
                              << given(s.channel_index.has_value());
  }
  const int64_t requests = t.qo_indptr.numel() - 1;
  if (mean) {
    p->q_mean = mean_operand(a.call, "q_mean", s.q_mean.value(), requests, p->a.num_qo_heads,
                             &p->q_mean_request, &p->q_mean_head);
    p->k_mean = mean_operand(a.call, "k_mean", s.k_mean.value(), requests, p->a.num_kv_heads,
                             &p->k_mean_request, &p->k_mean_head);
  }
  if (channels) {
    const TensorView& index = s.channel_index.value();
    a.call.same_device("channel_index", index);
    require(is_dtype(index, kDLInt, 32), "channel_index", index, "int32");
    check_shape("channel_index", index, {p->a.num_kv_heads, p->a.channels});
    check_contiguous("channel_index", index);
    p->channel_index = static_cast<const int32_t*>(index.data_ptr());
  }
}

// Every page of every head starts at a multiple of 16 bytes.
bool is_aligned_pages(const TensorView& t) {
  const auto aligned = [&](int i) { return t.size(i) <= 1 || byte_stride(t, i) % 16 == 0; };
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0 && aligned(0) && aligned(1);
}

decode::Params make_params(const AttentionTensors& t, const Attention& a) {
  decode::Params p;
  p.a = a.params;
  require(a.paged, "kv_indices", t.kv_indptr, "given: decode reads a paged cache");
  constexpr int kLeastPage = 16;
  require_value(p.a.page_size >= kLeastPage, "page_size", p.a.page_size, "16, 32, 64 or 128");
  p.page_shift = log2_exact("page_size", p.a.page_size, kLeastPage, decode::kBlock);
  const TensorView pages = t.kv_indices.value();
  const TensorView* plan[decode::kPlanRanges] = {&t.items, &t.qo_indptr, &t.kv_indptr, &t.kv_len,
                                                 &pages};
  for (int i = 0; i < decode::kPlanRanges; ++i) {
    // A graph's tables may be far larger than a batch's: the rest takes its misses.
    constexpr int64_t kMostPrefetched = 256 << 10;
    p.plan[i] = {plan[i]->data_ptr(),
                 static_cast<int32_t>(std::min(plan[i]->numel() * 4, kMostPrefetched))};
  }
  require_aligned("k", t.k, 16);
  require_aligned("v", t.v, 16);
  p.map_k = kv_map("k", p.a.k, a, kHeadDim / 2, p.a.page_size);
  p.map_v = kv_map("v", p.a.v, a, kHeadDim, p.a.page_size);
  p.k_scale = cache_operand("k_scale", t.k_scale);
  const bool atoms = p.a.page_size == decode::kBlock;
  const bool dense = t.k_scale.stride(2) == kHeadDim / 16 && is_aligned_pages(t.k_scale);
  require_aligned("k_scale", t.k_scale, atoms ? 16 : 4);
  p.scale_layout = atoms   ? decode::ScaleLayout::kAtoms
                   : dense ? decode::ScaleLayout::kDense
                           : decode::ScaleLayout::kStrided;
  if (t.aux_delta.has_value()) {
    require_aligned("aux_delta", t.aux_delta.value(), 16);
    p.delta = cache_operand("aux_delta", t.aux_delta.value());
  }
  if (t.aux_channels.has_value()) {
    const TensorView& c = t.aux_channels.value();
    require(p.a.channels <= decode::kMaxChannels && c.stride(2) == c.size(3) && is_aligned_pages(c),
            "aux_channels", c, "at most 16 wide, pages dense and aligned to 16 bytes");
    p.channels = cache_operand("aux_channels", c);
  }
  return p;
}

template <int Tiles>
void launch_tiles(const Attention& a, decode::Params p) {
  using C = decode::Config<kHeadDim, Tiles>;
  if (p.delta.data != nullptr) {
    p.delta_heads = p.a.group_size < C::kColumns ? p.a.group_size : C::kColumns;
  }
  p.side_bytes = C::side_bytes(p.delta_heads, p.a.channels);
  const auto kernel = decode::sm90_decode<kHeadDim, Tiles>;
  const uint32_t shared = decode::Smem<C>::bytes(p.side_bytes);
  allow_shared_memory(kernel, 227 * 1024);
  const dim3 grid(p.a.num_workers, p.a.num_kv_heads);
  a.call.launch(kernel, grid, C::kThreads, p, /*pdl=*/true, shared);
}

// `tile_rows`: an upper bound of the rows of the plan's tiles; any is correct, a tight one is fast.
void launch(const AttentionTensors& t, const Statistics& s, QueryForm form, int64_t tile_rows) {
  const Attention a = make_attention(t, KvFormat::kQk4pv8, kHeadDim, form);
  decode::Params p = make_params(t, a);
  if (form == QueryForm::kValues) {
    p.query_type = is_bf16(t.q) ? decode::QueryType::kBf16 : decode::QueryType::kFp16;
    p.query_vectors = is_aligned(t.q, 16) ? 1 : 0;
    set_statistics(t, s, a, &p);
  } else {
    require_aligned("q", t.q, 4);
  }
  if (a.query_tokens == 0) return;
  if (tile_rows <= 8) {
    launch_tiles<1>(a, p);
  } else if (tile_rows <= 16) {
    launch_tiles<2>(a, p);
  } else {
    launch_tiles<4>(a, p);
  }
}

void run(const TensorView& q, const OptionalTensor& q_scale, const OptionalTensor& a_comp,
         const OptionalTensor& row_term, const OptionalTensor& q_mean, const OptionalTensor& k_mean,
         const OptionalTensor& channel_index, const TensorView& k, const TensorView& k_scale,
         const TensorView& v, const OptionalTensor& aux_delta, const OptionalTensor& aux_channels,
         const TensorView& header, const TensorView& qo_indptr, const TensorView& kv_indptr,
         const TensorView& kv_len, const TensorView& kv_indices, const TensorView& items,
         const TensorView& worker_indptr, const TensorView& v_block_indptr,
         const TensorView& partial_o, const TensorView& partial_lse, const TensorView& out,
         const TensorView& lse, const OptionalTensor& sinks, double sm_scale,
         double logits_soft_cap, int64_t window_left, bool causal, int64_t num_workers,
         int64_t tile_rows) {
  const QueryForm form = q_scale.has_value() ? QueryForm::kCodes : QueryForm::kValues;
  // The scales' place is not read without codes.
  const TensorView scale = q_scale.has_value() ? q_scale.value() : q;
  const OptionalTensor none, pages(kv_indices);
  launch({q,     scale,     a_comp,        row_term,        k,           k_scale,     v,
          none,  aux_delta, aux_channels,  header,          qo_indptr,   kv_indptr,   kv_len,
          pages, items,     worker_indptr, v_block_indptr,  partial_o,   partial_lse, out,
          lse,   sinks,     sm_scale,      logits_soft_cap, window_left, causal,      num_workers},
         {q_mean, k_mean, channel_index}, form, tile_rows);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
