// SPDX-License-Identifier: Apache-2.0
// Shared-memory descriptors, swizzles, scale-factor layouts and instruction descriptors against
// CuTe, on the host.
#include <cstdint>
#include <cute/atom/mma_traits_sm100.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <cutlass/detail/sm100_blockscaled_layout.hpp>
#include <vector>

#include "check.h"
#include "sem/tma.h"
#include "sem/umma.h"

namespace sem = ptxsim::sem;
using namespace cute;

// Shared window stand-in: CuTe only does pointer arithmetic on it.
alignas(1024) static uint8_t g_smem[1 << 18];

template <class T>
uint32_t smem_address(T const* p) {
  return uint32_t(reinterpret_cast<uint8_t const*>(p) - g_smem);
}

enum class Which { kUmma, kWgmma };

template <Which W, bool MN, class Tensor>
uint64_t cute_desc(const Tensor& t) {
  if constexpr (W == Which::kUmma) {
    return uint64_t(UMMA::make_umma_desc<MN ? UMMA::Major::MN : UMMA::Major::K>(t));
  } else {
    return uint64_t(
        SM90::GMMA::make_gmma_desc<MN ? SM90::GMMA::Major::MN : SM90::GMMA::Major::K>(t).desc_);
  }
}

// Every K block of a (rows x k_tile) tile in the canonical layout: CuTe's descriptor, decoded by
// us, must address element (r, k) where CuTe's swizzled layout puts it.
template <Which W, bool MN, class T, class Layout>
void check_tile(const char* name, const Layout& layout, int rows, int k_tile) {
  constexpr int kInstr = 32 / int(sizeof(T));
  auto tensor = make_tensor(make_smem_ptr(reinterpret_cast<T*>(g_smem)), layout);
  auto where = as_position_independent_swizzle_tensor(tensor);
  auto blocks =
      flat_divide(tensor, make_shape(size<0>(layout), Int<kInstr>{}));  // (rows, k, 1, blocks)
  for (int blk = 0; blk < k_tile / kInstr; ++blk) {
    auto block = blocks(_, _, 0, blk);
    uint64_t bits = cute_desc<W, MN>(block);
    const uint32_t start = smem_address(raw_pointer_cast(block.data()));
    bits = (bits & ~uint64_t{0x3fff}) | (start >> 4);
    sem::SmemDesc d;
    const sem::Error e =
        W == Which::kUmma ? sem::decode_umma_desc(bits, &d) : sem::decode_wgmma_desc(bits, &d);
    CHECK(e.empty(), "%s: %s", name, e.c_str());
    CHECK(d.start == start, "%s start", name);
    for (int r = 0; r < rows; ++r) {
      for (int k = 0; k < kInstr; ++k) {
        const uint32_t want = smem_address(&where(r, blk * kInstr + k));
        const int byte = (MN ? r : k) * int(sizeof(T));
        const uint32_t got =
            (MN ? sem::mnmajor_chunk(d, byte / 16, k) : sem::kmajor_chunk(d, r, byte / 16)) +
            byte % 16;
        CHECK(got == want, "%s rows %d block %d (%d, %d): 0x%x, CuTe 0x%x", name, rows, blk, r, k,
              got, want);
      }
    }
  }
}

template <Which W, class T, int Rows, int KTile>
void check_k_major() {
  using Shape_ = Shape<Int<Rows>, Int<KTile>>;
  constexpr int kRow = KTile * int(sizeof(T));
  auto inter = tile_to_shape(SM90::GMMA::Layout_K_INTER_Atom<T>{}, Shape_{});
  check_tile<W, false, T>("K none", inter, Rows, KTile);
  auto inter_row = tile_to_shape(SM90::GMMA::Layout_K_INTER_Atom<T>{}, Shape_{}, Step<_2, _1>{});
  check_tile<W, false, T>("K none, k first", inter_row, Rows, KTile);
  if constexpr (kRow >= 32) {
    auto l = tile_to_shape(SM90::GMMA::Layout_K_SW32_Atom<T>{}, Shape_{});
    check_tile<W, false, T>("K 32B", l, Rows, KTile);
  }
  if constexpr (kRow >= 64) {
    auto l = tile_to_shape(SM90::GMMA::Layout_K_SW64_Atom<T>{}, Shape_{});
    check_tile<W, false, T>("K 64B", l, Rows, KTile);
  }
  if constexpr (kRow >= 128) {
    auto l = tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<T>{}, Shape_{});
    check_tile<W, false, T>("K 128B", l, Rows, KTile);
    auto l2 = tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<T>{}, Shape_{}, Step<_2, _1>{});
    check_tile<W, false, T>("K 128B, k first", l2, Rows, KTile);
  }
}

