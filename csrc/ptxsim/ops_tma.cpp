// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies: cp.async, cp.async.bulk, tensor copies, tensormap (PTX
// ISA 9.7.9.25-9.7.9.27). The shape of a tile is sem/tma.h; this file decides when effects land and
// which barrier hears of them.
#include "memory.h"
#include "sem/tma.h"

namespace ptxsim {
namespace {

const Type kU16{'u', 16, 1};
const Type kU32{'u', 32, 1};
const Type kU64{'u', 64, 1};
constexpr uint32_t kOffsetMask = (1u << kRankShift) - 1;

void emit_range(Warp& w, const AsyncOp& op, Space space, uint64_t addr, uint32_t size, Rw rw,
                Proxy proxy, Order order = Order::kWeak) {
  if (!watched(w) || size == 0) return;
  Access a;
  a.agent = op.agent;
  a.space = space;
  a.rw = rw;
  a.proxy = proxy;
  a.order = order;
  a.addr = addr;
  a.size = size;
  a.site = op.site;
  for (Observer* o : *w.cl->observers) o->on_access(a);
}

// ---- cp.async -----------------------------------------------------------------------------------
struct CpAsync : Extra {
  bool wide_d = false, wide_s = true;
  int64_t offset_s = 0;
  uint32_t src = 0;
  uint32_t size = 16;
  uint32_t src_size = 0;  // cell, 0 = all
  uint32_t ignore = 0;    // predicate cell
  bool not_ignore = false;
};

Status op_cp_async(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const CpAsync*>(i.x);
  struct Piece {
    uint32_t dst;
    const uint8_t* src;
    uint32_t bytes;
  };
  auto pieces = std::make_shared<std::vector<Piece>>();
  uint32_t ignore = 0;
  if (x.ignore) ignore = *w.cell<uint32_t>(x.ignore) ^ (x.not_ignore ? kFull : 0);
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    Piece p;
    p.dst = shared_address(w, i, x.wide_d, false, l, i.a, i.imm);
    shared_ptr_checked(w, p.dst, x.size);
    uint64_t src = w.cell<uint64_t>(x.src)[l] + static_cast<uint64_t>(x.offset_s);
    if (p.dst % x.size || src % x.size) {
      trap(w, Err::kMisalignedAddress,
           format("cp.async lane %d: 0x%x or 0x%llx is not aligned to %u bytes", l, p.dst,
                  (unsigned long long)src, x.size));
    }
    p.src = reinterpret_cast<const uint8_t*>(src);
    p.bytes = x.src_size ? std::min(w.cell<uint32_t>(x.src_size)[l], x.size) : x.size;
    if (ignore >> l & 1) p.bytes = 0;
    if (p.bytes) check_global(w, src, p.bytes);
    pieces->push_back(p);
  }
  AsyncPtr op = new_async(w, AgentKind::kCpAsync);
  AsyncOp* raw = op.get();
  Warp* wp = &w;
  uint32_t size = x.size;
  op->run = [wp, raw, pieces, size] {
    for (auto& p : *pieces) {
      uint8_t* d = wp->cl->window + p.dst;
      if (p.bytes) std::memcpy(d, p.src, p.bytes);
      std::memset(d + p.bytes, 0, size - p.bytes);
      emit_range(*wp, *raw, Space::kGlobal, reinterpret_cast<uint64_t>(p.src), p.bytes, Rw::kRead,
                 Proxy::kGeneric);
      emit_range(*wp, *raw, Space::kShared, shared_key(*wp->cl, p.dst), size, Rw::kWrite,
                 Proxy::kGeneric);
    }
  };
  lanes(m, [&](int l) { w.cp_async[l].open.push_back(op); });
  pool_add(w, op);
  return Status::kNext;
}

void commit(LaneGroups& g) {
  g.committed.push_back(std::move(g.open));
  g.open.clear();
}

void join(Warp& w, const AsyncPtr& op, Join what) {
  if (what == Join::kFull) {
    force(*op);
  } else {
    force_read(*op);
  }
  if (watched(w)) {
    for (Observer* o : *w.cl->observers) o->on_join(w.agent, op->agent, what);
  }
}

// Waits until at most `keep` committed groups are pending.
void wait_groups(Warp& w, LaneGroups& g, size_t keep, Join what) {
  if (what == Join::kRead) {
    if (g.committed.size() > keep) {
      for (size_t k = 0; k < g.committed.size() - keep; ++k) {
        for (auto& op : g.committed[k]) join(w, op, what);
      }
    }
    return;
  }
  while (g.committed.size() > keep) {
    for (auto& op : g.committed.front()) join(w, op, what);
    g.committed.pop_front();
  }
}

Status op_cp_commit(Warp& w, const Insn&, uint32_t m) {
  lanes(m, [&](int l) { commit(w.cp_async[l]); });
  return Status::kNext;
}

// aux: groups that may stay pending; n: wait_all.
Status op_cp_wait(Warp& w, const Insn& i, uint32_t m) {
  for (uint32_t r = m; r; r &= r - 1) {
    LaneGroups& g = w.cp_async[__builtin_ctz(r)];
    if (i.n) {
      for (auto& op : g.open) join(w, op, Join::kFull);
      g.open.clear();
    }
    wait_groups(w, g, i.n ? 0 : static_cast<size_t>(i.imm), Join::kFull);
  }
  return Status::kNext;
}

LaneGroups& bulk_groups(Warp& w, int lane) {
  if (!w.bulk) w.bulk = std::make_unique<LaneGroups[]>(kLanes);
  return w.bulk[lane];
}

Status op_bulk_commit(Warp& w, const Insn&, uint32_t m) {
  for (uint32_t r = m; r; r &= r - 1) commit(bulk_groups(w, __builtin_ctz(r)));
  return Status::kNext;
}

// n: .read
Status op_bulk_wait(Warp& w, const Insn& i, uint32_t m) {
  for (uint32_t r = m; r; r &= r - 1) {
    wait_groups(w, bulk_groups(w, __builtin_ctz(r)), static_cast<size_t>(i.imm),
                i.n ? Join::kRead : Join::kFull);
  }
  return Status::kNext;
}

// ---- operands of the bulk copies ----------------------------------------------------------------
struct Ref {
  uint32_t cell = 0;
  bool wide = true;
  int64_t offset = 0;
};
Ref ref_of(const Address& a) { return {a.cell, a.wide, a.offset}; }
uint32_t shared_at(const Warp& w, const Insn& i, const Ref& r, int lane) {
  return shared_address(w, i, r.wide, false, lane, r.cell, r.offset);
}
uint64_t global_at(const Warp& w, const Ref& r, int lane) {
  return w.cell<uint64_t>(r.cell)[lane] + static_cast<uint64_t>(r.offset);
}

struct BulkOp : Extra {
  Ref dst, src, bar, map;
  uint32_t size = 0;  // cell
  uint32_t mask = 0;  // multicast: cell of the CTA mask
  bool multicast = false, two_cta = false, src_shared = false;
  uint32_t byte_mask = 0;
  std::vector<uint32_t> coords;
  bool gather4 = false;
  int dims = 0;
  bool reduce = false;
  sem::TmaReduceOp op = sem::TmaReduceOp::kAdd;
  sem::TmaType type = sem::TmaType::kU32;
};

uint32_t targets_of(const Warp& w, const BulkOp& x, uint32_t dst, int lane) {
  uint32_t own = 1u << (dst >> kRankShift);
  if (!x.multicast) return own;
  uint32_t mask = w.cell<uint16_t>(x.mask)[lane];
  if (mask == 0 || mask >> w.cl->ctas.size()) {
    trap(w, Err::kIllegalInstruction,
         format("multicast mask 0x%x of a cluster of %zu CTAs", mask, w.cl->ctas.size()));
  }
  return mask;
}

// Barrier that hears of the copy into CTA `rank`.
uint32_t barrier_for(const BulkOp& x, uint32_t bar, uint32_t rank) {
  if (!x.multicast) return bar;
  if (x.two_cta) rank = (rank & ~1u) | (bar >> kRankShift & 1);
  return rank << kRankShift | (bar & kOffsetMask);
}

void check_bulk(const Warp& w, uint64_t a, uint64_t b, uint32_t n) {
  if ((a & 15) || (b & 15) || (n & 15)) {
    trap(w, Err::kMisalignedAddress,
         format("bulk copy of %u bytes from/to 0x%llx and 0x%llx: all must be multiples of 16", n,
                (unsigned long long)a, (unsigned long long)b));
  }
}

Status op_bulk_load(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const BulkOp*>(i.x);
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    uint32_t dst = shared_at(w, i, x.dst, l), bar = shared_at(w, i, x.bar, l);
    uint64_t src = x.src_shared
                       ? reinterpret_cast<uint64_t>(w.cl->window) + shared_at(w, i, x.src, l)
                       : global_at(w, x.src, l);
    uint32_t n = w.cell<uint32_t>(x.size)[l];
    check_bulk(w, dst, src, n);
    if (x.src_shared) shared_ptr_checked(w, shared_at(w, i, x.src, l), n);
    if (!x.src_shared) check_global(w, src, n);
    uint32_t targets = targets_of(w, x, dst, l);
    AsyncPtr op = new_async(w, AgentKind::kBulkLoad);
    AsyncOp* raw = op.get();
    Warp* wp = &w;
    const BulkOp* px = &x;
    op->run = [wp, raw, px, dst, bar, src, n, targets] {
      Warp& w = *wp;
      if (px->src_shared) {
        emit_range(w, *raw, Space::kShared,
                   shared_key(*w.cl, static_cast<uint32_t>(
                                         src - reinterpret_cast<uint64_t>(w.cl->window))),
                   n, Rw::kRead, Proxy::kAsync);
      } else {
        emit_range(w, *raw, Space::kGlobal, src, n, Rw::kRead, Proxy::kAsync);
      }
      for (uint32_t t = targets; t; t &= t - 1) {
        uint32_t rank = static_cast<uint32_t>(__builtin_ctz(t));
        uint32_t to = px->multicast ? rank << kRankShift | (dst & kOffsetMask) : dst;
        uint8_t* p = shared_ptr_checked(w, to, n);
        if (px->reduce) {
          sem::tma_reduce(px->type, px->op, reinterpret_cast<const uint8_t*>(src), p, n);
        } else {
          std::memcpy(p, reinterpret_cast<const void*>(src), n);
        }
        emit_range(w, *raw, Space::kShared, shared_key(*w.cl, to), n,
                   px->reduce ? Rw::kAtomic : Rw::kWrite, Proxy::kAsync,
                   px->reduce ? Order::kRelaxed : Order::kWeak);
        mbar_arrive(w, raw->agent, barrier_for(*px, bar, rank), 0, -static_cast<int64_t>(n),
                    Order::kRelease, raw->site);
      }
    };
    pool_add(w, op);
  }
  return Status::kNext;
}

