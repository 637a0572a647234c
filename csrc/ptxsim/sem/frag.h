// SPDX-License-Identifier: Apache-2.0
// Lane/register maps of the warp-level matrix instructions (PTX ISA 9.7.14.5, 9.7.15.5). Registers
// are passed as arrays of pointers: reg[r][lane], the simulator's own cell layout.
#pragma once

#include <cstdint>

#include "types.h"

namespace ptxsim::sem {

struct Coord {
  int row = 0;
  int col = 0;
};

// mma.sync m16n8kK and m8n8kK fragments. `bits` is the element width in the register (64, 32, 16, 8
// or 4); element e of register r (e < 32 / bits; 64-bit elements: e = 0) of `lane`.
// A: (m, k). B: (k, n). C/D: (m, n), where r counts elements, not registers (f16 pairs: 2 per
// register).
Coord mma_a_coord(int m, int bits, int lane, int r, int e);
Coord mma_b_coord(int bits, int lane, int r, int e);
Coord mma_c_coord(int lane, int i);
int mma_a_regs(int m, int k, int bits);
int mma_b_regs(int k, int bits);

// wgmma m64nNkK: `thread` is 0..127 in the warpgroup.
Coord wgmma_d_coord(int thread, int i);                   // i: element index, N / 2 per thread
Coord wgmma_a_coord(int bits, int thread, int r, int e);  // 4 registers

// Lane that supplies a scale of block-scaled mma.sync: row 0..15 of A, column 0..7 of B.
int mma_sfa_lane(int row, int thread_id);
int mma_sfb_lane(int col, int thread_id);
// Byte of the 32-bit scale register for block `blk` (0 .. scale_vec - 1); byte_id as in the
// instruction.
inline int mma_sf_byte(int byte_id, int blk) { return byte_id + blk; }

enum class MatrixShape : uint8_t {
  kM8n8B16,        // ldmatrix / stmatrix
  kM16n16B8,       // ldmatrix .trans only
  kM8n16B8x16B6,   // ldmatrix .b8x16.b6x16_p32
  kM8n16B8x16B4,   // ldmatrix .b8x16.b4x16_p64
  kM16n16B8x16B6,  // ldmatrix .trans
  kM16n16B8x16B4,  // ldmatrix .trans
  kM16n8B8,        // stmatrix .trans only
};

struct MatrixOp {
  MatrixShape shape = MatrixShape::kM8n8B16;
  int num = 1;
  bool trans = false;
};

Error check_ldmatrix(const MatrixOp& op);
Error check_stmatrix(const MatrixOp& op);
// Lanes 0 .. rows - 1 supply row addresses, each 16 bytes long and 16-byte aligned.
int matrix_rows(const MatrixOp& op);
int matrix_regs(const MatrixOp& op);

// rows[i]: the 16 bytes at lane i's address.
void ldmatrix(const MatrixOp& op, const uint8_t (*rows)[16], uint32_t* const* reg);
void stmatrix(const MatrixOp& op, const uint32_t* const* reg, uint8_t (*rows)[16]);
void movmatrix(const uint32_t* src, uint32_t* dst);  // m8n8.trans.b16, 32 lanes; no aliasing

// Decompression of one 16-byte chunk: 16 packed 6-bit (12 B + pad) or 4-bit (8 B + pad) codes to
// bytes. Both place the code in the low bits of its byte, as ldmatrix does.
void expand_b6(const uint8_t src[16], uint8_t dst[16]);
void expand_b4(const uint8_t src[16], uint8_t dst[16]);

}  // namespace ptxsim::sem
