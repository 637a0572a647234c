// SPDX-License-Identifier: Apache-2.0
// Floating-point arithmetic of PTX 9.7.3-9.7.5: rounding modes without fesetround, NaN rules of
// min/max, and the approximate functions with their stated error bounds.
#pragma once

#include <cstdint>

#include "types.h"

namespace ptxsim::sem {

struct FpMode {
  Round round = Round::kRn;
  bool ftz = false;   // f32: subnormal inputs and results become zero of the same sign
  bool sat = false;   // clamp to [0, 1], NaN -> +0
  bool relu = false;  // f16/bf16 fma: negative -> 0, NaN -> canonical NaN
};

// f32: results NaN are 0x7fffffff as the hardware gives.
float fma_f32(float a, float b, float c, FpMode m = {});
float add_f32(float a, float b, FpMode m = {});
float mul_f32(float a, float b, FpMode m = {});
float div_f32(float a, float b, FpMode m = {});
float sqrt_f32(float a, FpMode m = {});
float rcp_f32(float a, FpMode m = {});

// f64: NaN results keep the payload of a NaN operand, quieted: the last one of add, mul, min and
// max, the first of (b, c, a) of fma, the first one of div. A generated NaN is 0xfff8000000000000.
// Both as measured on an H200.
double fma_f64(double a, double b, double c, Round r = Round::kRn);
double add_f64(double a, double b, Round r = Round::kRn);
double mul_f64(double a, double b, Round r = Round::kRn);
double div_f64(double a, double b, Round r = Round::kRn);
double sqrt_f64(double a, Round r = Round::kRn);

// f16 / bf16 (elem = kF16 or kBf16), only .rn exists. NaN results are 0x7fff. ftz flushes f16.
uint16_t fma_h(Elem elem, uint16_t a, uint16_t b, uint16_t c, FpMode m = {});
uint16_t add_h(Elem elem, uint16_t a, uint16_t b, FpMode m = {});
uint16_t sub_h(Elem elem, uint16_t a, uint16_t b, FpMode m = {});
uint16_t mul_h(Elem elem, uint16_t a, uint16_t b, FpMode m = {});

struct MinMaxMode {
  bool is_max = false;
  bool nan = false;      // .NaN: any NaN operand gives the canonical NaN
  bool xorsign = false;  // .xorsign.abs: magnitudes compared, sign = xor of the operand signs
  bool abs = false;      // .abs of the three-input form: magnitudes compared, result positive
  bool ftz = false;
};
// Without .NaN one NaN operand is dropped; both NaN give the canonical NaN. -0 < +0.
float minmax_f32(float a, float b, MinMaxMode m);
float minmax3_f32(float a, float b, float c, MinMaxMode m);  // (a op b) op c; no .xorsign
double minmax_f64(double a, double b, bool is_max);
uint16_t minmax_h(Elem elem, uint16_t a, uint16_t b, MinMaxMode m);

// Approximate functions. The value is the correctly rounded result of the exact function, moved by
// `ulps` units in the last place (the pessimistic mode passes values in [-bound, bound]); special
// values, zeros, infinities and exact powers of two (ex2 of an integer, rcp/rsqrt/sqrt of exact
// powers) are never moved. `approx_bound` is the bound PTX states, in ulp of the result; for
// sin/cos/lg2 PTX bounds the absolute error instead, see approx_abs_bound.
enum class Approx : uint8_t { kEx2, kLg2, kRcp, kRsqrt, kSqrt, kSin, kCos, kTanh, kDiv };
int approx_bound_ulps(Approx op);
double approx_abs_bound(Approx op);
float approx_f32(Approx op, float x, bool ftz, int ulps = 0);
float div_approx_f32(float a, float b, bool ftz, bool full_range, int ulps = 0);
uint16_t approx_h(Approx op, Elem elem, uint16_t x, bool ftz, int ulps = 0);  // ex2, tanh
double approx_ftz_f64(Approx op, double x);  // rcp/rsqrt.approx.ftz.f64: upper 32 bits only

}  // namespace ptxsim::sem