template <Which W, class T, int Rows, int KTile>
void check_mn_major() {
  using Shape_ = Shape<Int<Rows>, Int<KTile>>;
  constexpr int kCol = Rows * int(sizeof(T));
  auto inter = tile_to_shape(SM90::GMMA::Layout_MN_INTER_Atom<T>{}, Shape_{});
  check_tile<W, true, T>("MN none", inter, Rows, KTile);
  auto inter2 = tile_to_shape(SM90::GMMA::Layout_MN_INTER_Atom<T>{}, Shape_{}, Step<_2, _1>{});
  check_tile<W, true, T>("MN none, k first", inter2, Rows, KTile);
  if constexpr (kCol % 32 == 0) {
    auto l = tile_to_shape(SM90::GMMA::Layout_MN_SW32_Atom<T>{}, Shape_{});
    check_tile<W, true, T>("MN 32B", l, Rows, KTile);
  }
  if constexpr (kCol % 64 == 0) {
    auto l = tile_to_shape(SM90::GMMA::Layout_MN_SW64_Atom<T>{}, Shape_{});
    check_tile<W, true, T>("MN 64B", l, Rows, KTile);
  }
  if constexpr (kCol % 128 == 0) {
    auto l = tile_to_shape(SM90::GMMA::Layout_MN_SW128_Atom<T>{}, Shape_{});
    check_tile<W, true, T>("MN 128B", l, Rows, KTile);
    auto l2 = tile_to_shape(SM90::GMMA::Layout_MN_SW128_Atom<T>{}, Shape_{}, Step<_2, _1>{});
    check_tile<W, true, T>("MN 128B, k first", l2, Rows, KTile);
  }
}

template <int Rows, int KTile>
void check_mn_atom32() {
  auto l = tile_to_shape(UMMA::Layout_MN_SW128_32B_Atom<float>{}, Shape<Int<Rows>, Int<KTile>>{});
  check_tile<Which::kUmma, true, float>("MN 128B, 32B atom", l, Rows, KTile);
}

void check_tma_swizzles() {
  for (uint32_t a = 0; a < 8192; ++a) {
    CHECK(sem::tma_swizzle(sem::TmaSwizzle::k32B, a) == uint32_t(Swizzle<1, 4, 3>{}(a)),
          "TMA 32B at %u", a);
    CHECK(sem::tma_swizzle(sem::TmaSwizzle::k64B, a) == uint32_t(Swizzle<2, 4, 3>{}(a)),
          "TMA 64B at %u", a);
    CHECK(sem::tma_swizzle(sem::TmaSwizzle::k128B, a) == uint32_t(Swizzle<3, 4, 3>{}(a)),
          "TMA 128B at %u", a);
    CHECK(sem::tma_swizzle(sem::TmaSwizzle::k128BAtom32B, a) == uint32_t(Swizzle<2, 5, 2>{}(a)),
          "TMA 32B atom %u", a);
  }
}

// The atom of scale factors in memory, copied by tcgen05.cp, must land where CuTe's Tensor Memory
// fragment of the scales expects it.
template <int VS, int MN, int NSF>
void check_scale_factors(bool two_by_two) {
  using Atom = typename cutlass::detail::Sm1xxBlockScaledBasicChunk<VS>::SfAtom;
  Atom atom;
  for (int i = 0; i < 512; ++i) g_smem[1024 + i] = uint8_t(i % 251);
  std::vector<uint32_t> tmem(128 * 512, 0);
  sem::CpPlan plan;
  const uint64_t desc = (1024 >> 4) | (uint64_t(128 >> 4) << 32) | (uint64_t{1} << 46);
  CHECK(sem::plan_cp(sem::CpShape::k32x128b, sem::CpFormat::kNone, 0, desc, &plan).empty(),
        "scale cp");
  sem::CtaView view{g_smem, 0, sizeof g_smem, tmem.data()};
  CHECK(sem::execute_cp(plan, view).empty(), "scale cp");
  auto shape = make_shape(make_shape(Int<MN>{}, make_shape(Int<VS>{}, Int<NSF>{})), _1{}, _1{});
  auto check = [&](auto frag) {
    for (int mn = 0; mn < MN; ++mn) {
      for (int s = 0; s < NSF; ++s) {
        const long idx = long(frag.layout()(make_coord(make_coord(mn, make_coord(0, s)), 0, 0)));
        const int lane = int(idx >> 18),
                  byte_col = int(idx & ((1 << 18) - 1));  // 8-bit cells: 4 per column
        const uint32_t cell = tmem[lane * 512 + byte_col / 4];
        const int got = (cell >> (8 * (byte_col % 4))) & 0xff;
        CHECK(got == g_smem[1024 + int(atom(mn, s * VS))], "scale VS %d row %d block %d", VS, mn,
              s);
      }
    }
  };
  if (!two_by_two) {
    check(UMMA::tmem_sf_frg<float_ue8m0_t, VS, 1, true,
                            UMMA::TmemAllocMode::ScaleFactorDuplicated4by1>::make(shape));
  }
}

