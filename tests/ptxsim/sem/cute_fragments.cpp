// SPDX-License-Identifier: Apache-2.0
// Register fragments, ldmatrix/stmatrix, Tensor Memory layouts against CuTe's traits, evaluated on
// the host.
#include <cstring>
#include <cute/atom/copy_traits_sm100.hpp>
#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/copy_traits_sm90.hpp>
#include <cute/atom/mma_traits_sm100.hpp>
#include <cute/atom/mma_traits_sm120.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm89.hpp>
#include <cute/atom/mma_traits_sm90.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <vector>

#include "check.h"
#include "sem/frag.h"
#include "sem/umma.h"

namespace sem = ptxsim::sem;
using namespace cute;

template <class Traits>
void check_mma(const char* name, int bits_a, int bits_b, bool b_too = true) {
  const int m = size<0>(typename Traits::Shape_MNK{}), n = size<1>(typename Traits::Shape_MNK{}),
            k = size<2>(typename Traits::Shape_MNK{});
  typename Traits::ALayout al;
  typename Traits::BLayout bl;
  typename Traits::CLayout cl;
  const int per_a = bits_a >= 32 ? 1 : 32 / bits_a, per_b = bits_b >= 32 ? 1 : 32 / bits_b;
  CHECK(sem::mma_a_regs(m, k, bits_a) * per_a * 32 == m * k, "%s A register count", name);
  CHECK(sem::mma_b_regs(k, bits_b) * per_b * 32 == n * k, "%s B register count", name);
  for (int t = 0; t < 32; ++t) {
    for (int v = 0; v < m * k / 32; ++v) {
      const sem::Coord c = sem::mma_a_coord(m, bits_a, t, v / per_a, v % per_a);
      CHECK(int(al(t, v)) == c.row + m * c.col, "%s A lane %d value %d: (%d, %d)", name, t, v,
            c.row, c.col);
    }
    for (int v = 0; b_too && v < n * k / 32; ++v) {
      const sem::Coord c = sem::mma_b_coord(bits_b, t, v / per_b, v % per_b);
      CHECK(int(bl(t, v)) == c.col + n * c.row, "%s B lane %d value %d: (%d, %d)", name, t, v,
            c.row, c.col);
    }
    for (int v = 0; v < m * n / 32; ++v) {
      const sem::Coord c = sem::mma_c_coord(t, v);
      CHECK(int(cl(t, v)) == c.row + m * c.col, "%s C lane %d value %d: (%d, %d)", name, t, v,
            c.row, c.col);
    }
  }
}

template <class Traits>
void check_scales(const char* name, int vec) {
  const int k = size<2>(typename Traits::Shape_MNK{});
  typename Traits::SFALayout sfa;
  typename Traits::SFBLayout sfb;
  CHECK(k / Traits::SFVecSize == vec, "%s blocks", name);
  // CuTe hard-wires selector 0: of each quad, threads 0 and 1 feed A, thread 0 feeds B.
  for (int kk = 0; kk < k; ++kk) {
    for (int row = 0; row < 16; ++row) {
      CHECK(int(sfa(sem::mma_sfa_lane(row, 0), kk)) == row + 16 * kk, "%s SFA row %d k %d", name,
            row, kk);
      CHECK(int(sfa(sem::mma_sfa_lane(row, 1), kk)) == row + 16 * kk, "%s SFA row %d k %d thread 1",
            name, row, kk);
    }
    for (int col = 0; col < 8; ++col) {
      for (int t = 0; t < 4; ++t) {
        CHECK(int(sfb(sem::mma_sfb_lane(col, t), kk)) == col + 8 * kk,
              "%s SFB col %d k %d thread %d", name, col, kk, t);
      }
    }
  }
}

