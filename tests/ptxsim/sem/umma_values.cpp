// SPDX-License-Identifier: Apache-2.0
// tcgen05.mma and wgmma by value: operands written to shared memory or Tensor Memory from their
// layout formulas (PTX 9.7.16.3, 9.7.16.10), results compared with a plain product; refusals; a
// speed print.
#include <chrono>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "sem/narrow.h"
#include "sem/tma.h"
#include "sem/umma.h"

using namespace ptxsim::sem;

enum class Layout { kNone, k32, k64, k128, kAtom32 };
const TmaSwizzle kTma[] = {TmaSwizzle::kNone, TmaSwizzle::k32B, TmaSwizzle::k64B, TmaSwizzle::k128B,
                           TmaSwizzle::k128BAtom32B};
const int kSpan[] = {16, 32, 64, 128, 128};
const uint64_t kUmmaMode[] = {0, 6, 4, 2, 1}, kWgmmaMode[] = {0, 3, 2, 1, 0};

// An operand tile in shared memory: strides chosen so that wrong ones collide or miss.
struct Tile {
  Layout layout = Layout::k128;
  bool mn_major = false;
  uint32_t start = 0, lbo = 0, sbo = 0;

  uint64_t desc(bool wgmma) const {
    const uint64_t mode = (wgmma ? kWgmmaMode : kUmmaMode)[int(layout)];
    return (start >> 4) | uint64_t(lbo >> 4) << 16 | uint64_t(sbo >> 4) << 32 |
           (wgmma ? mode << 62 : uint64_t{1} << 46 | mode << 61);
  }
  // Address of byte `mn_byte` / `k_byte` of the operand seen as a byte matrix; for MN-major `k`
  // counts rows.
  uint32_t address(int mn, int k) const {
    const uint32_t span = uint32_t(kSpan[int(layout)]);
    uint32_t a;
    if (!mn_major) {  // mn: row, k: byte along K
      if (layout == Layout::kNone) {
        a = start + uint32_t(mn / 8) * sbo + uint32_t(mn % 8) * 16 + uint32_t(k / 16) * lbo +
            uint32_t(k % 16);
      } else {
        a = start + uint32_t(mn / 8) * sbo + uint32_t(mn % 8) * span + uint32_t(k);
      }
    } else if (layout == Layout::kNone) {  // mn: byte along MN, k: index
      a = start + uint32_t(mn / 16) * sbo + uint32_t(mn % 16) + uint32_t(k % 8) * 16 +
          uint32_t(k / 8) * lbo;
    } else {
      const int rows = layout == Layout::kAtom32 ? 4 : 8;
      a = start + uint32_t(mn) % span + uint32_t(mn) / span * lbo + uint32_t(k % rows) * span +
          uint32_t(k / rows) * sbo;
    }
    return tma_swizzle(kTma[int(layout)], a);
  }
};

Tile make_tile(Layout layout, bool mn_major, uint32_t start, int rows, int elem_bytes) {
  Tile t;
  t.layout = layout;
  t.mn_major = mn_major;
  t.start = start;
  const uint32_t span = uint32_t(kSpan[int(layout)]);
  if (!mn_major) {
    t.sbo = layout == Layout::kNone ? 128 : 8 * span + 1024;  // a gap after every 8 rows
    t.lbo = layout == Layout::kNone ? uint32_t(rows / 8) * 128 : 16;
  } else if (layout == Layout::kNone) {
    t.sbo = 128;
    t.lbo = uint32_t(rows * elem_bytes / 16) * 128;
  } else {
    const uint32_t atom = span * (layout == Layout::kAtom32 ? 4 : 8);
    t.lbo = atom;
    t.sbo = atom * (uint32_t(rows * elem_bytes) / span + 1);
  }
  return t;
}

struct Operand {
  Elem elem;
  int rows, k;
  std::vector<uint32_t> code;
  std::vector<double> value;
};
Operand random_operand(Rng& rng, Elem e, int rows, int k) {
  Operand o{e, rows, k, {}, {}};
  for (int i = 0; i < rows * k; ++i) {
    uint32_t c;
    if (e == Elem::kS8 || e == Elem::kU8) {
      c = uint32_t(rng.below(15) - (e == Elem::kS8 ? 7 : 0)) & 0xff;
    } else {
      do {
        c = encode(e, (rng.below(33) - 16) / 4.0);
      } while (std::fabs(decode(e, c) * 4) != std::floor(std::fabs(decode(e, c) * 4)));
    }
    o.code.push_back(c);
    o.value.push_back(decode(e, c));
  }
  return o;
}

