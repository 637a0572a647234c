// SPDX-License-Identifier: Apache-2.0
// Tensor maps for TMA, encoded by the driver. The entry point comes from the runtime, so modules
// do not link libcuda.
#pragma once

#include <cuda.h>

#include <initializer_list>

#include "check.h"

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

}  // namespace mpfa::bind