template <class Layout>
void check_wgmma_d(int n) {
  Layout l;
  for (int t = 0; t < 128; ++t) {
    for (int v = 0; v < n / 2; ++v) {
      const sem::Coord c = sem::wgmma_d_coord(t, v);
      CHECK(int(l(t, v)) == c.row + 64 * c.col, "wgmma D n %d thread %d value %d", n, t, v);
    }
  }
}
template <class Layout>
void check_wgmma_a(int bits, int k) {
  Layout l;
  const int per = 32 / bits;
  for (int t = 0; t < 128; ++t) {
    for (int v = 0; v < k / 2; ++v) {
      const sem::Coord c = sem::wgmma_a_coord(bits, t, v / per, v % per);
      CHECK(int(l(t, v)) == c.row + 64 * c.col, "wgmma A k %d thread %d value %d", k, t, v);
    }
  }
}

// CuTe numbers the bits of a matrix copy; SrcLayout maps (address lane, bit of its 16 bytes),
// DstLayout maps (lane, register bit). Both sides are filled with the logical bit number, byte by
// byte.
template <class Traits, class Rows, class Regs>
void for_each_byte(int rows, int regs, Rows&& on_row, Regs&& on_reg) {
  typename Traits::SrcLayout src;
  typename Traits::DstLayout dst;
  for (int lane = 0; lane < rows; ++lane) {
    for (int b = 0; b < 16; ++b) on_row(lane, b, int(src(lane, 8 * b)) / 8);
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < regs; ++r) {
      for (int b = 0; b < 4; ++b) on_reg(lane, r, b, int(dst(lane, 32 * r + 8 * b)) / 8);
    }
  }
}

template <class Traits>
void check_ldmatrix(const char* name, sem::MatrixOp op, bool cute_shuffles_bytes = false) {
  CHECK(sem::check_ldmatrix(op).empty(), "%s refused", name);
  static uint8_t rows[32][16];
  static uint32_t out[4][32];
  uint32_t* reg[4] = {out[0], out[1], out[2], out[3]};
  for (int half = 0; half < 2; ++half) {  // low and high byte of the logical byte number
    for_each_byte<Traits>(
        sem::matrix_rows(op), 0,
        [&](int lane, int b, int id) { rows[lane][b] = uint8_t(id >> (8 * half)); },
        [](int, int, int, int) {});
    sem::ldmatrix(op, rows, reg);
    if (cute_shuffles_bytes) {  // CuTe's wrapper regroups the four bytes of register pairs
      for (int r = 0; r < sem::matrix_regs(op); r += 2) {
        for (int lane = 0; lane < 32; ++lane) {
          const uint32_t a = out[r][lane], b = out[r + 1][lane];
          out[r][lane] = (a & 0xffff) | (b << 16);
          out[r + 1][lane] = (a >> 16) | (b & 0xffff0000u);
        }
      }
    }
    for_each_byte<Traits>(
        0, sem::matrix_regs(op), [](int, int, int) {},
        [&](int lane, int r, int b, int id) {
          const int got = (out[r][lane] >> (8 * b)) & 0xff;
          CHECK(got == ((id >> (8 * half)) & 0xff), "%s lane %d register %d byte %d", name, lane, r,
                b);
        });
  }
}

template <class Traits>
void check_stmatrix(const char* name, sem::MatrixOp op) {
  CHECK(sem::check_stmatrix(op).empty(), "%s refused", name);
  static uint8_t rows[32][16];
  static uint32_t in[4][32];
  const uint32_t* reg[4] = {in[0], in[1], in[2], in[3]};
  typename Traits::SrcLayout src;  // registers
  typename Traits::DstLayout dst;  // addresses
  for (int half = 0; half < 2; ++half) {
    std::memset(in, 0, sizeof in);
    for (int lane = 0; lane < 32; ++lane) {
      for (int r = 0; r < sem::matrix_regs(op); ++r) {
        for (int b = 0; b < 4; ++b) {
          const int id = int(src(lane, 32 * r + 8 * b)) / 8;
          in[r][lane] |= uint32_t((id >> (8 * half)) & 0xff) << (8 * b);
        }
      }
    }
    sem::stmatrix(op, reg, rows);
    for (int lane = 0; lane < sem::matrix_rows(op); ++lane) {
      for (int b = 0; b < 16; ++b) {
        const int id = int(dst(lane, 8 * b)) / 8;
        CHECK(rows[lane][b] == ((id >> (8 * half)) & 0xff), "%s address lane %d byte %d", name,
              lane, b);
      }
    }
  }
}

