// SPDX-License-Identifier: Apache-2.0
// mma.sync: legality, register fragments, scale selection.
#include <cstdint>

#include "fault.h"
#include "fp.h"
#include "frag.h"
#include "mma.h"
#include "narrow.h"

namespace ptxsim::sem {
namespace {

constexpr int kMaxM = 16, kN = 8, kMaxK = 64;

bool is_f8(Elem e) { return e == Elem::kE4m3 || e == Elem::kE5m2; }
bool is_f8f6f4(Elem e) {
  return is_f8(e) || e == Elem::kE3m2 || e == Elem::kE2m3 || e == Elem::kE2m1;
}
bool is_i8(Elem e) { return e == Elem::kS8 || e == Elem::kU8; }
bool is_i4(Elem e) { return e == Elem::kS4 || e == Elem::kU4; }
bool is_int(Elem e) { return is_i8(e) || is_i4(e); }

// Width of an element in its register: the f8f6f4 kinds keep 6- and 4-bit elements in bytes.
int container_bits(const MmaSync& op, Elem e) {
  const bool bytes = op.kind == MmaKind::kF8f6f4 || op.kind == MmaKind::kMxf8f6f4;
  return bytes ? 8 : elem_bits(e);
}

std::string shape_name(const MmaSync& op) {
  return "m" + std::to_string(op.m) + "n" + std::to_string(op.n) + "k" + std::to_string(op.k);
}

Error fail(const MmaSync& op, const std::string& what) {
  return "mma.sync " + shape_name(op) + " " + elem_name(op.d) + "." + elem_name(op.a) + "." +
         elem_name(op.b) + "." + elem_name(op.c) + ": " + what;
}

bool shape_is(const MmaSync& op, int m, std::initializer_list<int> ks) {
  if (op.m != m || op.n != 8) return false;
  for (int k : ks) {
    if (op.k == k) return true;
  }
  return false;
}

Error check_block_scaled(const MmaSync& op) {
  if (op.c != Elem::kF32 || op.d != Elem::kF32)
    return fail(op, "block-scaled kinds accumulate in f32 only");
  if (op.scale != Elem::kUe8m0 && op.scale != Elem::kUe4m3)
    return fail(op, "scale type must be ue8m0 or ue4m3");
  if (op.kind == MmaKind::kMxf8f6f4) {
    if (!shape_is(op, 16, {32})) return fail(op, "kind::mxf8f6f4 needs m16n8k32");
    if (!is_f8f6f4(op.a) || !is_f8f6f4(op.b))
      return fail(op, "kind::mxf8f6f4 takes 8-, 6- or 4-bit floats");
    if (op.scale_vec != 1 || op.scale != Elem::kUe8m0)
      return fail(op, "kind::mxf8f6f4 needs scale_vec::1X with ue8m0");
    return {};
  }
  if (!shape_is(op, 16, {64})) return fail(op, "kinds mxf4 and mxf4nvf4 need m16n8k64");
  if (op.a != Elem::kE2m1 || op.b != Elem::kE2m1)
    return fail(op, "kinds mxf4 and mxf4nvf4 take e2m1");
  if (op.kind == MmaKind::kMxf4) {
    if (op.scale_vec != 2 || op.scale != Elem::kUe8m0)
      return fail(op, "kind::mxf4 needs scale_vec::2X with ue8m0");
    return {};
  }
  if (op.scale_vec == 4) return {};
  if (op.scale_vec == 2 && op.scale == Elem::kUe8m0) return {};
  return fail(op, "kind::mxf4nvf4 needs scale_vec::4X, or scale_vec::2X with ue8m0");
}

// Value of the element held by `container`.
double decode_container(const MmaSync& op, Elem e, uint32_t container) {
  const bool bytes = op.kind == MmaKind::kF8f6f4 || op.kind == MmaKind::kMxf8f6f4;
  // In a byte container e2m1 occupies bits 5:2, 6-bit elements the low bits (PTX 9.7.14.5.14).
  if (bytes && e == Elem::kE2m1) container >>= 2;
  return decode(e, container);
}

struct Decoder {
  const MmaSync& op;
  Elem elem;
  int bits;
  float table[256];