// Stores rows r0 .. r0 + count - 1. `padded`: 16 six- or four-bit codes per 16-byte chunk.
void write_operand(std::vector<uint8_t>& smem, const Tile& t, const Operand& o, int r0, int count,
                   bool padded) {
  const int bits = elem_bits(o.elem);
  for (int r = 0; r < count; ++r) {
    for (int k = 0; k < o.k; ++k) {
      const uint32_t code = o.code[size_t((r0 + r) * o.k + k)];
      if (bits >= 8) {
        for (int b = 0; b < bits / 8; ++b) {
          const uint32_t a =
              t.mn_major ? t.address(r * bits / 8 + b, k) : t.address(r, k * bits / 8 + b);
          smem[a] = uint8_t(code >> (8 * b));
        }
      } else {
        for (int b = 0; b < bits; ++b) {
          const int bit = padded ? k % 16 * bits + b : k * 4 + b;
          const int byte = padded ? k / 16 * 16 + bit / 8 : bit / 8;
          uint8_t& m = smem[t.address(r, byte)];
          m = uint8_t((m & ~(1u << (bit % 8))) | ((code >> b) & 1) << (bit % 8));
        }
      }
    }
  }
}

struct UmmaCase {
  UmmaKind kind;
  Elem a, b, d;
  int m, n, cta_group = 1;
  Layout la = Layout::k128, lb = Layout::k128;
  bool mn_a = false, mn_b = false, tmem_a = false, ws = false;
  int scale_vec = 0;
  Elem scale = Elem::kUe8m0;
  int sfa_id = 0, sfb_id = 0;
  bool neg_a = false, neg_b = false, enable_d = true;
  int scale_d = 0;
  bool disable = false;
  int d_lane = 0;
};

uint32_t type_code(UmmaKind kind, Elem e) {
  if (kind == UmmaKind::kF16) return e == Elem::kBf16;
  if (kind == UmmaKind::kTf32) return 2;
  if (kind == UmmaKind::kI8) return e == Elem::kS8;
  if (kind == UmmaKind::kMxf4 || kind == UmmaKind::kMxf4nvf4) return 1;
  return e == Elem::kE4m3   ? 0
         : e == Elem::kE5m2 ? 1
         : e == Elem::kE2m3 ? 3
         : e == Elem::kE3m2 ? 4
                            : 5;
}

bool scaled(UmmaKind k) {
  return k == UmmaKind::kMxf8f6f4 || k == UmmaKind::kMxf4 || k == UmmaKind::kMxf4nvf4;
}
int k_of(UmmaKind k) {
  return k == UmmaKind::kF16                                ? 16
         : k == UmmaKind::kTf32                             ? 8
         : k == UmmaKind::kMxf4 || k == UmmaKind::kMxf4nvf4 ? 64
                                                            : 32;
}

uint32_t idesc_of(const UmmaCase& c) {
  uint32_t v = type_code(c.kind, c.a) << 7 | type_code(c.kind, c.b) << 10 |
               uint32_t(c.neg_a) << 13 | uint32_t(c.neg_b) << 14 | uint32_t(c.mn_a) << 15 |
               uint32_t(c.mn_b) << 16 | uint32_t(c.n / 8) << 17 | uint32_t(c.m / 16) << 24;
  if (scaled(c.kind)) {
    v |= uint32_t(c.sfb_id) << 4 | uint32_t(c.sfa_id) << 29 |
         uint32_t(c.scale == Elem::kUe8m0) << 23;
  } else {
    v |= uint32_t(c.d == Elem::kF16 ? 0 : c.d == Elem::kF32 ? 1 : 2) << 4;
  }
  return v;
}

constexpr int kDCol = 32, kACol = 300, kSfaCol = 320, kSfbCol = 340;

