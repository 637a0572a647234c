// SPDX-License-Identifier: Apache-2.0
#include "frag.h"

#include <cstring>

#include "fault.h"

namespace ptxsim::sem {

// Every m16n8kK and m8n8kK fragment (f16 m8n8k4 of sm_70 excepted) follows one rule: with P
// elements per 32-bit register, a quad's lane t holds P consecutive k, four lanes span 4P, further
// registers the next 4P; A alternates row halves first.
Coord mma_a_coord(int m, int bits, int lane, int r, int e) {
  const int per = bits >= 32 ? 1 : 32 / bits;
  const int g = lane >> 2, t = lane & 3;
  const int halves = m == 16 ? 2 : 1;
  return {g + 8 * (r % halves), (r / halves) * 4 * per + t * per + e};
}

Coord mma_b_coord(int bits, int lane, int r, int e) {
  const int per = bits >= 32 ? 1 : 32 / bits;
  return {r * 4 * per + (lane & 3) * per + e, lane >> 2};
}

Coord mma_c_coord(int lane, int i) {
  return {(lane >> 2) + 8 * (i >> 1), 2 * (lane & 3) + (i & 1)};
}

int mma_a_regs(int m, int k, int bits) {
  const int per = bits >= 32 ? 1 : 32 / bits;
  return (m / 8) * (k / (4 * per));
}
int mma_b_regs(int k, int bits) {
  const int per = bits >= 32 ? 1 : 32 / bits;
  return k / (4 * per);
}

Coord wgmma_d_coord(int thread, int i) {
  const int lane = thread & 31;
  return {16 * (thread >> 5) + (lane >> 2) + 8 * ((i >> 1) & 1),
          8 * (i >> 2) + 2 * (lane & 3) + (i & 1)};
}

Coord wgmma_a_coord(int bits, int thread, int r, int e) {
  Coord c = mma_a_coord(16, bits, thread & 31, r, e);
  c.row += 16 * (thread >> 5);
  return c;
}

int mma_sfa_lane(int row, int thread_id) { return 4 * (row & 7) + 2 * thread_id + (row >> 3); }
int mma_sfb_lane(int col, int thread_id) { return 4 * col + thread_id; }

namespace {

bool is_m16n16(MatrixShape s) {
  return s == MatrixShape::kM16n16B8 || s == MatrixShape::kM16n16B8x16B6 ||
         s == MatrixShape::kM16n16B8x16B4;
}

Error bad_num(const char* op, int num) {
  return std::string(op) + ": .x" + std::to_string(num) + " is not a legal .num for this shape";
}

}  // namespace

Error check_ldmatrix(const MatrixOp& op) {
  const bool pow2 = op.num == 1 || op.num == 2 || op.num == 4;
  switch (op.shape) {
    case MatrixShape::kM8n8B16:
      return pow2 ? Error{} : bad_num("ldmatrix", op.num);
    case MatrixShape::kM8n16B8x16B6:
    case MatrixShape::kM8n16B8x16B4:
      if (op.trans) return "ldmatrix: .m8n16 has no .trans form";
      return pow2 ? Error{} : bad_num("ldmatrix", op.num);
    case MatrixShape::kM16n16B8:
    case MatrixShape::kM16n16B8x16B6:
    case MatrixShape::kM16n16B8x16B4:
      if (!op.trans) return "ldmatrix: .m16n16 requires .trans";
      return op.num == 1 || op.num == 2 ? Error{} : bad_num("ldmatrix", op.num);
    case MatrixShape::kM16n8B8:
      break;
  }
  return "ldmatrix: .m16n8 is a stmatrix shape";
}

Error check_stmatrix(const MatrixOp& op) {
  const bool pow2 = op.num == 1 || op.num == 2 || op.num == 4;
  if (op.shape == MatrixShape::kM8n8B16) return pow2 ? Error{} : bad_num("stmatrix", op.num);
  if (op.shape == MatrixShape::kM16n8B8) {
    if (!op.trans) return "stmatrix: .m16n8 requires .trans";
    return pow2 ? Error{} : bad_num("stmatrix", op.num);
  }
  return "stmatrix: shape must be .m8n8 or .m16n8";
}

int matrix_rows(const MatrixOp& op) { return (is_m16n16(op.shape) ? 16 : 8) * op.num; }
int matrix_regs(const MatrixOp& op) { return (is_m16n16(op.shape) ? 2 : 1) * op.num; }

void expand_b6(const uint8_t src[16], uint8_t dst[16]) {
  for (int i = 0; i < 16; ++i) {
    const int bit = 6 * i, byte = bit >> 3;
    const uint32_t w = src[byte] | (byte + 1 < 12 ? static_cast<uint32_t>(src[byte + 1]) << 8 : 0);
    dst[i] = (w >> (bit & 7)) & 0x3f;
  }
}

void expand_b4(const uint8_t src[16], uint8_t dst[16]) {
  for (int i = 0; i < 16; ++i) dst[i] = (src[i >> 1] >> (4 * (i & 1))) & 0xf;
}

void ldmatrix(const MatrixOp& op, const uint8_t (*rows)[16], uint32_t* const* reg) {
  const bool trans = op.trans && !faulty(Fault::kLdmatrixTrans);
  if (op.shape == MatrixShape::kM8n8B16) {
    for (int x = 0; x < op.num; ++x) {
      const uint8_t (*mat)[16] = rows + 8 * x;
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane >> 2, t = lane & 3;
        uint32_t v = 0;
        for (int e = 0; e < 2; ++e) {
          uint16_t h;
          const int row = trans ? 2 * t + e : g, col = trans ? g : 2 * t + e;
          std::memcpy(&h, mat[row] + 2 * col, 2);
          v |= static_cast<uint32_t>(h) << (16 * e);
        }
        reg[x][lane] = v;
      }
    }
    return;
  }
  const bool b6 = op.shape == MatrixShape::kM8n16B8x16B6 || op.shape == MatrixShape::kM16n16B8x16B6;
  const bool b4 = op.shape == MatrixShape::kM8n16B8x16B4 || op.shape == MatrixShape::kM16n16B8x16B4;
  const bool big = is_m16n16(op.shape);
  const int per = big ? 16 : 8;
  for (int x = 0; x < op.num; ++x) {
    uint8_t mat[16][16];
    for (int i = 0; i < per; ++i) {
      const uint8_t* src = rows[per * x + i];
      if (b6) {
        expand_b6(src, mat[i]);
      } else if (b4) {
        expand_b4(src, mat[i]);
      } else {
        std::memcpy(mat[i], src, 16);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane >> 2, t = lane & 3;
      if (!big) {
        std::memcpy(&reg[x][lane], mat[g] + 4 * t, 4);
        continue;
      }
      for (int half = 0; half < 2; ++half) {  // transposed: four rows of one column per register
        uint32_t v = 0;
        for (int e = 0; e < 4; ++e) {
          const int row = 4 * t + e, col = g + 8 * half;
          v |= static_cast<uint32_t>(trans ? mat[row][col] : mat[col][row]) << (8 * e);
        }
        reg[2 * x + half][lane] = v;
      }
    }
  }
}

void stmatrix(const MatrixOp& op, const uint32_t* const* reg, uint8_t (*rows)[16]) {
  for (int x = 0; x < op.num; ++x) {
    uint8_t (*mat)[16] = rows + 8 * x;
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane >> 2, t = lane & 3;
      const uint32_t v = reg[x][lane];
      if (op.shape == MatrixShape::kM8n8B16) {
        for (int e = 0; e < 2; ++e) {
          const uint16_t h = static_cast<uint16_t>(v >> (16 * e));
          const int row = op.trans ? 2 * t + e : g, col = op.trans ? g : 2 * t + e;
          std::memcpy(mat[row] + 2 * col, &h, 2);
        }
      } else {
        // The 16x8 byte matrix in accumulator order; address i is column i, so it lands transposed.
        for (int e = 0; e < 4; ++e)
          mat[2 * t + (e & 1)][g + 8 * (e >> 1)] = static_cast<uint8_t>(v >> (8 * e));
      }
    }
  }
}

void movmatrix(const uint32_t* src, uint32_t* dst) {
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane >> 2, t = lane & 3;
    uint32_t v = 0;
    for (int e = 0; e < 2; ++e) {
      const int row = 2 * t + e, col = g;  // element of the source that becomes (g, 2t + e)
      const uint32_t word = src[4 * row + (col >> 1)];
      v |= ((word >> (16 * (col & 1))) & 0xffff) << (16 * e);
    }
    dst[lane] = v;
  }
}

}  // namespace ptxsim::sem
