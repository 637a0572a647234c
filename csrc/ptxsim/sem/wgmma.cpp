// SPDX-License-Identifier: Apache-2.0
// wgmma.mma_async (sm_90a): legality and execution. The descriptors share umma_desc.cpp.
#include <cstdio>
#include <vector>

#include "fault.h"
#include "narrow.h"
#include "umma.h"

namespace ptxsim::sem {
namespace {

constexpr int kM = 64;

Error fail(const WgmmaOp& op, const std::string& what) {
  return "wgmma.mma_async m64n" + std::to_string(op.n) + "k" + std::to_string(op.k) + " " +
         elem_name(op.d) + "." + elem_name(op.a) + "." + elem_name(op.b) + ": " + what;
}

bool is_f8(Elem e) { return e == Elem::kE4m3 || e == Elem::kE5m2; }
bool is_i8(Elem e) { return e == Elem::kS8 || e == Elem::kU8; }

}  // namespace

Error check_wgmma(const WgmmaOp& op) {
  if (op.n < 8 || op.n > 256 || op.n % 8 != 0) return fail(op, "N must be 8 to 256 in steps of 8");
  const bool i8 = is_i8(op.a);
  if (i8 && op.n > 32 && op.n % 16 != 0)
    return fail(op, "integer N above 32 must be a multiple of 16");
  bool d_ok = op.d == Elem::kF32;
  int k = 0;
  if (op.a == Elem::kF16 && op.b == Elem::kF16) {
    k = 16;
    d_ok |= op.d == Elem::kF16;
  } else if (op.a == Elem::kBf16 && op.b == Elem::kBf16) {
    k = 16;
  } else if (op.a == Elem::kTf32 && op.b == Elem::kTf32) {
    k = 8;
  } else if (is_f8(op.a) && is_f8(op.b)) {
    k = 32;
    d_ok |= op.d == Elem::kF16;
  } else if (i8 && is_i8(op.b)) {
    k = 32;
    d_ok = op.d == Elem::kS32;
  } else {
    return fail(op, "no such pair of operand types");
  }
  if (op.k != k) return fail(op, "K must be " + std::to_string(k));
  if (!d_ok) return fail(op, "no such D type for these operands");
  if ((op.trans_a || op.trans_b) && elem_bits(op.a) != 16)
    return fail(op, "transposition needs 16-bit operands");
  if (op.trans_a && op.a_in_regs) return fail(op, "A in registers cannot be transposed");
  if (i8 && (op.negate_a || op.negate_b)) return fail(op, "integer operands have no imm-scale");
  if (op.satfinite && !i8) return fail(op, ".satfinite is for integer types");
  return {};
}

Error plan_wgmma(const WgmmaOp& op, uint64_t a_desc, uint64_t b_desc, SmemOperand* a,
                 SmemOperand* b) {
  if (Error e = check_wgmma(op); !e.empty()) return e;
  auto operand = [&](SmemOperand* o, uint64_t bits, Elem elem, bool mn, int rows) {
    *o = SmemOperand{};
    o->elem = elem;
    o->mn_major = mn;
    o->rows = rows;
    o->k = op.k;
    return decode_wgmma_desc(bits, &o->desc);
  };
  *a = SmemOperand{};
  if (!op.a_in_regs) {
    if (Error e = operand(a, a_desc, op.a, op.trans_a, kM); !e.empty()) return e;
  }
  return operand(b, b_desc, op.b, op.trans_b, op.n);
}

Error execute_wgmma(const WgmmaOp& op, const SmemOperand& a, const SmemOperand& b, const CtaView& v,
                    const uint32_t* const* a_regs, uint32_t* const* d, bool scale_d,
                    Accumulate mode) {
  scale_d = scale_d || faulty(Fault::kAccumulate);
  static thread_local std::vector<uint32_t> chunks;
  static thread_local std::vector<double> am, bm;
  am.resize(static_cast<size_t>(kM) * op.k);
  bm.resize(static_cast<size_t>(op.n) * op.k);
  auto load = [&](const SmemOperand& o, const char* name, bool negate, double* out) -> Error {
    operand_chunks(o, &chunks);
    for (uint32_t c : chunks) {
      if (c < v.smem_begin || c + 16 > v.smem_end) {
        char buf[128];
        std::snprintf(buf, sizeof buf, "%s reads shared address 0x%x outside [0x%x, 0x%x)", name, c,
                      v.smem_begin, v.smem_end);
        return fail(op, buf);
      }
    }
    decode_operand(o, v.window, chunks.data(), negate, out, op.k);
    return {};
  };
  if (Error e = load(b, "B", op.negate_b, bm.data()); !e.empty()) return e;
  if (op.a_in_regs) {
    const int bits = elem_bits(op.a), per = 32 / bits;
    for (int r = 0; r < 4; ++r) {
      for (int t = 0; t < 128; ++t) {
        for (int e = 0; e < per; ++e) {
          const Coord c = wgmma_a_coord(bits, t, r, e);
          const uint32_t code =
              bits == 32 ? a_regs[r][t] : (a_regs[r][t] >> (bits * e)) & ((1u << bits) - 1);
          const double x = decode(op.a, code);
          am[static_cast<size_t>(c.row) * op.k + c.col] = op.negate_a ? -x : x;
        }
      }
    }
  } else {
    if (Error e = load(a, "A", op.negate_a, am.data()); !e.empty()) return e;
  }

  const int elems = op.n / 2;  // per thread
  Numerics num(mode, op.a, op.b);
  if (is_f8(op.a)) num.align_bits = num.out_bits = 13;  // measured on an H200
  const size_t cells = static_cast<size_t>(kM) * op.n;
  if (op.d == Elem::kS32) {
    static thread_local std::vector<int32_t> ai, bi, acc;
    ai.assign(am.begin(), am.end());
    bi.assign(bm.begin(), bm.end());
    acc.resize(cells);
    for (int i = 0; i < elems; ++i) {
      for (int t = 0; t < 128; ++t) {
        const Coord c = wgmma_d_coord(t, i);
        acc[static_cast<size_t>(c.row) * op.n + c.col] = static_cast<int32_t>(d[i][t]);
      }
    }
    mma_s32(kM, op.n, op.k, ai.data(), bi.data(), scale_d ? acc.data() : nullptr, acc.data(), op.n,
            op.satfinite);
    for (int i = 0; i < elems; ++i) {
      for (int t = 0; t < 128; ++t) {
        const Coord c = wgmma_d_coord(t, i);
        d[i][t] = static_cast<uint32_t>(acc[static_cast<size_t>(c.row) * op.n + c.col]);
      }
    }
  } else if (op.d == Elem::kF16) {
    static thread_local std::vector<uint16_t> acc;
    acc.resize(cells);
    for (int i = 0; i < elems; ++i) {
      for (int t = 0; t < 128; ++t) {
        const Coord c = wgmma_d_coord(t, i);
        acc[static_cast<size_t>(c.row) * op.n + c.col] =
            static_cast<uint16_t>(d[i >> 1][t] >> (16 * (i & 1)));
      }
    }
    mma_f16(kM, op.n, op.k, am.data(), bm.data(), scale_d ? acc.data() : nullptr, acc.data(), op.n,
            num);
    for (int r = 0; r < elems / 2; ++r) {
      for (int t = 0; t < 128; ++t) {
        const Coord x = wgmma_d_coord(t, 2 * r), y = wgmma_d_coord(t, 2 * r + 1);
        d[r][t] = acc[static_cast<size_t>(x.row) * op.n + x.col] |
                  static_cast<uint32_t>(acc[static_cast<size_t>(y.row) * op.n + y.col]) << 16;
      }
    }
  } else {
    static thread_local std::vector<float> acc;
    acc.resize(cells);
    for (int i = 0; i < elems; ++i) {
      for (int t = 0; t < 128; ++t) {
        const Coord c = wgmma_d_coord(t, i);
        acc[static_cast<size_t>(c.row) * op.n + c.col] = bits_f32(d[i][t]);
      }
    }
    mma_f32(kM, op.n, op.k, am.data(), bm.data(), scale_d ? acc.data() : nullptr, acc.data(), op.n,
            num);
    for (int i = 0; i < elems; ++i) {
      for (int t = 0; t < 128; ++t) {
        const Coord c = wgmma_d_coord(t, i);
        d[i][t] = f32_bits(acc[static_cast<size_t>(c.row) * op.n + c.col]);
      }
    }
  }
  return {};
}

}  // namespace ptxsim::sem
