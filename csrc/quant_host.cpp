// SPDX-License-Identifier: Apache-2.0
// The block functions of the quantise kernels compiled for the host, so that they are tested
// against mpfa/reference on machines without nvcc or a GPU. The kernels include the same headers.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <vector>

#include "mpfa/quant/block.h"

namespace {

namespace ffi = tvm::ffi;
using namespace mpfa::quant;
using ffi::TensorView;

template <class T>
T* data(const TensorView& t) {
  return static_cast<T*>(t.data_ptr());
}

// x fp32 [n, 16] -> codes uint8 [n, 8], scale uint8 [n].
void nvfp4(const TensorView& x, bool four_over_six, const TensorView& codes,
           const TensorView& scale) {
  for (int64_t i = 0; i < scale.numel(); ++i) {
    const float* in = data<float>(x) + 16 * i;
    const Nvfp4Block b = four_over_six ? quantize_nvfp4<true>(in, amax16(in))
                                       : quantize_nvfp4<false>(in, amax16(in));
    for (int j = 0; j < 8; ++j) {
      data<uint8_t>(codes)[8 * i + j] = static_cast<uint8_t>(b.codes[j / 4] >> (8 * (j % 4)));
    }
    data<uint8_t>(scale)[i] = static_cast<uint8_t>(b.scale);
  }
}

// x fp32 [n] -> uint8 [n].
void e4m3(const TensorView& x, const TensorView& codes) {
  for (int64_t i = 0; i < x.numel(); ++i) {
    data<uint8_t>(codes)[i] = static_cast<uint8_t>(e4m3_code(data<float>(x)[i]));
  }
}

// x fp32 [n, 32] -> codes uint8 [n, 32], scale uint8 [n]; two threads of a kernel share a block.
void mxfp8(const TensorView& x, const TensorView& codes, const TensorView& scale) {
  for (int64_t i = 0; i < scale.numel(); ++i) {
    const float* in = data<float>(x) + 32 * i;
    const uint32_t byte = ue8m0_byte(max_f(amax16(in), amax16(in + 16)));
    data<uint8_t>(scale)[i] = static_cast<uint8_t>(byte);
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
      encode_e4m3_16(in + 16 * half, ue8m0_inverse(byte), words);
      for (int j = 0; j < 16; ++j) {
        data<uint8_t>(codes)[32 * i + 16 * half + j] =
            static_cast<uint8_t>(words[j / 4] >> (8 * (j % 4)));
      }
    }
  }
}

// a, b fp32 [n, D] -> fp32 [n], blocks of 16 channels in sequence, then neighbours pairwise.
void dot(const TensorView& a, const TensorView& b, const TensorView& out) {
  const int64_t dim = a.size(1);
  std::vector<float> sums(dim / 16);
  for (int64_t i = 0; i < out.numel(); ++i) {
    for (int64_t k = 0; k < dim / 16; ++k) {
      float acc = 0.0f;
      for (int j = 0; j < 16; j += 4) {
        const int64_t at = i * dim + k * 16 + j;
        acc = dot4(acc, data<float>(a) + at, data<float>(b) + at, j == 0);
      }
      sums[k] = acc;
    }
    for (size_t n = sums.size(); n > 1; n /= 2) {
      for (size_t k = 0; k < n / 2; ++k) sums[k] = add_rn(sums[2 * k], sums[2 * k + 1]);
    }
    data<float>(out)[i] = sums[0];
  }
}

// Pairs of 16-bit values as int32 [n] -> fp32 [n, 2].
void unpack(const TensorView& pairs, bool bf16, const TensorView& out) {
  for (int64_t i = 0; i < pairs.numel(); ++i) {
    float* o = data<float>(out) + 2 * i;
    const uint32_t pair = data<uint32_t>(pairs)[i];
    bf16 ? Bf16::unpack(pair, o[0], o[1]) : Fp16::unpack(pair, o[0], o[1]);
  }
}

void bf16(const TensorView& x, const TensorView& bits) {
  for (int64_t i = 0; i < x.numel(); ++i) {
    data<uint16_t>(bits)[i] = static_cast<uint16_t>(bf16_bits(data<float>(x)[i]));
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(nvfp4, nvfp4);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(e4m3, e4m3);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mxfp8, mxfp8);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dot, dot);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unpack, unpack);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bf16, bf16);