void check_movmatrix() {
  uint32_t src[32], dst[32];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    src[lane] = uint32_t(8 * g + 2 * t) | uint32_t(8 * g + 2 * t + 1) << 16;
  }
  sem::movmatrix(src, dst);
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    CHECK(dst[lane] == (uint32_t(8 * (2 * t) + g) | uint32_t(8 * (2 * t + 1) + g) << 16),
          "movmatrix lane %d", lane);
  }
}

// Address bits of Tensor Memory: lanes 2^21 bits apart, columns 32 bits.
struct TmemBit {
  int lane, column, bit;
};
TmemBit split_bits(long address) {
  return {int(address >> 21), int(address & ((1 << 21) - 1)) / 32, int(address % 32)};
}

template <class Traits>
void check_tmem_ld(const char* name, sem::TmemShape shape, int num, bool pack) {
  sem::TmemAccess a;
  a.shape = shape;
  a.num = num;
  a.pack16 = pack;
  if (shape == sem::TmemShape::k16x32bx2) a.half_split = num * (pack ? 2 : 1);
  CHECK(sem::check_tmem_access(a).empty(), "%s refused: %s", name,
        sem::check_tmem_access(a).c_str());
  typename Traits::ValID val;
  typename Traits::DstLayout dst;
  CHECK(int(size<1>(dst)) == 32 * sem::tmem_regs(a), "%s registers %d", name, sem::tmem_regs(a));
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < sem::tmem_regs(a); ++r) {
      const sem::Coord c = sem::tmem_reg_coord(a, lane, r);
      for (int h = 0; h < 2; ++h) {
        const TmemBit e = split_bits(long(val(dst(lane, 32 * r + 16 * h))));
        const int col = c.col + (pack ? h : 0), bit = pack ? 0 : 16 * h;
        CHECK(e.lane == c.row && e.column == col && e.bit == bit,
              "%s lane %d register %d half %d: (%d, %d) not (%d, %d)", name, lane, r, h, c.row, col,
              e.lane, e.column);
      }
    }
  }
}

