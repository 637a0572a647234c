// SPDX-License-Identifier: Apache-2.0
// ld, st and their relatives (PTX ISA 9.7.9.8-9.7.9.18).
#include "memory.h"

namespace ptxsim {

uint8_t* shared_ptr_checked(const Warp& w, uint64_t addr, uint32_t size) {
  const Cluster& cl = *w.cl;
  uint64_t rank = addr >> kRankShift, off = addr & ((1u << kRankShift) - 1);
  if (rank >= cl.ctas.size()) {
    trap(w, Err::kIllegalAddress,
         format("shared address 0x%llx belongs to CTA rank %llu, the cluster has %zu CTAs",
                (unsigned long long)addr, (unsigned long long)rank, cl.ctas.size()));
  }
  if (off < kSmemBase || off + size > cl.ctas[rank].smem_end) {
    trap(w, Err::kIllegalAddress,
         format("%u bytes at shared address 0x%llx (offset %lld of CTA rank %llu) are outside the "
                "%u bytes of the CTA",
                size, (unsigned long long)addr, (long long)off - kSmemBase,
                (unsigned long long)rank, cl.ctas[rank].smem_end - kSmemBase));
  }
  return cl.window + addr;
}

Cta& cta_of_shared(const Warp& w, uint32_t addr) {
  uint32_t rank = addr >> kRankShift;
  if (rank >= w.cl->ctas.size()) shared_ptr_checked(w, addr, 1);
  return w.cl->ctas[rank];
}

void check_global_slow(const Warp& w, uint64_t addr, uint64_t size) {
  static thread_local MemoryRange last;
  static thread_local uint64_t generation = 0;
  uint64_t now = range_generation.load(std::memory_order_relaxed);
  if (generation == now && addr >= last.begin && addr + size <= last.begin + last.size) return;
  const Grid& g = *w.cl->grid;
  uint64_t param = reinterpret_cast<uint64_t>(g.param_ptr);
  if (addr >= param && addr + size <= param + g.kernel->param_bytes) return;
  uint64_t local = reinterpret_cast<uint64_t>(w.local);
  uint64_t local_size = static_cast<uint64_t>(w.kernel->local_bytes) * kLanes;
  if (local && addr >= local && addr + size <= local + local_size) return;
  if (size == 0) return;
  MemoryRange found;
  if (find_range(addr, &found) && addr + size <= found.begin + found.size) {
    last = found;
    generation = now;
    return;
  }
  std::string near;
  MemoryRange r;
  if (find_range(addr, &r) || nearest_allocation(addr, 1 << 20, &r)) {
    near = format(", %lld bytes from the start of a %s of %llu bytes", (long long)(addr - r.begin),
                  r.what.c_str(), (unsigned long long)r.size);
  }
  trap(w, Err::kIllegalAddress,
       format("access of %llu bytes at 0x%llx outside every allocation%s", (unsigned long long)size,
              (unsigned long long)addr, near.c_str()));
}

void resolve(const Warp& w, const Insn& i, const MemOp& x, uint32_t mask, uint32_t size,
             uint8_t* (&out)[kLanes]) {
  uint64_t addr[kLanes];
  if (x.wide) {
    const uint64_t* a = w.cell<uint64_t>(i.a);
    for (int l = 0; l < kLanes; ++l) addr[l] = a[l] + static_cast<uint64_t>(i.imm);
  } else {
    const uint32_t* a = w.cell<uint32_t>(i.a);
    for (int l = 0; l < kLanes; ++l)
      addr[l] = static_cast<uint32_t>(a[l] + static_cast<uint32_t>(i.imm));
  }
  uint64_t misaligned = 0;
  lanes(mask, [&](int l) { misaligned |= addr[l] & (size - 1); });
  if (__builtin_expect(misaligned != 0 && (size & (size - 1)) == 0, 0)) {
    for (int l = 0; l < kLanes; ++l) {
      if ((mask >> l & 1) && (addr[l] & (size - 1))) {
        trap(w, Err::kMisalignedAddress,
             format("lane %d: address 0x%llx is not aligned to %u bytes", l,
                    (unsigned long long)addr[l], size));
      }
    }
  }
  uint64_t window = reinterpret_cast<uint64_t>(w.cl->window);
  if (x.space == Mem::kShared) {
    uint64_t lo = (static_cast<uint64_t>(w.cta->rank) << kRankShift) + kSmemBase;
    uint64_t hi = (static_cast<uint64_t>(w.cta->rank) << kRankShift) + w.cta->smem_end;
    bool bad = false;
    lanes(mask, [&](int l) { bad |= addr[l] < lo || addr[l] + size > hi; });
    if (__builtin_expect(bad, 0)) {
      lanes(mask, [&](int l) { shared_ptr_checked(w, addr[l], size); });
    }
    for (int l = 0; l < kLanes; ++l) out[l] = reinterpret_cast<uint8_t*>(window + addr[l]);
    return;
  }
  if (x.space == Mem::kGeneric) {
    lanes(mask, [&](int l) {
      if (addr[l] - window < kWindow) shared_ptr_checked(w, addr[l] - window, size);
    });
  }
  if (x.space == Mem::kLocal) {
    uint64_t lo = reinterpret_cast<uint64_t>(w.local);
    uint64_t hi = lo + static_cast<uint64_t>(w.kernel->local_bytes) * kLanes;
    lanes(mask, [&](int l) {
      if (addr[l] < lo || addr[l] + size > hi) {
        trap(w, Err::kIllegalAddress,
             format("lane %d: local address 0x%llx is outside the local memory of the warp", l,
                    (unsigned long long)addr[l]));
      }
    });
  }
  if (__builtin_expect(host_ranges_registered(), 0) &&
      (x.space == Mem::kGeneric || x.space == Mem::kGlobal)) {
    lanes(mask, [&](int l) {
      if (addr[l] - window >= kWindow) check_global_slow(w, addr[l], size);
    });
  }
  for (int l = 0; l < kLanes; ++l) out[l] = reinterpret_cast<uint8_t*>(addr[l]);
}

void emit_accesses(Warp& w, const MemOp& x, uint32_t mask, uint32_t size, Rw rw,
                   uint8_t* const (&ptr)[kLanes]) {
  Access a;
  a.agent = w.agent;
  a.rw = rw;
  a.order = x.order;
  a.scope = x.scope;
  a.size = size;
  a.site = w.site();
  uint8_t* local_end = w.local + static_cast<size_t>(w.kernel->local_bytes) * kLanes;
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = __builtin_ctz(m);
    a.lane = static_cast<uint32_t>(l);
    uint8_t* p = ptr[l];
    if (in_window(w, p)) {
      a.space = Space::kShared;
      a.addr = shared_key(*w.cl, static_cast<uint32_t>(p - w.cl->window));
    } else {
      a.space = x.space == Mem::kParam                     ? Space::kParam
                : w.local && p >= w.local && p < local_end ? Space::kLocal
                                                           : Space::kGlobal;
      a.addr = reinterpret_cast<uint64_t>(p);
    }
    for (Observer* o : *w.cl->observers) o->on_access(a);
  }
}