// The same scales through plan/execute: with A and B all ones, D(m, n) = sum over the instruction's
// blocks of 32 sfa * sfb or 16 sfa * sfb, which identifies every scale by value. A tile has four
// blocks along K; `id` is the first one that the instruction takes, Vec how many.
template <class Elem, class Scale, int CtaGroup, int M, int N>
void check_scale_use(const char* name, sem::UmmaKind kind, int vec, int id) {
  constexpr bool kFp4 = sizeof_bits_v<Elem> == 4;
  constexpr bool kNv = std::is_same_v<Scale, float_ue4m3_t>;
  constexpr int kBlock = kNv ? 16 : 32;
  std::vector<uint32_t> tmem[2] = {std::vector<uint32_t>(128 * 512, 0),
                                   std::vector<uint32_t>(128 * 512, 0)};
  std::vector<uint8_t> smem(1 << 17, kFp4 ? 0x22 : 0x38);  // 1.0 in e2m1 (both nibbles) or e4m3
  constexpr int kSfa = 256, kSfb = 272;
  auto code = [](int row, int blk) {
    return uint8_t(kNv ? 0x20 + (row * 4 + blk * 7) % 60 : 122 + (row * 5 + blk * 3) % 11);
  };
  auto value = [](uint8_t c) {
    return kNv ? (1 + (c & 7) / 8.0) * std::ldexp(1.0, (c >> 3) - 7) : std::ldexp(1.0, c - 127);
  };
  const int local_m = M / CtaGroup;
  for (int cta = 0; cta < CtaGroup; ++cta) {
    auto at = [&](long idx, int column, uint8_t c) {  // 8-bit cells: 4 per column
      const int lane = int(idx >> 18), bc = int(idx & ((1 << 18) - 1));
      tmem[cta][lane * 512 + column + bc / 4] |= uint32_t(c) << (8 * (bc % 4));
    };
    auto put = [&](auto frag, int column, int row, int blk, int global_row) {
      for (int rep = 0; rep < int(size<0, 0, 1>(frag.layout())); ++rep) {
        at(long(frag.layout()(
               make_coord(make_coord(make_coord(row, rep), make_coord(0, blk)), 0, 0))),
           column, code(global_row, blk));
      }
    };
    auto sfa = UMMA::tmem_sf_frg<Scale, kBlock, CtaGroup, true>::make(
        make_shape(make_shape(Int<M / CtaGroup>{}, make_shape(Int<kBlock>{}, _4{})), _1{}, _1{}));
    for (int m = 0; m < local_m; ++m) {
      for (int b = 0; b < 4; ++b) put(sfa, kSfa, m, b, cta * local_m + m);
    }
    constexpr auto kMode = M / CtaGroup == 128 ? UMMA::TmemAllocMode::ScaleFactorDuplicated4by1
                                               : UMMA::TmemAllocMode::ScaleFactorDuplicated2by2;
    // CuTe allocates scales of B for multiples of 128 columns.
    constexpr int kPadded = (N + 127) / 128 * 128;
    auto sfb = UMMA::tmem_sf_frg<Scale, kBlock, CtaGroup, false, kMode>::make(
        make_shape(make_shape(Int<kPadded>{}, make_shape(Int<kBlock>{}, _4{})), _1{}, _1{}));
    for (int n = 0; n < N; ++n) {
      for (int b = 0; b < 4; ++b) {
        if constexpr (kMode == UMMA::TmemAllocMode::ScaleFactorDuplicated4by1) {
          put(sfb, kSfb, n, b, 300 + n);
        } else {  // modes ((32, N/64), halves, replicas)
          for (int rep = 0; rep < 2; ++rep) {
            at(long(sfb.layout()(make_coord(
                   make_coord(make_coord(n % (N / 2), n / (N / 2), rep), make_coord(0, b)), 0, 0))),
               kSfb, code(300 + n, b));
          }
        }
      }
    }
  }
  auto idesc = UMMA::make_instr_desc_block_scaled<Elem, Elem, float, Scale, M, N, UMMA::Major::K,
                                                  UMMA::Major::K>();
  sem::UmmaArgs args;
  args.kind = kind;
  args.cta_group = CtaGroup;
  args.scale_vec = vec;
  args.idesc = uint32_t(idesc) | uint32_t(id) << 4 | uint32_t(id) << 29;
  args.a = args.b =
      (1024 >> 4) | (uint64_t(256 >> 4) << 32) | (uint64_t{1} << 46) | (uint64_t{6} << 61);
  args.sfa_tmem = kSfa;
  args.sfb_tmem = kSfb;
  args.enable_d = false;
  sem::UmmaPlan plan;
  const sem::Error e = sem::plan_umma(args, &plan);
  CHECK(e.empty(), "%s scale use M %d N %d: %s", name, M, N, e.c_str());
  sem::CtaView views[2] = {{smem.data(), 0, uint32_t(smem.size()), tmem[0].data()},
                           {smem.data(), 0, uint32_t(smem.size()), tmem[1].data()}};
  CHECK(sem::execute_umma(plan, views, sem::Accumulate::kExact).empty(), "scale use");
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      double want = 0;
      for (int b = id; b < id + vec; ++b)
        want += kBlock * value(code(m, b)) * value(code(300 + n, b));
      const sem::TmemCell c = sem::umma_d_cell(M, N, CtaGroup, false, m, n);
      float got;
      std::memcpy(&got, &tmem[c.cta][c.lane * 512 + c.column], 4);
      CHECK(got == float(want), "%s scale use M %d N %d id %d (%d, %d): %g, want %g", name, M, N,
            id, m, n, got, want);
    }
  }
}

