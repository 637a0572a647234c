// SPDX-License-Identifier: Apache-2.0
// Shared-memory matrix descriptors, operand addresses and the tcgen05 instruction descriptor.
#include <cstdio>
#include <cstring>

#include "fault.h"
#include "narrow.h"
#include "umma.h"

namespace ptxsim::sem {
namespace {

constexpr uint64_t field(uint64_t bits, int lo, int width) {
  return (bits >> lo) & ((uint64_t{1} << width) - 1);
}

std::string hex(uint64_t v) {
  char buf[24];
  std::snprintf(buf, sizeof buf, "0x%llx", static_cast<unsigned long long>(v));
  return buf;
}

Error desc_error(const char* what, uint64_t bits, const std::string& text) {
  return std::string(what) + " " + hex(bits) + ": " + text;
}

int span_bytes(SmemSwizzle s) {
  switch (s) {
    case SmemSwizzle::kNone:
      return 16;
    case SmemSwizzle::k32B:
      return 32;
    case SmemSwizzle::k64B:
      return 64;
    default:
      return 128;
  }
}

// Address bits 4.. (16-byte atoms) or 5.. (32-byte atoms) XOR the 128-byte row index of the
// pattern.
uint32_t swizzle(const SmemDesc& d, uint32_t address) {
  if (faulty(Fault::kOperandSwizzle)) return address;
  const uint32_t row = (address >> 7) - d.base_offset;
  switch (d.swizzle) {
    case SmemSwizzle::kNone:
      return address;
    case SmemSwizzle::k32B:
      return address ^ ((row & 1) << 4);
    case SmemSwizzle::k64B:
      return address ^ ((row & 3) << 4);
    case SmemSwizzle::k128B:
      return address ^ ((row & 7) << 4);
    case SmemSwizzle::k128BAtom32B:
      return address ^ ((row & 3) << 5);
  }
  return address;
}

void decode_common(uint64_t bits, SmemDesc* d) {
  d->start = static_cast<uint32_t>(field(bits, 0, 14)) << 4;
  d->lbo = static_cast<uint32_t>(field(bits, 16, 14)) << 4;
  d->sbo = static_cast<uint32_t>(field(bits, 32, 14)) << 4;
  d->base_offset = static_cast<uint8_t>(field(bits, 49, 3));
  d->lbo_absolute = false;
}

int element_container_bits(const SmemOperand& op) { return op.padded ? 8 : elem_bits(op.elem); }

}  // namespace

Error decode_umma_desc(uint64_t bits, SmemDesc* d) {
  const char* kWhat = "tcgen05 matrix descriptor";
  if (field(bits, 14, 2) || field(bits, 30, 2))
    return desc_error(kWhat, bits, "bits 14-15 and 30-31 must be 0");
  if (field(bits, 46, 3) != 1)
    return desc_error(kWhat, bits,
                      "bits 46-48 are " + std::to_string(field(bits, 46, 3)) + ", must be 0b001");
  if (field(bits, 53, 8)) return desc_error(kWhat, bits, "bits 53-60 must be 0");
  decode_common(bits, d);
  if (field(bits, 52, 1))
    return desc_error(
        kWhat, bits, "bit 52 (absolute leading-dimension address, sm_103a K = 96) is not modelled");
  switch (field(bits, 61, 3)) {
    case 0:
      d->swizzle = SmemSwizzle::kNone;
      break;
    case 1:
      d->swizzle = SmemSwizzle::k128BAtom32B;
      break;
    case 2:
      d->swizzle = SmemSwizzle::k128B;
      break;
    case 4:
      d->swizzle = SmemSwizzle::k64B;
      break;
    case 6:
      d->swizzle = SmemSwizzle::k32B;
      break;
    default:
      return desc_error(
          kWhat, bits,
          "swizzle mode " + std::to_string(field(bits, 61, 3)) + " is invalid (0, 1, 2, 4, 6)");
  }
  return {};
}

Error decode_wgmma_desc(uint64_t bits, SmemDesc* d) {
  const char* kWhat = "wgmma matrix descriptor";
  if (field(bits, 14, 2) || field(bits, 30, 2) || field(bits, 46, 3) || field(bits, 52, 10))
    return desc_error(kWhat, bits, "bits 14-15, 30-31, 46-48 and 52-61 must be 0");
  decode_common(bits, d);
  static const SmemSwizzle kModes[] = {SmemSwizzle::kNone, SmemSwizzle::k128B, SmemSwizzle::k64B,
                                       SmemSwizzle::k32B};
  d->swizzle = kModes[field(bits, 62, 2)];
  return {};
}

uint32_t kmajor_chunk(const SmemDesc& d, int row, int u) {
  const uint32_t r8 = static_cast<uint32_t>(row & 7), group = static_cast<uint32_t>(row >> 3);
  uint32_t a = d.start + group * d.sbo;
  if (d.swizzle == SmemSwizzle::kNone) {
    a += r8 * 16 + static_cast<uint32_t>(u) * d.lbo;
  } else {
    a += r8 * static_cast<uint32_t>(span_bytes(d.swizzle)) + static_cast<uint32_t>(u) * 16;
  }
  return swizzle(d, a);
}

uint32_t mnmajor_chunk(const SmemDesc& d, int u, int k) {
  const uint32_t un = static_cast<uint32_t>(u), uk = static_cast<uint32_t>(k);
  if (d.swizzle == SmemSwizzle::kNone)
    return d.start + un * d.sbo + (uk & 7) * 16 + (uk >> 3) * d.lbo;
  const uint32_t span = static_cast<uint32_t>(span_bytes(d.swizzle));
  const uint32_t rows = d.swizzle == SmemSwizzle::k128BAtom32B ? 4 : 8;
  const uint32_t byte = un * 16;
  return swizzle(
      d, d.start + byte % span + byte / span * d.lbo + uk % rows * span + uk / rows * d.sbo);
}

void operand_chunks(const SmemOperand& op, std::vector<uint32_t>* chunks) {
  chunks->clear();
  const int bits = element_container_bits(op);
  if (op.mn_major) {
    const int units = op.rows * bits / 128;
    chunks->reserve(static_cast<size_t>(op.k) * units);
    for (int k = 0; k < op.k; ++k) {
      for (int u = 0; u < units; ++u) chunks->push_back(mnmajor_chunk(op.desc, u, k));
    }
  } else {
    const int units = op.k * bits / 128;
    chunks->reserve(static_cast<size_t>(op.rows) * units);
    for (int r = 0; r < op.rows; ++r) {
      for (int u = 0; u < units; ++u) chunks->push_back(kmajor_chunk(op.desc, r, u));
    }
  }
}

namespace {

// Decodes the 16-byte chunk at p into `per` values; padded chunks hold 16 six- or four-bit codes.
void decode_chunk(const SmemOperand& op, const uint8_t* p, double* v) {
  const int bits = elem_bits(op.elem);
  if (bits == 32) {
    for (int i = 0; i < 4; ++i) {
      uint32_t w;
      std::memcpy(&w, p + 4 * i, 4);
      v[i] = decode(op.elem, w);
    }
  } else if (bits == 16) {
    for (int i = 0; i < 8; ++i) {
      uint16_t w;
      std::memcpy(&w, p + 2 * i, 2);
      v[i] = op.elem == Elem::kF16 ? f16_to_f32(w) : bf16_to_f32(w);
    }
  } else {
    const float* table = decode_table(op.elem);
    if (op.padded && bits < 8) {
      uint8_t codes[16];
      bits == 6 ? expand_b6(p, codes) : expand_b4(p, codes);
      for (int i = 0; i < 16; ++i) v[i] = table[codes[i]];
    } else if (bits == 4) {
      for (int i = 0; i < 16; ++i) {
        v[2 * i] = table[p[i] & 0xf];
        v[2 * i + 1] = table[p[i] >> 4];
      }
    } else {
      for (int i = 0; i < 16; ++i) v[i] = table[p[i]];
    }
  }
}

}  // namespace

void decode_operand(const SmemOperand& op, const uint8_t* window, const uint32_t* chunks,
                    bool negate, double* out, int k_stride) {
  const int per = 128 / element_container_bits(op);
  const double sign = negate ? -1.0 : 1.0;
  double v[32];
  if (op.mn_major) {
    const int units = op.rows / per;
    for (int k = 0; k < op.k; ++k) {
      for (int u = 0; u < units; ++u) {
        decode_chunk(op, window + *chunks++, v);
        for (int i = 0; i < per; ++i)
          out[static_cast<size_t>(u * per + i) * k_stride + k] = sign * v[i];
      }
    }
  } else {
    const int units = op.k / per;
    for (int r = 0; r < op.rows; ++r) {
      for (int u = 0; u < units; ++u) {
        decode_chunk(op, window + *chunks++, v);
        double* dst = out + static_cast<size_t>(r) * k_stride + u * per;
        for (int i = 0; i < per; ++i) dst[i] = sign * v[i];
      }
    }
  }
}

// ---- instruction descriptor
// ------------------------------------------------------------------------
namespace {

const char* kind_name(UmmaKind k) {
  static const char* const kNames[] = {"f16",      "tf32", "f8f6f4",  "i8",
                                       "mxf8f6f4", "mxf4", "mxf4nvf4"};
  return kNames[static_cast<int>(k)];
}

bool block_scaled(UmmaKind k) {
  return k == UmmaKind::kMxf8f6f4 || k == UmmaKind::kMxf4 || k == UmmaKind::kMxf4nvf4;
}

bool decode_type(UmmaKind kind, uint64_t code, Elem* e) {
  switch (kind) {
    case UmmaKind::kF16:
      *e = code == 0 ? Elem::kF16 : Elem::kBf16;
      return code <= 1;
    case UmmaKind::kTf32:
      *e = Elem::kTf32;
      return code == 2;
    case UmmaKind::kI8:
      *e = code == 0 ? Elem::kU8 : Elem::kS8;
      return code <= 1;
    case UmmaKind::kF8f6f4:
    case UmmaKind::kMxf8f6f4: {
      static const Elem kTypes[] = {Elem::kE4m3, Elem::kE5m2, Elem::kE4m3,
                                    Elem::kE2m3, Elem::kE3m2, Elem::kE2m1};
      if (code > 5 || code == 2) return false;
      *e = kTypes[code];
      return true;
    }
    case UmmaKind::kMxf4:
    case UmmaKind::kMxf4nvf4:
      *e = Elem::kE2m1;
      return code == 1;
  }
  return false;
}

bool legal_m(const InstrDesc& d, int cta_group, bool ws) {
  if (ws) return d.m == 32 || d.m == 64 || d.m == 128;
  if (cta_group == 2) return d.m == 128 || d.m == 256;
  return d.m == 128 || (d.m == 64 && !block_scaled(d.kind));
}

bool legal_n(const InstrDesc& d, int cta_group, bool ws) {
  const int n = d.n;
  if (n < 8 || n > 256) return false;
  if (ws) return n == 64 || n == 128 || n == 256;
  if (d.kind == UmmaKind::kI8) {
    if (cta_group == 2) return n % 32 == 0;
    return n <= 32 ? n % 8 == 0 : n % 16 == 0;
  }
  const bool wide_b = d.mn_major_b && elem_bits(d.b) == 8;  // PTX table 52
  if (cta_group == 2) return n % (wide_b ? 32 : 16) == 0;
  return n % (wide_b ? 16 : 8) == 0;
}

}  // namespace

Error decode_idesc(uint32_t bits, UmmaKind kind, int cta_group, bool ws, InstrDesc* d) {
  auto bad = [&](const std::string& text) {
    return desc_error("tcgen05.mma instruction descriptor", bits,
                      std::string("kind::") + kind_name(kind) + ": " + text);
  };
  if (cta_group != 1 && cta_group != 2) return bad("cta_group must be 1 or 2");
  if (ws && (cta_group == 2 || block_scaled(kind)))
    return bad(".ws needs cta_group::1 and no block scaling");
  *d = InstrDesc{};
  d->kind = kind;
  if (field(bits, 2, 1)) return bad("bit 2 (sparse A) is not modelled");
  if (field(bits, 6, 1)) return bad("bit 6 must be 0");
  d->negate_a = field(bits, 13, 1);
  d->negate_b = field(bits, 14, 1);
  d->mn_major_a = field(bits, 15, 1);
  d->mn_major_b = field(bits, 16, 1);
  d->n = static_cast<int>(field(bits, 17, 6)) * 8;
  const bool mx4 = kind == UmmaKind::kMxf4 || kind == UmmaKind::kMxf4nvf4;
  const uint64_t a_code = field(bits, 7, 3), b_code = mx4 ? field(bits, 10, 2) : field(bits, 10, 3);
  if (!decode_type(kind, a_code, &d->a))
    return bad("A type " + std::to_string(a_code) + " does not exist");
  if (!decode_type(kind, b_code, &d->b))
    return bad("B type " + std::to_string(b_code) + " does not exist");

  if (block_scaled(kind)) {
    if (field(bits, 0, 2) || field(bits, 3, 1) || field(bits, 24, 3))
      return bad("bits 0-1, 3 and 24-26 must be 0");
    if (mx4 && field(bits, 12, 1)) return bad("bit 12 must be 0");
    d->m = static_cast<int>(field(bits, 27, 2)) * 128;
    d->d = Elem::kF32;
    d->sfb_id = static_cast<int>(field(bits, 4, 2));
    d->sfa_id = static_cast<int>(field(bits, 29, 2));
    d->scale = field(bits, 23, 1) ? Elem::kUe8m0 : Elem::kUe4m3;
    if (kind != UmmaKind::kMxf4nvf4 && d->scale != Elem::kUe8m0)
      return bad("bit 23 must be 1 (ue8m0 scales)");
    if (field(bits, 31, 1))
      return bad(mx4 ? "bit 31 (K = 96, sm_103a) is not modelled" : "bit 31 must be 0");
    d->k = mx4 ? 64 : 32;
  } else {
    if (field(bits, 0, 2)) return bad("bits 0-1 (sparsity selector) must be 0 for dense A");
    if (field(bits, 23, 1) || field(bits, 29, 1)) return bad("bits 23 and 29 must be 0");
    d->m = static_cast<int>(field(bits, 24, 5)) * 16;
    d->saturate = field(bits, 3, 1);
    d->max_shift = static_cast<int>(field(bits, 30, 2));
    if (d->saturate && kind != UmmaKind::kI8) return bad("bit 3 (saturate) is for kind::i8");
    if (d->max_shift != 0 && !ws) return bad("bits 30-31 (B shift) are for .ws");
    const uint64_t dt = field(bits, 4, 2);
    if (dt > 2) return bad("D type 3 does not exist");
    static const Elem kD[] = {Elem::kF16, Elem::kF32, Elem::kS32};
    d->d = kD[dt];
    d->k = kind == UmmaKind::kF16 ? 16 : kind == UmmaKind::kTf32 ? 8 : 32;
    bool ok = d->d == Elem::kF32;
    if (kind == UmmaKind::kI8) {
      ok = d->d == Elem::kS32;
    } else if (d->d == Elem::kF16) {
      ok = kind == UmmaKind::kF8f6f4 ||
           (kind == UmmaKind::kF16 && d->a == Elem::kF16 && d->b == Elem::kF16);
    }
    if (!ok)
      return bad(std::string("D type ") + elem_name(d->d) + " is not available for these operands");
  }
  if (kind == UmmaKind::kF16 && d->a != d->b) return bad("A and B must both be f16 or both bf16");
  if (kind == UmmaKind::kI8 && (d->negate_a || d->negate_b))
    return bad("negation is not available");
  if (mx4 && (d->mn_major_a || d->mn_major_b)) return bad("A and B must be K-major");
  if ((d->mn_major_a && elem_bits(d->a) < 8) || (d->mn_major_b && elem_bits(d->b) < 8))
    return bad("6- and 4-bit operands must be K-major");
  if (!legal_m(*d, cta_group, ws))
    return bad("M = " + std::to_string(d->m) +
               " is illegal for cta_group::" + std::to_string(cta_group));
  if (!legal_n(*d, cta_group, ws))
    return bad("N = " + std::to_string(d->n) + " is illegal for M = " + std::to_string(d->m) +
               ", cta_group::" + std::to_string(cta_group));
  return {};
}

}  // namespace ptxsim::sem