Status op_bulk_store(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const BulkOp*>(i.x);
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    uint64_t dst = global_at(w, x.dst, l);
    uint32_t src = shared_at(w, i, x.src, l);
    uint32_t n = w.cell<uint32_t>(x.size)[l];
    check_bulk(w, dst, src, n);
    shared_ptr_checked(w, src, n);
    check_global(w, dst, n);
    uint32_t byte_mask = x.byte_mask ? w.cell<uint16_t>(x.byte_mask)[l] : 0xffff;
    AsyncPtr op = new_async(w, AgentKind::kBulkStore);
    AsyncOp* raw = op.get();
    Warp* wp = &w;
    const BulkOp* px = &x;
    auto data = std::make_shared<std::vector<uint8_t>>();
    op->read = [wp, raw, src, n, data] {
      data->assign(wp->cl->window + src, wp->cl->window + src + n);
      emit_range(*wp, *raw, Space::kShared, shared_key(*wp->cl, src), n, Rw::kRead, Proxy::kAsync);
    };
    op->run = [wp, raw, px, dst, n, data, byte_mask] {
      uint8_t* p = reinterpret_cast<uint8_t*>(dst);
      if (px->reduce) {
        sem::tma_reduce(px->type, px->op, data->data(), p, n);
      } else if (byte_mask == 0xffff) {
        std::memcpy(p, data->data(), n);
      } else {
        for (uint32_t k = 0; k < n; ++k) {
          if (byte_mask >> (k & 15) & 1) p[k] = (*data)[k];
        }
      }
      emit_range(*wp, *raw, Space::kGlobal, dst, n, px->reduce ? Rw::kAtomic : Rw::kWrite,
                 Proxy::kAsync, px->reduce ? Order::kRelaxed : Order::kWeak);
    };
    bulk_groups(w, l).open.push_back(op);
    pool_add(w, op);
  }
  return Status::kNext;
}

