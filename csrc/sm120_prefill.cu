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

// (channel, row, KV head, page); one copy is box_rows rows of one KV head.
mpfa::sm120::TensorMap operand_map(const char* name, const TensorView& t, const Attention& a,
                                   const mpfa::KvOperand& operand, uint32_t box_rows) {
  require_aligned(name, t, 16);
  const int64_t rows = a.paged ? a.params.page_size : a.kv_tokens;
  const auto swizzle =
      Config::kHeadDim == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  // why: the strides of dimensions of one element (and of no page) are not checked but must encode.
  const auto stride = [](int64_t bytes, int64_t size) { return size > 1 ? bytes : int64_t{16}; };
  const CUtensorMap map =
      make_tensor_map(name, CU_TENSOR_MAP_DATA_TYPE_UINT8, t.data_ptr(),
                      {{Config::kHeadDim, 1, static_cast<uint32_t>(Config::kHeadDim)},
                       {rows, stride(operand.row, rows), box_rows},
                       {a.params.num_kv_heads, stride(operand.head, a.params.num_kv_heads), 1},
                       {a.paged ? a.num_pages : 1, stride(operand.page, a.num_pages), 1}},
                      swizzle);
  mpfa::sm120::TensorMap copy;
  static_assert(sizeof(copy) == sizeof(map), "an opaque copy of the driver's struct");
  memcpy(copy.bytes, &map, sizeof(map));
  return copy;
}

void launch(const AttentionTensors& t) {
  const Attention a = make_attention(t, KvFormat::kMxfp8, Config::kHeadDim);
  require_device();
  require_aligned("q", t.q, 4);
  require_aligned("q_scale", t.q_scale, Config::kChannelBlocks);
  require_aligned("k_scale", t.k_scale, Config::kChannelBlocks);
  require_aligned("v_scale", t.v_scale.value(), 4);
  require_aligned("out", t.out, 2 * element_bytes(t.out));
  const int32_t page_size = a.params.page_size;
  mpfa::sm120::Params p;
  p.attention = a.params;
  p.page_shift = 0;
  while (a.paged && (1 << p.page_shift) < page_size) ++p.page_shift;
  p.page_mask = a.paged ? page_size - 1 : 0x7fffffff;
  p.num_pages = a.paged ? static_cast<int32_t>(a.num_pages) : 1;
  p.box_rows = a.paged && page_size < Config::kKvBlock ? page_size : int32_t{Config::kKvBlock};
  p.k_map = operand_map("k", t.k, a, a.params.k, p.box_rows);
  p.v_map = operand_map("v", t.v, a, a.params.v, p.box_rows);
  const auto kernel = mpfa::sm120::sm120_prefill<Config>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError) << "cannot get " << sizeof(Shared)
                                << " bytes of shared memory: " << cudaGetErrorString(error);
  }
  a.call.launch(kernel, dim3(p.attention.num_workers, p.attention.num_kv_heads), Config::kThreads,
                p, false, sizeof(Shared));
}

}  // namespace

MPFA_EXPORT_ATTENTION(launch);