template <int CtaGroup, int M, int N>
void check_scale_uses() {
  check_scale_use<float_e2m1_t, float_ue4m3_t, CtaGroup, M, N>("mxf4nvf4 4X",
                                                               sem::UmmaKind::kMxf4nvf4, 4, 0);
  for (int id : {0, 2}) {
    check_scale_use<float_e2m1_t, float_ue8m0_t, CtaGroup, M, N>("mxf4 2X", sem::UmmaKind::kMxf4, 2,
                                                                 id);
  }
  for (int id = 0; id < 4; ++id) {
    check_scale_use<float_e4m3_t, float_ue8m0_t, CtaGroup, M, N>("mxf8f6f4 1X",
                                                                 sem::UmmaKind::kMxf8f6f4, 1, id);
  }
}

void check_idesc() {
  sem::InstrDesc d;
  auto ok = [&](uint32_t bits, sem::UmmaKind kind, int group) {
    const sem::Error e = sem::decode_idesc(bits, kind, group, false, &d);
    CHECK(e.empty(), "idesc 0x%x: %s", bits, e.c_str());
  };
  using M = UMMA::Major;
  ok(uint32_t(UMMA::make_instr_desc<half_t, half_t, float, 128, 256, M::K, M::MN>()),
     sem::UmmaKind::kF16, 1);
  CHECK(d.m == 128 && d.n == 256 && d.k == 16 && d.a == sem::Elem::kF16 && d.d == sem::Elem::kF32 &&
            !d.mn_major_a && d.mn_major_b,
        "idesc f16");
  ok(uint32_t(UMMA::make_instr_desc<bfloat16_t, bfloat16_t, float, 256, 64, M::MN, M::K>()),
     sem::UmmaKind::kF16, 2);
  CHECK(d.m == 256 && d.n == 64 && d.a == sem::Elem::kBf16 && d.mn_major_a, "idesc bf16");
  ok(uint32_t(UMMA::make_instr_desc<tfloat32_t, tfloat32_t, float, 64, 8, M::K, M::K>()),
     sem::UmmaKind::kTf32, 1);
  CHECK(d.m == 64 && d.n == 8 && d.k == 8 && d.a == sem::Elem::kTf32, "idesc tf32");
  ok(uint32_t(UMMA::make_instr_desc<float_e4m3_t, float_e5m2_t, half_t, 128, 48, M::K, M::MN>()),
     sem::UmmaKind::kF8f6f4, 1);
  CHECK(d.a == sem::Elem::kE4m3 && d.b == sem::Elem::kE5m2 && d.d == sem::Elem::kF16 && d.k == 32,
        "idesc f8");
  ok(uint32_t(UMMA::make_instr_desc<detail::float_e2m1_unpacksmem_t,
                                    detail::float_e3m2_unpacksmem_t, float, 128, 48, M::K, M::K>()),
     sem::UmmaKind::kF8f6f4, 1);
  CHECK(d.a == sem::Elem::kE2m1 && d.b == sem::Elem::kE3m2, "idesc f4 f6");
  ok(uint32_t(UMMA::make_instr_desc<int8_t, uint8_t, int32_t, 128, 32, M::K, M::K>()),
     sem::UmmaKind::kI8, 1);
  CHECK(d.a == sem::Elem::kS8 && d.b == sem::Elem::kU8 && d.d == sem::Elem::kS32, "idesc i8");
  ok(uint32_t(UMMA::make_instr_desc_block_scaled<float_e4m3_t, float_e5m2_t, float, float_ue8m0_t,
                                                 128, 192, M::K, M::MN>()),
     sem::UmmaKind::kMxf8f6f4, 1);
  CHECK(d.m == 128 && d.n == 192 && d.k == 32 && d.scale == sem::Elem::kUe8m0 && d.mn_major_b,
        "idesc mxf8");
  ok(uint32_t(UMMA::make_instr_desc_block_scaled<float_e2m1_t, float_e2m1_t, float, float_ue4m3_t,
                                                 256, 128, M::K, M::K>()),
     sem::UmmaKind::kMxf4nvf4, 2);
  CHECK(d.m == 256 && d.n == 128 && d.k == 64 && d.scale == sem::Elem::kUe4m3 &&
            d.a == sem::Elem::kE2m1,
        "idesc nvf4");
}

