// SPDX-License-Identifier: Apache-2.0
// tvm-ffi binding of the SM120 MXFP8 attention kernel (prefill, and decode with packed rows); the
// arguments and their checks are attention_args.h's.
#include "attention_args.h"
#include "mpfa/sm120/kernel.cuh"
#include "tensor_map.h"

namespace {

using namespace mpfa::bind;
using Config = mpfa::sm120::Config<MPFA_HEAD_DIM>;
using Shared = mpfa::sm120::SharedMemory<Config>;

void require_device() {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (major != 12) {
    TVM_FFI_THROW(RuntimeError) << "the sm120 attention kernel needs compute capability 12.x, "
                                << "found " << major << "." << minor;
  }
}

void launch(const AttentionTensors& t) {
  const Attention a = make_attention(t, KvFormat::kMxfp8, Config::kHeadDim);
  require_device();
  require_aligned("k", t.k, 16);
  require_aligned("v", t.v, 16);
  require_aligned("q", t.q, 4);
  require_aligned("q_scale", t.q_scale, Config::kChannelBlocks);
  require_aligned("k_scale", t.k_scale, Config::kChannelBlocks);
  require_aligned("v_scale", t.v_scale.value(), 4);
  require_aligned("out", t.out, 2 * element_bytes(t.out));
  const int32_t page_size = a.params.page_size;
  mpfa::sm120::Params p;
  p.attention = a.params;
  p.page_shift = a.paged ? log2_exact("page_size", page_size, 32, 128) : 0;
  p.page_mask = a.paged ? page_size - 1 : 0x7fffffff;
  p.num_pages = a.paged ? static_cast<int32_t>(a.num_pages) : 1;
  p.box_rows = a.paged && page_size < Config::kKvBlock ? page_size : int32_t{Config::kKvBlock};
  p.k_map = kv_map("k", a.params.k, a, Config::kHeadDim, p.box_rows);
  p.v_map = kv_map("v", a.params.v, a, Config::kHeadDim, p.box_rows);
  const auto kernel = mpfa::sm120::sm120_prefill<Config>;
  allow_shared_memory(kernel, sizeof(Shared));
  a.call.launch(kernel, dim3(p.attention.num_workers, p.attention.num_kv_heads), Config::kThreads,
                p, false, sizeof(Shared));
}

}  // namespace

MPFA_EXPORT_ATTENTION(launch);
