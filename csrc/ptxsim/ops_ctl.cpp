// SPDX-License-Identifier: Apache-2.0
// Control flow and calls (PTX ISA 9.7.12, 9.7.19).
#include <algorithm>

#include "memory.h"

namespace ptxsim {
namespace {

// Moves the lanes `m` of the running split to `target`; the others go on behind the instruction.
Status jump(Warp& w, uint32_t m, uint32_t target) {
  Split& s = w.split();
  if (m == s.mask) {
    if (target <= s.pc) ++w.backward;
    s.pc = target;
    return Status::kJump;
  }
  if (m == 0) {
    ++s.pc;
    return Status::kJump;
  }
  Split other;
  other.pc = target;
  other.mask = m;
  s.mask &= ~m;
  ++s.pc;
  w.splits.push_back(other);
  return Status::kJump;
}

Status op_brx(Warp& w, const Insn& i, uint32_t m) {
  auto& table = *reinterpret_cast<const std::vector<uint32_t>*>(static_cast<uintptr_t>(i.imm));
  const uint32_t* index = w.cell<uint32_t>(i.a);
  w.split().mask &= ~m;
  w.split().pc++;
  for (uint32_t left = m; left;) {
    uint32_t k = index[__builtin_ctz(left)];
    if (k >= table.size()) {
      trap(w, Err::kIllegalInstruction,
           format("brx.idx: index %u of a list of %zu labels", k, table.size()));
    }
    Split other;
    other.pc = table[k];
    for (uint32_t r = left; r; r &= r - 1) {
      int l = __builtin_ctz(r);
      if (index[l] == k) other.mask |= 1u << l;
    }
    left &= ~other.mask;
    w.splits.push_back(other);
  }
  return Status::kJump;
}

Status op_nop(Warp&, const Insn&, uint32_t) { return Status::kNext; }

Status op_trap(Warp& w, const Insn& i, uint32_t) {
  trap(w, i.aux ? Err::kLaunchFailure : Err::kLaunchFailure,
       i.aux ? "brkpt executed (a device-side assertion)" : "trap executed");
}

Status op_pause(Warp&, const Insn&, uint32_t) { return Status::kPause; }

std::string host_string(uint64_t address) {
  const char* s = reinterpret_cast<const char*>(address);
  return s ? std::string(s, strnlen(s, 4096)) : std::string("(null)");
}

}  // namespace

Status op_jump(Warp& w, const Insn& i, uint32_t m) {
  return jump(w, m, static_cast<uint32_t>(i.imm));
}

Status op_exit(Warp& w, const Insn&, uint32_t m) {
  Split& s = w.split();
  s.mask &= ~m;
  w.live &= ~m;
  w.cl->live_threads -= static_cast<uint32_t>(__builtin_popcount(m));
  w.cl->progress = w.cl->progress || m != 0;
  if (s.mask) ++s.pc;
  return Status::kJump;
}

// vprintf(format, arguments): the argument buffer holds the values with C varargs promotions,
// naturally aligned.
Status op_vprintf(Warp& w, const Insn& i, uint32_t m) {
  if (i.n != 2) trap(w, Err::kInvalidPtx, "vprintf takes two arguments");
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    auto value = [&](uint32_t cell) {
      uint64_t v;
      std::memcpy(&v, reinterpret_cast<const void*>(w.cell<uint64_t>(cell)[l]), 8);
      return v;
    };
    std::string f = host_string(value(i.a));
    const char* args = reinterpret_cast<const char*>(value(i.b));
    size_t at = 0;
    std::string out;
    for (size_t k = 0; k < f.size(); ++k) {
      if (f[k] != '%') {
        out += f[k];
        continue;
      }
      size_t e = k + 1;
      while (e < f.size() && !strchr("diouxXcsfFeEgGaAp%", f[e])) ++e;
      if (e >= f.size()) {
        out += f.substr(k);
        break;
      }
      std::string spec = f.substr(k, e - k + 1);
      char c = f[e];
      k = e;
      if (c == '%') {
        out += '%';
        continue;
      }
      bool is64 = strchr("fFeEgGaAsp", c) || spec.find('l') != std::string::npos ||
                  spec.find('z') != std::string::npos || spec.find('j') != std::string::npos;
      size_t bytes = is64 ? 8 : 4;
      at = (at + bytes - 1) / bytes * bytes;
      uint64_t v = 0;
      std::memcpy(&v, args + at, bytes);
      at += bytes;
      char buf[512];
      if (strchr("fFeEgGaA", c)) {
        snprintf(buf, sizeof(buf), spec.c_str(), bit_cast<double>(v));
      } else if (c == 's') {
        snprintf(buf, sizeof(buf), spec.c_str(), host_string(v).c_str());
      } else if (is64) {
        snprintf(buf, sizeof(buf), spec.c_str(), v);
      } else {
        snprintf(buf, sizeof(buf), spec.c_str(), static_cast<uint32_t>(v));
      }
      out += buf;
    }
    fputs(out.c_str(), stdout);
    if (i.d) {
      int32_t n = static_cast<int32_t>(out.size());
      std::memcpy(reinterpret_cast<void*>(w.cell<uint64_t>(i.d)[l]), &n, 4);
    }
  }
  fflush(stdout);
  return Status::kNext;
}

struct CallArgs : Extra {
  std::vector<uint32_t> cells;
};

Status op_assertfail(Warp& w, const Insn& i, uint32_t m) {
  int l = __builtin_ctz(m);
  auto value = [&](uint32_t cell, int bytes) {
    uint64_t v = 0;
    std::memcpy(&v, reinterpret_cast<const void*>(w.cell<uint64_t>(cell)[l]), bytes);
    return v;
  };
  std::string text = "device-side assertion";
  if (i.n >= 3) {
    text = format("%s:%d: device-side assertion `%s' failed (lane %d)",
                  host_string(value(i.b, 8)).c_str(), static_cast<int>(value(i.c, 4)),
                  host_string(value(i.a, 8)).c_str(), l);
  }
  trap(w, Err::kAssert, text);
}

void low_bra(Lower& L) {
  if (L.op(0).kind != Operand::kName) L.fail("branch target is not a label");
  Insn& i = L.emit(op_jump);
  i.flags |= kAlwaysRun;
  L.label_fixup(i, L.op(0).name);
}

void low_brx(Lower& L) {
  if (L.op(1).kind != Operand::kName) L.fail("expected a label list");
  uint32_t a = L.src(0, Type{'u', 32, 1});
  auto* table = L.jump_table(L.op(1).name);
  Insn& i = L.emit(op_brx);
  i.a = a;
  i.imm = static_cast<int64_t>(reinterpret_cast<uintptr_t>(table));
  i.flags |= kAlwaysRun;
}

void low_call(Lower& L) { L.call(); }
void low_ret(Lower& L) { L.ret(); }
void low_exit(Lower& L) { L.emit(op_exit).flags |= kAlwaysRun; }

void low_trap(Lower& L) { L.emit(op_trap).aux = L.s->op == "brkpt"; }

void low_nanosleep(Lower& L) {
  L.src(0, Type{'u', 32, 1});
  L.emit(op_pause);
}

void low_pmevent(Lower& L) { L.emit(op_nop); }

// setmaxnreg changes no value; its register arithmetic is a matter of ptxas.
void low_setmaxnreg(Lower& L) {
  int64_t n = L.immediate(0);
  if (n < 24 || n > 256 || n % 8) L.fail("register count must be a multiple of 8 in [24, 256]");
  L.emit(op_nop);
}

}  // namespace ptxsim
