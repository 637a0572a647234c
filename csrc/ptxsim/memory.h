// SPDX-License-Identifier: Apache-2.0
// Address resolution and access events shared by the memory handlers.
#ifndef PTXSIM_MEMORY_H_
#define PTXSIM_MEMORY_H_

#include "lanes.h"
#include "lower.h"
#include "ranges.h"

namespace ptxsim {

enum class Mem : uint8_t { kGeneric, kGlobal, kShared, kLocal, kParam };

struct MemOp : Extra {
  Mem space = Mem::kGeneric;
  Order order = Order::kWeak;
  Scope scope = Scope::kNone;
  bool wide = true;  // 64-bit address register
  bool is_signed = false;
  uint8_t bytes = 4;  // one element in memory
  uint8_t count = 1;  // elements
  uint8_t cell_bits = 32;
  std::vector<uint32_t> cells;  // element registers
};

// Host pointers of all active lanes; traps on shared addresses outside the CTA's (or cluster's)
// memory and on misalignment.
void resolve(const Warp& w, const Insn& i, const MemOp& x, uint32_t mask, uint32_t size,
             uint8_t* (&out)[kLanes]);
// Reports the access of each active lane to the observers.
void emit_accesses(Warp& w, const MemOp& x, uint32_t mask, uint32_t size, Rw rw,
                   uint8_t* const (&ptr)[kLanes]);

// Traps on a global access outside every known allocation, if the host has declared its tensors.
void check_global_slow(const Warp& w, uint64_t addr, uint64_t size);
inline void check_global(const Warp& w, uint64_t addr, uint64_t size) {
  if (__builtin_expect(host_ranges_registered(), 0)) check_global_slow(w, addr, size);
}

inline bool in_window(const Warp& w, const uint8_t* p) {
  return static_cast<uint64_t>(p - w.cl->window) < kWindow;
}

Order order_of(Lower& L);
Scope scope_of(Lower& L);
Mem space_of(Lower& L);
// Fills space, order, scope and the address of operand `index`; returns the address.
Address memory_operand(Lower& L, size_t index, MemOp* x);

// An address operand of the synchronisation instructions as a shared address per lane (generic
// addresses are translated).
uint32_t shared_address(const Warp& w, const Insn& i, bool wide, bool generic, int lane,
                        uint32_t cell, int64_t offset);

}  // namespace ptxsim

#endif  // PTXSIM_MEMORY_H_
