// SPDX-License-Identifier: Apache-2.0
// mma.sync of every kind on exactly representable data: fragments packed with the formulas of
// PTX 9.7.14.5, results compared with a plain matrix product in all accumulate modes. Also the
// accumulate modes themselves.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "sem/frag.h"
#include "sem/mma.h"
#include "sem/narrow.h"

using namespace ptxsim::sem;

// (row, k) of element i of a lane, from the manual's listings.
Coord doc_a(int m, int k, int bits, int lane, int i) {
  const int g = lane >> 2, t = lane % 4;
  if (m == 8) return {g, bits == 8 ? 4 * t + i : bits == 4 ? 8 * t + i : t};
  if (bits == 16 && k == 8) return {i < 2 ? g : g + 8, 2 * t + (i & 1)};
  if (bits == 16)
    return {i < 2 || (i >= 4 && i < 6) ? g : g + 8, 2 * t + (i & 1) + (i >= 4 ? 8 : 0)};
  if (bits == 32) return {i % 2 == 0 ? g : g + 8, t + (i >= 2 ? 4 : 0)};
  if (bits == 8 && k == 16) return {i < 4 ? g : g + 8, 4 * t + (i & 3)};
  if (bits == 8)
    return {i < 4 || (i >= 8 && i < 12) ? g : g + 8, 4 * t + (i & 3) + (i >= 8 ? 16 : 0)};
  if (bits == 4 && k == 32) return {i < 8 ? g : g + 8, 8 * t + (i & 7)};
  if (bits == 4)
    return {i < 8 || (i >= 16 && i < 24) ? g : g + 8, 8 * t + (i & 7) + (i >= 16 ? 32 : 0)};
  return {i % 2 == 0 ? g : g + 8, t + 4 * (i / 2)};  // f64
}
Coord doc_b(int k, int bits, int lane, int i) {
  const int g = lane >> 2, t = lane % 4;
  if (bits == 16) return {2 * t + (i & 1) + (i >= 2 ? 8 : 0), g};
  if (bits == 32) return {t + 4 * i, g};
  if (bits == 8) return {4 * t + (i & 3) + (i >= 4 ? 16 : 0), g};
  if (bits == 4) return {8 * t + (i & 7) + (i >= 8 ? 32 : 0), g};
  (void)k;
  return {t + 4 * i, g};
}

// A code whose value is a multiple of 1/8 with magnitude at most 4 (small integers for integer
// types).
uint32_t random_code(Rng& rng, Elem e) {
  if (e == Elem::kS8) return uint32_t(rng.below(31) - 15) & 0xff;
  if (e == Elem::kU8) return uint32_t(rng.below(31));
  if (e == Elem::kS4 || e == Elem::kU4) return uint32_t(rng.below(16));
  for (;;) {
    const double v = (rng.below(65) - 32) / 8.0;
    const uint32_t c = encode(e, v);
    if (decode(e, c) == v) return c;
  }
}

struct MatrixData {
  std::vector<uint32_t> code;
  std::vector<double> value;
};
MatrixData random_matrix(Rng& rng, Elem e, int rows, int cols) {
  MatrixData d;
  for (int i = 0; i < rows * cols; ++i) {
    d.code.push_back(random_code(rng, e));
    d.value.push_back(decode(e, d.code.back()));
  }
  return d;
}