// ---- tensor copies ------------------------------------------------------------------------------
sem::TensorMap read_map(Warp& w, const BulkOp& x, int lane, uint64_t* address) {
  *address = global_at(w, x.map, lane);
  if (*address & 63)
    trap(w, Err::kMisalignedAddress,
         format("tensor map at 0x%llx is not aligned to 64 bytes", (unsigned long long)*address));
  sem::TensorMap map;
  need(w, sem::decode_tensor_map(reinterpret_cast<const void*>(*address), &map));
  if (!x.gather4 && map.rank != x.dims)
    trap(w, Err::kIllegalInstruction,
         format("a %dd copy with a tensor map of rank %d", x.dims, map.rank));
  return map;
}

void make_tile(Warp& w, const BulkOp& x, const sem::TensorMap& map, sem::TmaDir dir, int lane,
               uint32_t smem, sem::TmaTile* tile) {
  int32_t c[5] = {};
  for (size_t k = 0; k < x.coords.size() && k < 5; ++k) c[k] = w.cell<int32_t>(x.coords[k])[lane];
  need(w, x.gather4 ? sem::tma_gather4(map, dir, c, smem & kOffsetMask, tile)
                    : sem::tma_tile(map, dir, c, smem & kOffsetMask, tile));
}

Status op_tensor_load(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const BulkOp*>(i.x);
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    uint32_t dst = shared_at(w, i, x.dst, l), bar = shared_at(w, i, x.bar, l);
    uint64_t map_address;
    auto map = std::make_shared<sem::TensorMap>(read_map(w, x, l, &map_address));
    auto tile = std::make_shared<sem::TmaTile>();
    make_tile(w, x, *map, sem::TmaDir::kLoad, l, dst, tile.get());
    uint32_t targets = targets_of(w, x, dst, l);
    AsyncPtr op = new_async(w, AgentKind::kBulkLoad);
    AsyncOp* raw = op.get();
    Warp* wp = &w;
    const BulkOp* px = &x;
    emit_range(w, *op, Space::kGlobal, map_address, 128, Rw::kRead, Proxy::kTensormap);
    op->run = [wp, raw, px, dst, bar, map, tile, targets] {
      Warp& w = *wp;
      uint8_t pattern[16];
      sem::tma_fill_pattern(*map, pattern);
      for (uint32_t t = targets; t; t &= t - 1) {
        uint32_t rank = static_cast<uint32_t>(__builtin_ctz(t));
        uint32_t base = (px->multicast ? rank : dst >> kRankShift) << kRankShift;
        bool first = (t & (t - 1)) == 0;
        for (const sem::TmaRun& run : tile->runs) {
          uint8_t* p = shared_ptr_checked(w, base + run.smem, run.bytes);
          if (run.in_bounds) {
            check_global(w, run.global, run.gbytes ? run.gbytes : run.bytes);
            sem::tma_copy_load(*map, run, reinterpret_cast<const uint8_t*>(run.global), p);
            if (first)
              emit_range(w, *raw, Space::kGlobal, run.global, run.gbytes ? run.gbytes : run.bytes,
                         Rw::kRead, Proxy::kAsync);
          } else {
            for (uint32_t k = 0; k < run.bytes; ++k) p[k] = pattern[k & 15];
          }
          emit_range(w, *raw, Space::kShared, shared_key(*w.cl, base + run.smem), run.bytes,
                     Rw::kWrite, Proxy::kAsync);
        }
        mbar_arrive(w, raw->agent, barrier_for(*px, bar, rank), 0,
                    -static_cast<int64_t>(tile->tx_bytes), Order::kRelease, raw->site);
      }
    };
    pool_add(w, op);
  }
  return Status::kNext;
}

