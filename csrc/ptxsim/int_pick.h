// SPDX-License-Identifier: Apache-2.0
// Helpers of the integer lowerings.
#ifndef PTXSIM_INT_PICK_H_
#define PTXSIM_INT_PICK_H_

#include "lanes.h"
#include "lower.h"

namespace ptxsim {

// Handler of a template for the integer type of an instruction.
#define PICK_INT(t, X)                                 \
  ((t).kind == 's' ? ((t).bits == 16   ? (X(int16_t))  \
                      : (t).bits == 32 ? (X(int32_t))  \
                                       : (X(int64_t))) \
                   : ((t).bits == 16   ? (X(uint16_t)) \
                      : (t).bits == 32 ? (X(uint32_t)) \
                                       : (X(uint64_t))))

inline void three(Lower& L, Handler fn, Type t) {
  uint32_t a = L.src(1, t), b = L.src(2, t), d = L.dst(0, t);
  Insn& i = L.emit(fn);
  i.d = d;
  i.a = a;
  i.b = b;
}

inline void four(Lower& L, Handler fn, Type t) {
  uint32_t a = L.src(1, t), b = L.src(2, t), c = L.src(3, t), d = L.dst(0, t);
  Insn& i = L.emit(fn);
  i.d = d;
  i.a = a;
  i.b = b;
  i.c = c;
}

inline void two(Lower& L, Handler fn, Type d_type, Type t) {
  uint32_t a = L.src(1, t), d = L.dst(0, d_type);
  Insn& i = L.emit(fn);
  i.d = d;
  i.a = a;
}

inline const Type kU32{'u', 32, 1};

}  // namespace ptxsim

#endif  // PTXSIM_INT_PICK_H_