void check_case(Rng& rng, const MmaSync& op, int byte_a = 0, int thread_a = 0, int byte_b = 0,
                int thread_b = 0) {
  const Error legal = check_mma_sync(op);
  CHECK(legal.empty(), "%s", legal.c_str());
  const MatrixData a = random_matrix(rng, op.a, op.m, op.k),
                   b = random_matrix(rng, op.b, op.n, op.k);
  const bool bytes = op.kind == MmaKind::kF8f6f4 || op.kind == MmaKind::kMxf8f6f4;
  auto width = [&](Elem e) { return bytes ? 8 : elem_bits(e); };
  auto container = [&](Elem e, uint32_t code) {
    // Padding bits are set to ones where the value must not depend on them.
    if (!bytes) return code;
    if (e == Elem::kE2m1) return (code << 2) | 0xc3u;
    if (elem_bits(e) == 6) return code | 0xc0u;
    return code;
  };
  uint32_t ra[8][32] = {}, rb[8][32] = {}, rc[8][32] = {}, rd[8][32] = {};
  const uint32_t *pa[8], *pb[8], *pc[8];
  uint32_t* pd[8];
  for (int i = 0; i < 8; ++i) {
    pa[i] = ra[i];
    pb[i] = rb[i];
    pc[i] = rc[i];
    pd[i] = rd[i];
  }
  const int wa = width(op.a), wb = width(op.b);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < op.m * op.k / 32; ++i) {
      const Coord c = doc_a(op.m, op.k, wa, lane, i);
      ra[i * wa / 32][lane] |= container(op.a, a.code[size_t(c.row * op.k + c.col)])
                               << (i * wa % 32);
    }
    for (int i = 0; i < op.n * op.k / 32; ++i) {
      const Coord c = doc_b(op.k, wb, lane, i);
      rb[i * wb / 32][lane] |= container(op.b, b.code[size_t(c.col * op.k + c.row)])
                               << (i * wb % 32);
    }
  }
  double cv[16][8], want[16][8];
  for (int r = 0; r < 16; ++r) {
    for (int n = 0; n < 8; ++n) cv[r][n] = rng.below(17) - 8;
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < op.m * 8 / 32; ++i) {
      const double v = cv[lane / 4 + (i >= 2 ? 8 : 0)][lane % 4 * 2 + (i & 1)];
      if (op.c == Elem::kF16) {
        rc[i / 2][lane] |= encode(Elem::kF16, v) << (16 * (i & 1));
      } else {
        rc[i][lane] = op.c == Elem::kS32 ? uint32_t(int32_t(v)) : f32_bits(float(v));
      }
    }
  }
  // Scales: unselected bytes and lanes hold 0xff (NaN), so a wrong selector cannot go unnoticed.
  uint32_t sa[32], sb[32];
  double va[16][4], vb[8][4];
  for (int i = 0; i < 32; ++i) sa[i] = sb[i] = 0xffffffffu;
  const int vec = op.scale_vec;
  auto scale_code = [&] {
    return op.scale == Elem::kUe8m0 ? uint32_t(126 + rng.below(3))
                                    : encode(Elem::kUe4m3, 0.5 * (1 + rng.below(4)));
  };
  auto put = [&](uint32_t& word, int byte, uint32_t code) {
    word = (word & ~(0xffu << (8 * byte))) | code << (8 * byte);
  };
  for (int s = 0; s < vec; ++s) {
    for (int r = 0; r < 16; ++r) {
      const uint32_t code = scale_code();
      va[r][s] = decode(op.scale, code);
      // PTX: the quad of row r % 8; threads 2 * id (rows 0..7) and 2 * id + 1 (rows 8..15).
      put(sa[r % 8 * 4 + thread_a * 2 + r / 8], byte_a + s, code);
    }
    for (int n = 0; n < 8; ++n) {
      const uint32_t code = scale_code();
      vb[n][s] = decode(op.scale, code);
      put(sb[n * 4 + thread_b], byte_b + s, code);
    }
  }
  for (int r = 0; r < op.m; ++r) {
    for (int n = 0; n < 8; ++n) {
      double sum = cv[r][n];
      for (int k = 0; k < op.k; ++k) {
        double p = a.value[size_t(r * op.k + k)] * b.value[size_t(n * op.k + k)];
        if (vec) p *= va[r][k / (op.k / vec)] * vb[n][k / (op.k / vec)];
        sum += p;
      }
      want[r][n] = sum;
    }
  }
  MmaScales scales;
  scales.a = sa;
  scales.b = sb;
  scales.byte_a = byte_a;
  scales.thread_a = thread_a;
  scales.byte_b = byte_b;
  scales.thread_b = thread_b;
  for (Accumulate mode : {Accumulate::kExact, Accumulate::kSequential, Accumulate::kTruncating}) {
    // sm_90 rounds the two halves of an 8-bit K to f16; the H200 goldens cover that.
    const bool f8 = op.kind == MmaKind::kPlain && elem_bits(op.a) == 8 && op.c == Elem::kF16;
    if (mode == Accumulate::kTruncating && f8) continue;
    const Error e = mma_sync(op, pa, pb, pc, pd, vec ? &scales : nullptr, mode);
    CHECK(e.empty(), "%s", e.c_str());
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < op.m * 8 / 32; ++i) {
        const int r = lane / 4 + (i >= 2 ? 8 : 0), n = lane % 4 * 2 + (i & 1);
        const double got = op.d == Elem::kF16
                               ? decode(Elem::kF16, (rd[i / 2][lane] >> (16 * (i & 1))) & 0xffff)
                           : op.d == Elem::kS32 ? double(int32_t(rd[i][lane]))
                                                : double(bits_f32(rd[i][lane]));
        const double expect =
            op.d == Elem::kF16 ? decode(Elem::kF16, encode(Elem::kF16, want[r][n])) : want[r][n];
        CHECK(got == expect,
              "m%dn8k%d %s.%s kind %d mode %d selectors %d %d %d %d (%d, %d): %g, want %g", op.m,
              op.k, elem_name(op.a), elem_name(op.b), int(op.kind), int(mode), byte_a, thread_a,
              byte_b, thread_b, r, n, got, expect);
      }
    }
  }
}

