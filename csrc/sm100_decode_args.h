// SPDX-License-Identifier: Apache-2.0
// Launch parameters that both SM100 decode kernels take.
#pragma once

#include "attention_args.h"
#include "mpfa/sm100/decode/config.cuh"
#include "tensor_map.h"

namespace mpfa::bind {

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
  require_aligned("k", t.k, 16);
  require_aligned("v", t.v, 16);
  p.map_k = kv_map("k", p.a.k, a, head_dim / 2, p.a.page_size);
  p.map_v = kv_map("v", p.a.v, a, head_dim, p.a.page_size);
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
  allow_shared_memory(kernel, 227 * 1024);
  const dim3 grid(p.a.num_workers, p.a.num_kv_heads);
  a.call.launch(kernel, grid, sm100::decode::kThreads, p, /*pdl=*/true, shared);
}

}  // namespace mpfa::bind