template <class Traits>
void check_cp(const char* name, sem::CpShape shape, int rows, int bits, int copies, int part = 0) {
  // CuTe numbers the bits of `part` rows (all of them unless given) before those of the next part.
  if (part == 0) part = rows;
  // Source: row r, chunk u at a no-swizzle descriptor with 8-row groups 128 B apart (one chunk) or
  // two chunks `lbo` apart; content: the byte's number.
  static std::vector<uint8_t> window(1 << 16);
  static std::vector<uint32_t> tmem(128 * 512);
  typename Traits::ValID val;
  typename Traits::SrcLayout src;
  const int chunks = bits / 128;
  const uint32_t lbo = 4096, sbo = 128;
  const uint64_t desc =
      (uint64_t(lbo) >> 4 << 16) | (uint64_t(sbo) >> 4 << 32) | (uint64_t{1} << 46) | (1024 >> 4);
  for (int half = 0; half < 2; ++half) {
    auto id = [&](int r, int byte) { return uint8_t((r * 64 + byte) >> (8 * half)); };
    for (int r = 0; r < rows; ++r) {
      for (int b = 0; b < 16 * chunks; ++b) {
        window[1024 + (r / 8) * sbo + (r % 8) * 16 + (b / 16) * lbo + b % 16] = id(r, b);
      }
    }
    std::fill(tmem.begin(), tmem.end(), 0xdeadbeefu);
    sem::CpPlan plan;
    const sem::Error e = sem::plan_cp(shape, sem::CpFormat::kNone, 8, desc, &plan);
    CHECK(e.empty(), "%s: %s", name, e.c_str());
    sem::CtaView view{window.data(), 0, uint32_t(window.size()), tmem.data()};
    CHECK(sem::execute_cp(plan, view).empty(), "%s refused", name);
    // CuTe: value index v = copy bit, broadcast last; SrcLayout gives the logical bit of a source
    // bit.
    const int total = int(size<1>(src));
    const int source_bits = rows * bits;
    int seen = 0;
    for (int v = 0; v < total; ++v) {
      const int row = v % part + v / (part * bits) * part % rows, bit = v / part % bits;
      if (bit % 8) continue;
      const int copy = v / source_bits;
      CHECK(copy < copies, "%s copies", name);
      // 4x256b numbers its logical bits over all 128 lanes, the others over the copied matrix.
      const long logical = shape == sem::CpShape::k4x256b ? long(src(0, v)) : long(v);
      const TmemBit t = split_bits(long(val(logical)));
      const uint32_t cell = tmem[t.lane * 512 + 8 + t.column];
      CHECK(((cell >> t.bit) & 0xff) == id(row, bit / 8),
            "%s row %d byte %d copy %d at lane %d column %d", name, row, bit / 8, copy, t.lane,
            t.column);
      ++seen;
    }
    int written = 0;
    for (uint32_t c : tmem) written += c != 0xdeadbeefu;
    CHECK(written * 4 == seen, "%s wrote %d cells, expected %d", name, written, seen / 4);
  }
}

template <class Tensor>
TmemBit tmem_cell(const Tensor& t, int bits, int m, int n) {
  const long idx = long(t.layout()(make_coord(make_coord(m, n), 0, 0)));
  return split_bits(idx * bits);
}

template <int M, int N>
void check_d_1sm() {
  auto t = UMMA::tmem_frg_1sm<float, float, UMMA::TmemAllocMode::NonInterleaved>::make(
      make_shape(make_shape(Int<M>{}, Int<N>{}), _1{}, _1{}));
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      const sem::TmemCell c = sem::umma_d_cell(M, N, 1, false, m, n);
      const TmemBit e = tmem_cell(t, 32, m, n);
      CHECK(c.cta == 0 && c.lane == e.lane && c.column == e.column, "D 1-CTA M %d N %d (%d, %d)", M,
            N, m, n);
    }
  }
}
template <int M, int N>
void check_d_2sm() {
  auto t = UMMA::tmem_frg_2sm<float, float>::make(
      make_shape(make_shape(Int<M / 2>{}, Int<N>{}), _1{}, _1{}));
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      const sem::TmemCell c = sem::umma_d_cell(M, N, 2, false, m, n);
      const TmemBit e = tmem_cell(t, 32, m % (M / 2), n);
      CHECK(c.cta == m / (M / 2) && c.lane == e.lane && c.column == e.column,
            "D 2-CTA M %d N %d (%d, %d)", M, N, m, n);
    }
  }
}
template <int M, int N>
void check_d_ws() {
  auto t = UMMA::tmem_frg_ws_1sm<float, float>::make(
      make_shape(make_shape(Int<M>{}, Int<N>{}), _1{}, _1{}));
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      const sem::TmemCell c = sem::umma_d_cell(M, N, 1, true, m, n);
      const TmemBit e = tmem_cell(t, 32, m, n);
      CHECK(c.lane == e.lane && c.column == e.column, "D .ws M %d N %d (%d, %d)", M, N, m, n);
    }
  }
}