Status op_tensor_store(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const BulkOp*>(i.x);
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    uint32_t src = shared_at(w, i, x.src, l);
    uint64_t map_address;
    auto map = std::make_shared<sem::TensorMap>(read_map(w, x, l, &map_address));
    auto tile = std::make_shared<sem::TmaTile>();
    make_tile(w, x, *map, x.reduce ? sem::TmaDir::kReduce : sem::TmaDir::kStore, l, src,
              tile.get());
    if (x.reduce) need(w, sem::check_tma_reduce(map->type, x.op));
    AsyncPtr op = new_async(w, AgentKind::kBulkStore);
    AsyncOp* raw = op.get();
    Warp* wp = &w;
    const BulkOp* px = &x;
    uint32_t base = src >> kRankShift << kRankShift;
    auto data = std::make_shared<std::vector<uint8_t>>();
    emit_range(w, *op, Space::kGlobal, map_address, 128, Rw::kRead, Proxy::kTensormap);
    op->read = [wp, raw, base, tile, data] {
      for (const sem::TmaRun& run : tile->runs) {
        if (!run.in_bounds) continue;
        const uint8_t* p = shared_ptr_checked(*wp, base + run.smem, run.bytes);
        data->insert(data->end(), p, p + run.bytes);
        emit_range(*wp, *raw, Space::kShared, shared_key(*wp->cl, base + run.smem), run.bytes,
                   Rw::kRead, Proxy::kAsync);
      }
    };
    op->run = [wp, raw, px, map, tile, data] {
      const uint8_t* p = data->data();
      for (const sem::TmaRun& run : tile->runs) {
        if (!run.in_bounds) continue;
        check_global(*wp, run.global, run.gbytes ? run.gbytes : run.bytes);
        uint8_t* g = reinterpret_cast<uint8_t*>(run.global);
        if (px->reduce) {
          sem::tma_reduce(map->type, px->op, p, g, run.bytes);
        } else {
          sem::tma_copy_store(*map, run, p, g);
        }
        p += run.bytes;
        emit_range(*wp, *raw, Space::kGlobal, run.global, run.gbytes ? run.gbytes : run.bytes,
                   px->reduce ? Rw::kAtomic : Rw::kWrite, Proxy::kAsync,
                   px->reduce ? Order::kRelaxed : Order::kWeak);
      }
    };
    bulk_groups(w, l).open.push_back(op);
    pool_add(w, op);
  }
  return Status::kNext;
}