void check_umma(Rng& rng, const UmmaCase& c) {
  const int k = k_of(c.kind), g = c.cta_group, lm = c.m / g, ln = c.n / g;
  const bool padded_kind = c.kind == UmmaKind::kF8f6f4 || c.kind == UmmaKind::kMxf8f6f4;
  char name[200];
  std::snprintf(name, sizeof name, "kind %d %s.%s M %d N %d group %d layouts %d%s %d%s%s%s",
                int(c.kind), elem_name(c.a), elem_name(c.b), c.m, c.n, g, int(c.la),
                c.mn_a ? "mn" : "k", int(c.lb), c.mn_b ? "mn" : "k", c.tmem_a ? " TS" : "",
                c.ws ? " ws" : "");
  const Operand a = random_operand(rng, c.a, c.m, k), b = random_operand(rng, c.b, c.n, k);
  const Tile ta = make_tile(c.la, c.mn_a, 2048, lm, std::max(8, elem_bits(c.a)) / 8);
  const Tile tb = make_tile(c.lb, c.mn_b, 2048 + 98304, ln, std::max(8, elem_bits(c.b)) / 8);
  std::vector<uint8_t> smem[2];
  std::vector<uint32_t> tmem[2];
  const float poison = -12345.0f;
  for (int cta = 0; cta < g; ++cta) {
    smem[cta].assign(1 << 18, 0xff);
    tmem[cta].assign(128 * 512, f32_bits(poison));
    if (!c.tmem_a) write_operand(smem[cta], ta, a, cta * lm, lm, padded_kind);
    write_operand(smem[cta], tb, b, cta * ln, ln, padded_kind);
  }
  // A in Tensor Memory: row r at the lane(s) where D row r lives, 32 / width elements per column.
  if (c.tmem_a) {
    const int w = padded_kind ? 8 : elem_bits(c.a);
    for (int m = 0; m < c.m; ++m) {
      std::vector<int> lanes;
      const int r = m % lm;
      if (lm == 64 && g == 1) {
        lanes = {c.d_lane + 32 * (r / 16) + r % 16};
      } else if (lm == 64) {
        lanes = {r, 64 + r};
      } else {
        lanes = {r};
      }
      for (int lane : lanes) {
        uint32_t cells[8] = {};
        for (int i = 0; i < k; ++i) {
          uint32_t code = a.code[size_t(m * k + i)];
          if (padded_kind && c.a == Elem::kE2m1) code = code << 2 | 0xc3;
          if (padded_kind && elem_bits(c.a) == 6) code |= 0xc0;
          cells[i * w / 32] |= code << (i * w % 32);
        }
        std::memcpy(&tmem[m / lm][lane * 512 + kACol], cells, sizeof cells);
      }
    }
  }
  // Scales: unused bytes are 0xff (NaN).
  std::vector<double> sa(size_t(c.m * 4), 1.0), sb(size_t(c.n * 4), 1.0);
  if (c.scale_vec) {
    auto draw = [&] {
      return c.scale == Elem::kUe8m0 ? uint32_t(126 + rng.below(3))
                                     : encode(Elem::kUe4m3, 0.5 * (1 + rng.below(3)));
    };
    auto put = [&](int cta, int lane, int col, int byte, uint32_t code) {
      uint32_t& w = tmem[cta][lane * 512 + col];
      w = (w & ~(0xffu << (8 * byte))) | code << (8 * byte);
    };
    for (int cta = 0; cta < g; ++cta) {
      for (int lane = 0; lane < 128; ++lane) {
        for (int col = 0; col < 4; ++col) tmem[cta][lane * 512 + kSfaCol + col] = 0xffffffffu;
        for (int col = 0; col < 8; ++col) tmem[cta][lane * 512 + kSfbCol + col] = 0xffffffffu;
      }
    }
    for (int s = 0; s < c.scale_vec; ++s) {
      for (int m = 0; m < c.m; ++m) {
        const uint32_t code = draw();
        sa[size_t(m * 4 + s)] = decode(c.scale, code);
        for (int q = 0; q < 4; ++q)
          put(m / lm, 32 * q + m % lm % 32, kSfaCol + m % lm / 32, c.sfa_id + s, code);
      }
      const int halves = lm == 64 ? 2 : 1, span = c.n / halves;
      for (int n = 0; n < c.n; ++n) {
        const uint32_t code = draw();
        sb[size_t(n * 4 + s)] = decode(c.scale, code);
        for (int cta = 0; cta < g; ++cta) {
          for (int q = 0; q < 4 / halves; ++q) {
            put(cta, 32 * (n / span * 2 + q) + n % span % 32, kSfbCol + n % span / 32, c.sfb_id + s,
                code);
          }
        }
      }
    }
  }
  std::vector<double> want(size_t(c.m * c.n));
  for (int m = 0; m < c.m; ++m) {
    for (int n = 0; n < c.n; ++n) {
      double sum = 0;
      for (int i = 0; i < k; ++i) {
        double p = a.value[size_t(m * k + i)] * b.value[size_t(n * k + i)];
        if (c.scale_vec)
          p *=
              sa[size_t(m * 4 + i / (k / c.scale_vec))] * sb[size_t(n * 4 + i / (k / c.scale_vec))];
        sum += p;
      }
      if (c.neg_a != c.neg_b) sum = -sum;
      TmemCell cell = umma_d_cell(c.m, c.n, g, c.ws, m, n);
      cell.lane += c.d_lane;
      const int init = rng.below(33) - 16;
      uint32_t& w = tmem[cell.cta][cell.lane * 512 + kDCol + cell.column];
      w = c.d == Elem::kF32   ? f32_bits(float(init))
          : c.d == Elem::kF16 ? encode(Elem::kF16, init) | 0xabcd0000u
                              : uint32_t(init);
      want[size_t(m * c.n + n)] = sum + (c.enable_d ? init * std::ldexp(1.0, -c.scale_d) : 0.0);
    }
  }
  UmmaArgs args;
  args.kind = c.kind;
  args.cta_group = g;
  args.ws = c.ws;
  args.scale_vec = c.scale_vec;
  args.idesc = idesc_of(c);
  args.d_tmem = uint32_t(c.d_lane) << 16 | kDCol;
  args.a_in_tmem = c.tmem_a;
  args.a = c.tmem_a ? (uint64_t(c.d_lane) << 16 | kACol) : ta.desc(false);
  args.b = tb.desc(false);
  // CUTLASS leaves the scale id in the address's two top bits as well.
  args.sfa_tmem = kSfaCol | uint32_t(c.sfa_id) << 30;
  args.sfb_tmem = kSfbCol | uint32_t(c.sfb_id) << 30;
  args.enable_d = c.enable_d;
  args.scale_input_d = c.scale_d;
  const uint32_t masks[8] = {0x1, 0x80000000u, 0, 0xf0, 0, 0xffffffffu, 0x10, 0};
  if (c.disable) args.disable_lanes = masks;
  UmmaPlan plan;
  const Error e = plan_umma(args, &plan);
  CHECK(e.empty(), "%s: %s", name, e.c_str());
  if (!e.empty()) return;
  for (Accumulate mode : {Accumulate::kExact, Accumulate::kSequential, Accumulate::kTruncating}) {
    std::vector<uint32_t> copy[2] = {tmem[0], tmem[1]};
    CtaView views[2] = {{smem[0].data(), 0, uint32_t(smem[0].size()), copy[0].data()},
                        {smem[1].data(), 0, uint32_t(smem[1].size()), copy[1].data()}};
    const Error ee = execute_umma(plan, views, mode);
    CHECK(ee.empty(), "%s: %s", name, ee.c_str());
    size_t changed = 0;
    for (int m = 0; m < c.m; ++m) {
      for (int n = 0; n < c.n; ++n) {
        TmemCell cell = umma_d_cell(c.m, c.n, g, c.ws, m, n);
        cell.lane += c.d_lane;
        const size_t at = size_t(cell.lane * 512 + kDCol + cell.column);
        const uint32_t w = copy[cell.cta][at];
        if (c.disable && (masks[4 * cell.cta + cell.lane / 32] >> (cell.lane % 32) & 1)) {
          CHECK(w == tmem[cell.cta][at], "%s disabled lane %d changed", name, cell.lane);
          continue;
        }
        changed += 1;
        const double ref = want[size_t(m * c.n + n)];
        const double got = c.d == Elem::kF32   ? bits_f32(w)
                           : c.d == Elem::kF16 ? decode(Elem::kF16, w & 0xffff)
                                               : double(int32_t(w));
        const double expect = c.d == Elem::kF16 ? decode(Elem::kF16, encode(Elem::kF16, ref)) : ref;
        CHECK(got == expect, "%s mode %d (%d, %d): %g, want %g", name, int(mode), m, n, got,
              expect);
      }
    }
    // Nothing else may be written.
    for (int cta = 0; cta < g; ++cta) {
      std::vector<uint8_t> allowed(128 * 512, 0);
      for (const TmemRect& r : plan.writes) {
        if (r.cta != cta) continue;
        for (int l = 0; l < r.lanes; ++l)
          std::memset(&allowed[size_t((r.lane + l) * 512 + r.column)], 1, r.columns);
      }
      for (size_t i = 0; i < allowed.size(); ++i) {
        if (!allowed[i])
          CHECK(copy[cta][i] == tmem[cta][i], "%s wrote lane %zu column %zu", name, i / 512,
                i % 512);
      }
    }
    (void)changed;
  }
}

