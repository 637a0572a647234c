// SPDX-License-Identifier: Apache-2.0
// Prints what probe.cu prints on an H200, computed by the semantic functions.
#include <vector>

#include "sem/fp.h"
#include "sem/frag.h"
#include "sem/mma.h"
#include "sem/narrow.h"
#include "sem/tma.h"
#include "sem/umma.h"
#include "twin.h"

using namespace ptxsim::sem;

namespace {

CvtMode cm(Round r, bool satfinite = false, bool relu = false) {
  CvtMode m;
  m.round = r;
  m.satfinite = satfinite;
  m.relu = relu;
  return m;
}
CvtMode cms(Round r) {
  CvtMode m;
  m.round = r;
  m.sat = true;
  return m;
}
FpMode fm(Round r, bool ftz = false, bool sat = false) {
  FpMode m;
  m.round = r;
  m.ftz = ftz;
  m.sat = sat;
  return m;
}
FpMode fr() {
  FpMode m;
  m.relu = true;
  return m;
}
MinMaxMode mm(bool is_max, bool nan = false, bool xorsign = false, bool ftz = false) {
  MinMaxMode m;
  m.is_max = is_max;
  m.nan = nan;
  m.xorsign = xorsign;
  m.ftz = ftz;
  return m;
}
uint32_t cvt2(Elem dst, Elem src, uint32_t v, CvtMode m) {
  double hi, lo;
  unpack2(src, v, &hi, &lo);
  return pack2(dst, hi, lo, m);
}

struct Op {
  const char* name;
  uint64_t (*f)(uint64_t, uint64_t, uint64_t);
  bool approximate;
};
#define FN(expr)                                       \
  [](uint64_t x, uint64_t y, uint64_t z) -> uint64_t { \
    (void)x;                                           \
    (void)y;                                           \
    (void)z;                                           \
    return static_cast<uint64_t>(expr);                \
  }
#define OP(name, device, host) {name, FN(host), false},
#define APPROX(name, op, ftz) \
  {#name, FN(f32_bits(approx_f32(Approx::op, bits_f32(uint32_t(x)), ftz))), true},
#define APPROXD(name, ftz, full)                                                                 \
  {#name, FN(f32_bits(div_approx_f32(bits_f32(uint32_t(x)), bits_f32(uint32_t(y)), ftz, full))), \
   true},
#define APPROXH(name, op, e, ftz) \
  {#name, FN(approx_h(Approx::op, Elem::e, uint16_t(x), ftz)), true},
const Op kOps[] = {
#include "ops.inc"
};

struct Mma {
  const char* name;
  int m, k;
  char a, b, acc;
};
#define MMA(ins, m, k, ta, tb, acc, na, nb, nc) {ins, m, k, ta, tb, acc},
const Mma kMmas[] = {
#include "mma.inc"
};

Elem type_of(char c) {
  switch (c) {
    case 'h':
      return Elem::kF16;
    case 'b':
      return Elem::kBf16;
    case 't':
      return Elem::kTf32;
    case '4':
      return Elem::kE4m3;
    case '5':
      return Elem::kE5m2;
    case 's':
      return Elem::kS8;
    case 'u':
      return Elem::kU8;
    default:
      return Elem::kS4;
  }
}

void scalar_ops() {
  std::vector<uint64_t> out(kInputs);
  for (const Op& o : kOps) {
    for (int i = 0; i < kInputs; ++i)
      out[size_t(i)] = o.f(input_word(i, 0), input_word(i, 1), input_word(i, 2));
    if (!o.approximate) {
      Hash h;
      h.add(out.data(), out.size());
      h.print(o.name);
      continue;
    }
    for (int i = 0; i < kInputs; i += 1024)
      std::printf("%s#%d %llx\n", o.name, i, (unsigned long long)out[size_t(i)]);
  }
}

void matrix_ops() {
  int index = 0;
  for (const Mma& mc : kMmas) {
    MmaSync op;
    op.m = mc.m;
    op.k = mc.k;
    op.a = type_of(mc.a);
    op.b = type_of(mc.b);
    op.c = op.d = mc.acc == 'f' ? Elem::kF32 : mc.acc == 'h' ? Elem::kF16 : Elem::kS32;
    op.satfinite = std::strstr(mc.name, "satfinite") != nullptr;
    Hash h;
    for (int set = 0; set < kSets; ++set) {
      uint32_t reg[16][32], d[4][32] = {};
      const uint32_t *a[8], *b[4], *c[4];
      uint32_t* dp[4];
      for (int r = 0; r < 16; ++r) {
        for (int lane = 0; lane < 32; ++lane)
          reg[r][lane] = mma_word(index, set, r, lane, mc.a, mc.b, mc.acc);
      }
      for (int i = 0; i < 8; ++i) a[i] = reg[i];
      for (int i = 0; i < 4; ++i) {
        b[i] = reg[8 + i];
        c[i] = reg[12 + i];
        dp[i] = d[i];
      }
      mma_sync(op, a, b, c, dp, nullptr, Accumulate::kTruncating);
      h.add(&d[0][0], 128);
    }
    h.print(mc.name);
    ++index;
  }
  double in[16][32], d[4][32];
  const double *a[8], *b[4], *c[4];
  double* dp[4];
  for (int i = 0; i < 16 * 32; ++i) in[i / 32][i % 32] = f64_word(uint64_t(i));
  for (int i = 0; i < 8; ++i) a[i] = in[i];
  for (int i = 0; i < 4; ++i) {
    b[i] = in[8 + i];
    c[i] = in[12 + i];
    dp[i] = d[i];
  }
  Hash h;
  const int shapes[4][2] = {{8, 4}, {16, 4}, {16, 8}, {16, 16}};
  for (const auto& s : shapes) {
    MmaSync op;
    op.m = s[0];
    op.k = s[1];
    op.a = op.b = op.c = op.d = Elem::kF64;
    if (s[1] == 8) op.round = Round::kRz;
    mma_sync_f64(op, a, b, c, dp);
    for (int i = 0; i < mma_sync_d_regs(op); ++i) h.add(d[i], 32);
  }
  h.print("mma.f64");
}

void matrix_moves() {
  uint8_t rows[32][16];
  for (int i = 0; i < 512; ++i) rows[i / 16][i % 16] = static_cast<uint8_t>(mix(uint64_t(i)));
  uint32_t r[4][32], moved[32];
  uint32_t* rp[4] = {r[0], r[1], r[2], r[3]};
  const uint32_t* cp[4] = {r[0], r[1], r[2], r[3]};
  Hash h;
  const MatrixOp ops[] = {{MatrixShape::kM8n8B16, 1, false},
                          {MatrixShape::kM8n8B16, 2, false},
                          {MatrixShape::kM8n8B16, 4, false},
                          {MatrixShape::kM8n8B16, 4, true}};
  for (const MatrixOp& op : ops) {
    ldmatrix(op, rows, rp);
    for (int i = 0; i < op.num; ++i) h.add(r[i], 32);
  }
  movmatrix(r[0], moved);
  h.add(moved, 32);
  for (int trans = 0; trans < 2; ++trans) {
    uint8_t out[32][16];
    stmatrix({MatrixShape::kM8n8B16, 4, trans != 0}, cp, out);
    h.add(&out[0][0], 512);
  }
  h.print("ldmatrix/movmatrix/stmatrix");
}

void wgmma_ops() {
  std::vector<uint8_t> window(1 << 18);
  constexpr uint32_t kBase =
      1024;  // any multiple of 1024 gives the same addresses modulo the swizzle
  for (size_t n = 0; n < sizeof kWgmmaCases / sizeof kWgmmaCases[0]; ++n) {
    const WgmmaCase& c = kWgmmaCases[n];
    wgmma_image(c, window.data() + kBase);
    std::vector<uint32_t> reg(36 * 128);
    std::vector<uint32_t*> d(32);
    const uint32_t* a[4];
    for (int i = 0; i < 36 * 128; ++i) reg[size_t(i)] = wgmma_word(c, i / 128, i % 128);
    for (int i = 0; i < 32; ++i) d[size_t(i)] = &reg[size_t(i) * 128];
    for (int i = 0; i < 4; ++i) a[i] = &reg[size_t(32 + i) * 128];
    WgmmaOp op;
    op.n = 64;
    op.a = type_of(c.ta);
    op.b = type_of(c.tb);
    op.k = 256 / elem_bits(op.a);
    op.d = c.variant == 4 ? Elem::kS32 : Elem::kF32;
    op.a_in_regs = c.variant == 2 || c.variant == 5;
    op.trans_a = c.variant == 1;
    op.trans_b = c.variant == 1 || c.variant == 5;
    op.negate_a = c.variant == 1;
    SmemOperand sa, sb;
    Error e = plan_wgmma(op, op.a_in_regs ? 0 : c.a + (kBase >> 4), c.b + (kBase >> 4), &sa, &sb);
    const CtaView view{window.data(), 0, 1 << 18, nullptr};
    if (e.empty()) e = execute_wgmma(op, sa, sb, view, a, d.data(), true, Accumulate::kTruncating);
    if (!e.empty()) std::printf("error: %s\n", e.c_str());
    Hash h;
    h.add(reg.data(), 32 * 128);
    h.print(("wgmma#" + std::to_string(n)).c_str());
  }
}

void tma_loads() {
  std::vector<uint8_t> buffer(65536 + 64), image(1024 + kTmaImage);
  uint8_t* tensor = buffer.data() + (64 - reinterpret_cast<uintptr_t>(buffer.data()) % 64) % 64;
  for (int i = 0; i < 65536; ++i) tensor[i] = tma_byte(i);
  for (size_t n = 0; n < sizeof kTmaCases / sizeof kTmaCases[0]; ++n) {
    const TmaCase& c = kTmaCases[n];
    alignas(64) uint8_t opaque[128];
    const uint64_t dim[2] = {c.d0, c.d1}, stride[1] = {c.stride};
    const uint32_t box[2] = {c.b0, c.b1}, es[2] = {1, c.es};
    const int32_t coords[2] = {c.c0, c.c1};
    TensorMap map;
    TmaTile tile;
    Error e = encode_tensor_map(opaque, c.type, 2, reinterpret_cast<uint64_t>(tensor), dim, stride,
                                box, es, 0, c.swizzle, 0, c.oob);
    if (e.empty()) e = decode_tensor_map(opaque, &map);
    if (e.empty()) e = tma_tile(map, TmaDir::kLoad, coords, uint32_t(1024 + c.offset), &tile);
    if (!e.empty() || tile.tx_bytes != uint32_t(c.bytes))
      std::printf("error: case %zu %s\n", n, e.c_str());
    std::fill(image.begin(), image.end(), uint8_t{0xee});
    for (const TmaRun& r : tile.runs) {
      tma_copy_load(map, r, reinterpret_cast<const uint8_t*>(r.global), image.data() + r.smem);
    }
    Hash h;
    h.add(image.data() + 1024, kTmaImage);
    h.print(("tma#" + std::to_string(n)).c_str());
  }
}

}  // namespace

int main() {
  scalar_ops();
  matrix_ops();
  matrix_moves();
  wgmma_ops();
  tma_loads();
  return 0;
}
