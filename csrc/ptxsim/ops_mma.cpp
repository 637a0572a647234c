// SPDX-License-Identifier: Apache-2.0
// Warp and warpgroup matrix instructions (PTX ISA 9.7.14, 9.7.15): operands to sem/mma.h,
// sem/frag.h and sem/umma.h.
#include "memory.h"
#include "sem/frag.h"
#include "sem/mma.h"
#include "sem/umma.h"
#include "warp_sync.h"

namespace ptxsim {
namespace {

const Type kB32{'b', 32, 1};
const Type kB64{'b', 64, 1};
const Type kU16{'u', 16, 1};

using sem::Elem;

Elem elem_of(const std::string& n) {
  static const std::unordered_map<std::string, Elem> map = {
      {"f16", Elem::kF16},    {"bf16", Elem::kBf16}, {"tf32", Elem::kTf32}, {"f32", Elem::kF32},
      {"f64", Elem::kF64},    {"e4m3", Elem::kE4m3}, {"e5m2", Elem::kE5m2}, {"e2m3", Elem::kE2m3},
      {"e3m2", Elem::kE3m2},  {"e2m1", Elem::kE2m1}, {"s8", Elem::kS8},     {"u8", Elem::kU8},
      {"s4", Elem::kS4},      {"u4", Elem::kU4},     {"s32", Elem::kS32},   {"ue8m0", Elem::kUe8m0},
      {"ue4m3", Elem::kUe4m3}};
  auto it = map.find(n);
  return it == map.end() ? Elem::kF32 : it->second;
}

bool is_elem(const std::string& n) { return n == "f32" || elem_of(n) != Elem::kF32; }

// Modifiers that name element types, in order.
std::vector<std::string> elems(Lower& L) {
  std::vector<std::string> v;
  for (auto& g : L.m.groups) {
    if (!g.empty() && is_elem(g)) v.push_back(g);
  }
  return v;
}

// ---- ldmatrix, stmatrix, movmatrix
// ---------------------------------------------------------------
struct MatrixExtra : MemOp {
  sem::MatrixOp op;
  uint32_t used = 16;  // bytes of a row that hold elements
};

void emit_rows(Warp& w, const uint32_t* addr, int rows, Rw rw, uint32_t used = 16) {
  if (!watched(w)) return;
  Access a;
  a.agent = w.agent;
  a.space = Space::kShared;
  a.rw = rw;
  a.size = used;
  a.site = w.site();
  for (int k = 0; k < rows; ++k) {
    a.addr = shared_key(*w.cl, addr[k]);
    a.lane = static_cast<uint32_t>(k);
    for (Observer* o : *w.cl->observers) o->on_access(a);
  }
}

void row_addresses(const Warp& w, const Insn& i, const MatrixExtra& x, int rows, uint32_t* addr) {
  for (int k = 0; k < rows; ++k) {
    addr[k] = shared_address(w, i, x.wide, x.space == Mem::kGeneric, k, i.a, i.imm);
    if (addr[k] & 15)
      trap(w, Err::kMisalignedAddress,
           format("matrix row address 0x%x of lane %d is not aligned to 16 bytes", addr[k], k));
    shared_ptr_checked(w, addr[k], 16);
  }
}

Status op_ldmatrix(Warp& w, const Insn& i, uint32_t) {
  auto& x = *static_cast<const MatrixExtra*>(i.x);
  if (!converged(w, kFull)) return Status::kConverge;
  int rows = sem::matrix_rows(x.op);
  uint32_t addr[kLanes];
  row_addresses(w, i, x, rows, addr);
  uint8_t data[kLanes][16];
  for (int k = 0; k < rows; ++k) std::memcpy(data[k], w.cl->window + addr[k], 16);
  uint32_t* reg[8];
  for (size_t k = 0; k < x.cells.size(); ++k) reg[k] = w.cell<uint32_t>(x.cells[k]);
  sem::ldmatrix(x.op, data, reg);
  emit_rows(w, addr, rows, Rw::kRead, x.used);
  return Status::kNext;
}

Status op_stmatrix(Warp& w, const Insn& i, uint32_t) {
  auto& x = *static_cast<const MatrixExtra*>(i.x);
  if (!converged(w, kFull)) return Status::kConverge;
  int rows = sem::matrix_rows(x.op);
  uint32_t addr[kLanes];
  row_addresses(w, i, x, rows, addr);
  uint8_t data[kLanes][16];
  const uint32_t* reg[8];
  for (size_t k = 0; k < x.cells.size(); ++k) reg[k] = w.cell<uint32_t>(x.cells[k]);
  sem::stmatrix(x.op, reg, data);
  for (int k = 0; k < rows; ++k) std::memcpy(w.cl->window + addr[k], data[k], 16);
  w.cl->progress = true;
  emit_rows(w, addr, rows, Rw::kWrite);
  return Status::kNext;
}

Status op_movmatrix(Warp& w, const Insn& i, uint32_t) {
  if (!converged(w, kFull)) return Status::kConverge;
  uint32_t tmp[kLanes];
  sem::movmatrix(w.cell<uint32_t>(i.a), tmp);
  std::memcpy(w.cell<uint32_t>(i.d), tmp, sizeof(tmp));
  return Status::kNext;
}

// ---- mma.sync -----------------------------------------------------------------------------------
struct MmaExtra : Extra {
  sem::MmaSync op;
  std::vector<uint32_t> d, a, b, c;
  uint32_t sfa = 0, sfb = 0;
  uint32_t ids[4] = {0, 0, 0, 0};  // cells: byte a, thread a, byte b, thread b
};

template <class T>
void pointers(const Warp& w, const std::vector<uint32_t>& cells, T** out) {
  for (size_t k = 0; k < cells.size(); ++k) out[k] = w.cell<std::remove_const_t<T>>(cells[k]);
}

Status op_mma(Warp& w, const Insn& i, uint32_t) {
  auto& x = *static_cast<const MmaExtra*>(i.x);
  if (!converged(w, kFull)) return Status::kConverge;
  ++w.cl->mma_sync;
  if (x.op.d == Elem::kF64) {
    const double *a[16], *b[16], *c[16];
    double* d[16];
    pointers(w, x.a, a);
    pointers(w, x.b, b);
    pointers(w, x.c, c);
    pointers(w, x.d, d);
    need(w, sem::mma_sync_f64(x.op, a, b, c, d));
    return Status::kNext;
  }
  const uint32_t *a[16], *b[16], *c[16];
  uint32_t* d[16];
  pointers(w, x.a, a);
  pointers(w, x.b, b);
  pointers(w, x.c, c);
  pointers(w, x.d, d);
  sem::MmaScales s;
  if (x.sfa) {
    s.a = w.cell<uint32_t>(x.sfa);
    s.b = w.cell<uint32_t>(x.sfb);
    int* id[4] = {&s.byte_a, &s.thread_a, &s.byte_b, &s.thread_b};
    for (int k = 0; k < 4; ++k) {
      const uint16_t* v = w.cell<uint16_t>(x.ids[k]);
      for (int l = 1; l < kLanes; ++l) {
        if (v[l] != v[0]) trap(w, Err::kIllegalInstruction, "scale selectors differ between lanes");
      }
      *id[k] = v[0];
    }
    need(w, sem::check_mma_scales(x.op, s));
  }
  need(w, sem::mma_sync(x.op, a, b, c, d, x.sfa ? &s : nullptr, config().accumulate));
  return Status::kNext;
}

void shape_of(Lower& L, sem::MmaSync* op) {
  for (auto& g : L.m.groups) {
    if (sscanf(g.c_str(), "m%dn%dk%d", &op->m, &op->n, &op->k) == 3) return;
  }
  L.fail("no shape");
}

void mma_registers(Lower& L, MmaExtra* x) {
  Type t = x->op.d == Elem::kF64 ? kB64 : kB32;
  x->d = L.vec(L.op(0), t, true);
  x->a = L.vec(L.op(1), t, false);
  x->b = L.vec(L.op(2), t, false);
  x->c = L.vec(L.op(3), t, false);
  std::string e = sem::check_mma_sync(x->op);
  if (!e.empty()) L.fail(e);
  auto count = [&](const std::vector<uint32_t>& v, int want, const char* what) {
    if (static_cast<int>(v.size()) != want)
      L.fail(format("%s needs %d registers, found %zu", what, want, v.size()));
  };
  count(x->d, sem::mma_sync_d_regs(x->op), "d");
  count(x->a, sem::mma_sync_a_regs(x->op), "a");
  count(x->b, sem::mma_sync_b_regs(x->op), "b");
  count(x->c, sem::mma_sync_c_regs(x->op), "c");
  Insn& i = L.emit(op_mma);
  i.x = x;
  i.flags |= kBlocking;
}

// ---- wgmma --------------------------------------------------------------------------------------
struct WgmmaExtra : Extra {
  sem::WgmmaOp op;
  std::vector<uint32_t> d, a;
  uint32_t a_desc = 0, b_desc = 0;
  uint32_t scale_d = 0;
  bool not_scale_d = false;
};

// One wgmma of a warpgroup: it runs once its four warps have issued it; each warp has its own
// asynchronous operation (agent).
struct WgmmaState {
  AsyncPtr ops[4];
  Warp* warps[4] = {};
  int issued = 0;
  bool ran = false;
  std::vector<uint32_t> a_regs;  // [r][128], copied at issue
  uint64_t a_desc = 0, b_desc = 0;
  bool scale_d = true;
  const WgmmaExtra* x = nullptr;
};

void emit_operand(Warp& w, const AsyncOp& op, const sem::SmemOperand& s) {
  if (!watched(w)) return;
  std::vector<uint32_t> chunks;
  sem::operand_chunks(s, &chunks);
  emit_chunks(w, op, *op.cta, chunks);
}

void run_wgmma(WgmmaState& s) {
  if (s.ran) return;
  s.ran = true;
  Warp& w0 = *s.warps[0];
  sem::SmemOperand a, b;
  need(w0, sem::plan_wgmma(s.x->op, s.a_desc, s.b_desc, &a, &b));
  sem::CtaView view;
  view.window = w0.cta->smem;
  view.smem_begin = kSmemBase;
  view.smem_end = w0.cta->smem_end;
  size_t nd = s.x->d.size(), na = s.x->a.size();
  std::vector<uint32_t> d(nd * 128);
  std::vector<uint32_t*> dp(nd);
  std::vector<const uint32_t*> ap(na);
  for (size_t r = 0; r < nd; ++r) {
    dp[r] = &d[r * 128];
    for (int q = 0; q < 4; ++q)
      std::memcpy(dp[r] + 32 * q, s.warps[q]->cell<uint32_t>(s.x->d[r]), 128);
  }
  for (size_t r = 0; r < na; ++r) ap[r] = &s.a_regs[r * 128];
  need(w0, sem::execute_wgmma(s.x->op, a, b, view, na ? ap.data() : nullptr, dp.data(), s.scale_d,
                              config().accumulate));
  for (size_t r = 0; r < nd; ++r) {
    for (int q = 0; q < 4; ++q)
      std::memcpy(s.warps[q]->cell<uint32_t>(s.x->d[r]), dp[r] + 32 * q, 128);
  }
  for (auto& op : s.ops) {
    if (!s.x->op.a_in_regs) emit_operand(w0, *op, a);
    emit_operand(w0, *op, b);
  }
}

Status op_wgmma(Warp& w, const Insn& i, uint32_t) {
  auto& x = *static_cast<const WgmmaExtra*>(i.x);
  if (!converged(w, kFull)) return Status::kConverge;
  if (w.live != kFull) trap(w, Err::kIllegalInstruction, "wgmma by a partial warp");
  uint32_t group = w.id / 4, q = w.id % 4;
  if (group * 4 + 4 > w.cta->warps.size())
    trap(w, Err::kIllegalInstruction, "wgmma needs a full warpgroup of 4 warps");
  std::pair<uint32_t, uint64_t> key{group, w.wgmma_count++};
  auto& slot = w.cta->wgmma_pending[key];
  if (!slot) slot = std::make_shared<WgmmaState>();
  auto state = std::static_pointer_cast<WgmmaState>(slot);
  uint64_t b_desc = w.cell<uint64_t>(x.b_desc)[0],
           a_desc = x.a_desc ? w.cell<uint64_t>(x.a_desc)[0] : 0;
  uint32_t sd = *w.cell<uint32_t>(x.scale_d) ^ (x.not_scale_d ? kFull : 0);
  if (sd != 0 && sd != kFull)
    trap(w, Err::kIllegalInstruction, "wgmma scale-d differs between lanes");
  if (state->issued == 0) {
    state->x = &x;
    state->a_desc = a_desc;
    state->b_desc = b_desc;
    state->scale_d = sd != 0;
    state->a_regs.resize(x.a.size() * 128);
  } else if (state->x != &x || state->a_desc != a_desc || state->b_desc != b_desc ||
             state->scale_d != (sd != 0)) {
    trap(w, Err::kIllegalInstruction,
         "the warps of the warpgroup issue different wgmma instructions or descriptors");
  }
  for (size_t r = 0; r < x.a.size(); ++r)
    std::memcpy(&state->a_regs[r * 128 + 32 * q], w.cell<uint32_t>(x.a[r]), 128);
  state->warps[q] = &w;
  ++state->issued;
  AsyncPtr op = new_async(w, AgentKind::kWgmma);
  op->held = true;
  op->run = [state] { run_wgmma(*state); };
  state->ops[q] = op;
  if (watched(w) && w.last_wgmma) {
    for (Observer* o : *w.cl->observers) o->on_order(w.last_wgmma, op->agent);
  }
  w.last_wgmma = op->agent;
  w.wgmma.open.push_back(op);
  if (state->issued == 4) {
    ++w.cl->wgmma;
    for (auto& each : state->ops) {
      each->held = false;
      for (int k = 0; k < 4; ++k) each->parts[k] = state->ops[k]->agent;
    }
    w.cl->progress = true;
    w.cta->wgmma_pending.erase(key);
    if (config().mode == Mode::kEager) {
      for (auto& each : state->ops) force(*each);
    }
  }
  return Status::kNext;
}

Status op_wgmma_fence(Warp& w, const Insn&, uint32_t) {
  if (!converged(w, kFull)) return Status::kConverge;
  if (watched(w)) {
    for (Observer* o : *w.cl->observers)
      o->on_fence(w.agent, Fence::kWgmma, Order::kAcqRel, Scope::kCta, w.site());
  }
  return Status::kNext;
}

Status op_wgmma_commit(Warp& w, const Insn&, uint32_t) {
  if (!converged(w, kFull)) return Status::kConverge;
  w.wgmma.committed.push_back(std::move(w.wgmma.open));
  w.wgmma.open.clear();
  return Status::kNext;
}

Status op_wgmma_wait(Warp& w, const Insn& i, uint32_t) {
  if (!converged(w, kFull)) return Status::kConverge;
  auto& g = w.wgmma.committed;
  while (g.size() > static_cast<size_t>(i.imm)) {
    for (auto& op : g.front()) {
      if (op->held) return Status::kBlock;
    }
    for (auto& op : g.front()) {
      force(*op);
      if (watched(w)) {
        // The operation is one of the warpgroup: seen complete by one warp, it is complete.
        for (AgentId part : op->parts) {
          for (Observer* o : *w.cl->observers) o->on_join(w.agent, part, Join::kFull);
        }
      }
    }
    g.pop_front();
  }
  return Status::kNext;
}

}  // namespace

void emit_chunks(Warp& w, const AsyncOp& op, Cta& cta, const std::vector<uint32_t>& chunks,
                 uint32_t used) {
  if (!watched(w)) return;
  Access a;
  a.agent = op.agent;
  a.space = Space::kShared;
  a.rw = Rw::kRead;
  a.proxy = Proxy::kAsync;
  a.site = op.site;
  // Chunks are 16 bytes; neighbours merge into one event.
  for (size_t k = 0; k < chunks.size();) {
    size_t n = 1;
    while (used == 16 && k + n < chunks.size() && chunks[k + n] == chunks[k] + 16 * n) ++n;
    a.addr = shared_key(*w.cl, cta.rank << kRankShift | chunks[k]);
    a.size = used == 16 ? static_cast<uint32_t>(16 * n) : used;
    for (Observer* o : *w.cl->observers) o->on_access(a);
    k += n;
  }
}

namespace {

void matrix(Lower& L, bool load) {
  auto* x = L.extra<MatrixExtra>();
  bool trans = L.has("trans");
  x->op.num = L.has("x1") ? 1 : L.has("x2") ? 2 : 4;
  x->op.trans = trans;
  bool b6 = L.has("b6x16_p32"), b4 = L.has("b4x16_p64");
  if (L.has("m8n8")) {
    if (!L.has("b16")) L.fail("m8n8 needs .b16");
    x->op.shape = sem::MatrixShape::kM8n8B16;
  } else if (L.has("m8n16")) {
    if (!b6 && !b4) L.fail("m8n16 needs .b8x16.b6x16_p32 or .b8x16.b4x16_p64");
    x->op.shape = b6 ? sem::MatrixShape::kM8n16B8x16B6 : sem::MatrixShape::kM8n16B8x16B4;
  } else if (L.has("m16n16")) {
    x->op.shape = b6   ? sem::MatrixShape::kM16n16B8x16B6
                  : b4 ? sem::MatrixShape::kM16n16B8x16B4
                       : sem::MatrixShape::kM16n16B8;
  } else {
    x->op.shape = sem::MatrixShape::kM16n8B8;
  }
  x->used = b6 ? 12 : b4 ? 8 : 16;
  std::string e = load ? sem::check_ldmatrix(x->op) : sem::check_stmatrix(x->op);
  if (!e.empty()) L.fail(e);
  size_t at = load ? 1 : 0;
  x->space = space_of(L);
  Address a = L.address(at, x->space == Mem::kShared);
  x->wide = a.wide;
  x->cells = L.vec(L.op(load ? 0 : 1), kB32, load);
  if (static_cast<int>(x->cells.size()) != sem::matrix_regs(x->op)) {
    L.fail(format("expected %d registers, found %zu", sem::matrix_regs(x->op), x->cells.size()));
  }
  Insn& i = L.emit(load ? op_ldmatrix : op_stmatrix);
  i.a = a.cell;
  i.imm = a.offset;
  i.x = x;
  i.flags |= kBlocking;
}

}  // namespace

void low_ldmatrix(Lower& L) { matrix(L, true); }
void low_stmatrix(Lower& L) { matrix(L, false); }

void low_movmatrix(Lower& L) {
  uint32_t a = L.src(1, kB32), d = L.dst(0, kB32);
  Insn& i = L.emit(op_movmatrix);
  i.d = d;
  i.a = a;
  i.flags |= kBlocking;
}

void low_mma_sync(Lower& L) {
  auto* x = L.extra<MmaExtra>();
  shape_of(L, &x->op);
  auto e = elems(L);
  if (e.size() != 4) L.unsupported("this mma type combination");
  x->op.d = elem_of(e[0]);
  x->op.a = elem_of(e[1]);
  x->op.b = elem_of(e[2]);
  x->op.c = elem_of(e[3]);
  x->op.satfinite = L.has("satfinite");
  if (L.has("kind::f8f6f4")) x->op.kind = sem::MmaKind::kF8f6f4;
  x->op.round = L.has("rz")   ? sem::Round::kRz
                : L.has("rm") ? sem::Round::kRm
                : L.has("rp") ? sem::Round::kRp
                              : sem::Round::kRn;
  mma_registers(L, x);
}

void low_mma_scaled(Lower& L) {
  auto* x = L.extra<MmaExtra>();
  shape_of(L, &x->op);
  auto e = elems(L);  // f32, a, b, f32, scale
  if (e.size() != 5) L.unsupported("this mma type combination");
  x->op.d = elem_of(e[0]);
  x->op.a = elem_of(e[1]);
  x->op.b = elem_of(e[2]);
  x->op.c = elem_of(e[3]);
  x->op.scale = elem_of(e[4]);
  x->op.kind = L.has("kind::mxf8f6f4") ? sem::MmaKind::kMxf8f6f4
               : L.has("kind::mxf4")   ? sem::MmaKind::kMxf4
                                       : sem::MmaKind::kMxf4nvf4;
  x->op.scale_vec = L.has("scale_vec::1X")                  ? 1
                    : L.has("scale_vec::2X")                ? 2
                    : L.has("scale_vec::4X")                ? 4
                    : x->op.kind == sem::MmaKind::kMxf8f6f4 ? 1
                                                            : 2;
  auto single = [&](const Operand& o) {
    if (o.kind != Operand::kVec) return L.src(o, kB32);
    if (o.elems.size() != 1) L.fail("scale data is one register");
    return L.src(o.elems[0], kB32);
  };
  x->sfa = single(L.op(4));
  x->sfb = single(L.op(6));
  for (int k = 0; k < 2; ++k) {
    const Operand& o = L.op(k ? 7 : 5);
    if (o.kind != Operand::kVec || o.elems.size() != 2) L.fail("expected {byte-id, thread-id}");
    x->ids[2 * k] = L.src(o.elems[0], kU16);
    x->ids[2 * k + 1] = L.src(o.elems[1], kU16);
  }
  mma_registers(L, x);
}

void low_wgmma_mma(Lower& L) {
  auto* x = L.extra<WgmmaExtra>();
  int m = 0;
  for (auto& g : L.m.groups) {
    if (sscanf(g.c_str(), "m%dn%dk%d", &m, &x->op.n, &x->op.k) == 3) break;
  }
  auto e = elems(L);
  if (e.size() != 3) L.unsupported("this wgmma type combination");
  x->op.d = elem_of(e[0]);
  x->op.a = elem_of(e[1]);
  x->op.b = elem_of(e[2]);
  x->op.satfinite = L.has("satfinite");
  x->d = L.vec(L.op(0), kB32, true);
  x->op.a_in_regs = L.op(1).kind == Operand::kVec;
  if (x->op.a_in_regs) {
    x->a = L.vec(L.op(1), kB32, false);
    if (x->a.size() != 4) L.fail("a takes four registers");
  } else {
    x->a_desc = L.src(1, kB64);
  }
  x->b_desc = L.src(2, kB64);
  x->scale_d = L.pred(L.op(3), &x->not_scale_d);
  size_t n = L.count();
  if (n > 4) {
    if (n < 6) L.fail("missing scale immediates");
    int64_t sa = L.immediate(4), sb = L.immediate(5);
    if ((sa != 1 && sa != -1) || (sb != 1 && sb != -1)) L.fail("imm-scale must be 1 or -1");
    x->op.negate_a = sa < 0;
    x->op.negate_b = sb < 0;
    if (n == 8) {
      x->op.trans_a = L.immediate(6) != 0;
      x->op.trans_b = L.immediate(7) != 0;
    } else if (n == 7) {
      x->op.trans_b = L.immediate(6) != 0;
    }
  }
  std::string err = sem::check_wgmma(x->op);
  if (!err.empty()) L.fail(err);
  size_t want =
      x->op.d == Elem::kF16 ? static_cast<size_t>(x->op.n / 4) : static_cast<size_t>(x->op.n / 2);
  if (x->d.size() != want) L.fail(format("d takes %zu registers, found %zu", want, x->d.size()));
  Insn& i = L.emit(op_wgmma);
  i.x = x;
  i.flags |= kBlocking;
}

void low_wgmma_fence(Lower& L) { L.emit(op_wgmma_fence).flags |= kBlocking; }
void low_wgmma_commit(Lower& L) { L.emit(op_wgmma_commit).flags |= kBlocking; }
void low_wgmma_wait(Lower& L) {
  int64_t n = L.immediate(0);
  Insn& i = L.emit(op_wgmma_wait);
  i.imm = n;
  i.flags |= kBlocking;
}

}  // namespace ptxsim
