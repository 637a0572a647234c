// SPDX-License-Identifier: Apache-2.0
#include "mma.h"

#include <cmath>
#include <vector>

#include "fp.h"
#include "narrow.h"

// The inner kernels are compiled for several vector widths and picked at load time. Contraction is
// off
// (-ffp-contract=off), so every variant gives the same bits.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#define PTXSIM_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PTXSIM_CLONES
#endif

namespace ptxsim::sem {
namespace {

constexpr int kRows = 4;  // register tile: 4 rows x 8 columns of doubles
constexpr int kCols = 8;

using Vec = double __attribute__((vector_size(8 * kCols)));
using VecF = float __attribute__((vector_size(4 * kCols)));
using VecI = int32_t __attribute__((vector_size(4 * kCols)));
using VecL = int64_t __attribute__((vector_size(8 * kCols)));

// One tile of each accumulate mode. a: kRows pointers to k values; bt: k x kCols with row stride
// `ldb`; acc: kRows x kCols, holds C on entry and D (as double, not yet rounded in the exact mode)
// on return.
PTXSIM_CLONES void tile_exact(int k, const double* const* a, const double* bt, int ldb,
                              double* acc) {
  Vec s0 = {}, s1 = {}, s2 = {}, s3 = {};
  for (int i = 0; i < k; ++i) {
    Vec b;
    __builtin_memcpy(&b, bt + static_cast<size_t>(i) * ldb, sizeof b);
    s0 += b * a[0][i];
    s1 += b * a[1][i];
    s2 += b * a[2][i];
    s3 += b * a[3][i];
  }
  const Vec sums[kRows] = {s0, s1, s2, s3};
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kCols; ++j) acc[r * kCols + j] += sums[r][j];
  }
}

PTXSIM_CLONES void tile_sequential(int k, const double* const* a, const double* bt, int ldb,
                                   double* acc) {
  VecF s[kRows];
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kCols; ++j) s[r][j] = static_cast<float>(acc[r * kCols + j]);
  }
  for (int i = 0; i < k; ++i) {
    Vec b;
    __builtin_memcpy(&b, bt + static_cast<size_t>(i) * ldb, sizeof b);
    for (int r = 0; r < kRows; ++r) {  // four independent chains hide the conversion latency
      s[r] = __builtin_convertvector(__builtin_convertvector(s[r], Vec) + b * a[r][i], VecF);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kCols; ++j) acc[r * kCols + j] = s[r][j];
  }
}

// Operand exponents of the truncating mode as powers of two, laid out like the operands.
struct Powers {
  const double* const* a = nullptr;
  const double* bt = nullptr;
  int align_bits = 0;
  int out_bits = 0;
};

double power_of(double v, int min_exp) {
  if (v == 0.0 || !std::isfinite(v)) return 0.0;
  const int e = std::ilogb(v);
  return std::ldexp(1.0, e < min_exp ? min_exp : e);
}

// x truncated to `out_bits` mantissa bits (23: fp32).
double truncate_result(double x, int out_bits) {
  if (out_bits >= 23 || x == 0.0) return f64_to_f32(x, Round::kRz);
  const double q = std::ldexp(1.0, std::ilogb(x) - out_bits);
  return std::trunc(x / q) * q;
}

PTXSIM_CLONES void tile_truncating(int k, const double* const* a, const double* bt, int ldb,
                                   double* acc, const Powers& pw) {
  constexpr double kTiny = 0x1p-900, kHuge = 0x1p900;
  const double unit = bits_f64(static_cast<uint64_t>(1023 - pw.align_bits) << 52);
  for (int r = 0; r < kRows; ++r) {
    Vec c, top, plain;
    for (int j = 0; j < kCols; ++j) {
      c[j] = acc[r * kCols + j];
      top[j] = power_of(c[j], -1022);
    }
    plain = c;
    for (int i = 0; i < k; ++i) {
      Vec b, pb;
      __builtin_memcpy(&b, bt + static_cast<size_t>(i) * ldb, sizeof b);
      __builtin_memcpy(&pb, pw.bt + static_cast<size_t>(i) * ldb, sizeof pb);
      const Vec e = pb * pw.a[r][i];
      top = e > top ? e : top;
      plain += b * a[r][i];
    }
    Vec q = {}, inv = {};
    for (int j = 0; j < kCols; ++j) {
      const bool usable = top[j] >= kTiny && top[j] <= kHuge && std::isfinite(plain[j]);
      q[j] = usable ? top[j] * unit : 1.0;
      inv[j] = usable ? 1.0 / q[j] : 0.0;
    }
    // |term| * inv < 2^(align_bits + 2), so the truncation can go through 32-bit integers.
    VecI n = __builtin_convertvector(c * inv, VecI);
    VecL sum = __builtin_convertvector(n, VecL);
    for (int i = 0; i < k; ++i) {
      Vec b;
      __builtin_memcpy(&b, bt + static_cast<size_t>(i) * ldb, sizeof b);
      n = __builtin_convertvector(b * a[r][i] * inv, VecI);
      sum += __builtin_convertvector(n, VecL);
    }
    for (int j = 0; j < kCols; ++j) {
      acc[r * kCols + j] = inv[j] != 0.0
                               ? truncate_result(static_cast<double>(sum[j]) * q[j], pw.out_bits)
                               : plain[j];
    }
  }
}

