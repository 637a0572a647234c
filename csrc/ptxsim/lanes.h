// SPDX-License-Identifier: Apache-2.0
// Loops over the active lanes. The full-mask loop is a plain counted loop that the compiler
// vectorises; cells are either the same or disjoint, so there is no loop-carried dependence.
#ifndef PTXSIM_LANES_H_
#define PTXSIM_LANES_H_

#include "machine.h"

namespace ptxsim {

template <class F>
inline __attribute__((always_inline)) void lanes(uint32_t mask, F f) {
  if (__builtin_expect(mask == kFull, 1)) {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) f(l);
  } else {
    for (uint32_t m = mask; m; m &= m - 1) f(__builtin_ctz(m));
  }
}

// d = Op(a), Op(a, b), Op(a, b, c) with all operands of one type.
template <class T, class Op>
Status op1(Warp& w, const Insn& i, uint32_t m) {
  T* d = w.cell<T>(i.d);
  const T* a = w.cell<T>(i.a);
  lanes(m, [=](int l) { d[l] = Op::f(a[l]); });
  return Status::kNext;
}

template <class T, class Op>
Status op2(Warp& w, const Insn& i, uint32_t m) {
  T* d = w.cell<T>(i.d);
  const T* a = w.cell<T>(i.a);
  const T* b = w.cell<T>(i.b);
  lanes(m, [=](int l) { d[l] = Op::f(a[l], b[l]); });
  return Status::kNext;
}

template <class T, class Op>
Status op3(Warp& w, const Insn& i, uint32_t m) {
  T* d = w.cell<T>(i.d);
  const T* a = w.cell<T>(i.a);
  const T* b = w.cell<T>(i.b);
  const T* c = w.cell<T>(i.c);
  lanes(m, [=](int l) { d[l] = Op::f(a[l], b[l], c[l]); });
  return Status::kNext;
}

// Result type differs from the operand type.
template <class D, class T, class Op>
Status op1x(Warp& w, const Insn& i, uint32_t m) {
  D* d = w.cell<D>(i.d);
  const T* a = w.cell<T>(i.a);
  lanes(m, [=](int l) { d[l] = Op::f(a[l]); });
  return Status::kNext;
}

template <class D, class T, class Op>
Status op2x(Warp& w, const Insn& i, uint32_t m) {
  D* d = w.cell<D>(i.d);
  const T* a = w.cell<T>(i.a);
  const T* b = w.cell<T>(i.b);
  lanes(m, [=](int l) { d[l] = Op::f(a[l], b[l]); });
  return Status::kNext;
}

// Merges lane bits into a predicate cell.
inline void set_pred(Warp& w, uint32_t cell, uint32_t m, uint32_t bits) {
  uint32_t* p = w.cell<uint32_t>(cell);
  *p = (*p & ~m) | (bits & m);
}

}  // namespace ptxsim

#endif  // PTXSIM_LANES_H_
