// SPDX-License-Identifier: Apache-2.0
// Access to one lane of a cell by its width.
#ifndef PTXSIM_CELLS_H_
#define PTXSIM_CELLS_H_

#include "machine.h"

namespace ptxsim {

// Width of the cell that holds a register of the type.
inline int cell_width(Type t) { return t.bits <= 16 ? 16 : t.bits; }

inline uint64_t get_elem(const Warp& w, uint32_t cell, int bits, int l) {
  return bits <= 16   ? w.cell<uint16_t>(cell)[l]
         : bits == 32 ? w.cell<uint32_t>(cell)[l]
                      : w.cell<uint64_t>(cell)[l];
}
inline void put_elem(const Warp& w, uint32_t cell, int bits, int l, uint64_t v) {
  if (bits <= 16) {
    w.cell<uint16_t>(cell)[l] = static_cast<uint16_t>(v);
  } else if (bits == 32) {
    w.cell<uint32_t>(cell)[l] = static_cast<uint32_t>(v);
  } else {
    w.cell<uint64_t>(cell)[l] = v;
  }
}

}  // namespace ptxsim

#endif  // PTXSIM_CELLS_H_