UmmaCase base(UmmaKind kind, Elem a, Elem b, int m, int n, int g = 1, Elem d = Elem::kF32) {
  UmmaCase c{};
  c.kind = kind;
  c.a = a;
  c.b = b;
  c.d = d;
  c.m = m;
  c.n = n;
  c.cta_group = g;
  c.la = c.lb = Layout::k128;
  c.enable_d = true;
  return c;
}

void check_umma_kinds() {
  Rng rng(31);
  const Layout swizzles[] = {Layout::kNone, Layout::k32, Layout::k64, Layout::k128};
  for (Layout l : swizzles) {
    for (int mn = 0; mn < 4; ++mn) {
      UmmaCase c = base(UmmaKind::kF16, Elem::kF16, Elem::kF16, 128, 64);
      c.la = l;
      c.lb = swizzles[(int(l) + 1) % 4];
      c.mn_a = mn & 1;
      c.mn_b = mn & 2;
      check_umma(rng, c);
      c.kind = UmmaKind::kF8f6f4;
      c.a = Elem::kE4m3;
      c.b = Elem::kE5m2;
      check_umma(rng, c);
    }
    UmmaCase c = base(UmmaKind::kTf32, Elem::kTf32, Elem::kTf32, 64, 24);
    c.la = c.lb = l;
    check_umma(rng, c);
    for (UmmaKind kind : {UmmaKind::kMxf4, UmmaKind::kMxf4nvf4}) {
      UmmaCase x = base(kind, Elem::kE2m1, Elem::kE2m1, 128, 40);
      x.la = x.lb = l;
      x.scale_vec = 2;
      x.sfa_id = 2;
      check_umma(rng, x);
    }
  }
  UmmaCase t = base(UmmaKind::kTf32, Elem::kTf32, Elem::kTf32, 128, 64);
  t.la = t.lb = Layout::kAtom32;
  t.mn_a = t.mn_b = true;
  check_umma(rng, t);
  for (int m : {64, 128}) {
    for (int n : {8, 16, 136, 256}) {
      check_umma(rng, base(UmmaKind::kF16, Elem::kBf16, Elem::kBf16, m, n));
      UmmaCase c = base(UmmaKind::kF16, Elem::kF16, Elem::kF16, m, n, 1, Elem::kF16);
      check_umma(rng, c);
      c.d = Elem::kF32;
      c.tmem_a = true;
      check_umma(rng, c);
    }
  }
  const Elem small[] = {Elem::kE4m3, Elem::kE5m2, Elem::kE2m3, Elem::kE3m2, Elem::kE2m1};
  for (Elem a : small) {
    for (Elem b : small) {
      UmmaCase c = base(UmmaKind::kF8f6f4, a, b, 64, 32);
      check_umma(rng, c);
      c.tmem_a = true;
      c.d_lane = 16;
      check_umma(rng, c);
      UmmaCase x = base(UmmaKind::kMxf8f6f4, a, b, 128, 48);
      x.scale_vec = 1;
      x.sfa_id = rng.below(4);
      x.sfb_id = rng.below(4);
      check_umma(rng, x);
      x.tmem_a = true;
      check_umma(rng, x);
    }
  }
  for (Elem a : {Elem::kS8, Elem::kU8})
    check_umma(rng, base(UmmaKind::kI8, a, Elem::kS8, 128, 48, 1, Elem::kS32));
  for (Elem s : {Elem::kUe8m0, Elem::kUe4m3}) {
    for (int n : {8, 128, 200, 256}) {
      UmmaCase x = base(UmmaKind::kMxf4nvf4, Elem::kE2m1, Elem::kE2m1, 128, n);
      x.scale_vec = 4;
      x.scale = s;
      check_umma(rng, x);
      x.tmem_a = true;
      x.enable_d = false;
      check_umma(rng, x);
    }
  }
  // Pairs of CTAs.
  for (int m : {128, 256}) {
    for (int n : {32, 64, 256}) {
      check_umma(rng, base(UmmaKind::kF16, Elem::kF16, Elem::kF16, m, n, 2));
      UmmaCase c = base(UmmaKind::kF8f6f4, Elem::kE4m3, Elem::kE4m3, m, n, 2);
      c.mn_b = n >= 32;
      check_umma(rng, c);
      c.mn_b = false;
      c.tmem_a = true;
      check_umma(rng, c);
      UmmaCase x = base(UmmaKind::kMxf4nvf4, Elem::kE2m1, Elem::kE2m1, m, n, 2);
      x.scale_vec = 4;
      x.scale = Elem::kUe4m3;
      check_umma(rng, x);
      UmmaCase y = base(UmmaKind::kMxf8f6f4, Elem::kE4m3, Elem::kE2m1, m, n, 2);
      y.scale_vec = 1;
      y.sfa_id = 3;
      y.sfb_id = 1;
      check_umma(rng, y);
    }
  }
  for (int m : {32, 64, 128}) {
    UmmaCase c = base(UmmaKind::kF16, Elem::kF16, Elem::kF16, m, 64);
    c.ws = true;
    check_umma(rng, c);
  }
  UmmaCase c = base(UmmaKind::kF16, Elem::kF16, Elem::kF16, 128, 32);
  c.neg_a = true;
  check_umma(rng, c);
  c.neg_b = true;
  check_umma(rng, c);
  c.neg_a = false;
  c.scale_d = 3;
  check_umma(rng, c);
  c.enable_d = false;
  c.disable = true;
  check_umma(rng, c);
  UmmaCase pair = base(UmmaKind::kTf32, Elem::kTf32, Elem::kTf32, 256, 32, 2);
  pair.disable = true;
  check_umma(rng, pair);
}

