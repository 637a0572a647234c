// SPDX-License-Identifier: Apache-2.0
// tvm-ffi binding of the host planner. mpfa/planner.py is the only caller; it has checked dtypes,
// devices, contiguity and lengths of the tensors.
#include "mpfa/plan/planner.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cstdint>

namespace ffi = tvm::ffi;

namespace {

const int32_t* ints(const ffi::TensorView& t) { return static_cast<const int32_t*>(t.data_ptr()); }

// result: int64 [13 + 2 * kNumSections]: scalars in the order below, then offsets, then sizes.
void write_result(const mpfa::PlanResult& r, int64_t* out) {
  const int64_t scalars[] = {
      r.layout.total_bytes,  r.layout.int_bytes, r.num_items,        r.num_workers,
      r.num_partial_rows,    r.nnz_qo,           r.nnz_kv,           r.pages.max_id,
      r.pages.max_request,   r.balance.min_load, r.balance.max_load, r.balance.total_load,
      r.balance.largest_item};
  for (int64_t value : scalars) *out++ = value;
  for (int64_t offset : r.layout.offset) *out++ = offset;
  for (int64_t size : r.layout.size) *out++ = size;
}

// Returns the integer block, uint8 [int_bytes], or nothing when count_only.
ffi::Optional<ffi::Tensor> plan(ffi::TensorView qo_indptr, ffi::TensorView kv_indptr,
                                ffi::Optional<ffi::TensorView> kv_indices,
                                ffi::Optional<ffi::TensorView> last_page_len,
                                ffi::TensorView result, int64_t mode, int64_t num_qo_heads,
                                int64_t num_kv_heads, int64_t head_dim, int64_t page_size,
                                bool causal, int64_t window_left, int64_t q_tile_tokens,
                                int64_t heads_per_group, int64_t kv_block, int64_t partition_tokens,
                                int64_t num_sm, bool graph, int64_t max_batch_size,
                                int64_t max_total_qo_len, int64_t max_num_pages, bool count_only) {
  mpfa::PlanInput in;
  in.params.mode = static_cast<mpfa::PlanMode>(mode);
  in.params.num_qo_heads = num_qo_heads;
  in.params.num_kv_heads = num_kv_heads;
  in.params.head_dim = head_dim;
  in.params.page_size = page_size;
  in.params.causal = causal;
  in.params.window_left = window_left;
  in.params.q_tile_tokens = q_tile_tokens;
  in.params.heads_per_group = heads_per_group;
  in.params.kv_block = kv_block;
  in.params.partition_tokens = partition_tokens;
  in.params.num_sm = num_sm;
  in.params.graph = graph;
  in.params.max_batch_size = max_batch_size;
  in.params.max_total_qo_len = max_total_qo_len;
  in.params.max_num_pages = max_num_pages;
  in.batch_size = qo_indptr.numel() - 1;
  in.qo_indptr = ints(qo_indptr);
  in.kv_indptr = ints(kv_indptr);
  if (kv_indices.has_value()) {
    in.kv_indices = ints(kv_indices.value());
    in.num_kv_indices = kv_indices.value().numel();
  }
  if (last_page_len.has_value()) in.last_page_len = ints(last_page_len.value());

  // Planning runs in the thread that calls plan(); the scratch only saves allocations.
  static thread_local mpfa::PlanScratch scratch;
  ffi::Optional<ffi::Tensor> block;
  const auto allocate = [&](int64_t bytes) -> uint8_t* {
    if (count_only) return nullptr;
    const int64_t shape[] = {bytes};
    ffi::Tensor tensor = ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, ffi::ShapeView(shape, 1),
                                                   DLDataType{kDLUInt, 8, 1}, DLDevice{kDLCPU, 0});
    block = tensor;
    return static_cast<uint8_t*>(tensor.data_ptr());
  };
  mpfa::PlanResult out;
  if (auto error = mpfa::make_plan(in, allocate, &scratch, &out)) {
    TVM_FFI_THROW(ValueError) << mpfa::describe(error);
  }
  write_result(out, static_cast<int64_t*>(result.data_ptr()));
  return block;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, plan);
