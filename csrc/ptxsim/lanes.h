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

// d = f(a), f(a, b), f(a, b, c) with all operands of one type; the result may have another.
template <class D, class T, class F>
inline __attribute__((always_inline)) Status each1(Warp& w, const Insn& i, uint32_t m, F f) {
  D* d = w.cell<D>(i.d);
  const T* a = w.cell<T>(i.a);
  lanes(m, [=](int l) { d[l] = f(a[l]); });
  return Status::kNext;
}

template <class D, class T, class F>
inline __attribute__((always_inline)) Status each2(Warp& w, const Insn& i, uint32_t m, F f) {
  D* d = w.cell<D>(i.d);
  const T* a = w.cell<T>(i.a);
  const T* b = w.cell<T>(i.b);
  lanes(m, [=](int l) { d[l] = f(a[l], b[l]); });
  return Status::kNext;
}

template <class D, class T, class F>
inline __attribute__((always_inline)) Status each3(Warp& w, const Insn& i, uint32_t m, F f) {
  D* d = w.cell<D>(i.d);
  const T* a = w.cell<T>(i.a);
  const T* b = w.cell<T>(i.b);
  const T* c = w.cell<T>(i.c);
  lanes(m, [=](int l) { d[l] = f(a[l], b[l], c[l]); });
  return Status::kNext;
}

// The same as handlers.
template <class D, class T, class Op>
Status op1x(Warp& w, const Insn& i, uint32_t m) {
  return each1<D, T>(w, i, m, [](T a) { return Op::f(a); });
}
template <class D, class T, class Op>
Status op2x(Warp& w, const Insn& i, uint32_t m) {
  return each2<D, T>(w, i, m, [](T a, T b) { return Op::f(a, b); });
}
template <class T, class Op>
Status op1(Warp& w, const Insn& i, uint32_t m) {
  return op1x<T, T, Op>(w, i, m);
}
template <class T, class Op>
Status op2(Warp& w, const Insn& i, uint32_t m) {
  return op2x<T, T, Op>(w, i, m);
}
template <class T, class Op>
Status op3(Warp& w, const Insn& i, uint32_t m) {
  return each3<T, T>(w, i, m, [](T a, T b, T c) { return Op::f(a, b, c); });
}

// Merges lane bits into a predicate cell.
inline void set_pred(Warp& w, uint32_t cell, uint32_t m, uint32_t bits) {
  uint32_t* p = w.cell<uint32_t>(cell);
  *p = (*p & ~m) | (bits & m);
}

}  // namespace ptxsim

#endif  // PTXSIM_LANES_H_