MmaSync make(int m, int k, Elem a, Elem b, Elem acc, MmaKind kind = MmaKind::kPlain, int vec = 0,
             Elem scale = Elem::kUe8m0) {
  MmaSync op;
  op.m = m;
  op.k = k;
  op.a = a;
  op.b = b;
  op.c = op.d = acc;
  op.kind = kind;
  op.scale_vec = vec;
  op.scale = scale;
  return op;
}

void check_all_kinds() {
  Rng rng(21);
  for (Elem acc : {Elem::kF32, Elem::kF16}) {
    for (int k : {8, 16}) check_case(rng, make(16, k, Elem::kF16, Elem::kF16, acc));
    for (Elem a : {Elem::kE4m3, Elem::kE5m2}) {
      for (Elem b : {Elem::kE4m3, Elem::kE5m2}) {
        for (int k : {16, 32}) check_case(rng, make(16, k, a, b, acc));
      }
    }
  }
  for (int k : {8, 16}) check_case(rng, make(16, k, Elem::kBf16, Elem::kBf16, Elem::kF32));
  for (int k : {4, 8}) check_case(rng, make(16, k, Elem::kTf32, Elem::kTf32, Elem::kF32));
  for (Elem a : {Elem::kS8, Elem::kU8}) {
    for (Elem b : {Elem::kS8, Elem::kU8}) {
      check_case(rng, make(8, 16, a, b, Elem::kS32));
      for (int k : {16, 32}) check_case(rng, make(16, k, a, b, Elem::kS32));
    }
  }
  for (Elem a : {Elem::kS4, Elem::kU4}) {
    for (Elem b : {Elem::kS4, Elem::kU4}) {
      check_case(rng, make(8, 32, a, b, Elem::kS32));
      for (int k : {32, 64}) check_case(rng, make(16, k, a, b, Elem::kS32));
    }
  }
  const Elem small[] = {Elem::kE4m3, Elem::kE5m2, Elem::kE2m3, Elem::kE3m2, Elem::kE2m1};
  for (Elem a : small) {
    for (Elem b : small) {
      for (Elem acc : {Elem::kF32, Elem::kF16})
        check_case(rng, make(16, 32, a, b, acc, MmaKind::kF8f6f4));
      const MmaSync mx = make(16, 32, a, b, Elem::kF32, MmaKind::kMxf8f6f4, 1);
      for (int id = 0; id < 128; ++id)
        check_case(rng, mx, id & 3, id >> 2 & 1, id >> 3 & 3, id >> 5 & 3);
    }
  }
  for (int ta = 0; ta < 2; ++ta) {
    for (int tb = 0; tb < 4; ++tb) {
      for (int ba : {0, 2}) {
        for (int bb : {0, 2}) {
          check_case(rng, make(16, 64, Elem::kE2m1, Elem::kE2m1, Elem::kF32, MmaKind::kMxf4, 2), ba,
                     ta, bb, tb);
          check_case(rng, make(16, 64, Elem::kE2m1, Elem::kE2m1, Elem::kF32, MmaKind::kMxf4nvf4, 2),
                     ba, ta, bb, tb);
        }
      }
      for (Elem s : {Elem::kUe8m0, Elem::kUe4m3}) {
        check_case(rng,
                   make(16, 64, Elem::kE2m1, Elem::kE2m1, Elem::kF32, MmaKind::kMxf4nvf4, 4, s), 0,
                   ta, 0, tb);
      }
    }
  }
}

