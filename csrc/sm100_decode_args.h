// SPDX-License-Identifier: Apache-2.0
// Launch parameters that both SM100 decode kernels take.
#pragma once

#include "attention_args.h"
#include "mpfa/sm100/decode/config.cuh"
#include "tensor_map.h"

namespace mpfa::bind {

// [page, KV head, token, bytes] with one page per copy.
inline CUtensorMap page_map(const char* name, const TensorView& t, CUtensorMapSwizzle swizzle) {
  require_aligned(name, t, 16);
  const auto dim = [&](int i, uint32_t box) {
    const int64_t bytes = t.size(i) * element_bytes(t);
    // The stride of a dimension of one element is not used, but still has to be a legal one.
    const int64_t stride = t.size(i) > 1 ? byte_stride(t, i) : round_up<int64_t>(bytes, 16);
    return MapDim{t.size(i), stride, box};
  };
  const auto row = static_cast<uint32_t>(t.size(3));
  const auto tokens = static_cast<uint32_t>(t.size(2));
  return make_tensor_map(name, CU_TENSOR_MAP_DATA_TYPE_UINT8, t.data_ptr(),
                         {MapDim{row, 1, row}, dim(2, tokens), dim(1, 1), dim(0, 1)}, swizzle);
}

inline sm100::decode::Params decode_params(const AttentionTensors& t, const Attention& a,
                                           int head_dim) {
  namespace decode = sm100::decode;
  decode::Params p;
  p.a = a.params;
  require(a.paged, "kv_indices", t.kv_indptr, "given: decode reads a paged cache");
  require_value(p.a.page_size >= decode::kBlock / decode::kMaxPieces, "page_size", p.a.page_size,
                "16, 32, 64 or 128");
  require_aligned("q", t.q, 16);
  require_aligned("q_scale", t.q_scale, 4);
  require_aligned("k_scale", t.k_scale, p.a.page_size == decode::kBlock ? 16 : 4);
  const bool wide = head_dim == 128;
  p.map_k = page_map("k", t.k, wide ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_32B);
  p.map_v = page_map("v", t.v, wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
  if (t.aux_delta.has_value()) {
    require_aligned("aux_delta", t.aux_delta.value(), 16);
    p.delta_heads = p.a.group_size < decode::kMaxColumns ? p.a.group_size : decode::kMaxColumns;
  }
  if (t.aux_channels.has_value()) {
    const TensorView& c = t.aux_channels.value();
    const auto aligned = [&](int i) { return c.size(i) <= 1 || byte_stride(c, i) % 16 == 0; };
    require(p.a.channels <= decode::kMaxChannels && c.stride(2) == c.size(3) &&
                reinterpret_cast<uintptr_t>(c.data_ptr()) % 16 == 0 && aligned(0) && aligned(1),
            "aux_channels", c, "at most 16 wide, pages dense and aligned to 16 bytes");
  }
  return p;
}

inline void launch_decode(const Attention& a, void (*kernel)(const sm100::decode::Params),
                          const sm100::decode::Params& p, uint32_t shared) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024);
  if (error != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError) << "sm100 decode: " << cudaGetErrorString(error);
  }
  const dim3 grid(p.a.num_workers, p.a.num_kv_heads);
  a.call.launch(kernel, grid, sm100::decode::kThreads, p, /*pdl=*/true, shared);
}

}  // namespace mpfa::bind
