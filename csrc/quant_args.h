// SPDX-License-Identifier: Apache-2.0
// From checked tensors to the views that the quantise kernels take.
#pragma once

#include "check.h"
#include "mpfa/quant/params.h"

namespace mpfa::bind {

using quant::Means;
using quant::Pages;
using quant::TokenMap;
using quant::Tokens;

inline int block_shift_of(int64_t head_dim) {
  require_value(head_dim == 64 || head_dim == 128 || head_dim == 256, "head_dim", head_dim,
                "64, 128 or 256");
  return head_dim == 64 ? 2 : head_dim == 128 ? 3 : 4;
}

inline Tokens token_view(const Call& call, const char* name, const TensorView& t, int64_t tokens,
                         int64_t heads, int64_t dim) {
  call.same_device(name, t);
  check_shape(name, t, {tokens, heads, dim});
  require(is_bf16(t) || is_fp16(t), name, t, "bfloat16 or float16");
  return {bytes(t), short_stride(name, t, 1), short_stride(name, t, 0), is_aligned(t, 16)};
}

// [P, Hkv, rows, last] (paged) with stores of `alignment` bytes.
inline Pages page_view(const Call& call, const char* name, const TensorView& t, int64_t pages,
                       int64_t heads, int64_t rows, int64_t last, int64_t alignment) {
  call.same_device(name, t);
  check_shape(name, t, {pages, heads, rows, last});
  return {bytes(t), short_stride(name, t, 0), short_stride(name, t, 1), short_stride(name, t, 2),
          is_aligned(t, alignment)};
}

// [tokens, heads, last] seen as one page whose rows are the tokens.
inline Pages ragged_view(const Call& call, const char* name, const TensorView& t, int64_t tokens,
                         int64_t heads, int64_t last, int64_t alignment) {
  call.same_device(name, t);
  check_shape(name, t, {tokens, heads, last});
  return {bytes(t), 0, short_stride(name, t, 1), short_stride(name, t, 0),
          is_aligned(t, alignment)};
}

// Static [heads, D] or one row per request [B, heads, D]; sets the number of rows.
inline Means mean_view(const Call& call, const char* name, const TensorView& t, int64_t heads,
                       int64_t dim, int32_t* num_rows) {
  call.same_device(name, t);
  require(is_fp32(t), name, t, "float32");
  require(is_aligned(t, 16), name, t, "aligned to 16 bytes in every head");
  if (t.ndim() == 2) {
    check_shape(name, t, {heads, dim});
    *num_rows = 1;
    return {static_cast<const float*>(t.data_ptr()), 0, t.stride(0)};
  }
  check_shape(name, t, {-1, heads, dim});
  *num_rows = static_cast<int32_t>(t.size(0));
  return {static_cast<const float*>(t.data_ptr()), t.stride(0), t.stride(1)};
}

inline const int32_t* int32_view(const Call& call, const char* name, const TensorView& t,
                                 int64_t size) {
  call.same_device(name, t);
  require(is_dtype(t, kDLInt, 32), name, t, "int32");
  check_shape(name, t, {size});
  return static_cast<const int32_t*>(t.data_ptr());
}

inline void set_slots(const Call& call, const TensorView& slots, int64_t num_pages,
                      int64_t page_size, TokenMap* map) {
  call.same_device("slot_mapping", slots);
  require(is_dtype(slots, kDLInt, 32) || is_dtype(slots, kDLInt, 64), "slot_mapping", slots,
          "int32 or int64");
  check_shape("slot_mapping", slots, {map->num_tokens});
  map->slots = slots.data_ptr();
  map->slots_are_64 = is_dtype(slots, kDLInt, 64);
  map->num_slots = num_pages * page_size;
  map->page_shift = log2_exact("page_size", page_size, 1, quant::kMaxPageSize);
}

inline int32_t token_count(const char* name, const TensorView& t) {
  require(t.ndim() == 3, name, t, "of shape [tokens, heads, head_dim]");
  require_value(t.size(0) < (int64_t{1} << 30), name, t.size(0), "fewer than 2^30 tokens");
  return static_cast<int32_t>(t.size(0));
}

template <class T>
inline T* dense_output(const Call& call, const char* name, const TensorView& t,
                       std::initializer_list<int64_t> shape) {
  call.same_device(name, t);
  check_shape(name, t, shape);
  check_contiguous(name, t);
  require(element_bytes(t) == static_cast<int64_t>(sizeof(T)), name, t,
          std::to_string(8 * sizeof(T)) + "-bit");
  require(reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0 || t.numel() == 0, name, t,
          "16-byte aligned");
  return static_cast<T*>(t.data_ptr());
}

}  // namespace mpfa::bind