#define TMEM_LD(name, shape, num)                                                                  \
  check_tmem_ld<Copy_Traits<SM100::TMEM::LOAD::SM100_TMEM_LOAD_##name##num##x>>(#name #num, shape, \
                                                                                num, false);       \
  check_tmem_ld<Copy_Traits<SM100::TMEM::LOAD::SM100_TMEM_LOAD_##name##num##x_16b>>(               \
      #name #num "_16b", shape, num, true)

int main() {
  check_mma<MMA_Traits<SM80_16x8x8_F32F16F16F32_TN>>("m16n8k8 f16", 16, 16);
  check_mma<MMA_Traits<SM80_16x8x16_F32F16F16F32_TN>>("m16n8k16 f16", 16, 16);
  check_mma<MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN>>("m16n8k16 bf16", 16, 16);
  check_mma<MMA_Traits<SM80_16x8x4_F32TF32TF32F32_TN>>("m16n8k4 tf32", 32, 32);
  check_mma<MMA_Traits<SM80_16x8x8_F32TF32TF32F32_TN>>("m16n8k8 tf32", 32, 32);
  check_mma<MMA_Traits<SM80_8x8x4_F64F64F64F64_TN>>("m8n8k4 f64", 64, 64);
  check_mma<MMA_Traits<SM90_16x8x4_F64F64F64F64_TN>>("m16n8k4 f64", 64, 64);
  check_mma<MMA_Traits<SM90_16x8x8_F64F64F64F64_TN>>("m16n8k8 f64", 64, 64);
  check_mma<MMA_Traits<SM90_16x8x16_F64F64F64F64_TN>>("m16n8k16 f64", 64, 64);
  check_mma<MMA_Traits<SM80_8x8x16_S32S8S8S32_TN>>("m8n8k16 s8", 8, 8);
  check_mma<MMA_Traits<SM80_16x8x16_S32S8S8S32_TN>>("m16n8k16 s8", 8, 8);
  check_mma<MMA_Traits<SM80_16x8x32_S32S8S8S32_TN>>("m16n8k32 s8", 8, 8);
  check_mma<MMA_Traits<SM80_8x8x32_S32S4S4S32_TN>>("m8n8k32 s4", 4, 4);
  // CuTe's BLayout of this one shape is not injective (lane stride 32 where 8 values need 64);
  // PTX's formula is tested by value in mma_values.cpp.
  check_mma<MMA_Traits<SM80_16x8x32_S32S4S4S32_TN>>("m16n8k32 s4", 4, 4, false);
  check_mma<MMA_Traits<SM80_16x8x64_S32S4S4S32_TN>>("m16n8k64 s4", 4, 4);
  check_mma<MMA_Traits<SM89_16x8x32_F32E4M3E4M3F32_TN>>("m16n8k32 e4m3", 8, 8);
  using MxF8 =
      SM120::BLOCKSCALED::SM120_16x8x32_TN_VS<float_e4m3_t, float_e4m3_t, float, float_ue8m0_t, 32>;
  using MxF4 =
      SM120::BLOCKSCALED::SM120_16x8x64_TN_VS<float_e2m1_t, float_e2m1_t, float, float_ue8m0_t, 32>;
  using NvF4 =
      SM120::BLOCKSCALED::SM120_16x8x64_TN_VS<float_e2m1_t, float_e2m1_t, float, float_ue4m3_t, 16>;
  check_mma<MMA_Traits<MxF8>>("m16n8k32 mxf8f6f4", 8, 8);
  check_mma<MMA_Traits<MxF4>>("m16n8k64 mxf4", 4, 4);
  check_mma<MMA_Traits<NvF4>>("m16n8k64 mxf4nvf4", 4, 4);
  check_scales<MMA_Traits<MxF8>>("mxf8f6f4 1X", 1);
  check_scales<MMA_Traits<MxF4>>("mxf4 2X", 2);
  check_scales<MMA_Traits<NvF4>>("mxf4nvf4 4X", 4);

  check_wgmma_d<SM90::GMMA::CLayout_64x8>(8);
  check_wgmma_d<SM90::GMMA::CLayout_64x96>(96);
  check_wgmma_d<SM90::GMMA::CLayout_64xN<200>>(200);
  check_wgmma_d<SM90::GMMA::CLayout_64x256>(256);
  check_wgmma_a<SM90::GMMA::ALayout_64x8>(32, 8);
  check_wgmma_a<SM90::GMMA::ALayout_64x16>(16, 16);
  check_wgmma_a<SM90::GMMA::ALayout_64x32>(8, 32);

  using S = sem::MatrixShape;
  check_ldmatrix<Copy_Traits<SM75_U32x1_LDSM_N>>("ldmatrix x1", {S::kM8n8B16, 1, false});
  check_ldmatrix<Copy_Traits<SM75_U32x2_LDSM_N>>("ldmatrix x2", {S::kM8n8B16, 2, false});
  check_ldmatrix<Copy_Traits<SM75_U32x4_LDSM_N>>("ldmatrix x4", {S::kM8n8B16, 4, false});
  check_ldmatrix<Copy_Traits<SM75_U16x2_LDSM_T>>("ldmatrix x1 trans", {S::kM8n8B16, 1, true});
  check_ldmatrix<Copy_Traits<SM75_U16x4_LDSM_T>>("ldmatrix x2 trans", {S::kM8n8B16, 2, true});
  check_ldmatrix<Copy_Traits<SM75_U16x8_LDSM_T>>("ldmatrix x4 trans", {S::kM8n8B16, 4, true});
  check_ldmatrix<Copy_Traits<SM100_U8x8_LDSM_T>>("ldmatrix m16n16 x1", {S::kM16n16B8, 1, true},
                                                 true);
  check_ldmatrix<Copy_Traits<SM100_U8x16_LDSM_T>>("ldmatrix m16n16 x2", {S::kM16n16B8, 2, true},
                                                  true);
  check_stmatrix<Copy_Traits<SM90_U32x1_STSM_N>>("stmatrix x1", {S::kM8n8B16, 1, false});
  check_stmatrix<Copy_Traits<SM90_U32x2_STSM_N>>("stmatrix x2", {S::kM8n8B16, 2, false});
  check_stmatrix<Copy_Traits<SM90_U32x4_STSM_N>>("stmatrix x4", {S::kM8n8B16, 4, false});
  check_stmatrix<Copy_Traits<SM90_U16x2_STSM_T>>("stmatrix x1 trans", {S::kM8n8B16, 1, true});
  check_stmatrix<Copy_Traits<SM90_U16x4_STSM_T>>("stmatrix x2 trans", {S::kM8n8B16, 2, true});
  check_stmatrix<Copy_Traits<SM90_U16x8_STSM_T>>("stmatrix x4 trans", {S::kM8n8B16, 4, true});
  check_stmatrix<Copy_Traits<SM100_U8x4_STSM_T>>("stmatrix m16n8 x1", {S::kM16n8B8, 1, true});
  check_stmatrix<Copy_Traits<SM100_U8x8_STSM_T>>("stmatrix m16n8 x2", {S::kM16n8B8, 2, true});
  check_stmatrix<Copy_Traits<SM100_U8x16_STSM_T>>("stmatrix m16n8 x4", {S::kM16n8B8, 4, true});
  check_movmatrix();

  using T = sem::TmemShape;
  TMEM_LD(16dp256b, T::k16x256b, 1);
  TMEM_LD(16dp256b, T::k16x256b, 2);
  TMEM_LD(16dp256b, T::k16x256b, 4);
  TMEM_LD(16dp256b, T::k16x256b, 8);
  TMEM_LD(16dp256b, T::k16x256b, 16);
  TMEM_LD(16dp256b, T::k16x256b, 32);
  TMEM_LD(16dp128b, T::k16x128b, 1);
  TMEM_LD(16dp128b, T::k16x128b, 2);
  TMEM_LD(16dp128b, T::k16x128b, 4);
  TMEM_LD(16dp128b, T::k16x128b, 8);
  TMEM_LD(16dp128b, T::k16x128b, 16);
  TMEM_LD(16dp128b, T::k16x128b, 32);
  TMEM_LD(16dp128b, T::k16x128b, 64);
  TMEM_LD(16dp64b, T::k16x64b, 1);
  TMEM_LD(16dp64b, T::k16x64b, 2);
  TMEM_LD(16dp64b, T::k16x64b, 4);
  TMEM_LD(16dp64b, T::k16x64b, 8);
  TMEM_LD(16dp64b, T::k16x64b, 16);
  TMEM_LD(16dp64b, T::k16x64b, 32);
  TMEM_LD(16dp64b, T::k16x64b, 64);
  TMEM_LD(16dp64b, T::k16x64b, 128);
  TMEM_LD(16dp32b, T::k16x32bx2, 1);
  TMEM_LD(16dp32b, T::k16x32bx2, 2);
  TMEM_LD(16dp32b, T::k16x32bx2, 4);
  TMEM_LD(16dp32b, T::k16x32bx2, 8);
  TMEM_LD(16dp32b, T::k16x32bx2, 16);
  TMEM_LD(16dp32b, T::k16x32bx2, 32);
  TMEM_LD(16dp32b, T::k16x32bx2, 64);
  TMEM_LD(16dp32b, T::k16x32bx2, 128);
  TMEM_LD(32dp32b, T::k32x32b, 1);
  TMEM_LD(32dp32b, T::k32x32b, 2);
  TMEM_LD(32dp32b, T::k32x32b, 4);
  TMEM_LD(32dp32b, T::k32x32b, 8);
  TMEM_LD(32dp32b, T::k32x32b, 16);
  TMEM_LD(32dp32b, T::k32x32b, 32);
  TMEM_LD(32dp32b, T::k32x32b, 64);
  TMEM_LD(32dp32b, T::k32x32b, 128);

  namespace U = SM100::TMEM::UTCCP;
  using P = sem::CpShape;
  check_cp<Copy_Traits<U::SM100_UTCCP_128dp256bit_1cta>>("cp 128x256b", P::k128x256b, 128, 256, 1);
  check_cp<Copy_Traits<U::SM100_UTCCP_128dp128bit_1cta>>("cp 128x128b", P::k128x128b, 128, 128, 1);
  check_cp<Copy_Traits<U::SM100_UTCCP_4dp256bit_1cta>>("cp 4x256b", P::k4x256b, 4, 256, 1);
  check_cp<Copy_Traits<U::SM100_UTCCP_4x32dp128bit_1cta>>("cp 32x128b", P::k32x128b, 32, 128, 4);
  check_cp<Copy_Traits<U::SM100_UTCCP_2x64dp128bitlw0213_1cta>>("cp 64x128b 02_13", P::k64x128b0213,
                                                                64, 128, 2);
  check_cp<Copy_Traits<U::SM100_UTCCP_2x64dp128bitlw0123_1cta>>("cp 64x128b 01_23", P::k64x128b0123,
                                                                64, 128, 2, 32);

  check_d_1sm<128, 8>();
  check_d_1sm<128, 256>();
  check_d_1sm<128, 136>();
  check_d_1sm<64, 8>();
  check_d_1sm<64, 64>();
  check_d_1sm<64, 256>();
  check_d_2sm<256, 16>();
  check_d_2sm<256, 64>();
  check_d_2sm<256, 256>();
  check_d_2sm<128, 32>();
  check_d_2sm<128, 256>();
  check_d_ws<32, 64>();
  check_d_ws<64, 128>();
  check_d_ws<32, 256>();
  check_d_ws<64, 256>();
  check_d_ws<128, 64>();
  check_d_ws<128, 256>();
  return check_report("cute_fragments");
}
