// SPDX-License-Identifier: Apache-2.0
// Shapes, shared memory, Tensor Memory and barriers of the SM100 prefill kernel.
// docs/kernels/sm100_prefill.md has the pictures.
#pragma once

#include <cstdint>

#include "mpfa/base/math.h"

namespace mpfa::sm100::prefill {

// Warps by role. Softmax and correction warps need warp % 4 to select their quarter of the Tensor
// Memory lanes; setmaxnreg works on aligned groups of four warps.
constexpr int kSoftmaxWarps = 4;  // per query stage
constexpr int kCorrectionFirstWarp = 8;
constexpr int kCorrectionWarps = 4;
constexpr int kMmaWarp = 12;
constexpr int kEpilogueWarp = 13;
constexpr int kLoadFirstWarp = 14;
constexpr int kLoadWarps = 2;
constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
static_assert(kLoadFirstWarp + kLoadWarps == kWarps, "the load warps are the last ones");

// Registers: 4 warpgroups share 512 per thread slot; the kernel is launched with 128 each.
constexpr int kSoftmaxRegisters = 176;
constexpr int kCorrectionRegisters = 88;
constexpr int kOtherRegisters = 64;
static_assert(2 * kSoftmaxRegisters + kCorrectionRegisters + kOtherRegisters <= 512,
              "register file of an SM: 64K for 512 threads");

constexpr int kStages = 2;  // query stages, 128 rows each
constexpr int kStageRows = 128;
constexpr int kTileRows = kStages * kStageRows;  // q_tile_tokens * heads_per_group of the plan
constexpr int kKvBlock = 128;
constexpr int kCompSlots = 16;  // K of one bf16 MMA
constexpr int kRingSlots = 8;   // K and V blocks in turn
constexpr int kTmemColumns = 512;
constexpr int kMaxSharedBytes = 232448;  // 227 KB, the most that a block may have on sm_100

// Builds for measurements; the shipped modules have both at 0.
//   MPFA_SM100_ELEMENTWISE_DELTA 1: Delta is added by the softmax threads from shared memory
//   instead
//     of by a bf16 product (paper section 7.4); no outlier channels.
//   MPFA_SM100_SOFTMAX_CUT n: the softmax leaves out the exponential (1), the row maximum as well
//     (2), row sum and rescale as well (3). Results are wrong; what remains is timed.
#if !defined(MPFA_SM100_ELEMENTWISE_DELTA)
#define MPFA_SM100_ELEMENTWISE_DELTA 0
#endif
#if !defined(MPFA_SM100_SOFTMAX_CUT)
#define MPFA_SM100_SOFTMAX_CUT 0
#endif
constexpr bool kElementwiseDelta = MPFA_SM100_ELEMENTWISE_DELTA != 0;
constexpr int kSoftmaxCut = MPFA_SM100_SOFTMAX_CUT;

// Formats of P and V. The kernel is built for e4m3; the other two are the precision assignments of
// the paper's Figure 3, for comparison: head_dim 128, launcher csrc/sm100_prefill_pv.cu.
enum class Pv { kE4m3, kBf16, kNvfp4 };

//   kLog2Scale     P is stored as 2^kLog2Scale P, the format's largest number where it has a limit
//   kExp2Top       an integer at or above it, for the polynomial, whose results end at
//                  2^(kExp2Top - 128), a normal number
//   kBits          of an element of P and V
//   kStepTokens    K of a product
//   kEarlyTokens   PV starts when this much of a block's P is stored
//   kVUnits        ring slots that V of a block takes
template <Pv kFormat>
struct PvFormat;

template <>
struct PvFormat<Pv::kE4m3> {
  static constexpr float kLog2Scale = 8.8073549220576041f;  // 448
  static constexpr float kExp2Top = 9.0f;
  static constexpr int kBits = 8;
  static constexpr int kStepTokens = 32;
  static constexpr int kEarlyTokens = 96;
  static constexpr int kVUnits = 1;
};

template <>
struct PvFormat<Pv::kBf16> {
  static constexpr float kLog2Scale = 0.0f;
  static constexpr float kExp2Top = 9.0f;
  static constexpr int kBits = 16;
  static constexpr int kStepTokens = 16;
  static constexpr int kEarlyTokens = 96;
  static constexpr int kVUnits = 2;
};

template <>
struct PvFormat<Pv::kNvfp4> {
  static constexpr float kLog2Scale = 11.392317422778761f;  // 448 * 6: scale times element
  static constexpr float kExp2Top = 12.0f;
  static constexpr int kBits = 4;
  static constexpr int kStepTokens = 64;
  static constexpr int kEarlyTokens = 64;
  static constexpr int kVUnits = 1;
};

template <int HeadDim, Pv kFormat = Pv::kE4m3>
struct Config {
  static_assert(HeadDim == 64 || HeadDim == 128, "256 needs 768 Tensor Memory columns");
  static_assert(kFormat == Pv::kE4m3 || HeadDim == 128, "the comparison builds have one size");
  static constexpr int kHeadDim = HeadDim;
  static constexpr Pv kPv = kFormat;
  using P = PvFormat<kFormat>;