int main() {
  // Rows: the smallest, an odd number of 8-row groups, and the largest legal M or N; K: one
  // instruction up to several swizzle spans.
  check_k_major<Which::kUmma, half_t, 128, 64>();
  check_k_major<Which::kUmma, half_t, 8, 128>();
  check_k_major<Which::kUmma, half_t, 24, 32>();
  check_k_major<Which::kUmma, half_t, 256, 16>();
  check_k_major<Which::kUmma, uint8_t, 8, 32>();
  check_k_major<Which::kUmma, uint8_t, 128, 128>();
  check_k_major<Which::kUmma, float, 256, 8>();
  check_k_major<Which::kUmma, uint8_t, 64, 256>();
  check_k_major<Which::kUmma, uint8_t, 24, 64>();
  check_k_major<Which::kUmma, float, 16, 64>();
  check_k_major<Which::kWgmma, half_t, 64, 64>();
  check_k_major<Which::kWgmma, uint8_t, 256, 128>();
  check_k_major<Which::kWgmma, half_t, 8, 16>();
  check_k_major<Which::kWgmma, float, 64, 32>();
  check_mn_major<Which::kUmma, half_t, 128, 64>();
  check_mn_major<Which::kUmma, half_t, 32, 64>();
  check_mn_major<Which::kUmma, half_t, 256, 16>();
  check_mn_major<Which::kUmma, uint8_t, 32, 32>();
  check_mn_major<Which::kUmma, uint8_t, 64, 128>();
  check_mn_major<Which::kUmma, uint8_t, 128, 32>();
  check_mn_major<Which::kUmma, uint8_t, 192, 64>();
  check_mn_major<Which::kWgmma, half_t, 256, 16>();
  check_mn_major<Which::kUmma, half_t, 16, 16>();
  check_mn_major<Which::kUmma, uint8_t, 256, 128>();
  check_mn_major<Which::kUmma, uint8_t, 16, 32>();
  check_mn_major<Which::kWgmma, half_t, 64, 64>();
  check_mn_atom32<32, 8>();
  check_mn_atom32<256, 16>();
  check_tma_swizzles();
  check_scale_factors<16, 128, 4>(false);
  check_scale_factors<32, 128, 2>(false);
  check_scale_factors<32, 128, 4>(false);
  check_scale_uses<1, 128, 8>();
  check_scale_uses<1, 128, 64>();
  check_scale_uses<1, 128, 128>();
  check_scale_uses<1, 128, 192>();
  check_scale_uses<1, 128, 256>();
  check_scale_uses<2, 256, 128>();
  check_scale_uses<2, 256, 256>();
  check_scale_uses<2, 128, 256>();
  check_idesc();
  return check_report("cute_smem");
}