void check_refusals() {
  auto refused = [](UmmaArgs a, const char* word) {
    UmmaPlan p;
    const Error e = plan_umma(a, &p);
    CHECK(e.find(word) != std::string::npos, "expected '%s' in '%s'", word, e.c_str());
  };
  UmmaArgs ok;
  ok.kind = UmmaKind::kF16;
  ok.idesc = idesc_of(base(UmmaKind::kF16, Elem::kF16, Elem::kF16, 128, 64));
  ok.a = ok.b = make_tile(Layout::k128, false, 1024, 128, 2).desc(false);
  UmmaPlan plan;
  CHECK(plan_umma(ok, &plan).empty(), "legal instruction refused");
  auto with = [&](auto f) {
    UmmaArgs a = ok;
    f(a);
    return a;
  };
  refused(with([](UmmaArgs& a) { a.a &= ~(uint64_t{1} << 46); }), "0b001");
  refused(with([](UmmaArgs& a) { a.a |= uint64_t{1} << 55; }), "53-60");
  refused(with([](UmmaArgs& a) { a.a |= uint64_t{1} << 14; }), "14-15");
  refused(with([](UmmaArgs& a) { a.a |= uint64_t{1} << 52; }), "not modelled");
  for (uint64_t mode : {3, 5, 7})
    refused(with([=](UmmaArgs& a) { a.b = (a.b & ~(uint64_t{7} << 61)) | mode << 61; }),
            "swizzle mode");
  refused(with([](UmmaArgs& a) { a.b = (a.b & ~(uint64_t{7} << 61)) | uint64_t{1} << 61; }),
          "32B-atom");
  refused(with([](UmmaArgs& a) { a.idesc |= 1u << 2; }), "sparse");
  refused(with([](UmmaArgs& a) { a.idesc |= 1u << 6; }), "bit 6");
  refused(with([](UmmaArgs& a) { a.idesc |= 1u << 29; }), "29");
  refused(with([](UmmaArgs& a) { a.idesc |= 2u << 7; }), "A type");
  refused(with([](UmmaArgs& a) { a.idesc |= 1u << 7; }), "both");
  refused(with([](UmmaArgs& a) { a.idesc |= 2u << 4; }), "D type");
  refused(with([](UmmaArgs& a) { a.idesc |= 1u << 3; }), "saturate");
  refused(with([](UmmaArgs& a) { a.idesc = (a.idesc & ~(0x1fu << 24)) | 2u << 24; }), "M = 32");
  refused(with([](UmmaArgs& a) { a.idesc &= ~(0x3fu << 17); }), "N = 0");
  refused(
      with([](UmmaArgs& a) { a.cta_group = 2, a.idesc = (a.idesc & ~(0x3fu << 17)) | 9u << 17; }),
      "N = 72");
  refused(with([](UmmaArgs& a) { a.scale_input_d = 16; }), "scale-input-d");
  refused(with([](UmmaArgs& a) { a.d_tmem = 460; }), "exceed 511");
  refused(with([](UmmaArgs& a) { a.d_tmem = 16u << 16; }), "D lane");
  refused(with([](UmmaArgs& a) { a.scale_vec = 1; }), "without block scaling");
  UmmaArgs nv = ok;
  UmmaCase nvc = base(UmmaKind::kMxf4nvf4, Elem::kE2m1, Elem::kE2m1, 128, 64);
  nvc.scale = Elem::kUe4m3;
  nv.kind = UmmaKind::kMxf4nvf4;
  nv.idesc = idesc_of(nvc);
  nv.block16 = true;
  CHECK(plan_umma(nv, &plan).empty(), "legal nvfp4 refused");
  auto nvw = [&](auto f) {
    UmmaArgs a = nv;
    f(a);
    return a;
  };
  refused(nvw([](UmmaArgs& a) { a.block16 = false; }), "needs .block16");
  refused(nvw([](UmmaArgs& a) { a.block16 = false, a.block32 = true; }), "ue4m3");
  refused(nvw([](UmmaArgs& a) { a.idesc |= 1u << 4; }), "scale factor id 1");
  refused(nvw([](UmmaArgs& a) { a.idesc |= 1u << 16; }), "K-major");
  refused(nvw([](UmmaArgs& a) { a.idesc |= 1u << 31; }), "K = 96");
  refused(nvw([](UmmaArgs& a) { a.sfa_tmem = 510; }), "scale A");
  refused(nvw([](UmmaArgs& a) { a.idesc = (a.idesc & ~(3u << 27)) | 2u << 27; }), "M = 256");
  refused(nvw([](UmmaArgs& a) { a.kind = UmmaKind::kMxf4; }), "ue8m0");
  UmmaCase f8 = base(UmmaKind::kF8f6f4, Elem::kE4m3, Elem::kE4m3, 128, 24);
  f8.mn_b = true;
  UmmaArgs t = ok;
  t.kind = UmmaKind::kF8f6f4;
  t.idesc = idesc_of(f8);
  refused(t, "N = 24");
  f8.n = 32;
  f8.b = Elem::kE2m1;
  t.idesc = idesc_of(f8);
  refused(t, "K-major");
  // A descriptor that leaves shared memory is an error at execution, not a stray read.
  std::vector<uint8_t> smem(65536);
  std::vector<uint32_t> tmem(128 * 512);
  UmmaArgs far = ok;
  far.a = make_tile(Layout::k128, false, 60 * 1024, 128, 2).desc(false);
  CHECK(plan_umma(far, &plan).empty(), "plan");
  CtaView view{smem.data(), 1024, 65536, tmem.data()};
  CHECK(execute_umma(plan, &view, Accumulate::kExact).find("outside") != std::string::npos,
        "out of shared memory");
  std::vector<TmemRect> rects;
  TmemAccess acc;
  acc.num = 4;
  CHECK(!plan_tmem_access(acc, 32u << 16, 0, &rects).empty(), "warp 0 reached lane 32");
  CHECK(plan_tmem_access(acc, 32u << 16, 1, &rects).empty(), "warp 1 lane 32");
  acc.num = 3;
  CHECK(!plan_tmem_access(acc, 0, 0, &rects).empty(), ".x3");
  CpPlan cp;
  CHECK(!plan_cp(CpShape::k32x128b, CpFormat::kNone, 510, ok.a, &cp).empty(), "cp past column 511");
}