uint32_t shared_address(const Warp& w, const Insn& i, bool wide, bool generic, int lane,
                        uint32_t cell, int64_t offset) {
  uint64_t a = wide ? w.cell<uint64_t>(cell)[lane] : w.cell<uint32_t>(cell)[lane];
  a += static_cast<uint64_t>(offset);
  if (generic && wide) {
    uint64_t rel = a - reinterpret_cast<uint64_t>(w.cl->window);
    if (rel < kWindow) return static_cast<uint32_t>(rel);
    trap(w, Err::kIllegalAddress,
         format("lane %d: generic address 0x%llx is not in shared memory", lane,
                (unsigned long long)a));
  }
  if (a >= kWindow)
    trap(w, Err::kIllegalAddress,
         format("lane %d: 0x%llx is no shared address", lane, (unsigned long long)a));
  return static_cast<uint32_t>(a);
}

namespace {

// T: unsigned type in memory, D: cell type, S: value type for the extension.
template <class D, class S>
inline void load_elem(D* d, uint8_t* const (&p)[kLanes], uint32_t m, uint32_t at) {
  if (m == kFull && sizeof(D) == sizeof(S)) {
    bool unit = true;
    for (int l = 1; l < kLanes; ++l) unit &= p[l] == p[0] + l * sizeof(S);
    if (unit && at == 0) {
      std::memcpy(d, p[0], sizeof(S) * kLanes);
      return;
    }
  }
  lanes(m, [&](int l) {
    S v;
    std::memcpy(&v, p[l] + at, sizeof(S));
    d[l] = static_cast<D>(v);
  });
}

template <class D, class S>
void load_all(Warp& w, const MemOp& x, uint8_t* const (&p)[kLanes], uint32_t m) {
  for (uint32_t k = 0; k < x.count; ++k) {
    if (x.cells[k]) load_elem<D, S>(w.cell<D>(x.cells[k]), p, m, k * sizeof(S));
  }
}

template <class D>
void load_width(Warp& w, const MemOp& x, uint8_t* const (&p)[kLanes], uint32_t m) {
  // The extension goes to the destination register; a signed source of a wider cell is
  // sign-extended.
  switch (x.bytes) {
    case 1:
      x.is_signed ? load_all<D, int8_t>(w, x, p, m) : load_all<D, uint8_t>(w, x, p, m);
      break;
    case 2:
      x.is_signed ? load_all<D, int16_t>(w, x, p, m) : load_all<D, uint16_t>(w, x, p, m);
      break;
    case 4:
      x.is_signed ? load_all<D, int32_t>(w, x, p, m) : load_all<D, uint32_t>(w, x, p, m);
      break;
    default:
      load_all<D, uint64_t>(w, x, p, m);
  }
}

void load_values(Warp& w, const MemOp& x, uint8_t* const (&p)[kLanes], uint32_t m) {
  switch (x.cell_bits) {
    case 16:
      load_width<uint16_t>(w, x, p, m);
      break;
    case 32:
      load_width<uint32_t>(w, x, p, m);
      break;
    case 64:
      load_width<uint64_t>(w, x, p, m);
      break;
    default:
      for (uint32_t k = 0; k < x.count; ++k) {
        uint64_t* d = w.cell<uint64_t>(x.cells[k]);
        lanes(m, [&](int l) {
          std::memcpy(&d[l], p[l] + 16 * k, 8);
          std::memcpy(&d[l + kLanes], p[l] + 16 * k + 8, 8);
        });
      }
  }
}

Status op_ld(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const MemOp*>(i.x);
  uint8_t* p[kLanes];
  uint32_t size = static_cast<uint32_t>(x.bytes) * x.count;
  resolve(w, i, x, m, size, p);
  if (x.order >= Order::kAcquire) std::atomic_thread_fence(std::memory_order_acquire);
  load_values(w, x, p, m);
  if (watched(w)) emit_accesses(w, x, m, size, Rw::kRead, p);
  // Polling another warp's flag: let the others run now and then.
  if (x.order != Order::kWeak && w.splits.size() > 1) return Status::kPause;
  return Status::kNext;
}

// Entry parameters: one address for all lanes.
Status op_ld_param(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const MemOp*>(i.x);
  const uint8_t* src =
      reinterpret_cast<const uint8_t*>(w.cell<uint64_t>(i.a)[0] + static_cast<uint64_t>(i.imm));
  uint8_t* p[kLanes];
  for (int l = 0; l < kLanes; ++l) p[l] = const_cast<uint8_t*>(src);
  load_values(w, x, p, m);
  return Status::kNext;
}

template <class D, class T>
void store_all(Warp& w, const MemOp& x, uint8_t* const (&p)[kLanes], uint32_t m) {
  for (uint32_t k = 0; k < x.count; ++k) {
    const D* s = w.cell<D>(x.cells[k]);
    if (m == kFull && sizeof(D) == sizeof(T) && x.count == 1) {
      bool unit = true;
      for (int l = 1; l < kLanes; ++l) unit &= p[l] == p[0] + l * sizeof(T);
      if (unit) {
        std::memcpy(p[0], s, sizeof(T) * kLanes);
        continue;
      }
    }
    lanes(m, [&](int l) {
      T v = static_cast<T>(s[l]);
      std::memcpy(p[l] + k * sizeof(T), &v, sizeof(T));
    });
  }
}

template <class D>
void store_width(Warp& w, const MemOp& x, uint8_t* const (&p)[kLanes], uint32_t m) {
  switch (x.bytes) {
    case 1:
      store_all<D, uint8_t>(w, x, p, m);
      break;
    case 2:
      store_all<D, uint16_t>(w, x, p, m);
      break;
    case 4:
      store_all<D, uint32_t>(w, x, p, m);
      break;
    default:
      store_all<D, uint64_t>(w, x, p, m);
  }
}

Status op_st(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const MemOp*>(i.x);
  uint8_t* p[kLanes];
  uint32_t size = static_cast<uint32_t>(x.bytes) * x.count;
  resolve(w, i, x, m, size, p);
  if (x.order >= Order::kRelease) std::atomic_thread_fence(std::memory_order_release);
  switch (x.cell_bits) {
    case 16:
      store_width<uint16_t>(w, x, p, m);
      break;
    case 32:
      store_width<uint32_t>(w, x, p, m);
      break;
    case 64:
      store_width<uint64_t>(w, x, p, m);
      break;
    default:
      for (uint32_t k = 0; k < x.count; ++k) {
        const uint64_t* s = w.cell<uint64_t>(x.cells[k]);
        lanes(m, [&](int l) {
          std::memcpy(p[l] + 16 * k, &s[l], 8);
          std::memcpy(p[l] + 16 * k + 8, &s[l + kLanes], 8);
        });
      }
  }
  w.cl->progress = true;
  if (watched(w)) emit_accesses(w, x, m, size, Rw::kWrite, p);
  return Status::kNext;
}

Status op_nop(Warp&, const Insn&, uint32_t) { return Status::kNext; }

}  // namespace

