// SPDX-License-Identifier: Apache-2.0
// tcgen05 and wgmma: matrix and instruction descriptors, shared-memory and Tensor Memory address
// generation (PTX ISA 9.7.15.5, 9.7.16). Addresses in shared memory are absolute addresses of the
// CTA's shared window, 18 bits; Tensor Memory of a CTA is tmem[lane * 512 + column], 128 lanes.
#pragma once

#include <cstdint>
#include <vector>

#include "frag.h"
#include "mma.h"
#include "types.h"

namespace ptxsim::sem {

constexpr int kTmemLanes = 128;
constexpr int kTmemColumns = 512;

// ---- Shared-memory matrix descriptors
// -------------------------------------------------------------
enum class SmemSwizzle : uint8_t { kNone, k32B, k64B, k128B, k128BAtom32B };

struct SmemDesc {
  uint32_t start = 0;  // bytes
  uint32_t lbo = 0;    // leading-dimension byte offset
  uint32_t sbo = 0;    // stride-dimension byte offset
  uint8_t base_offset = 0;
  bool lbo_absolute = false;
  SmemSwizzle swizzle = SmemSwizzle::kNone;
};

Error decode_umma_desc(uint64_t bits, SmemDesc* d);   // tcgen05 (version field 0b001 at 46-48)
Error decode_wgmma_desc(uint64_t bits, SmemDesc* d);  // sm_90

// Address of the 16-byte chunk that holds K-bytes 16u .. 16u+15 of row `row` (K-major).
uint32_t kmajor_chunk(const SmemDesc& d, int row, int u);
// Address of the 16-byte chunk that holds MN-bytes 16u .. 16u+15 of k index `k` (MN-major).
uint32_t mnmajor_chunk(const SmemDesc& d, int u, int k);

// An operand of `rows` (M or N) x `k` elements in shared memory. Elements of e2m3/e3m2/e2m1 under
// the f8f6f4 kinds sit 16 to a 16-byte chunk with padding (`padded`), e2m1 of the mxf4 kinds is
// packed.
struct SmemOperand {
  SmemDesc desc;
  bool mn_major = false;
  Elem elem = Elem::kF16;
  bool padded = false;
  int rows = 0;
  int k = 0;
};
// Chunk addresses in decode order: K-major [row][u], MN-major [k][u].
void operand_chunks(const SmemOperand& op, std::vector<uint32_t>* chunks);
// window[address] is the byte at a shared address. Writes out[row * k_stride + k].
void decode_operand(const SmemOperand& op, const uint8_t* window, const uint32_t* chunks,
                    bool negate, double* out, int k_stride);

// ---- tcgen05.mma
// ----------------------------------------------------------------------------------
enum class UmmaKind : uint8_t { kF16, kTf32, kF8f6f4, kI8, kMxf8f6f4, kMxf4, kMxf4nvf4 };

struct InstrDesc {
  UmmaKind kind = UmmaKind::kF16;
  Elem a = Elem::kF16, b = Elem::kF16, d = Elem::kF32;  // d: kF16, kF32 or kS32
  bool negate_a = false, negate_b = false;
  bool mn_major_a = false, mn_major_b = false;
  bool saturate = false;
  int m = 0, n = 0, k = 0;
  Elem scale = Elem::kUe8m0;
  int sfa_id = 0, sfb_id = 0;
  int max_shift = 0;  // .ws only
};
// Checks reserved bits, types and the M/N/K table for the kind. cta_group 1 or 2.
Error decode_idesc(uint32_t bits, UmmaKind kind, int cta_group, bool ws, InstrDesc* d);

// A rectangle of Tensor Memory for hazard tracking; cta is 0 (issuer's pair rank 0) or 1.
struct TmemRect {
  uint8_t cta = 0;
  uint8_t lane = 0;
  uint8_t lanes = 0;
  uint16_t column = 0;
  uint16_t columns = 0;
};

struct UmmaArgs {
  UmmaKind kind = UmmaKind::kF16;
  int cta_group = 1;
  bool ws = false;
  int scale_vec = 0;  // blocks of scales per K: 1, 2, 4; 0 for kinds without block scaling
  bool block16 = false, block32 = false;  // given as .block16/.block32 instead of .scale_vec
  uint32_t idesc = 0;
  uint32_t d_tmem = 0;
  bool a_in_tmem = false;
  uint64_t a = 0;  // descriptor, or Tensor Memory address
  uint64_t b = 0;
  uint32_t sfa_tmem = 0, sfb_tmem = 0;
  bool enable_d = true;
  int scale_input_d = 0;                    // 0 .. 15: D * 2^-s
  const uint32_t* disable_lanes = nullptr;  // 4 (cta_group 1) or 8 words, bit = 1 keeps the lane
};

// Everything of one tcgen05.mma that is known at issue: legality, operands, footprints.
struct UmmaPlan {
  UmmaArgs args;
  InstrDesc idesc;
  SmemOperand a, b;                          // per CTA: rows = M / cta_group, N / cta_group
  std::vector<uint32_t> a_chunks, b_chunks;  // identical addresses in both CTAs of a pair
  std::vector<TmemRect> reads;               // A in TMEM, D (if enabled), scales
  std::vector<TmemRect> writes;              // D
  uint32_t disable[8] = {};
};
Error plan_umma(const UmmaArgs& args, UmmaPlan* plan);

struct CtaView {
  const uint8_t* window = nullptr;  // byte at shared address 0 of the CTA's window
  uint32_t smem_begin = 0;          // valid shared addresses [begin, end)
  uint32_t smem_end = 0;
  uint32_t* tmem = nullptr;  // [128][512]
};
// views: cta_group entries, pair rank order.
Error execute_umma(const UmmaPlan& plan, const CtaView* views, Accumulate mode);

// D placement: CTA of the pair, lane (without the address's own lane offset), column offset.
struct TmemCell {
  int cta = 0;
  int lane = 0;
  int column = 0;
};
TmemCell umma_d_cell(int m_size, int n_size, int cta_group, bool ws, int m, int n);

// ---- wgmma
// ----------------------------------------------------------------------------------------
struct WgmmaOp {
  int n = 8;
  int k = 16;
  Elem a = Elem::kF16, b = Elem::kF16, d = Elem::kF32;
  bool a_in_regs = false;
  bool negate_a = false, negate_b = false;  // imm-scale = -1
  bool trans_a = false, trans_b = false;
  bool satfinite = false;
};
Error check_wgmma(const WgmmaOp& op);
// Operands in shared memory for footprint tracking; b always, a unless a_in_regs.
Error plan_wgmma(const WgmmaOp& op, uint64_t a_desc, uint64_t b_desc, SmemOperand* a,
                 SmemOperand* b);
// d[r][thread], a_regs[r][thread], 128 threads of the warpgroup. scale_d false: D = A * B.
Error execute_wgmma(const WgmmaOp& op, const SmemOperand& a, const SmemOperand& b,
                    const CtaView& view, const uint32_t* const* a_regs, uint32_t* const* d,
                    bool scale_d, Accumulate mode);

// ---- tcgen05.ld / tcgen05.st
// ----------------------------------------------------------------------
enum class TmemShape : uint8_t { k32x32b, k16x64b, k16x128b, k16x256b, k16x32bx2 };
struct TmemAccess {
  TmemShape shape = TmemShape::k32x32b;
  int num = 1;
  bool pack16 = false;  // .pack::16b / .unpack::16b
  int half_split = 0;   // immHalfSplitoff of 16x32bx2 (columns)
};
Error check_tmem_access(const TmemAccess& a);
int tmem_regs(const TmemAccess& a);
// Lane and column offsets of register r of warp lane `lane` (first of the two columns when packed).
Coord tmem_reg_coord(const TmemAccess& a, int lane, int r);
// Footprint after checking the warp's lane window (warp = warp id in the warpgroup, 0..3).
Error plan_tmem_access(const TmemAccess& a, uint32_t taddr, int warp, std::vector<TmemRect>* rects);
void tmem_load(const TmemAccess& a, uint32_t taddr, const uint32_t* tmem, uint32_t* const* reg);
void tmem_store(const TmemAccess& a, uint32_t taddr, const uint32_t* const* reg, uint32_t* tmem);

// ---- tcgen05.cp (tcgen05.shift is not modelled)
// ---------------------------------------------------
enum class CpShape : uint8_t {
  k128x256b,
  k128x128b,
  k4x256b,
  k64x128b0213,
  k64x128b0123,
  k32x128b
};
enum class CpFormat : uint8_t { kNone, kB6, kB4 };  // .b8x16.b6x16_p32, .b8x16.b4x16_p64
struct CpPlan {
  CpShape shape = CpShape::k32x128b;
  CpFormat format = CpFormat::kNone;
  uint32_t taddr = 0;
  int rows = 0;
  int row_chunks = 0;
  std::vector<uint32_t> chunks;  // [row][chunk] shared addresses, 16 bytes each
  std::vector<TmemRect> writes;  // per CTA (cta = 0)
};
Error plan_cp(CpShape shape, CpFormat format, uint32_t taddr, uint64_t desc, CpPlan* plan);
Error execute_cp(const CpPlan& plan, const CtaView& view);

}  // namespace ptxsim::sem
