// SPDX-License-Identifier: Apache-2.0
// Argument checks and launches shared by the tvm-ffi bindings of the CUDA kernels. A failed check
// raises ValueError with the argument, the value found and what is allowed.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

namespace mpfa::bind {

namespace ffi = tvm::ffi;
using ffi::TensorView;
using OptionalTensor = ffi::Optional<TensorView>;

inline std::string shape_text(const TensorView& t) {
  std::string text = "[";
  for (int i = 0; i < t.ndim(); ++i) {
    text += (i ? ", " : "") + std::to_string(t.size(i));
  }
  return text + "]";
}

inline int64_t element_bytes(const TensorView& t) { return (t.dtype().bits * t.dtype().lanes) / 8; }

inline bool is_dtype(const TensorView& t, uint8_t code, uint8_t bits) {
  return t.dtype().code == code && t.dtype().bits == bits && t.dtype().lanes == 1;
}

inline bool is_bf16(const TensorView& t) { return is_dtype(t, kDLBfloat, 16); }
inline bool is_fp16(const TensorView& t) { return is_dtype(t, kDLFloat, 16); }
inline bool is_fp32(const TensorView& t) { return is_dtype(t, kDLFloat, 32); }

inline void require(bool ok, const char* name, const TensorView& t, const std::string& allowed) {
  if (!ok) {
    TVM_FFI_THROW(ValueError) << name << ": must be " << allowed << ", got shape " << shape_text(t)
                              << ", " << ffi::DLDataTypeToString(t.dtype());
  }
}

inline void require_value(bool ok, const char* name, int64_t value, const std::string& allowed) {
  if (!ok) TVM_FFI_THROW(ValueError) << name << ": must be " << allowed << ", got " << value;
}

// Shape, -1 for a free dimension, and a contiguous last dimension.
inline void check_shape(const char* name, const TensorView& t,
                        std::initializer_list<int64_t> shape) {
  bool ok = t.ndim() == static_cast<int>(shape.size());
  std::string want = "[";
  int i = 0;
  for (int64_t size : shape) {
    want += (i ? ", " : "") + (size < 0 ? std::string("any") : std::to_string(size));
    ok = ok && (size < 0 || t.size(i) == size);
    ++i;
  }
  require(ok, name, t, "of shape " + want + "]");
  const int last = t.ndim() - 1;
  require(last < 0 || t.size(last) <= 1 || t.stride(last) == 1, name, t,
          "contiguous in its last dimension");
}

inline void check_contiguous(const char* name, const TensorView& t) {
  int64_t expected = 1;
  for (int i = t.ndim() - 1; i >= 0; --i) {
    require(t.size(i) <= 1 || t.stride(i) == expected, name, t, "contiguous");
    expected *= t.size(i);
  }
}

inline void check_bytes(const char* name, const TensorView& t) {
  require(element_bytes(t) == 1, name, t, "an 8-bit tensor");
}

// Every address base + sum of strides (all dimensions but the last) is a multiple of `alignment`.
inline bool is_aligned(const TensorView& t, int64_t alignment) {
  if (reinterpret_cast<uintptr_t>(t.data_ptr()) % alignment != 0) return false;
  for (int i = 0; i + 1 < t.ndim(); ++i) {
    if (t.size(i) > 1 && t.stride(i) * element_bytes(t) % alignment != 0) return false;
  }
  return true;
}

inline uint8_t* bytes(const TensorView& t) { return static_cast<uint8_t*>(t.data_ptr()); }

// Byte stride of a dimension.
inline int64_t byte_stride(const TensorView& t, int dim) {
  return t.stride(dim) * element_bytes(t);
}

// The same where kernels multiply it as a 32-bit number.
inline uint32_t short_stride(const char* name, const TensorView& t, int dim) {
  const int64_t stride = t.size(dim) > 1 ? byte_stride(t, dim) : 0;
  require(
      stride >= 0 && stride < (int64_t{1} << 31), name, t,
      "laid out with less than 2^31 bytes between neighbours in dimension " + std::to_string(dim));
  return static_cast<uint32_t>(stride);
}

inline int log2_exact(const char* name, int64_t value, int64_t low, int64_t high) {
  require_value(value >= low && value <= high && (value & (value - 1)) == 0, name, value,
                "a power of two in " + std::to_string(low) + ".." + std::to_string(high));
  int shift = 0;
  while ((int64_t{1} << shift) < value) ++shift;
  return shift;
}

// Device of a call: guards the current device, finds the current stream, checks that every tensor
// is on it. Host tensors pass: the simulator's runtime executes kernels on them;
// mpfa/backends/cuda.py gives this module nothing else.
class Call {
 public:
  explicit Call(const TensorView& t) : device_(t.device()) {
    if (device_.device_type == kDLCUDA) guard_.emplace(device_.device_id);
    stream_ = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device_.device_type, device_.device_id));
  }

  void same_device(const char* name, const TensorView& t) const {
    if (t.device().device_type == device_.device_type &&
        t.device().device_id == device_.device_id) {
      return;
    }
    TVM_FFI_THROW(ValueError) << name << ": must be on the device of the first tensor (type "
                              << device_.device_type << ", index " << device_.device_id
                              << "), got type " << t.device().device_type << ", index "
                              << t.device().device_id;
  }

  // Launches on the current stream. `pdl`: the grid may start before the one before it has
  // finished; it waits for it itself (griddepcontrol.wait).
  template <class Params>
  void launch(void (*kernel)(const Params), dim3 grid, int threads, const Params& params, bool pdl,
              size_t shared_bytes = 0) const {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream_;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    if (pdl) {
      config.attrs = &attribute;
      config.numAttrs = 1;
    }
    void* args[] = {const_cast<Params*>(&params)};
    const cudaError_t error =
        cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), args);
    if (error != cudaSuccess) {
      TVM_FFI_THROW(RuntimeError) << "kernel launch failed: " << cudaGetErrorString(error)
                                  << " (grid " << grid.x << " x " << grid.y << " x " << grid.z
                                  << ", " << threads << " threads)";
    }
  }

 private:
  DLDevice device_;
  std::optional<ffi::CUDADeviceGuard> guard_;
  cudaStream_t stream_ = nullptr;
};

// Lets launches of `kernel` take up to `bytes` of dynamic shared memory (more than 48 KB is
// opt-in).
template <class Params>
inline void allow_shared_memory(void (*kernel)(const Params), int bytes) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError) << "cannot get " << bytes
                                << " bytes of shared memory: " << cudaGetErrorString(error);
  }
}

inline dim3 linear_grid(const char* name, int64_t ctas) {
  require_value(ctas <= 0x7fffffff, name, ctas, "work for at most 2^31-1 thread blocks");
  return dim3(static_cast<unsigned>(ctas));
}

}  // namespace mpfa::bind