Order order_of(Lower& L) {
  if (L.has("relaxed") || L.has("volatile")) return Order::kRelaxed;
  if (L.has("acquire")) return Order::kAcquire;
  if (L.has("release")) return Order::kRelease;
  if (L.has("acq_rel")) return Order::kAcqRel;
  if (L.has("sc")) return Order::kSeqCst;
  return Order::kWeak;
}

Scope scope_of(Lower& L) {
  if (L.has("cta")) return Scope::kCta;
  if (L.has("cluster")) return Scope::kCluster;
  if (L.has("gpu") || L.has("gl")) return Scope::kGpu;
  if (L.has("sys") || L.has("volatile")) return Scope::kSys;
  return Scope::kNone;
}

Mem space_of(Lower& L) {
  if (L.has("shared") || L.has("shared::cta") || L.has("shared::cluster")) return Mem::kShared;
  if (L.has("global") || L.has("const")) return Mem::kGlobal;
  if (L.has("local")) return Mem::kLocal;
  if (L.has("param") || L.has("param::entry") || L.has("param::func")) return Mem::kParam;
  return Mem::kGeneric;
}

Address memory_operand(Lower& L, size_t index, MemOp* x) {
  x->space = space_of(L);
  x->order = order_of(L);
  x->scope = scope_of(L);
  Address a = L.address(index, x->space == Mem::kShared);
  x->wide = a.wide;
  if (!a.wide && x->space != Mem::kShared) L.fail("a 32-bit address needs the shared space");
  if (x->space == Mem::kParam && a.local) x->space = Mem::kLocal;
  return a;
}