struct ReplaceOp : Extra {
  Ref map;
  bool shared = false, generic = false;
  sem::TmaField field = sem::TmaField::kGlobalAddress;
  int index = 0;
  uint32_t value = 0;
  bool wide = false;
};

Status op_replace(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const ReplaceOp*>(i.x);
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    uint8_t* p = x.shared ? shared_ptr_checked(w, shared_at(w, i, x.map, l), 128)
                          : reinterpret_cast<uint8_t*>(global_at(w, x.map, l));
    uint64_t v = x.wide ? w.cell<uint64_t>(x.value)[l] : w.cell<uint32_t>(x.value)[l];
    need(w, sem::replace_tensor_map_field(p, x.field, x.index, v));
  }
  w.cl->progress = true;
  return Status::kNext;
}

Status op_map_copy(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const BulkOp*>(i.x);
  int l = __builtin_ctz(m);  // .sync.aligned: all lanes name the same map
  std::memcpy(reinterpret_cast<void*>(global_at(w, x.dst, l)),
              shared_ptr_checked(w, shared_at(w, i, x.src, l), 128), 128);
  w.cl->progress = true;
  if (watched(w)) {
    for (Observer* o : *w.cl->observers)
      o->on_fence(w.agent, Fence::kProxyTensormap, Order::kRelease, static_cast<Scope>(i.aux),
                  w.site());
  }
  return Status::kNext;
}

Status op_nop(Warp&, const Insn&, uint32_t) { return Status::kNext; }

Ref shared_ref(Lower& L, size_t index) { return ref_of(L.address(index, true)); }

sem::TmaReduceOp reduce_op(Lower& L) {
  static const std::pair<const char*, sem::TmaReduceOp> ops[] = {
      {"add", sem::TmaReduceOp::kAdd}, {"min", sem::TmaReduceOp::kMin},
      {"max", sem::TmaReduceOp::kMax}, {"inc", sem::TmaReduceOp::kInc},
      {"dec", sem::TmaReduceOp::kDec}, {"and", sem::TmaReduceOp::kAnd},
      {"or", sem::TmaReduceOp::kOr},   {"xor", sem::TmaReduceOp::kXor}};
  for (auto& p : ops) {
    if (L.has(p.first)) return p.second;
  }
  L.fail("no reduction operation");
}