  Decoder(const MmaSync& o, Elem e) : op(o), elem(e), bits(container_bits(o, e)) {
    if (bits > 8) return;
    if (bits < 8 ||
        !((op.kind == MmaKind::kF8f6f4 || op.kind == MmaKind::kMxf8f6f4) && e == Elem::kE2m1)) {
      const float* t = decode_table(e);
      for (int i = 0; i < 256; ++i) table[i] = t[i];
    } else {
      for (int i = 0; i < 256; ++i) table[i] = static_cast<float>(decode_container(op, e, i));
    }
  }
  double operator()(uint32_t word, int e) const {
    const uint32_t c = bits == 32 ? word : (word >> (bits * e)) & ((1u << bits) - 1);
    return bits <= 8 ? table[c] : decode(elem, c);
  }
};

template <class T, class D>
void gather(const MmaSync& op, const uint32_t* const* a, const uint32_t* const* b, const D& da,
            const D& db, T* am, T* bm) {
  const int per = 32 / da.bits;
  for (int r = 0; r < mma_sync_a_regs(op); ++r) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int e = 0; e < per; ++e) {
        const Coord c = mma_a_coord(op.m, da.bits, lane, r, e);
        am[c.row * op.k + c.col] = static_cast<T>(da(a[r][lane], e));
      }
    }
  }
  for (int r = 0; r < mma_sync_b_regs(op); ++r) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int e = 0; e < per; ++e) {
        const Coord c = mma_b_coord(db.bits, lane, r, e);
        bm[c.col * op.k + c.row] = static_cast<T>(db(b[r][lane], e));
      }
    }
  }
}

void apply_scales(const MmaSync& op, MmaScales s, double* am, double* bm) {
  if (faulty(Fault::kByteId)) s.byte_a = s.byte_b = 0;
  if (faulty(Fault::kThreadId)) s.thread_a = s.thread_b = 0;
  const int swap = faulty(Fault::kMmaScaleRows);
  const int block = op.k / op.scale_vec;
  const float* table = decode_table(op.scale);
  auto scale = [&](const uint32_t* data, int lane, int byte) {
    const uint32_t code = (data[lane] >> (8 * byte)) & 0xff;
    // 2^-127 is not a normal float but still exact in the table.
    return static_cast<double>(table[code]);
  };
  for (int row = 0; row < op.m; ++row) {
    for (int blk = 0; blk < op.scale_vec; ++blk) {
      const double v = scale(s.a, mma_sfa_lane(row ^ swap, s.thread_a), mma_sf_byte(s.byte_a, blk));
      for (int i = 0; i < block; ++i) am[row * op.k + blk * block + i] *= v;
    }
  }
  for (int col = 0; col < op.n; ++col) {
    for (int blk = 0; blk < op.scale_vec; ++blk) {
      const double v = scale(s.b, mma_sfb_lane(col, s.thread_b), mma_sf_byte(s.byte_b, blk));
      for (int i = 0; i < block; ++i) bm[col * op.k + blk * block + i] *= v;
    }
  }
}

// What sm_90 does for e4m3/e5m2 without .kind: bytes widened to f16, the even byte pairs of every
// quad multiplied first, then the odd ones, and C added to that in the accumulator's format
// (measured on an H200). `run` multiplies one half, adding `part` unless it is null.
template <class T, class Run>
void f8_halves(const MmaSync& op, const double* am, const double* bm, T* part, Run run) {
  const int half = op.k / 2;
  double a[2][kMaxM * kMaxK / 2], b[2][kN * kMaxK / 2];
  for (int k = 0; k < op.k; ++k) {
    const int h = (k >> 1) & 1, x = (k >> 2) * 2 + (k & 1);
    for (int r = 0; r < op.m; ++r) a[h][r * half + x] = am[r * op.k + k];
    for (int r = 0; r < kN; ++r) b[h][r * half + x] = bm[r * op.k + k];
  }
  run(half, a[0], b[0], static_cast<T*>(nullptr));
  run(half, a[1], b[1], part);
}

void mma_f8_f32(const MmaSync& op, const double* am, const double* bm, float* acc) {
  const Numerics num(Accumulate::kTruncating, Elem::kF16, Elem::kF16);
  float part[kMaxM * kN];
  f8_halves(op, am, bm, part, [&](int k, const double* a, const double* b, const float* c) {
    mma_f32(op.m, kN, k, a, b, c, part, kN, num);
  });
  for (int i = 0; i < op.m * kN; ++i) acc[i] = add_f32(acc[i], part[i]);
}

void mma_f8_f16(const MmaSync& op, const double* am, const double* bm, uint16_t* acc) {
  const Numerics num(Accumulate::kTruncating, Elem::kF16, Elem::kF16);
  uint16_t part[kMaxM * kN];
  f8_halves(op, am, bm, part, [&](int k, const double* a, const double* b, const uint16_t* c) {
    mma_f16(op.m, kN, k, a, b, c, part, kN, num);
  });
  for (int i = 0; i < op.m * kN; ++i) acc[i] = add_h(Elem::kF16, acc[i], part[i]);
}

}  // namespace