namespace {

void element_type(Lower& L, MemOp* x, const Operand& data, bool is_dst) {
  Type t = L.type();
  x->bytes = static_cast<uint8_t>(t.bits / 8);
  x->is_signed = t.kind == 's';
  int want = L.has("v2") ? 2 : L.has("v4") ? 4 : L.has("v8") ? 8 : 1;
  x->count = static_cast<uint8_t>(want);
  int have = data.kind == Operand::kVec ? static_cast<int>(data.elems.size()) : 1;
  if (have != want) L.fail(format("expected %d data registers, found %d", want, have));
  if (x->bytes * want > 32) L.fail("vector access above 32 bytes");
  auto one = [&](const Operand& o) {
    uint8_t bits = 0;
    uint32_t cell;
    if (is_dst && o.kind == Operand::kSink) {
      cell = L.scratch(t);
      bits = static_cast<uint8_t>(t.bits <= 16 ? 16 : t.bits > 64 ? 128 : t.bits);
    } else if (t.bits == 128) {
      cell = is_dst ? L.dst(o, t) : L.src(o, t);
      bits = 128;
    } else {
      cell = is_dst ? L.dst_loose(o, t, &bits) : L.src_loose(o, t, &bits);
    }
    if (!x->cells.empty() && bits != x->cell_bits) L.fail("data registers of different widths");
    x->cell_bits = bits;
    x->cells.push_back(cell);
  };
  if (data.kind == Operand::kVec) {
    for (auto& o : data.elems) one(o);
  } else {
    one(data);
  }
}

}  // namespace

void low_ld(Lower& L) {
  auto* x = L.extra<MemOp>();
  Address a = memory_operand(L, 1, x);
  element_type(L, x, L.op(0), true);
  bool uniform = x->space == Mem::kParam && a.uniform_param;
  Insn& i = L.emit(uniform ? op_ld_param : op_ld);
  i.a = a.cell;
  i.imm = a.offset;
  i.x = x;
}

void low_st(Lower& L) {
  auto* x = L.extra<MemOp>();
  Address a = memory_operand(L, 0, x);
  element_type(L, x, L.op(1), false);
  Insn& i = L.emit(op_st);
  i.a = a.cell;
  i.imm = a.offset;
  i.x = x;
}

void low_prefetch(Lower& L) {
  // Prefetches change no value. The address is evaluated for its errors only where the manual says
  // it must be valid.
  L.emit(op_nop);
}

}  // namespace ptxsim