  // Shared memory tiles. Row bytes select the swizzle: 32, 64 or 128.
  static constexpr int kQkRowBytes = HeadDim / 2;  // e2m1
  static constexpr int kQkBytes = 128 * kQkRowBytes;
  static constexpr int kScaleAtoms = HeadDim / 64;  // one per K = 64 step
  static constexpr int kScaleBytes = 512 * kScaleAtoms;
  static constexpr int kCompBytes = 128 * kCompSlots * 2;

  // V as it lies in a slot: rows are tokens, in panels of at most 128 bytes; of NVFP4, whose
  // products take K-major operands alone, rows are channels, and the scales follow.
  static constexpr bool kVTransposed = kPv == Pv::kNvfp4;
  static constexpr int kVRows = kVTransposed ? HeadDim : kKvBlock / P::kVUnits;
  static constexpr int kVRowBytes = (kVTransposed ? kKvBlock : HeadDim) * P::kBits / 8;
  static constexpr int kVPanelBytes = kVRowBytes < 128 ? kVRowBytes : 128;
  static constexpr int kVBytes = kVRows * kVRowBytes;
  static constexpr int kPvScaleAtoms = kVTransposed ? kKvBlock / 64 : 0;  // of V; the same for P
  static constexpr int kPvScaleBytes = 512 * kPvScaleAtoms;

  // A ring slot holds K with its scales and compensation slots, or a unit of V.
  static constexpr int kSlotScale = kQkBytes;
  static constexpr int kSlotComp = kSlotScale + kScaleBytes;
  static constexpr int kSlotKBytes = kSlotComp + kCompBytes;
  static constexpr int kSlotVScale = kVBytes;
  static constexpr int kSlotVBytes = kSlotVScale + kPvScaleBytes;
  static constexpr int kSlotBytes =
      round_up(kSlotKBytes > kSlotVBytes ? kSlotKBytes : kSlotVBytes, 1024);
  static constexpr int kBlockSlots = 1 + P::kVUnits;
  static_assert(!kElementwiseDelta || kRingSlots % kBlockSlots == 0,
                "element-wise Delta: a slot holds always K or always V");

  // Output rows are staged for bulk stores. why: 16 bytes of padding spread the rows, which the
  // correction threads write one each, over all banks.
  static constexpr int kOutPad = 16;
  static constexpr int kOutRowBytes = HeadDim * 4 + kOutPad;