sem::TmaType reduce_type(Lower& L) {
  static const std::pair<const char*, sem::TmaType> types[] = {
      {"u32", sem::TmaType::kU32}, {"b32", sem::TmaType::kU32},   {"s32", sem::TmaType::kS32},
      {"u64", sem::TmaType::kU64}, {"b64", sem::TmaType::kU64},   {"s64", sem::TmaType::kS64},
      {"f16", sem::TmaType::kF16}, {"bf16", sem::TmaType::kBf16}, {"f32", sem::TmaType::kF32},
      {"f64", sem::TmaType::kF64}};
  for (auto& p : types) {
    if (L.has(p.first)) return p.second;
  }
  L.fail("no element type");
}

void coordinates(Lower& L, const Operand& o, BulkOp* x) {
  // [map, {c0, c1, ...}]
  if (o.elems.size() < 2 || (o.elems[1].kind != Operand::kVec && o.elems[1].kind != Operand::kReg))
    L.fail("expected [tensorMap, {coordinates}]");
  Operand base = o;
  base.elems.resize(1);
  x->map = ref_of(L.address(base, false));
  x->coords = L.vec(o.elems[1], kU32, false);
  const std::string* d = nullptr;
  for (auto& g : L.m.groups) {
    if (g.size() == 2 && g[1] == 'd') d = &g;
  }
  x->dims = (*d)[0] - '0';
  x->gather4 = L.has("tile::gather4") || L.has("tile::scatter4");
  size_t want = x->gather4 ? 5 : static_cast<size_t>(x->dims);
  if (x->coords.size() != want)
    L.fail(format("expected %zu coordinates, found %zu", want, x->coords.size()));
}

}  // namespace

void low_cp_async(Lower& L) {
  auto* x = L.extra<CpAsync>();
  Address d = L.address(0, true), s = L.address(1, false);
  x->wide_d = d.wide;
  x->src = s.cell;
  x->offset_s = s.offset;
  x->size = static_cast<uint32_t>(L.immediate(2));
  if (x->size != 4 && x->size != 8 && x->size != 16) L.fail("cp-size must be 4, 8 or 16");
  if (L.has("cg") && x->size != 16) L.fail(".cg copies 16 bytes");
  size_t n = L.count() - (L.has("L2::cache_hint") ? 1 : 0);
  if (n == 4) {
    const Operand& o = L.op(3);
    if (o.kind == Operand::kReg && L.reg_type(o).kind == 'p') {
      x->ignore = L.pred(o, &x->not_ignore);
    } else {
      x->src_size = L.src(o, kU32);
    }
  }
  Insn& i = L.emit(op_cp_async);
  i.a = d.cell;
  i.imm = d.offset;
  i.x = x;
}

void low_cp_async_commit(Lower& L) { L.emit(op_cp_commit); }

void low_cp_async_wait(Lower& L) {
  bool all = L.has("wait_all");
  int64_t n = all ? 0 : L.immediate(0);
  Insn& i = L.emit(op_cp_wait);
  i.imm = n;
  i.n = all;
}

void low_bulk_commit(Lower& L) { L.emit(op_bulk_commit); }

void low_bulk_wait(Lower& L) {
  int64_t n = L.immediate(0);
  Insn& i = L.emit(op_bulk_wait);
  i.imm = n;
  i.n = L.has("read");
}

void low_bulk_load(Lower& L) {
  auto* x = L.extra<BulkOp>();
  x->src_shared = !L.has("global");
  x->dst = shared_ref(L, 0);
  x->src = ref_of(L.address(1, x->src_shared));
  x->size = L.src(2, kU32);
  x->bar = shared_ref(L, 3);
  x->multicast = L.has("multicast::cluster");
  if (x->multicast) x->mask = L.src(4, kU16);
  L.emit(op_bulk_load).x = x;
}

