// SPDX-License-Identifier: Apache-2.0
// Tensor maps for TMA, encoded by the driver. The entry point comes from the runtime, so modules
// do not link libcuda.
#pragma once

#include <cuda.h>

#include <cstring>
#include <initializer_list>

#include "attention_args.h"

namespace mpfa::bind {

// One dimension of a tensor map, innermost first. The stride of the innermost one is its element.
struct MapDim {
  int64_t size;    // elements; coordinates at or above it read as zero
  int64_t stride;  // bytes, a multiple of 16; not used for the innermost dimension
  uint32_t box;    // elements of a copy, at most 256
};

inline CUtensorMap make_tensor_map(const char* name, CUtensorMapDataType type, const void* data,
                                   std::initializer_list<MapDim> dims, CUtensorMapSwizzle swizzle) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      TVM_FFI_THROW(RuntimeError) << "this driver has no cuTensorMapEncodeTiled (CUDA 12.0): "
                                  << cudaGetErrorString(error);
    }
    return reinterpret_cast<Encode>(function);
  }();
  constexpr uint32_t kMaxRank = 5;
  cuuint64_t sizes[kMaxRank], strides[kMaxRank];
  cuuint32_t box[kMaxRank], steps[kMaxRank];
  cuuint32_t rank = 0;
  bool empty = false;
  for (const MapDim& dim : dims) {
    // why: a tensor without elements still needs a map; nothing is ever copied through it.
    empty = empty || dim.size <= 0;
    sizes[rank] = dim.size > 0 ? static_cast<cuuint64_t>(dim.size) : 1;
    if (rank > 0) strides[rank - 1] = static_cast<cuuint64_t>(dim.stride);
    box[rank] = dim.box;
    steps[rank++] = 1;
  }
  // why: such a tensor may have no memory, and the encoder refuses a null address.
  alignas(128) static unsigned char nowhere[128];
  if (empty) data = nowhere;
  // why a struct: GCC 12 gives a returned CUtensorMap a place of 16-byte alignment; the encoder
  // needs the type's own 64.
  struct Aligned {
    CUtensorMap map;
  } local;
  const CUresult error =
      encode(&local.map, type, rank, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) {
    std::string text;
    for (uint32_t i = 0; i < rank; ++i) {
      text += " [" + std::to_string(sizes[i]) + ", stride " +
              std::to_string(i > 0 ? strides[i - 1] : 0) + ", box " + std::to_string(box[i]) + "]";
    }
    TVM_FFI_THROW(ValueError) << name << ": the driver refuses a tensor map of dimensions" << text
                              << " at " << data << " (CUresult " << static_cast<int>(error)
                              << "); strides and the address must be multiples of 16 bytes";
  }
  return local.map;
}

// K or V, `row_bytes` of one head and token: (byte, row, KV head, page), copied in boxes of
// `box_rows` rows of one KV head and `box_bytes` of a row (0 = all). The swizzle spans a box's row.
inline TensorMap kv_map(const char* name, const KvOperand& operand, const Attention& a,
                        int64_t row_bytes, int64_t box_rows, int64_t box_bytes = 0) {
  if (box_bytes == 0) box_bytes = row_bytes;
  const CUtensorMapSwizzle swizzle = box_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                       : CU_TENSOR_MAP_SWIZZLE_32B;
  // why: a dimension of one element has an arbitrary stride, which the encoder would refuse.
  const auto dim = [](int64_t size, int64_t bytes, int64_t box) {
    return MapDim{size, size > 1 ? bytes : 16, static_cast<uint32_t>(box)};
  };
  const CUtensorMap map =
      make_tensor_map(name, CU_TENSOR_MAP_DATA_TYPE_UINT8, operand.data,
                      {{row_bytes, 1, static_cast<uint32_t>(box_bytes)},
                       dim(a.paged ? a.params.page_size : a.kv_tokens, operand.row, box_rows),
                       dim(a.params.num_kv_heads, operand.head, 1),
                       dim(a.paged ? a.num_pages : 1, operand.page, 1)},
                      swizzle);
  TensorMap result;
  static_assert(sizeof(result) == sizeof(map), "an opaque copy of the driver's struct");
  std::memcpy(result.bytes, &map, sizeof(map));
  return result;
}

}  // namespace mpfa::bind
