// SPDX-License-Identifier: Apache-2.0
// tcgen05.mma: legality of a whole instruction, its footprint, and its execution.
#include "umma.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "fault.h"
#include "narrow.h"

namespace ptxsim::sem {
namespace {

constexpr uint32_t kAddressMask = 0x3fffffffu;  // bits 30-31 of scale addresses carry the scale id

int lane_of(uint32_t taddr) { return static_cast<int>((taddr & kAddressMask) >> 16); }
int column_of(uint32_t taddr) { return static_cast<int>(taddr & 0xffff); }

bool scaled(UmmaKind k) {
  return k == UmmaKind::kMxf8f6f4 || k == UmmaKind::kMxf4 || k == UmmaKind::kMxf4nvf4;
}

Error fail(const std::string& what) { return "tcgen05.mma: " + what; }

// Where D lives in one CTA: `rows` rows of A (local index r) at lane(r), columns n0 .. n0 + n_count
// - 1 of D at TMEM column offset 0.. (PTX 9.7.16.10.5, layouts A to G).
struct Block {
  int rows = 0;
  int n0 = 0;
  int n_count = 0;
  int lane0 = 0;        // lane of local row 0
  bool spread = false;  // layout F: 16 rows per 32-lane quadrant
  int lane(int r) const { return lane0 + (spread ? 32 * (r / 16) + r % 16 : r); }
};

std::vector<Block> d_blocks(int m, int n, int cta_group, bool ws, int base_lane) {
  std::vector<Block> out;
  const int local = m / cta_group;
  auto add = [&](int rows, int n0, int count, int lane0, bool spread) {
    out.push_back(Block{rows, n0, count, lane0, spread});
  };
  if (local == 128) {
    add(128, 0, n, 0, false);
  } else if (local == 64 && !ws && cta_group == 1) {
    add(64, 0, n, base_lane, true);
  } else if (local == 64) {
    for (int h = 0; h < 2; ++h) add(64, h * (n / 2), n / 2, 64 * h, false);
  } else {
    for (int q = 0; q < 4; ++q) add(32, q * (n / 4), n / 4, 32 * q, false);
  }
  return out;
}

// Scale columns of `rows` rows at `column`; partial 32-row groups touch fewer lanes of each
// quadrant.
void scale_rects(int cta, int column, int rows, int quadrant0, int quadrants,
                 std::vector<TmemRect>* out) {
  auto rect = [&](int lane, int lanes, int col, int cols) {
    out->push_back({static_cast<uint8_t>(cta), static_cast<uint8_t>(lane),
                    static_cast<uint8_t>(lanes), static_cast<uint16_t>(col),
                    static_cast<uint16_t>(cols)});
  };
  if (rows / 32) rect(32 * quadrant0, 32 * quadrants, column, rows / 32);
  if (rows % 32) {
    for (int q = 0; q < quadrants; ++q)
      rect(32 * (quadrant0 + q), rows % 32, column + rows / 32, 1);
  }
}

Error resolve_scale_vec(UmmaArgs* a) {
  const bool nv = a->kind == UmmaKind::kMxf4nvf4;
  if (a->block16 && a->block32) return fail(".block16 and .block32 exclude each other");
  int vec = a->scale_vec;
  if (a->block16) vec = 4;
  if (a->block32) vec = a->kind == UmmaKind::kMxf8f6f4 ? 1 : 2;
  if (vec == 0) vec = a->kind == UmmaKind::kMxf8f6f4 ? 1 : a->kind == UmmaKind::kMxf4 ? 2 : 0;
  if (vec == 0) return fail("kind::mxf4nvf4 needs .block16, .block32 or .scale_vec::2X/4X");
  const bool ok = a->kind == UmmaKind::kMxf8f6f4 ? vec == 1 : vec == 2 || (nv && vec == 4);
  if (!ok) return fail("scale_vec::" + std::to_string(vec) + "X is illegal for this kind");
  a->scale_vec = vec;
  return {};
}

Error check_swizzle(const SmemOperand& op, const char* name) {
  const bool atom32 = op.desc.swizzle == SmemSwizzle::k128BAtom32B;
  if (!op.mn_major && atom32)
    return fail(std::string(name) + ": the 128B/32B-atom swizzle has no K-major layout");
  if (op.mn_major && elem_bits(op.elem) == 32 && !atom32)
    return fail(std::string(name) + ": an MN-major 32-bit operand needs the 128B/32B-atom swizzle");
  if (op.mn_major && elem_bits(op.elem) != 32 && atom32)
    return fail(std::string(name) + ": the 128B/32B-atom swizzle is for 32-bit operands");
  return {};
}

bool padded_kind(UmmaKind k) { return k == UmmaKind::kF8f6f4 || k == UmmaKind::kMxf8f6f4; }

Error check_columns(const char* what, int column, int count) {
  if (column + count <= kTmemColumns) return {};
  return fail(std::string(what) + " columns " + std::to_string(column) + " to " +
              std::to_string(column + count - 1) + " exceed 511");
}

}  // namespace

TmemCell umma_d_cell(int m_size, int n_size, int cta_group, bool ws, int m, int n) {
  const int local = m_size / cta_group;
  for (const Block& b : d_blocks(m_size, n_size, cta_group, ws, 0)) {
    if (n >= b.n0 && n < b.n0 + b.n_count) return {m / local, b.lane(m % local), n - b.n0};
  }
  return {};
}

Error plan_umma(const UmmaArgs& args, UmmaPlan* plan) {
  plan->args = args;
  UmmaArgs& a = plan->args;
  if (faulty(Fault::kAccumulate)) a.enable_d = true;
  InstrDesc& id = plan->idesc;
  if (Error e = decode_idesc(a.idesc, a.kind, a.cta_group, a.ws, &id); !e.empty()) return e;
  if (scaled(a.kind)) {
    if (Error e = resolve_scale_vec(&a); !e.empty()) return e;
    if (id.scale == Elem::kUe4m3 && a.scale_vec != 4)
      return fail("ue4m3 scales need .block16 / scale_vec::4X");
    for (int id_value : {id.sfa_id, id.sfb_id}) {
      if (id_value % a.scale_vec != 0)
        return fail("scale factor id " + std::to_string(id_value) +
                    " is illegal for scale_vec::" + std::to_string(a.scale_vec) + "X");
    }
    if (a.disable_lanes) return fail("disable-output-lane does not exist for block-scaled kinds");
  } else if (a.scale_vec != 0 || a.block16 || a.block32) {
    return fail("scale_vec given for a kind without block scaling");
  }
  if (a.scale_input_d < 0 || a.scale_input_d > 15)
    return fail("scale-input-d is " + std::to_string(a.scale_input_d) + ", allowed 0 to 15");
  if (a.scale_input_d != 0 && a.kind != UmmaKind::kF16 && a.kind != UmmaKind::kTf32)
    return fail("scale-input-d exists for kind::f16 and kind::tf32 only");
  std::memset(plan->disable, 0, sizeof plan->disable);
  if (a.disable_lanes)
    std::memcpy(plan->disable, a.disable_lanes, sizeof(uint32_t) * 4 * a.cta_group);
  a.disable_lanes = nullptr;

  const int local_m = id.m / a.cta_group;
  auto operand = [&](SmemOperand* op, uint64_t bits, Elem elem, bool mn, int rows,
                     const char* name) -> Error {
    *op = SmemOperand{};
    if (Error e = decode_umma_desc(bits, &op->desc); !e.empty()) return e;
    op->mn_major = mn;
    op->elem = elem;
    op->padded = padded_kind(a.kind) && elem_bits(elem) < 8;
    op->rows = rows;
    op->k = id.k;
    return check_swizzle(*op, name);
  };
  plan->reads.clear();
  plan->writes.clear();
  plan->a_chunks.clear();
  const int d_lane = lane_of(a.d_tmem), d_col = column_of(a.d_tmem);
  const bool half = local_m == 64 && a.cta_group == 1 && !a.ws;  // layout F
  if (d_lane != 0 && !(half && d_lane == 16))
    return fail("D lane is " + std::to_string(d_lane) + ", must be 0" + (half ? " or 16" : ""));
  const std::vector<Block> blocks = d_blocks(id.m, id.n, a.cta_group, a.ws, d_lane);
  if (Error e = check_columns("D", d_col, blocks[0].n_count); !e.empty()) return e;

  auto lane_rects = [&](int col, int cols, std::vector<TmemRect>* out) {
    for (int cta = 0; cta < a.cta_group; ++cta) {
      for (const Block& b : blocks) {
        const int pieces = b.spread ? 4 : 1, lanes = b.rows / pieces;
        for (int p = 0; p < pieces; ++p) {
          out->push_back({static_cast<uint8_t>(cta), static_cast<uint8_t>(b.lane(p * lanes)),
                          static_cast<uint8_t>(lanes), static_cast<uint16_t>(col),
                          static_cast<uint16_t>(cols)});
        }
      }
    }
  };
  if (a.a_in_tmem) {
    const uint32_t at = static_cast<uint32_t>(a.a);
    if (a.ws && id.m != 128) return fail("A in Tensor Memory with .ws and M < 128 is not modelled");
    if (id.mn_major_a) return fail("A in Tensor Memory cannot be transposed");
    if (lane_of(at) != d_lane)
      return fail("A lane is " + std::to_string(lane_of(at)) + ", must equal the D lane " +
                  std::to_string(d_lane));
    if (Error e = check_columns("A", column_of(at), 8); !e.empty()) return e;
    plan->a = SmemOperand{};
    plan->a.elem = id.a;
    plan->a.rows = local_m;
    plan->a.k = id.k;
    lane_rects(column_of(at), 8, &plan->reads);
  } else {
    if (Error e = operand(&plan->a, a.a, id.a, id.mn_major_a, local_m, "A"); !e.empty()) return e;
    operand_chunks(plan->a, &plan->a_chunks);
  }
  if (Error e = operand(&plan->b, a.b, id.b, id.mn_major_b, id.n / a.cta_group, "B"); !e.empty())
    return e;
  operand_chunks(plan->b, &plan->b_chunks);

  lane_rects(d_col, blocks[0].n_count, &plan->writes);
  if (a.enable_d) lane_rects(d_col, blocks[0].n_count, &plan->reads);
  if (scaled(a.kind)) {
    const int sfa = column_of(a.sfa_tmem), sfb = column_of(a.sfb_tmem);
    if (lane_of(a.sfa_tmem) != 0 || lane_of(a.sfb_tmem) != 0)
      return fail("scale addresses must have lane 0");
    if (Error e = check_columns("scale A", sfa, (local_m + 31) / 32); !e.empty()) return e;
    if (Error e = check_columns("scale B", sfb, (blocks[0].n_count + 31) / 32); !e.empty())
      return e;
    for (int cta = 0; cta < a.cta_group; ++cta) {
      scale_rects(cta, sfa, local_m, 0, 4, &plan->reads);
      const int quads = 4 / static_cast<int>(blocks.size());
      for (size_t i = 0; i < blocks.size(); ++i) {
        scale_rects(cta, sfb, blocks[i].n_count, static_cast<int>(i) * quads, quads, &plan->reads);
      }
    }
  }
  return {};
}

namespace {

Error check_window(const char* name, int cta, const std::vector<uint32_t>& chunks,
                   const CtaView& v) {
  for (uint32_t c : chunks) {
    if (c < v.smem_begin || c + 16 > v.smem_end) {
      char buf[160];
      std::snprintf(buf, sizeof buf, "%s reads shared address 0x%x of CTA %d outside [0x%x, 0x%x)",
                    name, c, cta, v.smem_begin, v.smem_end);
      return fail(buf);
    }
  }
  return {};
}

// A from Tensor Memory: K elements of a row packed into 8 columns of its lane. 6- and 4-bit
// elements of the f8f6f4 kinds sit in bytes, e2m1 in bits 5:2 (PTX 9.7.16.10.4.3).
void decode_tmem_row(const uint32_t* cells, const SmemOperand& a, bool byte_container, bool negate,
                     double* out) {
  const int bits = byte_container ? 8 : elem_bits(a.elem);
  const bool shift = byte_container && a.elem == Elem::kE2m1;
  const uint32_t mask = bits == 32 ? ~0u : (1u << bits) - 1;
  for (int k = 0; k < a.k; ++k) {
    const int bit = k * bits;
    uint32_t code = (cells[bit / 32] >> (bit % 32)) & mask;
    if (shift) code >>= 2;
    const double v = decode(a.elem, code);
    out[k] = negate ? -v : v;
  }
}

// Scale of row r and block blk: 32-row groups are columns, a row's scales are bytes of one cell,
// replicated in every 32-lane quadrant.
double scale_at(const CtaView& v, const float* table, int column, int quadrant, int r, int byte) {
  const uint32_t word = v.tmem[(32 * quadrant + r % 32) * kTmemColumns + column + r / 32];
  return table[(word >> (8 * byte)) & 0xff];
}

}  // namespace

Error execute_umma(const UmmaPlan& plan, const CtaView* views, Accumulate mode) {
  const UmmaArgs& a = plan.args;
  const InstrDesc& id = plan.idesc;
  const int k = id.k, local_n = id.n / a.cta_group;
  for (int cta = 0; cta < a.cta_group; ++cta) {
    if (Error e = check_window("A", cta, plan.a_chunks, views[cta]); !e.empty()) return e;
    if (Error e = check_window("B", cta, plan.b_chunks, views[cta]); !e.empty()) return e;
  }
  static thread_local std::vector<double> b_all, a_mat, b_mat;
  static thread_local std::vector<float> acc;
  static thread_local std::vector<uint16_t> acc_h;
  static thread_local std::vector<int32_t> acc_i, a_int, b_int;
  b_all.resize(static_cast<size_t>(id.n) * k);
  for (int cta = 0; cta < a.cta_group; ++cta) {
    decode_operand(plan.b, views[cta].window, plan.b_chunks.data(), id.negate_b,
                   b_all.data() + static_cast<size_t>(cta) * local_n * k, k);
  }
  const int d_lane = lane_of(a.d_tmem), d_col = column_of(a.d_tmem);
  const std::vector<Block> blocks = d_blocks(id.m, id.n, a.cta_group, a.ws, d_lane);
  const Numerics num = scaled(a.kind) ? Numerics(mode) : Numerics(mode, id.a, id.b);
  const float* table = scaled(a.kind) ? decode_table(id.scale) : nullptr;
  const int vec = a.scale_vec, block_k = table ? k / vec : k;

  for (int cta = 0; cta < a.cta_group; ++cta) {
    const CtaView& v = views[cta];
    for (const Block& blk : blocks) {
      a_mat.resize(static_cast<size_t>(blk.rows) * k);
      if (a.a_in_tmem) {
        const int col = column_of(static_cast<uint32_t>(a.a));
        for (int r = 0; r < blk.rows; ++r) {
          decode_tmem_row(v.tmem + blk.lane(r) * kTmemColumns + col, plan.a, padded_kind(a.kind),
                          id.negate_a, a_mat.data() + static_cast<size_t>(r) * k);
        }
      } else {
        decode_operand(plan.a, v.window, plan.a_chunks.data(), id.negate_a, a_mat.data(), k);
      }
      if (table) {
        for (int r = 0; r < blk.rows; ++r) {
          for (int s = 0; s < vec; ++s) {
            const int row = faulty(Fault::kUmmaScaleRows) ? r ^ 1 : r;
            const double sc =
                scale_at(v, table, column_of(a.sfa_tmem), blk.lane(r) / 32, row, id.sfa_id + s);
            double* p = a_mat.data() + static_cast<size_t>(r) * k + s * block_k;
            for (int i = 0; i < block_k; ++i) p[i] *= sc;
          }
        }
      }
      const double* b_block = b_all.data() + static_cast<size_t>(blk.n0) * k;

      // Block-scaled kinds read the scales of B from the quadrant that computes; row groups are
      // merged while their replicas agree.
      int row0 = 0;
      while (row0 < blk.rows) {
        int rows = blk.rows;
        const double* b_use = b_block;
        if (table) {
          const int col = column_of(a.sfb_tmem), cols = (blk.n_count + 31) / 32;
          const int q = blk.lane(row0) / 32;
          rows = 32;
          auto same = [&](int q2) {
            for (int c = 0; c < cols; ++c) {
              const int lanes = std::min(32, blk.n_count - 32 * c);
              for (int l = 0; l < lanes; ++l) {
                if (v.tmem[(32 * q + l) * kTmemColumns + col + c] !=
                    v.tmem[(32 * q2 + l) * kTmemColumns + col + c])
                  return false;
              }
            }
            return true;
          };
          while (row0 + rows < blk.rows && same(blk.lane(row0 + rows) / 32)) rows += 32;
          b_mat.assign(b_block, b_block + static_cast<size_t>(blk.n_count) * k);
          for (int n = 0; n < blk.n_count; ++n) {
            for (int s = 0; s < vec; ++s) {
              const double sc = scale_at(v, table, col, q, n, id.sfb_id + s);
              double* p = b_mat.data() + static_cast<size_t>(n) * k + s * block_k;
              for (int i = 0; i < block_k; ++i) p[i] *= sc;
            }
          }
          b_use = b_mat.data();
        }
        const double* a_use = a_mat.data() + static_cast<size_t>(row0) * k;
        const int nc = blk.n_count;
        const size_t cells = static_cast<size_t>(rows) * nc;
        auto cell = [&](int r) { return v.tmem + blk.lane(row0 + r) * kTmemColumns + d_col; };
        auto disabled = [&](int r) {
          const int lane = blk.lane(row0 + r);
          return (plan.disable[4 * cta + lane / 32] >> (lane % 32)) & 1;
        };
        if (id.d == Elem::kF32) {
          acc.resize(cells);
          const float s = std::ldexp(1.0f, -a.scale_input_d);
          if (a.enable_d) {
            for (int r = 0; r < rows; ++r) {
              std::memcpy(acc.data() + static_cast<size_t>(r) * nc, cell(r), sizeof(float) * nc);
            }
            if (a.scale_input_d) {
              for (float& x : acc) x *= s;
            }
          }
          mma_f32(rows, nc, k, a_use, b_use, a.enable_d ? acc.data() : nullptr, acc.data(), nc,
                  num);
          for (int r = 0; r < rows; ++r) {
            if (!disabled(r))
              std::memcpy(cell(r), acc.data() + static_cast<size_t>(r) * nc, sizeof(float) * nc);
          }
        } else if (id.d == Elem::kF16) {
          acc_h.resize(cells);
          const double s = std::ldexp(1.0, -a.scale_input_d);
          if (a.enable_d) {
            for (int r = 0; r < rows; ++r) {
              for (int n = 0; n < nc; ++n) {
                const uint16_t h = static_cast<uint16_t>(cell(r)[n]);
                acc_h[static_cast<size_t>(r) * nc + n] =
                    a.scale_input_d ? static_cast<uint16_t>(encode(Elem::kF16, f16_to_f32(h) * s))
                                    : h;
              }
            }
          }
          mma_f16(rows, nc, k, a_use, b_use, a.enable_d ? acc_h.data() : nullptr, acc_h.data(), nc,
                  num);
          for (int r = 0; r < rows; ++r) {
            if (disabled(r)) continue;
            for (int n = 0; n < nc; ++n) cell(r)[n] = acc_h[static_cast<size_t>(r) * nc + n];
          }
        } else {
          acc_i.resize(cells);
          a_int.assign(a_use, a_use + static_cast<size_t>(rows) * k);
          b_int.assign(b_use, b_use + static_cast<size_t>(nc) * k);
          if (a.enable_d) {
            for (int r = 0; r < rows; ++r) {
              std::memcpy(acc_i.data() + static_cast<size_t>(r) * nc, cell(r),
                          sizeof(int32_t) * nc);
            }
          }
          mma_s32(rows, nc, k, a_int.data(), b_int.data(), a.enable_d ? acc_i.data() : nullptr,
                  acc_i.data(), nc, id.saturate);
          for (int r = 0; r < rows; ++r) {
            if (!disabled(r))
              std::memcpy(cell(r), acc_i.data() + static_cast<size_t>(r) * nc,
                          sizeof(int32_t) * nc);
          }
        }
        row0 += rows;
      }
    }
  }
  return {};
}

}  // namespace ptxsim::sem