Error check_mma_sync(const MmaSync& op) {
  if (op.n != 8 || (op.m != 8 && op.m != 16)) return fail(op, "no such shape");
  if (op.kind == MmaKind::kMxf8f6f4 || op.kind == MmaKind::kMxf4 || op.kind == MmaKind::kMxf4nvf4)
    return check_block_scaled(op);
  if (op.scale_vec != 0) return fail(op, "scale_vec without .block_scale");
  const bool f16acc = op.c == Elem::kF16 && op.d == Elem::kF16;
  const bool f32acc = op.c == Elem::kF32 && op.d == Elem::kF32;
  if (op.satfinite && !is_int(op.a)) return fail(op, ".satfinite is for integer types");
  if (op.kind == MmaKind::kF8f6f4) {
    if (!shape_is(op, 16, {32})) return fail(op, "kind::f8f6f4 needs m16n8k32");
    if (!is_f8f6f4(op.a) || !is_f8f6f4(op.b))
      return fail(op, "kind::f8f6f4 takes 8-, 6- or 4-bit floats");
    return f16acc || f32acc ? Error{} : fail(op, "accumulators must both be f16 or both f32");
  }
  if (is_int(op.a)) {
    if (is_i8(op.a) != is_i8(op.b) || is_i4(op.a) != is_i4(op.b))
      return fail(op, "A and B must have equal width");
    if (op.c != Elem::kS32 || op.d != Elem::kS32)
      return fail(op, "integer types accumulate in s32");
    const bool ok = is_i8(op.a) ? shape_is(op, 8, {16}) || shape_is(op, 16, {16, 32})
                                : shape_is(op, 8, {32}) || shape_is(op, 16, {32, 64});
    return ok ? Error{} : fail(op, "no such shape for this integer type");
  }
  if (is_f8(op.a)) {
    if (!is_f8(op.b)) return fail(op, "B must be e4m3 or e5m2");
    if (!shape_is(op, 16, {16, 32})) return fail(op, "8-bit floats need m16n8k16 or m16n8k32");
    return f16acc || f32acc ? Error{} : fail(op, "accumulators must both be f16 or both f32");
  }
  if (op.a != op.b) return fail(op, "A and B must have the same type");
  switch (op.a) {
    case Elem::kF16:
      if (op.m == 8 && op.k == 4) return fail(op, "m8n8k4 f16 (sm_70) is not modelled");
      if (!shape_is(op, 16, {8, 16})) return fail(op, "f16 needs m16n8k8 or m16n8k16");
      return f16acc || f32acc ? Error{} : fail(op, "accumulators must both be f16 or both f32");
    case Elem::kBf16:
      if (!shape_is(op, 16, {8, 16})) return fail(op, "bf16 needs m16n8k8 or m16n8k16");
      return f32acc ? Error{} : fail(op, "bf16 accumulates in f32");
    case Elem::kTf32:
      if (!shape_is(op, 16, {4, 8})) return fail(op, "tf32 needs m16n8k4 or m16n8k8");
      return f32acc ? Error{} : fail(op, "tf32 accumulates in f32");
    case Elem::kF64:
      if (!shape_is(op, 8, {4}) && !shape_is(op, 16, {4, 8, 16}))
        return fail(op, "no such f64 shape");
      if (op.round == Round::kRna || op.round == Round::kRs)
        return fail(op, "f64 rounding must be .rn .rz .rm .rp");
      return op.c == Elem::kF64 && op.d == Elem::kF64 ? Error{}
                                                      : fail(op, "f64 accumulates in f64");
    default:
      return fail(op, "no such element type");
  }
}

int mma_sync_a_regs(const MmaSync& op) { return mma_a_regs(op.m, op.k, container_bits(op, op.a)); }
int mma_sync_b_regs(const MmaSync& op) { return mma_b_regs(op.k, container_bits(op, op.b)); }
int mma_sync_c_regs(const MmaSync& op) { return op.m * op.n / 32 / (op.c == Elem::kF16 ? 2 : 1); }
int mma_sync_d_regs(const MmaSync& op) { return op.m * op.n / 32 / (op.d == Elem::kF16 ? 2 : 1); }

Error check_mma_scales(const MmaSync& op, const MmaScales& s) {
  auto bad = [&](const char* name, int v, const char* allowed) {
    return fail(op, std::string(name) + " = " + std::to_string(v) + ", allowed " + allowed);
  };
  if (s.thread_a != 0 && s.thread_a != 1) return bad("thread-id-a", s.thread_a, "0 or 1");
  if (s.thread_b < 0 || s.thread_b > 3) return bad("thread-id-b", s.thread_b, "0 to 3");
  const int step = op.scale_vec;
  for (int i = 0; i < 2; ++i) {
    const int byte = i ? s.byte_b : s.byte_a;
    const char* name = i ? "byte-id-b" : "byte-id-a";
    if (byte < 0 || byte > 3 || byte % step != 0 || byte + step > 4) {
      return bad(name, byte, step == 1 ? "0 to 3" : step == 2 ? "0 or 2" : "0");
    }
  }
  return {};
}