  // Tensor Memory columns. P (e4m3: four tokens per column) lies in S of its stage, and behind it
  // the scales of NVFP4 P and V; at head_dim 128 the scales of Q and K of stage r lie in S of stage
  // 1 - r, which holds nothing between the softmax's load of S and the next QK product of that
  // stage.
  static constexpr bool kBorrowedScales = HeadDim == 128;
  static constexpr int kTmemS = 0;
  static constexpr int kTmemO = kStages * kKvBlock;
  static constexpr int kTmemFree = kTmemO + kStages * HeadDim;
  static constexpr int kTmemPOffset = 64;
  static constexpr int kTmemPColumns = kKvBlock * P::kBits / 32;
  static constexpr int kTmemPScaleOffset = kTmemPOffset + kTmemPColumns;
  static constexpr int kTmemVScaleOffset = kTmemPScaleOffset + 4 * kPvScaleAtoms;
  static constexpr int kTmemScaleColumns = 4 * kScaleAtoms;  // of Q; the same for K
  MPFA_HOST_DEVICE static constexpr int tmem_s(int stage) { return kTmemS + stage * kKvBlock; }
  MPFA_HOST_DEVICE static constexpr int tmem_p(int stage) { return tmem_s(stage) + kTmemPOffset; }
  MPFA_HOST_DEVICE static constexpr int tmem_o(int stage) { return kTmemO + stage * HeadDim; }
  MPFA_HOST_DEVICE static constexpr int tmem_scale_q(int stage) {
    return kBorrowedScales ? tmem_s(1 - stage) : kTmemFree + stage * 2 * kTmemScaleColumns;
  }
  MPFA_HOST_DEVICE static constexpr int tmem_scale_k(int stage) {
    return tmem_scale_q(stage) + kTmemScaleColumns;
  }
  static_assert(kTmemFree + (kBorrowedScales ? 0 : kStages * 2 * kTmemScaleColumns) <= kTmemColumns,
                "Tensor Memory has 512 columns");
  static_assert(2 * kTmemScaleColumns <= kTmemPOffset,
                "borrowed scales and P of one S region are live at the same time");
  static_assert(kTmemVScaleOffset + 4 * kPvScaleAtoms <= kKvBlock, "P lies inside S");
};

// Barriers. `arrivals` is the count of one phase; roles that arrive once per warp do so after
// __syncwarp. The table in docs/kernels/sm100_prefill.md is checked against these numbers.
//   barrier        arrives                                     waits
//   full[8]        each load warp: K (+ scales, Delta), or V   MMA
//   empty[8]       commit after the block's last product       load
//   q_full[2]      each load warp                              MMA
//   q_empty[2]     commit after the tile's last QK             load
//   s_full[2]      commit after QK                             softmax
//   s_loaded[2]    softmax warps, S is in registers            MMA, before it borrows S for scales
//   p_ready[2]     softmax warps (3/4 of P), correction (O)    MMA, before PV
//   p_last[2]      softmax warps, the last quarter of P        MMA, before PV's last step
//   rescale[2]     softmax warps, from a tile's second block   correction
//   final[2]       softmax warps, row sum and its exponent     correction
//   final_read[2]  correction warps                            softmax, before it writes the next
//   o_full[2]      commit after the tile's last PV             correction
//   out_full       correction warps, rows staged               epilogue
//   out_empty      epilogue, rows read                         correction
struct Arrivals {
  static constexpr int full = kLoadWarps;
  static constexpr int empty = 1;
  // K slots are the even ones. With element-wise Delta the softmax warps read K's slot too.
  MPFA_HOST_DEVICE static constexpr int empty_of(int slot) {
    return empty + (kElementwiseDelta && slot % 2 == 0 ? kStages * kSoftmaxWarps : 0);
  }
  static constexpr int q_full = kLoadWarps;
  static constexpr int q_empty = 1;
  static constexpr int s_full = 1;
  static constexpr int s_loaded = kSoftmaxWarps;
  static constexpr int p_ready = kSoftmaxWarps + kCorrectionWarps;
  static constexpr int p_last = kSoftmaxWarps;
  static constexpr int rescale = kSoftmaxWarps;
  static constexpr int final_stats = kSoftmaxWarps;
  static constexpr int final_read = kCorrectionWarps;
  static constexpr int o_full = 1;
  static constexpr int out_full = kCorrectionWarps;
  static constexpr int out_empty = 1;
};

// Offsets inside the block's shared memory.
template <class C>
struct SharedLayout {
  static constexpr int kAlignment = 1024;  // of the 128-byte swizzle pattern
  static constexpr int ring = 0;
  static constexpr int q = ring + kRingSlots * C::kSlotBytes;
  static constexpr int q_scale = q + kStages * C::kQkBytes;
  static constexpr int a_comp = q_scale + kStages * C::kScaleBytes;
  static constexpr int p_scale = a_comp + kStages * C::kCompBytes;  // of NVFP4 P
  static constexpr int out = p_scale + kStages * C::kPvScaleBytes;
  static constexpr int rescale = out + kStageRows * C::kOutRowBytes;  // float [stage][row]
  static constexpr int row_sum = rescale + kStages * kStageRows * 4;
  static constexpr int row_reference = row_sum + kStages * kStageRows * 4;
  static constexpr int barriers = row_reference + kStages * kStageRows * 4;

  static constexpr int full = barriers;
  static constexpr int empty = full + 8 * kRingSlots;
  static constexpr int q_full = empty + 8 * kRingSlots;
  static constexpr int q_empty = q_full + 8 * kStages;
  static constexpr int s_full = q_empty + 8 * kStages;
  static constexpr int s_loaded = s_full + 8 * kStages;
  static constexpr int p_ready = s_loaded + 8 * kStages;
  static constexpr int p_last = p_ready + 8 * kStages;
  static constexpr int rescale_full = p_last + 8 * kStages;
  static constexpr int final_full = rescale_full + 8 * kStages;
  static constexpr int final_read = final_full + 8 * kStages;
  static constexpr int o_full = final_read + 8 * kStages;
  static constexpr int out_full = o_full + 8 * kStages;
  static constexpr int out_empty = out_full + 8;
  static constexpr int paranoid = out_empty + 8;
  static constexpr int tmem_address = paranoid + 8;
  static constexpr int bytes = tmem_address + 8;

  static_assert(q % 1024 == 0 && C::kSlotBytes % 1024 == 0 &&
                    C::kVRows * C::kVPanelBytes % 1024 == 0,
                "swizzle patterns start aligned");
  static_assert(q_scale % 128 == 0 && a_comp % 128 == 0 && p_scale % 128 == 0 && out % 128 == 0,
                "alignment");
  static_assert(bytes + kAlignment <= kMaxSharedBytes, "227 KB of shared memory per block");
};

// Number of mbarriers between `full` and the end: the docs' ledger lists as many.
template <class C>
constexpr int kNumBarriers = (SharedLayout<C>::paranoid - SharedLayout<C>::full) / 8;
static_assert(kNumBarriers<Config<128>> == 2 * kRingSlots + 10 * kStages + 2,
              "14 rows of the barrier table: 2 per ring slot, 10 per stage, 2 of the epilogue");

}  // namespace mpfa::sm100::prefill
