// SPDX-License-Identifier: Apache-2.0
// tvm-ffi binding of the SM100 prefill kernel, one head dimension per module.
#include <cstring>

#include "attention_args.h"
#include "mpfa/sm100/prefill/kernel.cuh"
#include "tensor_map.h"

#ifndef MPFA_HEAD_DIM
#error "MPFA_HEAD_DIM: head dimension of the module, 64 or 128"
#endif

namespace {

using namespace mpfa;
using namespace mpfa::bind;

// cp.async reads 16 bytes of K, V and Q rows, 4 bytes of scales; bulk stores write whole rows.
void check_alignment(const AttentionTensors& t, const Attention& a) {
  require_aligned("q", t.q, 16);
  require_aligned("q_scale", t.q_scale, 4);
  require_aligned("k", t.k, 16);
  require_aligned("k_scale", t.k_scale, a.params.page_size == 128 ? 16 : 4);
  require_aligned("v", t.v, 16);
  require_aligned("out", t.out, 16);
  require_aligned("partial_o", t.partial_o, 16);
  const int64_t tokens = a.paged ? a.num_pages * a.params.page_size : a.kv_tokens;
  require_value(tokens < (int64_t{1} << 31), "tokens of k and v", tokens, "below 2^31");
}

// K or V as [page, KV head, row, bytes]; ragged: one page.
sm100::prefill::TensorMap block_map(const char* name, const KvOperand& t, const Attention& a,
                                    int64_t row_bytes) {
  const CUtensorMapSwizzle swizzle = row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                       : CU_TENSOR_MAP_SWIZZLE_32B;
  const int64_t rows = a.paged ? a.params.page_size : a.kv_tokens;
  const auto box = static_cast<uint32_t>(a.paged ? rows : 128);
  // why: a dimension of one element has an arbitrary stride, which the encoder would refuse.
  const auto stride = [](int64_t size, int64_t bytes) { return size > 1 ? bytes : 16; };
  const int64_t pages = a.paged ? a.num_pages : 1;
  const CUtensorMap map =
      make_tensor_map(name, CU_TENSOR_MAP_DATA_TYPE_UINT8, t.data,
                      {{row_bytes, 1, static_cast<uint32_t>(row_bytes)},
                       {rows, stride(rows, t.row), box},
                       {a.params.num_kv_heads, stride(a.params.num_kv_heads, t.head), 1},
                       {pages, stride(pages, t.page), 1}},
                      swizzle);
  sm100::prefill::TensorMap result;
  static_assert(sizeof(result) == sizeof(map), "tensor maps are 128 bytes");
  std::memcpy(&result, &map, sizeof(map));
  return result;
}

void launch(const AttentionTensors& t) {
  const Attention a = make_attention(t, KvFormat::kQk4pv8, MPFA_HEAD_DIM);
  check_alignment(t, a);
  const sm100::prefill::PrefillParams params = {block_map("k", a.params.k, a, MPFA_HEAD_DIM / 2),
                                                block_map("v", a.params.v, a, MPFA_HEAD_DIM),
                                                a.params};
  const auto kernel = sm100::prefill::mpfa_sm100_prefill<MPFA_HEAD_DIM>;
  constexpr int kShared = sm100::prefill::dynamic_shared_bytes<MPFA_HEAD_DIM>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError) << "sm100 prefill: " << kShared
                                << " bytes of shared memory: " << cudaGetErrorString(error);
  }
  const dim3 grid(static_cast<unsigned>(a.params.num_workers),
                  static_cast<unsigned>(a.params.num_kv_heads));
  a.call.launch(kernel, grid, sm100::prefill::kThreads, params, false, kShared);
}

}  // namespace

MPFA_EXPORT_ATTENTION(launch);