void check_f64() {
  Rng rng(22);
  const int shapes[][2] = {{8, 4}, {16, 4}, {16, 8}, {16, 16}};
  for (const auto& s : shapes) {
    const MmaSync op = make(s[0], s[1], Elem::kF64, Elem::kF64, Elem::kF64);
    CHECK(check_mma_sync(op).empty(), "f64 refused");
    double ra[8][32], rb[4][32], rc[4][32], rd[4][32];
    const double *pa[8], *pb[4], *pc[4];
    double* pd[4];
    for (int i = 0; i < 8; ++i) pa[i] = ra[i];
    for (int i = 0; i < 4; ++i) {
      pb[i] = rb[i];
      pc[i] = rc[i];
      pd[i] = rd[i];
    }
    std::vector<double> am(size_t(op.m * op.k)), bm(size_t(8 * op.k)), cm(size_t(op.m * 8));
    for (double& v : am) v = rng.below(101) - 50;
    for (double& v : bm) v = rng.below(101) - 50;
    for (double& v : cm) v = rng.below(101) - 50;
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < op.m * op.k / 32; ++i) {
        const Coord c = doc_a(op.m, op.k, 64, lane, i);
        ra[i][lane] = am[size_t(c.row * op.k + c.col)];
      }
      for (int i = 0; i < op.k / 4; ++i) {
        const Coord c = doc_b(op.k, 64, lane, i);
        rb[i][lane] = bm[size_t(c.col * op.k + c.row)];
      }
      for (int i = 0; i < op.m / 4; ++i)
        rc[i][lane] = cm[size_t((lane / 4 + (i >= 2 ? 8 : 0)) * 8 + lane % 4 * 2 + (i & 1))];
    }
    CHECK(mma_sync_f64(op, pa, pb, pc, pd).empty(), "f64 refused");
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < op.m / 4; ++i) {
        const int r = lane / 4 + (i >= 2 ? 8 : 0), n = lane % 4 * 2 + (i & 1);
        double want = cm[size_t(r * 8 + n)];
        for (int k = 0; k < op.k; ++k) want += am[size_t(r * op.k + k)] * bm[size_t(n * op.k + k)];
        CHECK(rd[i][lane] == want, "f64 m%dk%d (%d, %d)", op.m, op.k, r, n);
      }
    }
  }
}

void check_refusals() {
  auto refused = [](const MmaSync& op, const char* word) {
    const Error e = check_mma_sync(op);
    CHECK(e.find(word) != std::string::npos, "expected '%s' in '%s'", word, e.c_str());
  };
  refused(make(16, 32, Elem::kF16, Elem::kF16, Elem::kF32), "m16n8k8 or m16n8k16");
  refused(make(16, 16, Elem::kBf16, Elem::kBf16, Elem::kF16), "f32");
  refused(make(16, 16, Elem::kF16, Elem::kBf16, Elem::kF32), "same type");
  refused(make(16, 32, Elem::kE2m1, Elem::kE2m1, Elem::kF32), "no such element type");
  refused(make(16, 64, Elem::kE2m1, Elem::kE2m1, Elem::kF32, MmaKind::kMxf4, 4), "2X");
  refused(make(16, 64, Elem::kE2m1, Elem::kE2m1, Elem::kF32, MmaKind::kMxf4nvf4, 2, Elem::kUe4m3),
          "4X");
  refused(make(16, 32, Elem::kE4m3, Elem::kE4m3, Elem::kF32, MmaKind::kMxf8f6f4, 2), "1X");
  refused(make(16, 32, Elem::kE4m3, Elem::kE4m3, Elem::kF16, MmaKind::kMxf8f6f4, 1), "f32 only");
  refused(make(8, 4, Elem::kF16, Elem::kF16, Elem::kF32), "m8n8k4");
  MmaScales s;
  const MmaSync nv = make(16, 64, Elem::kE2m1, Elem::kE2m1, Elem::kF32, MmaKind::kMxf4nvf4, 4);
  s.byte_a = 1;
  CHECK(check_mma_scales(nv, s).find("byte-id-a") != std::string::npos, "byte-id-a 1 with 4X");
  s.byte_a = 0;
  s.thread_a = 2;
  CHECK(check_mma_scales(nv, s).find("thread-id-a") != std::string::npos, "thread-id-a 2");
  s.thread_a = 0;
  s.thread_b = 4;
  CHECK(!check_mma_scales(nv, s).empty(), "thread-id-b 4");
}

