// SPDX-License-Identifier: Apache-2.0
// tvm-ffi binding of the statistics kernels.
#include "mpfa/quant/stats.cuh"
#include "quant_args.h"

namespace {

using namespace mpfa::bind;
using namespace mpfa::quant;

// x bf16/fp16/fp32 [T, H, D]; indptr int32 [B+1]; partial fp32 [B, slices, H*D, 2]; mean fp32 [B,
// H, D].
void segment_mean(const TensorView& x, const TensorView& indptr, const TensorView& partial,
                  const TensorView& mean) {
  const Call call(x);
  StatsParams p;
  const int64_t tokens = token_count("x", x);
  const int64_t heads = x.size(1), dim = x.size(2);
  check_shape("x", x, {tokens, heads, dim});
  require(is_bf16(x) || is_fp16(x) || is_fp32(x), "x", x, "bfloat16, float16 or float32");
  require(indptr.ndim() == 1 && indptr.size(0) >= 1, "indptr", indptr, "of shape [B+1]");
  p.indptr = int32_view(call, "indptr", indptr, indptr.size(0));
  p.num_requests = static_cast<int32_t>(indptr.size(0) - 1);
  require_value(p.num_requests <= 65535, "indptr", p.num_requests, "at most 65535 requests");
  p.slices = stats_slices(tokens, p.num_requests);
  p.columns = static_cast<int32_t>(heads * dim);
  p.dim_shift = log2_exact("head_dim", dim, 8, 1024);
  p.x = bytes(x);
  p.token = byte_stride(x, 0);
  p.head = byte_stride(x, 1);
  p.vector = is_aligned(x, 16);
  p.partial = reinterpret_cast<float2*>(
      dense_output<float>(call, "partial", partial, {p.num_requests, p.slices, p.columns, 2}));
  p.mean = dense_output<float>(call, "mean", mean, {p.num_requests, heads, dim});
  if (p.num_requests == 0 || p.columns == 0) return;
  const int values = is_fp32(x) ? 4 : 8;
  const auto groups = [&](int per_thread) {
    const int columns = kStatsThreads * per_thread;
    return static_cast<unsigned>((p.columns + columns - 1) / columns);
  };
  const dim3 grid(groups(values), p.slices, p.num_requests);
  const auto kernel = is_fp32(x)   ? stats_partial<Fp32>
                      : is_bf16(x) ? stats_partial<Bf16>
                                   : stats_partial<Fp16>;
  call.launch(kernel, grid, kStatsThreads, p, false);
  call.launch(stats_finish, dim3(groups(1), p.num_requests), kStatsThreads, p, false);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(segment_mean, segment_mean);