void check_tmem_round_trip() {
  Rng rng(33);
  const TmemShape shapes[] = {TmemShape::k32x32b, TmemShape::k16x64b, TmemShape::k16x128b,
                              TmemShape::k16x256b, TmemShape::k16x32bx2};
  for (TmemShape s : shapes) {
    for (int num = 1; num <= 128; num *= 2) {
      for (int pack = 0; pack < 2; ++pack) {
        TmemAccess a;
        a.shape = s;
        a.num = num;
        a.pack16 = pack;
        if (s == TmemShape::k16x32bx2) a.half_split = 200;
        if (!check_tmem_access(a).empty() || (s == TmemShape::k16x32bx2 && num * (1 + pack) > 200))
          continue;
        std::vector<uint32_t> tmem(128 * 512, 0), regs(128 * 32), back(128 * 32);
        std::vector<uint32_t*> in(128), out(128);
        for (int r = 0; r < 128; ++r) {
          in[size_t(r)] = &regs[size_t(r) * 32];
          out[size_t(r)] = &back[size_t(r) * 32];
        }
        for (auto& v : regs) v = uint32_t(rng.next());
        const uint32_t taddr = 64u << 16 | 8;
        std::vector<TmemRect> rects;
        const Error e = plan_tmem_access(a, taddr, 2, &rects);
        if (!e.empty()) continue;
        tmem_store(a, taddr, in.data(), tmem.data());
        tmem_load(a, taddr, tmem.data(), out.data());
        size_t area = 0;
        for (const TmemRect& r : rects) area += size_t(r.lanes) * r.columns;
        CHECK(area == size_t(tmem_regs(a)) * 32 * size_t(1 + pack), "shape %d x%d footprint",
              int(s), num);
        for (int r = 0; r < tmem_regs(a); ++r) {
          for (int l = 0; l < 32; ++l)
            CHECK(regs[size_t(r * 32 + l)] == back[size_t(r * 32 + l)],
                  "shape %d x%d register %d lane %d", int(s), num, r, l);
        }
      }
    }
  }
}