void check_accumulate_modes() {
  Rng rng(23);
  const int m = 5, n = 11, k = 37;
  std::vector<double> a(size_t(m * k)), b(size_t(n * k));
  // Products of 40 bits: rounding them to f32 before the addition would be seen.
  for (double& v : a)
    v = (rng.below(2000001) - 1000000) / 65536.0 * std::ldexp(1.0, rng.below(9) - 4);
  for (double& v : b) v = (rng.below(2000001) - 1000000) / 65536.0;
  std::vector<float> c(size_t(m * n)), d(size_t(m * n));
  for (float& v : c) v = float(rng.below(1000)) / 7.0f;
  for (Accumulate mode : {Accumulate::kExact, Accumulate::kSequential, Accumulate::kTruncating}) {
    mma_f32(m, n, k, a.data(), b.data(), c.data(), d.data(), n, mode);
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        double sum = c[size_t(i * n + j)], mag = std::fabs(sum);
        float seq = c[size_t(i * n + j)];
        for (int x = 0; x < k; ++x) {
          const double p = a[size_t(i * k + x)] * b[size_t(j * k + x)];
          sum += p;
          mag += std::fabs(p);
          seq = float(double(seq) + p);
        }
        const float got = d[size_t(i * n + j)];
        if (mode == Accumulate::kExact) CHECK(got == float(sum), "exact (%d, %d)", i, j);
        if (mode == Accumulate::kSequential) CHECK(got == seq, "sequential (%d, %d)", i, j);
        if (mode == Accumulate::kTruncating) {
          // Written again from the definition: terms truncated to multiples of 2^(E - 25), E the
          // largest sum of operand exponents or the exponent of C.
          int e = std::ilogb(c[size_t(i * n + j)]);
          for (int x = 0; x < k; ++x) {
            const double va = a[size_t(i * k + x)], vb = b[size_t(j * k + x)];
            if (va != 0 && vb != 0) e = std::max(e, std::ilogb(va) + std::ilogb(vb));
          }
          const double q = std::ldexp(1.0, e - 25);
          double t = std::trunc(c[size_t(i * n + j)] / q);
          for (int x = 0; x < k; ++x) {
            t += std::trunc(a[size_t(i * k + x)] * b[size_t(j * k + x)] / q);
          }
          CHECK(got == f64_to_f32(t * q, Round::kRz), "truncating (%d, %d)", i, j);
          CHECK(std::fabs(got - sum) <= (k + 2) * q + std::fabs(sum) * 1.2e-7,
                "truncating error (%d, %d)", i, j);
        }
      }
    }
  }
  // Specials go through every mode.
  for (Accumulate mode : {Accumulate::kExact, Accumulate::kSequential, Accumulate::kTruncating}) {
    double x[2] = {INFINITY, 1}, y[2] = {1, 1}, z[2] = {0, 1};
    float r;
    mma_f32(1, 1, 2, x, y, nullptr, &r, 1, mode);
    CHECK(r == INFINITY, "inf mode %d", int(mode));
    mma_f32(1, 1, 2, x, z, nullptr, &r, 1, mode);
    CHECK(f32_bits(r) == 0x7fffffffu, "inf * 0 mode %d: 0x%x", int(mode), f32_bits(r));
    double tiny[1] = {1e-300}, one[1] = {1};
    mma_f32(1, 1, 1, tiny, one, nullptr, &r, 1, mode);
    CHECK(r == 0.0f, "underflow mode %d", int(mode));
    double big[2] = {3e38, 3e38};
    mma_f32(1, 1, 2, big, y, nullptr, &r, 1, mode);
    CHECK(r >= 3.4e38f, "overflow mode %d", int(mode));
  }
  int32_t ia[2] = {INT32_MAX, 1}, ib[2] = {1, 1}, ic = 1, id;
  mma_s32(1, 1, 2, ia, ib, &ic, &id, 1, false);
  CHECK(id == INT32_MIN + 1, "s32 wraps: %d", id);
  mma_s32(1, 1, 2, ia, ib, &ic, &id, 1, true);
  CHECK(id == INT32_MAX, "s32 saturates: %d", id);
}

int main() {
  check_all_kinds();
  check_f64();
  check_refusals();
  check_accumulate_modes();
  return check_report("mma_values");
}
