// SPDX-License-Identifier: Apache-2.0
// tcgen05.ld, .st and .cp: lane and column maps of Tensor Memory.
#include <cstdio>
#include <cstring>

#include "fault.h"
#include "umma.h"

namespace ptxsim::sem {
namespace {

int lane_of(uint32_t taddr) { return static_cast<int>(taddr >> 16); }
int column_of(uint32_t taddr) { return static_cast<int>(taddr & 0xffff); }

TmemRect rect(int lane, int lanes, int column, int columns) {
  return {0, static_cast<uint8_t>(lane), static_cast<uint8_t>(lanes), static_cast<uint16_t>(column),
          static_cast<uint16_t>(columns)};
}

bool pow2(int v) { return v > 0 && (v & (v - 1)) == 0; }

// 32-bit columns per access and lane (before packing doubles them).
int base_columns(TmemShape s) {
  switch (s) {
    case TmemShape::k16x64b:
      return 2;
    case TmemShape::k16x128b:
      return 4;
    case TmemShape::k16x256b:
      return 8;
    default:
      return 1;
  }
}

}  // namespace

int tmem_regs(const TmemAccess& a) {
  switch (a.shape) {
    case TmemShape::k16x128b:
      return 2 * a.num;
    case TmemShape::k16x256b:
      return 4 * a.num;
    default:
      return a.num;
  }
}

Error check_tmem_access(const TmemAccess& a) {
  if (!pow2(a.num) || tmem_regs(a) > 128)
    return "tcgen05.ld/st: .x" + std::to_string(a.num) + " is not a legal .num for this shape";
  if (a.shape != TmemShape::k16x32bx2 && a.half_split != 0)
    return "tcgen05.ld/st: immHalfSplitoff belongs to .16x32bx2";
  if (a.half_split < 0 || a.half_split >= kTmemColumns)
    return "tcgen05.ld/st: immHalfSplitoff is " + std::to_string(a.half_split) +
           ", allowed 0 to 511";
  return {};
}

Coord tmem_reg_coord(const TmemAccess& a, int lane, int r) {
  const int g = lane >> 2, t = lane & 3;
  const int w = a.pack16 ? 2 : 1;
  switch (a.shape) {
    case TmemShape::k32x32b:
      return {lane, w * r};
    case TmemShape::k16x64b:
      return {g + 8 * (t & 1), w * (2 * r + (t >> 1))};
    case TmemShape::k16x128b:
      return {g + 8 * (r & 1), w * (4 * (r >> 1) + t)};
    case TmemShape::k16x256b:
      return {g + 8 * ((r >> 1) & 1), w * (8 * (r >> 2) + 2 * t + (r & 1))};
    case TmemShape::k16x32bx2:
      return {lane & 15, w * r + (lane >= 16 ? a.half_split : 0)};
  }
  return {};
}

Error plan_tmem_access(const TmemAccess& a, uint32_t taddr, int warp,
                       std::vector<TmemRect>* rects) {
  if (Error e = check_tmem_access(a); !e.empty()) return e;
  const int lane = lane_of(taddr), col = column_of(taddr);
  const int lanes = a.shape == TmemShape::k32x32b ? 32 : 16;
  if (lane < 32 * warp || lane + lanes > 32 * warp + 32 || (lane % lanes) != 0) {
    char buf[160];
    std::snprintf(buf, sizeof buf,
                  "tcgen05.ld/st: address 0x%08x names lane %d; warp %d of its warpgroup reaches "
                  "lanes %d to %d in "
                  "units of %d",
                  taddr, lane, warp, 32 * warp, 32 * warp + 31, lanes);
    return buf;
  }
  const int cols = base_columns(a.shape) * a.num * (a.pack16 ? 2 : 1);
  const int last = col + cols + a.half_split;
  if (last > kTmemColumns)
    return "tcgen05.ld/st: columns " + std::to_string(col) + " to " + std::to_string(last - 1) +
           " exceed 511";
  rects->push_back(rect(lane, lanes, col, cols));
  if (a.shape == TmemShape::k16x32bx2)
    rects->push_back(rect(lane, lanes, col + a.half_split, cols));
  return {};
}

void tmem_load(const TmemAccess& a, uint32_t taddr, const uint32_t* tmem, uint32_t* const* reg) {
  if (faulty(Fault::kTmemQuadrant)) taddr &= 0xffff;
  const int regs = tmem_regs(a);
  const uint32_t* base = tmem + lane_of(taddr) * kTmemColumns + column_of(taddr);
  for (int r = 0; r < regs; ++r) {
    for (int lane = 0; lane < 32; ++lane) {
      const Coord c = tmem_reg_coord(a, lane, r);
      const uint32_t* p = base + c.row * kTmemColumns + c.col;
      reg[r][lane] = a.pack16 ? (p[0] & 0xffff) | (p[1] << 16) : p[0];
    }
  }
}

void tmem_store(const TmemAccess& a, uint32_t taddr, const uint32_t* const* reg, uint32_t* tmem) {
  const int regs = tmem_regs(a);
  uint32_t* base = tmem + lane_of(taddr) * kTmemColumns + column_of(taddr);
  for (int r = 0; r < regs; ++r) {
    for (int lane = 0; lane < 32; ++lane) {
      const Coord c = tmem_reg_coord(a, lane, r);
      uint32_t* p = base + c.row * kTmemColumns + c.col;
      const uint32_t v = reg[r][lane];
      if (a.pack16) {
        p[0] = v & 0xffff;
        p[1] = v >> 16;
      } else {
        p[0] = v;
      }
    }
  }
}

// ---- tcgen05.cp
// ------------------------------------------------------------------------------------
namespace {

struct CpGeometry {
  int rows;
  int chunks;
};

CpGeometry geometry(CpShape s) {
  switch (s) {
    case CpShape::k128x256b:
      return {128, 2};
    case CpShape::k128x128b:
      return {128, 1};
    case CpShape::k4x256b:
      return {4, 2};
    case CpShape::k32x128b:
      return {32, 1};
    default:
      return {64, 1};
  }
}

// Lanes that receive source row r.
int target_lanes(CpShape s, int r, int lanes[4]) {
  switch (s) {
    case CpShape::k4x256b:  // one row per 32-lane quadrant
      lanes[0] = 32 * r;
      return 1;
    case CpShape::k32x128b:
      for (int q = 0; q < 4; ++q) lanes[q] = 32 * q + r;
      return 4;
    case CpShape::k64x128b0213:
      lanes[0] = r;
      lanes[1] = 64 + r;
      return 2;
    case CpShape::k64x128b0123:
      lanes[0] = 64 * (r / 32) + r % 32;
      lanes[1] = lanes[0] + 32;
      return 2;
    default:
      lanes[0] = r;
      return 1;
  }
}

}  // namespace

Error plan_cp(CpShape shape, CpFormat format, uint32_t taddr, uint64_t desc, CpPlan* plan) {
  *plan = CpPlan{};
  SmemDesc d;
  if (Error e = decode_umma_desc(desc, &d); !e.empty()) return "tcgen05.cp: " + e;
  if (d.swizzle == SmemSwizzle::k128BAtom32B)
    return "tcgen05.cp: the 128B/32B-atom swizzle has no K-major layout";
  const CpGeometry g = geometry(shape);
  plan->shape = shape;
  plan->format = format;
  plan->taddr = taddr;
  plan->rows = g.rows;
  plan->row_chunks = g.chunks;
  const int lane = lane_of(taddr), col = column_of(taddr), cols = 4 * g.chunks;
  const int limit = shape == CpShape::k4x256b ? 31 : 0;
  if (lane > limit)
    return "tcgen05.cp: lane " + std::to_string(lane) + " of the address exceeds " +
           std::to_string(limit);
  if (col + cols > kTmemColumns)
    return "tcgen05.cp: columns " + std::to_string(col) + " to " + std::to_string(col + cols - 1) +
           " exceed 511";
  plan->chunks.reserve(static_cast<size_t>(g.rows) * g.chunks);
  for (int r = 0; r < g.rows; ++r) {
    for (int u = 0; u < g.chunks; ++u) plan->chunks.push_back(kmajor_chunk(d, r, u));
  }
  if (shape == CpShape::k4x256b) {
    for (int q = 0; q < 4; ++q) plan->writes.push_back(rect(32 * q + lane, 1, col, cols));
  } else {
    plan->writes.push_back(rect(0, kTmemLanes, col, cols));
  }
  return {};
}

Error execute_cp(const CpPlan& p, const CtaView& v) {
  for (uint32_t c : p.chunks) {
    if (c < v.smem_begin || c + 16 > v.smem_end) {
      char buf[128];
      std::snprintf(buf, sizeof buf, "tcgen05.cp: reads shared address 0x%x outside [0x%x, 0x%x)",
                    c, v.smem_begin, v.smem_end);
      return buf;
    }
  }
  const int base = lane_of(p.taddr), col = column_of(p.taddr);
  for (int r = 0; r < p.rows; ++r) {
    int lanes[4];
    const int n = target_lanes(p.shape, r, lanes);
    for (int u = 0; u < p.row_chunks; ++u) {
      const uint8_t* src = v.window + p.chunks[static_cast<size_t>(r) * p.row_chunks + u];
      uint8_t out[16] = {};
      switch (p.format) {
        case CpFormat::kNone:
          std::memcpy(out, src, 16);
          break;
        case CpFormat::kB6:
          expand_b6(src, out);
          break;
        case CpFormat::kB4:
          // The container of e2m1 in Tensor Memory: bits 5:2 (ldmatrix leaves the code in bits
          // 3:0).
          expand_b4(src, out);
          for (uint8_t& b : out) b = static_cast<uint8_t>(b << 2);
          break;
      }
      for (int i = 0; i < n; ++i)
        std::memcpy(v.tmem + (base + lanes[i]) * kTmemColumns + col + 4 * u, out, 16);
    }
  }
  return {};
}

}  // namespace ptxsim::sem