void check_wgmma_values() {
  Rng rng(34);
  struct W {
    Elem a, b, d;
    int n;
    bool ra, ta, tb;
    Layout l;
  };
  const W cases[] = {
      {Elem::kF16, Elem::kF16, Elem::kF32, 64, false, false, false, Layout::k128},
      {Elem::kF16, Elem::kF16, Elem::kF16, 24, false, true, true, Layout::k64},
      {Elem::kF16, Elem::kF16, Elem::kF32, 128, true, false, true, Layout::k128},
      {Elem::kBf16, Elem::kBf16, Elem::kF32, 256, false, true, false, Layout::kNone},
      {Elem::kTf32, Elem::kTf32, Elem::kF32, 40, true, false, false, Layout::k32},
      {Elem::kE4m3, Elem::kE5m2, Elem::kF32, 96, false, false, false, Layout::k128},
      {Elem::kE5m2, Elem::kE4m3, Elem::kF16, 8, true, false, false, Layout::kNone},
      {Elem::kS8, Elem::kU8, Elem::kS32, 48, true, false, false, Layout::k128},
      {Elem::kU8, Elem::kS8, Elem::kS32, 24, false, false, false, Layout::k64},
  };
  for (const W& w : cases) {
    WgmmaOp op;
    op.n = w.n;
    op.k = 256 / elem_bits(w.a);
    op.a = w.a;
    op.b = w.b;
    op.d = w.d;
    op.a_in_regs = w.ra;
    op.trans_a = w.ta;
    op.trans_b = w.tb;
    op.negate_b = w.d == Elem::kF32;
    const Operand a = random_operand(rng, w.a, 64, op.k), b = random_operand(rng, w.b, w.n, op.k);
    // A transposed tile needs whole swizzle spans along MN.
    const bool fits = !w.tb || w.n * elem_bits(w.b) / 8 % kSpan[int(w.l)] == 0;
    const Tile ta = make_tile(w.l, w.ta, 1024, 64, elem_bits(w.a) / 8);
    const Tile tb = make_tile(fits ? w.l : Layout::kNone, w.tb, 65536, w.n, elem_bits(w.b) / 8);
    std::vector<uint8_t> smem(1 << 18, 0xff);
    write_operand(smem, ta, a, 0, 64, false);
    write_operand(smem, tb, b, 0, w.n, false);
    std::vector<uint32_t> ar(4 * 128, 0), dr(size_t(128 * 128), 0);
    const uint32_t* ap[4];
    std::vector<uint32_t*> dp(128);
    for (int i = 0; i < 4; ++i) ap[i] = &ar[size_t(i) * 128];
    for (int i = 0; i < 128; ++i) dp[size_t(i)] = &dr[size_t(i) * 128];
    const int bits = elem_bits(w.a), per = 32 / bits;
    for (int t = 0; t < 128; ++t) {  // the m16 fragment of warp t / 32
      for (int r = 0; r < 4; ++r) {
        for (int e = 0; e < per; ++e) {
          const int row = 16 * (t / 32) + t % 32 / 4 + 8 * (r & 1),
                    k = (r / 2) * 4 * per + t % 4 * per + e;
          ar[size_t(r * 128 + t)] |= a.code[size_t(row * op.k + k)] << (bits * e);
        }
      }
    }
    std::vector<double> c(size_t(64 * w.n));
    for (double& v : c) v = rng.below(33) - 16;
    auto each = [&](auto f) {
      for (int t = 0; t < 128; ++t) {
        for (int i = 0; i < w.n / 2; ++i) {
          f(t, i, 16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + t % 4 * 2 + i % 2);
        }
      }
    };
    each([&](int t, int i, int m, int n) {
      const double v = c[size_t(m * w.n + n)];
      if (w.d == Elem::kF16) {
        dr[size_t(i / 2 * 128 + t)] |= encode(Elem::kF16, v) << (16 * (i % 2));
      } else {
        dr[size_t(i * 128 + t)] = w.d == Elem::kS32 ? uint32_t(int32_t(v)) : f32_bits(float(v));
      }
    });
    SmemOperand sa, sb;
    const Error e = plan_wgmma(op, ta.desc(true), tb.desc(true), &sa, &sb);
    CHECK(e.empty(), "%s", e.c_str());
    CtaView view{smem.data(), 0, uint32_t(smem.size()), nullptr};
    const Error ee = execute_wgmma(op, sa, sb, view, ap, dp.data(), true, Accumulate::kExact);
    CHECK(ee.empty(), "%s", ee.c_str());
    each([&](int t, int i, int m, int n) {
      double want = c[size_t(m * w.n + n)];
      for (int k = 0; k < op.k; ++k) {
        want +=
            (op.negate_b ? -1 : 1) * a.value[size_t(m * op.k + k)] * b.value[size_t(n * op.k + k)];
      }
      const uint32_t bitsv = w.d == Elem::kF16
                                 ? (dr[size_t(i / 2 * 128 + t)] >> (16 * (i % 2))) & 0xffff
                                 : dr[size_t(i * 128 + t)];
      const double got = w.d == Elem::kF32   ? double(bits_f32(bitsv))
                         : w.d == Elem::kS32 ? double(int32_t(bitsv))
                                             : decode(Elem::kF16, bitsv);
      if (w.d == Elem::kF16) want = decode(Elem::kF16, encode(Elem::kF16, want));
      CHECK(got == want, "wgmma %s.%s n %d (%d, %d): %g, want %g", elem_name(w.a), elem_name(w.b),
            w.n, m, n, got, want);
    });
  }
  WgmmaOp bad;
  bad.n = 12;
  CHECK(!check_wgmma(bad).empty(), "n 12");
  bad.n = 8;
  bad.d = Elem::kF16;
  bad.a = bad.b = Elem::kBf16;
  CHECK(!check_wgmma(bad).empty(), "bf16 with f16 accumulators");
  bad.a = bad.b = Elem::kE4m3;
  bad.k = 32;
  bad.trans_b = true;
  CHECK(!check_wgmma(bad).empty(), "transposed fp8");
  SmemDesc d;
  CHECK(!decode_wgmma_desc(uint64_t{1} << 46, &d).empty(), "reserved bits of a wgmma descriptor");
}