void low_bulk_store(Lower& L) {
  auto* x = L.extra<BulkOp>();
  x->dst = ref_of(L.address(0, false));
  x->src = shared_ref(L, 1);
  x->size = L.src(2, kU32);
  if (L.has("cp_mask")) x->byte_mask = L.src(L.count() - 1, kU16);
  L.emit(op_bulk_store).x = x;
}

void low_bulk_reduce(Lower& L) {
  auto* x = L.extra<BulkOp>();
  x->reduce = true;
  x->op = reduce_op(L);
  x->type = reduce_type(L);
  std::string e = sem::check_tma_reduce(x->type, x->op);
  if (!e.empty()) L.fail(e);
  if (L.has("bulk_group")) {
    x->dst = ref_of(L.address(0, false));
    x->src = shared_ref(L, 1);
    x->size = L.src(2, kU32);
    L.emit(op_bulk_store).x = x;
  } else {
    x->src_shared = true;
    x->dst = shared_ref(L, 0);
    x->src = shared_ref(L, 1);
    x->size = L.src(2, kU32);
    x->bar = shared_ref(L, 3);
    L.emit(op_bulk_load).x = x;
  }
}

void low_bulk_prefetch(Lower& L) { L.emit(op_nop); }
void low_tensor_prefetch(Lower& L) { L.emit(op_nop); }

void low_tensor_load(Lower& L) {
  auto* x = L.extra<BulkOp>();
  x->dst = shared_ref(L, 0);
  coordinates(L, L.op(1), x);
  x->bar = shared_ref(L, 2);
  x->multicast = L.has("multicast::cluster");
  x->two_cta = L.has("cta_group::2");
  size_t want = 3 + (x->multicast ? 1 : 0) + (L.has("L2::cache_hint") ? 1 : 0);
  if (L.count() != want) L.fail(format("expected %zu operands, found %zu", want, L.count()));
  if (x->multicast) x->mask = L.src(3, kU16);
  L.emit(op_tensor_load).x = x;
}

void low_tensor_store(Lower& L) {
  auto* x = L.extra<BulkOp>();
  coordinates(L, L.op(0), x);
  x->src = shared_ref(L, 1);
  L.emit(op_tensor_store).x = x;
}

void low_tensor_reduce(Lower& L) {
  auto* x = L.extra<BulkOp>();
  x->reduce = true;
  x->op = reduce_op(L);
  coordinates(L, L.op(0), x);
  x->src = shared_ref(L, 1);
  L.emit(op_tensor_store).x = x;
}

void low_tensormap_replace(Lower& L) {
  static const std::pair<const char*, sem::TmaField> fields[] = {
      {"global_address", sem::TmaField::kGlobalAddress},
      {"rank", sem::TmaField::kRank},
      {"box_dim", sem::TmaField::kBoxDim},
      {"global_dim", sem::TmaField::kGlobalDim},
      {"global_stride", sem::TmaField::kGlobalStride},
      {"element_stride", sem::TmaField::kElementStride},
      {"elemtype", sem::TmaField::kElemType},
      {"interleave_layout", sem::TmaField::kInterleave},
      {"swizzle_mode", sem::TmaField::kSwizzleMode},
      {"swizzle_atomicity", sem::TmaField::kSwizzleAtomicity},
      {"fill_mode", sem::TmaField::kFillMode}};
  auto* x = L.extra<ReplaceOp>();
  for (auto& f : fields) {
    if (L.has(f.first)) x->field = f.second;
  }
  x->shared = L.has("shared::cta");
  x->map = ref_of(L.address(0, x->shared));
  bool indexed = L.count() == 3;
  if (indexed) x->index = static_cast<int>(L.immediate(1));
  x->wide = L.has("b64");
  x->value = L.src(indexed ? 2 : 1, x->wide ? kU64 : kU32);
  L.emit(op_replace).x = x;
}

void low_tensormap_cp(Lower& L) {
  auto* x = L.extra<BulkOp>();
  x->dst = ref_of(L.address(0, false));
  x->src = shared_ref(L, 1);
  if (L.immediate(2) != 128) L.fail("the size must be 128");
  Scope scope = scope_of(L);
  Insn& i = L.emit(op_map_copy);
  i.x = x;
  i.aux = static_cast<uint16_t>(scope);
}

}  // namespace ptxsim