void transpose(int n, int np, int k, const double* b, std::vector<double>* bt) {
  bt->assign(static_cast<size_t>(k) * np, 0.0);
  for (int j = 0; j < n; ++j) {
    for (int i = 0; i < k; ++i) {
      (*bt)[static_cast<size_t>(i) * np + j] = b[static_cast<size_t>(j) * k + i];
    }
  }
}

// Runs one tile function over the matrix; load(i, j) gives C as double, store(i, j, v) takes D.
template <class Load, class Store>
void for_tiles(int m, int n, int k, const double* a, const double* b, const Numerics& num,
               Load load, Store store) {
  const int np = (n + kCols - 1) / kCols * kCols;
  static thread_local std::vector<double> bt, pa, pb, pbt;
  transpose(n, np, k, b, &bt);
  const bool truncating = num.mode == Accumulate::kTruncating;
  if (truncating) {
    pa.resize(static_cast<size_t>(m) * k);
    pb.resize(static_cast<size_t>(n) * k);
    for (size_t i = 0; i < pa.size(); ++i) pa[i] = power_of(a[i], num.a_min_exp);
    for (size_t i = 0; i < pb.size(); ++i) pb[i] = power_of(b[i], num.b_min_exp);
    transpose(n, np, k, pb.data(), &pbt);
  }
  for (int i0 = 0; i0 < m; i0 += kRows) {
    const double *rows[kRows], *power_rows[kRows] = {};
    for (int r = 0; r < kRows; ++r) {
      const int i = i0 + r < m ? i0 + r : m - 1;
      rows[r] = a + static_cast<size_t>(i) * k;
      if (truncating) power_rows[r] = pa.data() + static_cast<size_t>(i) * k;
    }
    for (int j0 = 0; j0 < np; j0 += kCols) {
      double acc[kRows * kCols] = {};
      for (int r = 0; r < kRows && i0 + r < m; ++r) {
        for (int j = 0; j < kCols && j0 + j < n; ++j) acc[r * kCols + j] = load(i0 + r, j0 + j);
      }
      if (truncating) {
        const Powers pw = {power_rows, pbt.data() + j0, num.align_bits, num.out_bits};
        tile_truncating(k, rows, bt.data() + j0, np, acc, pw);
      } else if (num.mode == Accumulate::kSequential) {
        tile_sequential(k, rows, bt.data() + j0, np, acc);
      } else {
        tile_exact(k, rows, bt.data() + j0, np, acc);
      }
      for (int r = 0; r < kRows && i0 + r < m; ++r) {
        for (int j = 0; j < kCols && j0 + j < n; ++j) {
          store(i0 + r, j0 + j, acc[r * kCols + j]);
        }
      }
    }
  }
}

int min_exponent(Elem e) {
  switch (e) {
    case Elem::kF16:
    case Elem::kE5m2:
      return -14;
    case Elem::kE4m3:
      return -6;
    case Elem::kE3m2:
      return -2;
    case Elem::kE2m3:
    case Elem::kE2m1:
      return 0;
    default:
      return -126;
  }
}

}  // namespace

Numerics::Numerics(Accumulate m, Elem a, Elem b)
    : mode(m), a_min_exp(min_exponent(a)), b_min_exp(min_exponent(b)) {}

void mma_f32(int m, int n, int k, const double* a, const double* b, const float* c, float* d,
             int ld, const Numerics& num) {
  for_tiles(
      m, n, k, a, b, num,
      [=](int i, int j) {
        return c ? static_cast<double>(c[static_cast<size_t>(i) * ld + j]) : 0.0;
      },
      [=](int i, int j, double v) {
        d[static_cast<size_t>(i) * ld + j] =
            std::isnan(v) ? bits_f32(0x7fffffffu) : static_cast<float>(v);
      });
}

void mma_f16(int m, int n, int k, const double* a, const double* b, const uint16_t* c, uint16_t* d,
             int ld, const Numerics& num) {
  for_tiles(
      m, n, k, a, b, num,
      [=](int i, int j) {
        return c ? static_cast<double>(f16_to_f32(c[static_cast<size_t>(i) * ld + j])) : 0.0;
      },
      [=](int i, int j, double v) {
        d[static_cast<size_t>(i) * ld + j] = static_cast<uint16_t>(encode(Elem::kF16, v));
      });
}

void mma_s32(int m, int n, int k, const int32_t* a, const int32_t* b, const int32_t* c, int32_t* d,
             int ld, bool satfinite) {
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      int64_t s = c ? c[static_cast<size_t>(i) * ld + j] : 0;
      for (int x = 0; x < k; ++x) {
        s += static_cast<int64_t>(a[static_cast<size_t>(i) * k + x]) *
             b[static_cast<size_t>(j) * k + x];
      }
      if (satfinite) s = s > INT32_MAX ? INT32_MAX : s < INT32_MIN ? INT32_MIN : s;
      d[static_cast<size_t>(i) * ld + j] = static_cast<int32_t>(static_cast<uint32_t>(s));
    }
  }
}

void mma_f64(int m, int n, int k, const double* a, const double* b, const double* c, double* d,
             int ld, Round round) {
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double s = c ? c[static_cast<size_t>(i) * ld + j] : 0.0;
      for (int x = 0; x < k; ++x) {
        s = fma_f64(a[static_cast<size_t>(i) * k + x], b[static_cast<size_t>(j) * k + x], s, round);
      }
      d[static_cast<size_t>(i) * ld + j] = s;
    }
  }
}

}  // namespace ptxsim::sem