Error mma_sync(const MmaSync& op, const uint32_t* const* a, const uint32_t* const* b,
               const uint32_t* const* c, uint32_t* const* d, const MmaScales* scales,
               Accumulate mode) {
  const Decoder da(op, op.a), db(op, op.b);
  if (is_int(op.a)) {
    int32_t am[kMaxM * kMaxK], bm[kN * kMaxK], acc[kMaxM * kN];
    gather(op, a, b, da, db, am, bm);
    for (int i = 0; i < op.m * op.n / 32; ++i) {
      for (int lane = 0; lane < 32; ++lane) {
        const Coord x = mma_c_coord(lane, i);
        acc[x.row * kN + x.col] = static_cast<int32_t>(c[i][lane]);
      }
    }
    mma_s32(op.m, kN, op.k, am, bm, acc, acc, kN, op.satfinite);
    for (int i = 0; i < op.m * op.n / 32; ++i) {
      for (int lane = 0; lane < 32; ++lane) {
        const Coord x = mma_c_coord(lane, i);
        d[i][lane] = static_cast<uint32_t>(acc[x.row * kN + x.col]);
      }
    }
    return {};
  }
  double am[kMaxM * kMaxK], bm[kN * kMaxK];
  gather(op, a, b, da, db, am, bm);
  if (op.scale_vec != 0) {
    if (!scales) return fail(op, "scale operands missing");
    if (Error e = check_mma_scales(op, *scales); !e.empty()) return e;
    apply_scales(op, *scales, am, bm);
  }
  if (op.c == Elem::kF16) {
    uint16_t acc[kMaxM * kN];
    for (int i = 0; i < 4; ++i) {
      for (int lane = 0; lane < 32; ++lane) {
        const Coord x = mma_c_coord(lane, i);
        acc[x.row * kN + x.col] = static_cast<uint16_t>(c[i >> 1][lane] >> (16 * (i & 1)));
      }
    }
    if (mode == Accumulate::kTruncating && op.kind == MmaKind::kPlain && is_f8(op.a)) {
      mma_f8_f16(op, am, bm, acc);
    } else {
      mma_f16(op.m, kN, op.k, am, bm, acc, acc, kN, Numerics(mode, op.a, op.b));
    }
    for (int r = 0; r < 2; ++r) {
      for (int lane = 0; lane < 32; ++lane) {
        const Coord x = mma_c_coord(lane, 2 * r), y = mma_c_coord(lane, 2 * r + 1);
        d[r][lane] = acc[x.row * kN + x.col] | static_cast<uint32_t>(acc[y.row * kN + y.col]) << 16;
      }
    }
    return {};
  }
  float acc[kMaxM * kN];
  for (int i = 0; i < 4; ++i) {
    for (int lane = 0; lane < 32; ++lane) {
      const Coord x = mma_c_coord(lane, i);
      acc[x.row * kN + x.col] = bits_f32(c[i][lane]);
    }
  }
  if (mode == Accumulate::kTruncating && op.kind == MmaKind::kPlain && is_f8(op.a)) {
    mma_f8_f32(op, am, bm, acc);
  } else {
    const Numerics num = op.scale_vec ? Numerics(mode) : Numerics(mode, op.a, op.b);
    mma_f32(op.m, kN, op.k, am, bm, acc, acc, kN, num);
  }
  for (int i = 0; i < 4; ++i) {
    for (int lane = 0; lane < 32; ++lane) {
      const Coord x = mma_c_coord(lane, i);
      d[i][lane] = f32_bits(acc[x.row * kN + x.col]);
    }
  }
  return {};
}

Error mma_sync_f64(const MmaSync& op, const double* const* a, const double* const* b,
                   const double* const* c, double* const* d) {
  if (op.a != Elem::kF64) return fail(op, "not an f64 instruction");
  double am[kMaxM * 16], bm[kN * 16], acc[kMaxM * kN];
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < mma_sync_a_regs(op); ++r) {
      const Coord x = mma_a_coord(op.m, 64, lane, r, 0);
      am[x.row * op.k + x.col] = a[r][lane];
    }
    for (int r = 0; r < mma_sync_b_regs(op); ++r) {
      const Coord x = mma_b_coord(64, lane, r, 0);
      bm[x.col * op.k + x.row] = b[r][lane];
    }
    for (int i = 0; i < mma_sync_c_regs(op); ++i) {
      const Coord x = mma_c_coord(lane, i);
      acc[x.row * kN + x.col] = c[i][lane];
    }
  }
  mma_f64(op.m, kN, op.k, am, bm, acc, acc, kN, op.round);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < mma_sync_d_regs(op); ++i) {
      const Coord x = mma_c_coord(lane, i);
      d[i][lane] = acc[x.row * kN + x.col];
    }
  }
  return {};
}

}  // namespace ptxsim::sem