void print_speed() {
  Rng rng(35);
  const int k = 64;
  std::vector<uint8_t> smem(1 << 18, 0x25);
  std::vector<uint32_t> tmem(128 * 512, 0x38383838u);
  UmmaCase c = base(UmmaKind::kMxf4nvf4, Elem::kE2m1, Elem::kE2m1, 128, 128);
  c.scale = Elem::kUe4m3;
  UmmaArgs a;
  a.kind = c.kind;
  a.block16 = true;
  a.idesc = idesc_of(c);
  a.a = a.b = make_tile(Layout::k64, false, 1024, 128, 1).desc(false);
  a.sfa_tmem = 300;
  a.sfb_tmem = 310;
  CtaView view{smem.data(), 0, uint32_t(smem.size()), tmem.data()};
  for (Accumulate mode : {Accumulate::kExact, Accumulate::kSequential, Accumulate::kTruncating}) {
    const auto t0 = std::chrono::steady_clock::now();
    const int reps = 20;
    for (int i = 0; i < reps; ++i) {
      for (int step = 0; step < 128 / k; ++step) {
        UmmaPlan plan;
        plan_umma(a, &plan);
        execute_umma(plan, &view, mode);
      }
    }
    const double ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - t0).count() /
        reps;
    std::printf("128x128x128 nvfp4, accumulate mode %d: %.3f ms\n", int(mode), ms);
  }
}

int main() {
  check_umma_kinds();
  check_refusals();
  check_tmem_round_trip();
  check_wgmma_values();
  print_speed();
  return check_report("umma_values");
}
