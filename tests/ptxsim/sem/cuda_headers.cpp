// SPDX-License-Identifier: Apache-2.0
// cvt against the host emulation in NVIDIA's own cuda_fp4/fp6/fp8/fp16/bf16 headers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp6.h>
#include <cuda_fp8.h>

#include <cmath>

#include "check.h"
#include "sem/narrow.h"

using namespace ptxsim::sem;

int main() {
  CvtMode rn;
  rn.satfinite = true;
  CvtMode up = rn, down = rn;
  up.round = Round::kRp;
  down.round = Round::kRz;
  Rng rng(7);
  auto one = [&](float x) {
    const uint32_t u = f32_bits(x);
    CHECK(encode(Elem::kE4m3, x, rn) == __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3),
          "e4m3 0x%08x", u);
    CHECK(encode(Elem::kE5m2, x, rn) == __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2),
          "e5m2 0x%08x", u);
    CHECK(encode(Elem::kE2m3, x, rn) == __nv_cvt_float_to_fp6(x, __NV_E2M3, cudaRoundNearest),
          "e2m3 0x%08x", u);
    CHECK(encode(Elem::kE3m2, x, rn) == __nv_cvt_float_to_fp6(x, __NV_E3M2, cudaRoundNearest),
          "e3m2 0x%08x", u);
    CHECK(encode(Elem::kE2m1, x, rn) == __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest),
          "e2m1 0x%08x", u);
    CHECK(encode(Elem::kUe8m0, x, up) == __nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundPosInf),
          "ue8m0 rp 0x%08x", u);
    CHECK(encode(Elem::kUe8m0, x, down) == __nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundZero),
          "ue8m0 rz 0x%08x", u);
    if (!std::isnan(x)) {
      CHECK(f32_to_f16(x) == static_cast<__half_raw>(__float2half_rn(x)).x, "f16 0x%08x", u);
      CHECK(f32_to_bf16(x) == static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(x)).x,
            "bf16 0x%08x", u);
      CvtMode m;
      m.round = Round::kRz;
      CHECK(encode(Elem::kF16, x, m) == static_cast<__half_raw>(__float2half_rz(x)).x,
            "f16 rz 0x%08x", u);
      m.round = Round::kRm;
      CHECK(encode(Elem::kF16, x, m) == static_cast<__half_raw>(__float2half_rd(x)).x,
            "f16 rm 0x%08x", u);
      m.round = Round::kRp;
      CHECK(encode(Elem::kF16, x, m) == static_cast<__half_raw>(__float2half_ru(x)).x,
            "f16 rp 0x%08x", u);
      CHECK(encode(Elem::kBf16, x, m) == static_cast<__nv_bfloat16_raw>(__float2bfloat16_ru(x)).x,
            "bf16 rp 0x%08x", u);
    }
  };
  for (uint32_t i = 0; i < 4096; ++i) {  // all exponents, few mantissas
    for (uint32_t low : {0u, 1u, 0x7ffffu, 0x80000u, 0x80001u, 0xfffffu})
      one(bits_f32((i << 20) | low));
  }
  for (int i = 0; i < 1000000; ++i) {
    uint32_t u = static_cast<uint32_t>(rng.next());
    if (i & 1) u = (u & 0x807fffffu) | (static_cast<uint32_t>(100 + rng.below(50)) << 23);
    one(bits_f32(u));
  }
  for (int c = 0; c < 256; ++c) {
    auto half_value = [](__half_raw h) { return static_cast<double>(f16_to_f32(h.x)); };
    auto check = [&](Elem e, double want) {
      const double got = decode(e, static_cast<uint32_t>(c));
      CHECK(got == want || (std::isnan(got) && std::isnan(want)), "decode %s 0x%x", elem_name(e),
            c);
    };
    const auto byte = static_cast<unsigned char>(c);
    check(Elem::kE4m3, half_value(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3)));
    check(Elem::kE5m2, half_value(__nv_cvt_fp8_to_halfraw(byte, __NV_E5M2)));
    if (c < 64) check(Elem::kE2m3, half_value(__nv_cvt_fp6_to_halfraw(byte, __NV_E2M3)));
    if (c < 64) check(Elem::kE3m2, half_value(__nv_cvt_fp6_to_halfraw(byte, __NV_E3M2)));
    if (c < 16) check(Elem::kE2m1, half_value(__nv_cvt_fp4_to_halfraw(byte, __NV_E2M1)));
    check(Elem::kUe8m0, bf16_to_f32(__nv_cvt_e8m0_to_bf16raw(byte).x));
  }
  return check_report("cuda_headers");
}
