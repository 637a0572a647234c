// SPDX-License-Identifier: Apache-2.0
#include "tma.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "fault.h"
#include "fp.h"
#include "narrow.h"

namespace ptxsim::sem {
namespace {

// Words of the opaque map. Word 1 stays zero and is ignored: CUTLASS clears its bit 21 on the host
// for small tensors under old drivers.
constexpr int kWordAddress = 0, kWordHead = 2, kWordDim = 3, kWordStride = 8;
constexpr uint32_t kMagic = 0x4d50544d;

struct Head {
  uint32_t magic;
  uint8_t type;
  uint8_t rank;
  uint8_t swizzle_mode;  // PTX numbering
  uint8_t atomicity;
};
constexpr int kWordFlags = 12;  // interleave | l2 << 8 | oob << 16

struct Words {
  uint64_t w[16];
};

bool padded(TmaType t) { return t == TmaType::kU4x16P64 || t == TmaType::kU6x16P32; }
bool packed(TmaType t) { return t == TmaType::kU4x16 || padded(t); }
bool floating(TmaType t) {
  switch (t) {
    case TmaType::kF16:
    case TmaType::kF32:
    case TmaType::kF64:
    case TmaType::kBf16:
    case TmaType::kF32Ftz:
    case TmaType::kTf32:
    case TmaType::kTf32Ftz:
      return true;
    default:
      return false;
  }
}

Error bad(const std::string& name, const std::string& value, const std::string& allowed) {
  return "tensor map: " + name + " is " + value + ", " + allowed;
}
Error bad(const std::string& name, uint64_t value, const std::string& allowed) {
  return bad(name, std::to_string(value), allowed);
}

void split_swizzle(TmaSwizzle s, uint8_t* mode, uint8_t* atom) {
  static const uint8_t kMode[] = {0, 1, 2, 3, 3, 3, 3}, kAtom[] = {0, 0, 0, 0, 1, 2, 3};
  *mode = kMode[static_cast<int>(s)];
  *atom = kAtom[static_cast<int>(s)];
}

Error join_swizzle(uint8_t mode, uint8_t atom, TmaSwizzle* s) {
  if (mode == 4) return "tensor map: the 96-byte swizzle is not modelled";
  if (mode > 4) return bad("swizzle_mode", mode, "allowed 0 to 4");
  if (atom > 3) return bad("swizzle_atomicity", atom, "allowed 0 to 3");
  if (atom != 0 && mode != 3)
    return "tensor map: a swizzle atomicity other than 16B needs the 128B swizzle";
  static const TmaSwizzle kFlat[] = {TmaSwizzle::kNone, TmaSwizzle::k32B, TmaSwizzle::k64B};
  static const TmaSwizzle kAtoms[] = {TmaSwizzle::k128B, TmaSwizzle::k128BAtom32B,
                                      TmaSwizzle::k128BAtom32BFlip8B, TmaSwizzle::k128BAtom64B};
  *s = mode < 3 ? kFlat[mode] : kAtoms[atom];
  return {};
}

uint32_t swizzle_span(TmaSwizzle s) {
  switch (s) {
    case TmaSwizzle::kNone:
      return 0;
    case TmaSwizzle::k32B:
      return 32;
    case TmaSwizzle::k64B:
      return 64;
    default:
      return 128;
  }
}

void pack_words(const TensorMap& m, uint8_t mode, uint8_t atom, void* out) {
  Words w = {};
  w.w[kWordAddress] = m.address;
  const Head h = {kMagic, static_cast<uint8_t>(m.type), static_cast<uint8_t>(m.rank), mode, atom};
  std::memcpy(&w.w[kWordHead], &h, sizeof h);
  for (int i = 0; i < 5; ++i) {
    // 33 bits of dimension, 9 of box, 4 of element stride.
    w.w[kWordDim + i] = m.dim[i] | static_cast<uint64_t>(m.box[i]) << 34 |
                        static_cast<uint64_t>(m.estride[i]) << 44;
  }
  for (int i = 1; i < 5; ++i) w.w[kWordStride + i - 1] = m.stride[i];
  w.w[kWordFlags] = m.interleave | static_cast<uint64_t>(m.l2_promotion) << 8 |
                    static_cast<uint64_t>(m.oob_nan) << 16;
  std::memcpy(out, &w, sizeof w);
}

Error unpack_words(const void* in, TensorMap* m, uint8_t* mode, uint8_t* atom) {
  Words w;
  std::memcpy(&w, in, sizeof w);
  Head h;
  std::memcpy(&h, &w.w[kWordHead], sizeof h);
  if (h.magic != kMagic)
    return "tensor map: these 128 bytes were not written by cuTensorMapEncodeTiled";
  if (h.type > 15) return bad("element type", h.type, "allowed 0 to 15");
  if (h.rank < 1 || h.rank > 5) return bad("rank", h.rank, "allowed 1 to 5");
  *m = TensorMap{};
  m->type = static_cast<TmaType>(h.type);
  m->rank = h.rank;
  m->address = w.w[kWordAddress];
  for (int i = 0; i < 5; ++i) {
    const uint64_t v = w.w[kWordDim + i];
    m->dim[i] = v & ((uint64_t{1} << 34) - 1);
    m->box[i] = static_cast<uint32_t>(v >> 34) & 0x3ff;
    m->estride[i] = static_cast<uint32_t>(v >> 44) & 0xf;
  }
  for (int i = 1; i < 5; ++i) m->stride[i] = w.w[kWordStride + i - 1];
  m->interleave = static_cast<uint8_t>(w.w[kWordFlags]);
  m->l2_promotion = static_cast<uint8_t>(w.w[kWordFlags] >> 8);
  m->oob_nan = (w.w[kWordFlags] >> 16) & 1;
  *mode = h.swizzle_mode;
  *atom = h.atomicity;
  return {};
}

}  // namespace

int tma_elem_bits(TmaType t) {
  static const int kBits[] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6};
  return kBits[static_cast<int>(t)];
}

Error check_tensor_map(const TensorMap& m) {
  if (static_cast<int>(m.type) > 15)
    return bad("tensorDataType", static_cast<int>(m.type), "allowed 0 to 15");
  if (m.rank < 1 || m.rank > 5) return bad("tensorRank", std::to_string(m.rank), "allowed 1 to 5");
  if (m.interleave > 2) return bad("interleave", m.interleave, "allowed 0 to 2");
  if (m.interleave != 0) return "tensor map: interleaved layouts are not modelled";
  if (static_cast<int>(m.swizzle) > 6)
    return bad("swizzle", static_cast<int>(m.swizzle), "allowed 0 to 6");
  if (m.l2_promotion > 3) return bad("l2Promotion", m.l2_promotion, "allowed 0 to 3");
  const bool pad = padded(m.type);
  const uint64_t align = pad ? 32 : 16;
  if (m.address % align) {
    return bad("globalAddress", m.address, "must be a multiple of " + std::to_string(align));
  }
  for (int i = 0; i < m.rank; ++i) {
    const std::string idx = "[" + std::to_string(i) + "]";
    if (m.dim[i] == 0 || m.dim[i] > (uint64_t{1} << 32))
      return bad("globalDim" + idx, m.dim[i], "allowed 1 to 2^32");
    if (m.box[i] == 0 || m.box[i] > 256) return bad("boxDim" + idx, m.box[i], "allowed 1 to 256");
    if (m.estride[i] == 0 || m.estride[i] > 8)
      return bad("elementStrides" + idx, m.estride[i], "allowed 1 to 8");
    if (i > 0) {
      const std::string name = "globalStrides[" + std::to_string(i - 1) + "]";
      if (m.stride[i] % align)
        return bad(name, m.stride[i], "must be a multiple of " + std::to_string(align));
      if (m.stride[i] >= (uint64_t{1} << 40)) return bad(name, m.stride[i], "must be below 2^40");
    }
  }
  if (pad && m.dim[0] % 128)
    return bad("globalDim[0]", m.dim[0], "must be a multiple of 128 for this type");
  if (m.type == TmaType::kU4x16 && m.dim[0] % 2)
    return bad("globalDim[0]", m.dim[0], "must be even for this type");
  if (pad && m.box[0] != 128) return bad("boxDim[0]", m.box[0], "must be 128 for this type");
  const uint64_t inner_bits = static_cast<uint64_t>(m.box[0]) * tma_elem_bits(m.type);
  if (inner_bits % 128)
    return bad("boxDim[0] in bytes", inner_bits / 8, "must be a multiple of 16");
  const uint32_t span = swizzle_span(m.swizzle);
  if (span != 0 && inner_bits / 8 > span)
    return bad("boxDim[0] in bytes", inner_bits / 8,
               "must not exceed the swizzle size " + std::to_string(span));
  if (pad) {
    const bool ok = m.swizzle == TmaSwizzle::kNone || m.swizzle == TmaSwizzle::k128B ||
                    m.swizzle == TmaSwizzle::k128BAtom32B ||
                    (m.swizzle == TmaSwizzle::k128BAtom64B && m.type == TmaType::kU6x16P32);
    if (!ok) return bad("swizzle", static_cast<int>(m.swizzle), "not available for this type");
  }
  if (m.oob_nan && (!floating(m.type) || packed(m.type)))
    return "tensor map: oobFill NaN needs a floating-point type";
  return {};
}

Error encode_tensor_map(void* out, int type, int rank, uint64_t address, const uint64_t* global_dim,
                        const uint64_t* global_stride, const uint32_t* box_dim,
                        const uint32_t* element_stride, int interleave, int swizzle,
                        int l2_promotion, int oob_fill) {
  if (out == nullptr) return "tensor map: tensorMap is null";
  if (reinterpret_cast<uintptr_t>(out) % 64) return "tensor map: tensorMap must be 64-byte aligned";
  if (type < 0 || type > 15) return bad("tensorDataType", std::to_string(type), "allowed 0 to 15");
  if (rank < 1 || rank > 5) return bad("tensorRank", std::to_string(rank), "allowed 1 to 5");
  if (address == 0) return "tensor map: globalAddress is null";
  if (!global_dim) return "tensor map: globalDim is null";
  if (!box_dim) return "tensor map: boxDim is null";
  if (!element_stride) return "tensor map: elementStrides is null";
  if (!global_stride && rank > 1) return "tensor map: globalStrides is null";
  if (interleave < 0 || interleave > 2)
    return bad("interleave", std::to_string(interleave), "allowed 0 to 2");
  if (swizzle < 0 || swizzle > 6) return bad("swizzle", std::to_string(swizzle), "allowed 0 to 6");
  if (l2_promotion < 0 || l2_promotion > 3)
    return bad("l2Promotion", std::to_string(l2_promotion), "allowed 0 to 3");
  if (oob_fill < 0 || oob_fill > 1)
    return bad("oobFill", std::to_string(oob_fill), "allowed 0 or 1");
  TensorMap m;
  m.type = static_cast<TmaType>(type);
  m.rank = rank;
  m.address = address;
  for (int i = 0; i < rank; ++i) {
    m.dim[i] = global_dim[i];
    m.box[i] = box_dim[i];
    m.estride[i] = element_stride[i];
    if (i > 0) m.stride[i] = global_stride[i - 1];
  }
  m.estride[0] = 1;  // ignored by the driver without interleave
  m.interleave = static_cast<uint8_t>(interleave);
  m.swizzle = static_cast<TmaSwizzle>(swizzle);
  m.l2_promotion = static_cast<uint8_t>(l2_promotion);
  m.oob_nan = oob_fill == 1;
  if (Error e = check_tensor_map(m); !e.empty()) return e;
  pack_tensor_map(m, out);
  return {};
}

void pack_tensor_map(const TensorMap& m, void* out) {
  uint8_t mode, atom;
  split_swizzle(m.swizzle, &mode, &atom);
  pack_words(m, mode, atom, out);
}

Error decode_tensor_map(const void* in, TensorMap* m) {
  uint8_t mode, atom;
  if (Error e = unpack_words(in, m, &mode, &atom); !e.empty()) return e;
  if (Error e = join_swizzle(mode, atom, &m->swizzle); !e.empty()) return e;
  if (faulty(Fault::kTmaSwizzle)) m->swizzle = TmaSwizzle::kNone;
  return check_tensor_map(*m);
}

Error replace_tensor_map_field(void* map, TmaField field, int index, uint64_t value) {
  TensorMap m;
  uint8_t mode, atom;
  if (Error e = unpack_words(map, &m, &mode, &atom); !e.empty()) return e;
  if (index < 0 || index > 4) return bad("ordinal", std::to_string(index), "allowed 0 to 4");
  auto limit = [&](const char* name, uint64_t max) {
    return value > max ? bad(name, value, "allowed 0 to " + std::to_string(max)) : Error{};
  };
  Error e;
  switch (field) {
    case TmaField::kGlobalAddress:
      m.address = value;
      break;
    case TmaField::kRank:
      e = limit("rank", 4);
      m.rank = static_cast<int>(value) + 1;
      break;
    case TmaField::kBoxDim:
      e = limit("box_dim", 256);
      m.box[index] = static_cast<uint32_t>(value);
      break;
    case TmaField::kGlobalDim:
      e = limit("global_dim", uint64_t{1} << 32);
      m.dim[index] = value;
      break;
    case TmaField::kGlobalStride:
      if (index == 4) return bad("global_stride ordinal", 4, "allowed 0 to 3");
      m.stride[index + 1] = value;
      break;
    case TmaField::kElementStride:
      e = limit("element_stride", 8);
      m.estride[index] = static_cast<uint32_t>(value);
      break;
    case TmaField::kElemType: {
      e = limit("elemtype", 15);
      // PTX numbers f32.ftz, f64 and bf16 in another order than the driver.
      static const uint8_t kMap[16] = {0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 9, 11, 12, 13, 14, 15};
      if (e.empty()) m.type = static_cast<TmaType>(kMap[value]);
      break;
    }
    case TmaField::kInterleave:
      e = limit("interleave_layout", 2);
      m.interleave = static_cast<uint8_t>(value);
      break;
    case TmaField::kSwizzleMode:
      e = limit("swizzle_mode", 4);
      mode = static_cast<uint8_t>(value);
      break;
    case TmaField::kSwizzleAtomicity:
      e = limit("swizzle_atomicity", 3);
      atom = static_cast<uint8_t>(value);
      break;
    case TmaField::kFillMode:
      e = limit("fill_mode", 1);
      m.oob_nan = value == 1;
      break;
  }
  if (!e.empty()) return e;
  // Consistency is checked at use: a sequence of replacements passes through inconsistent states.
  pack_words(m, mode, atom, map);
  return {};
}

uint32_t tma_swizzle(TmaSwizzle s, uint32_t a) {
  const uint32_t row = a >> 7;
  switch (s) {
    case TmaSwizzle::kNone:
      return a;
    case TmaSwizzle::k32B:
      return a ^ ((row & 1) << 4);
    case TmaSwizzle::k64B:
      return a ^ ((row & 3) << 4);
    case TmaSwizzle::k128B:
      return a ^ ((row & 7) << 4);
    case TmaSwizzle::k128BAtom32B:
      return a ^ ((row & 3) << 5);
    case TmaSwizzle::k128BAtom32BFlip8B:
      return a ^ ((row & 3) << 5) ^ ((row & 1) << 3);
    case TmaSwizzle::k128BAtom64B:
      return a ^ ((row & 1) << 6);
  }
  return a;
}

namespace {

constexpr uint32_t kMaxRun = 1u << 15;

void push_run(std::vector<TmaRun>* runs, const TmaRun& r) {
  if (!runs->empty()) {
    TmaRun& p = runs->back();
    const bool same_kind = p.in_bounds == r.in_bounds && p.bytes == p.gbytes && r.bytes == r.gbytes;
    const bool joined =
        p.smem + p.bytes == r.smem && (!r.in_bounds || p.global + p.gbytes == r.global);
    if (same_kind && joined && p.bytes + r.bytes <= kMaxRun) {
      p.bytes += r.bytes;
      p.gbytes += r.bytes;
      return;
    }
  }
  runs->push_back(r);
}

// One inner row of the box: elements c0 .. c0 + box[0] - 1 at global row address `row`, shared row
// at `smem`. `row_in` says whether the outer coordinates are inside the tensor.
void emit_row(const TensorMap& m, TmaDir dir, int64_t c0, uint64_t row, uint32_t smem, bool row_in,
              TmaTile* out) {
  const int bits = tma_elem_bits(m.type);
  const uint32_t n = m.box[0];
  if (padded(m.type)) {
    const uint32_t payload = static_cast<uint32_t>(16 * bits / 8);
    const bool pack6 = m.type == TmaType::kU6x16P32 && dir != TmaDir::kLoad;
    for (uint32_t g = 0; g < n / 16; ++g) {
      const int64_t c = c0 + 16 * static_cast<int64_t>(g);
      TmaRun r;
      r.in_bounds = row_in && c >= 0 && c < static_cast<int64_t>(m.dim[0]);
      r.smem = tma_swizzle(m.swizzle, smem + 16 * g);
      r.gbytes = payload;
      r.bytes = pack6 ? 16 : payload;
      r.global = r.in_bounds ? row + static_cast<uint64_t>(c / 16) * payload : 0;
      out->runs.push_back(r);
    }
    return;
  }
  const uint32_t bytes = n * static_cast<uint32_t>(bits) / 8;
  // Byte range of the row that lies inside the tensor.
  const int64_t dim = static_cast<int64_t>(m.dim[0]);
  int64_t lo = std::min<int64_t>(std::max<int64_t>(-c0, 0), n);
  int64_t hi = std::min<int64_t>(std::max<int64_t>(dim - c0, 0), n);
  if (!row_in || hi < lo) lo = hi = 0;
  const uint32_t lo_b = static_cast<uint32_t>(lo * bits / 8),
                 hi_b = static_cast<uint32_t>(hi * bits / 8);
  const uint32_t step = m.swizzle == TmaSwizzle::kNone                ? bytes
                        : m.swizzle == TmaSwizzle::k128BAtom32BFlip8B ? 8
                                                                      : 16;
  uint32_t pos = 0;
  while (pos < bytes) {
    uint32_t end = std::min(bytes, pos - pos % step + step);
    if (pos < lo_b) end = std::min(end, lo_b);
    if (pos >= lo_b && pos < hi_b) end = std::min(end, hi_b);
    TmaRun r;
    r.in_bounds = pos >= lo_b && pos < hi_b;
    r.smem = tma_swizzle(m.swizzle, smem + pos);
    r.bytes = r.gbytes = end - pos;
    r.global =
        r.in_bounds ? row + static_cast<uint64_t>(c0 * bits / 8 + static_cast<int64_t>(pos)) : 0;
    push_run(&out->runs, r);
    pos = end;
  }
}

Error check_tile(const TensorMap& m, TmaDir dir, int64_t c0, uint32_t smem) {
  if (smem % 128)
    return "cp.async.bulk.tensor: shared address " + std::to_string(smem) +
           " must be 128-byte aligned";
  if (padded(m.type) && c0 % 128)
    return "cp.async.bulk.tensor: coordinate 0 is " + std::to_string(c0) +
           ", must be a multiple of 128 for this type";
  // The hardware traps (illegal instruction) when the box does not start on 16 bytes.
  if (c0 * tma_elem_bits(m.type) % 128 != 0)
    return "cp.async.bulk.tensor: coordinate 0 is " + std::to_string(c0) +
           ", the box must start on a multiple of 16 bytes";
  if (dir == TmaDir::kReduce && packed(m.type))
    return "cp.reduce.async.bulk.tensor: packed types are not supported";
  if (dir == TmaDir::kStore && m.type == TmaType::kU4x16P64)
    return "cp.async.bulk.tensor: 16U4_ALIGN16B cannot be stored";
  if (dir == TmaDir::kLoad && m.type == TmaType::kU6x16P32 && m.swizzle == TmaSwizzle::k128BAtom64B)
    return "cp.async.bulk.tensor: 16U6_ALIGN16B with the 64B atom is for stores only";
  return {};
}

uint32_t smem_row_bytes(const TensorMap& m) {
  return padded(m.type) ? m.box[0] : m.box[0] * static_cast<uint32_t>(tma_elem_bits(m.type)) / 8;
}

}  // namespace

Error tma_tile(const TensorMap& m, TmaDir dir, const int32_t* coords, uint32_t smem, TmaTile* out) {
  *out = TmaTile{};
  if (Error e = check_tile(m, dir, coords[0], smem); !e.empty()) return e;
  if (dir != TmaDir::kLoad) {
    for (int i = 0; i < m.rank; ++i) {
      if (coords[i] < 0)
        return "cp.async.bulk.tensor: store coordinate " + std::to_string(i) + " is " +
               std::to_string(coords[i]) + ", must not be negative";
    }
  }
  uint32_t size[5] = {1, 1, 1, 1, 1};
  uint64_t rows = 1;
  for (int i = 1; i < m.rank; ++i) {
    size[i] = (m.box[i] + m.estride[i] - 1) / m.estride[i];
    rows *= size[i];
  }
  const uint32_t row_bytes = smem_row_bytes(m);
  if (rows * row_bytes > (uint64_t{1} << 24))
    return "cp.async.bulk.tensor: the box exceeds shared memory";
  uint32_t at = smem;
  uint32_t j[5] = {};
  for (uint64_t r = 0; r < rows; ++r) {
    bool in = true;
    uint64_t row = m.address;
    for (int i = 1; i < m.rank; ++i) {
      const int64_t c = static_cast<int64_t>(coords[i]) + static_cast<int64_t>(j[i]) * m.estride[i];
      in = in && c >= 0 && c < static_cast<int64_t>(m.dim[i]);
      row += static_cast<uint64_t>(c) * m.stride[i];
    }
    emit_row(m, dir, coords[0], row, at, in, out);
    at += row_bytes;
    for (int i = 1; i < m.rank; ++i) {
      if (++j[i] < size[i]) break;
      j[i] = 0;
    }
  }
  out->smem_bytes = static_cast<uint32_t>(rows) * row_bytes;
  out->tx_bytes =
      static_cast<uint32_t>(rows * m.box[0] * static_cast<uint64_t>(tma_elem_bits(m.type)) / 8);
  return {};
}

Error tma_gather4(const TensorMap& m, TmaDir dir, const int32_t coords[5], uint32_t smem,
                  TmaTile* out) {
  *out = TmaTile{};
  if (m.rank != 2)
    return "cp.async.bulk.tensor: gather4/scatter4 need a 2-D map, rank is " +
           std::to_string(m.rank);
  if (m.box[1] != 1)
    return "cp.async.bulk.tensor: gather4/scatter4 need boxDim[1] = 1, it is " +
           std::to_string(m.box[1]);
  if (Error e = check_tile(m, dir, coords[0], smem); !e.empty()) return e;
  const uint32_t row_bytes = smem_row_bytes(m);
  for (int r = 0; r < 4; ++r) {
    const int64_t c = coords[1 + r];
    const bool in = c >= 0 && c < static_cast<int64_t>(m.dim[1]);
    if (dir != TmaDir::kLoad && (c < 0 || coords[0] < 0))
      return "cp.async.bulk.tensor: scatter4 coordinates must not be negative";
    emit_row(m, dir, coords[0], m.address + static_cast<uint64_t>(c) * m.stride[1],
             smem + r * row_bytes, in, out);
  }
  out->smem_bytes = 4 * row_bytes;
  out->tx_bytes = 4 * m.box[0] * static_cast<uint32_t>(tma_elem_bits(m.type)) / 8;
  return {};
}

void tma_fill_pattern(const TensorMap& m, uint8_t pattern[16]) {
  std::memset(pattern, faulty(Fault::kOutOfBoundsFill) ? 0x38 : 0, 16);
  if (!m.oob_nan) return;
  // The same 16-bit pattern whatever the element type (measured on an H200).
  for (int i = 0; i < 16; ++i) pattern[i] = i % 2 ? 0x7f : 0xf7;
}

void tma_copy_load(const TensorMap& m, const TmaRun& run, const uint8_t* global, uint8_t* smem) {
  if (run.in_bounds && (m.type == TmaType::kTf32 || m.type == TmaType::kTf32Ftz)) {
    // Loads of the tf32 types round to nearest even, NaN becomes 0x7fffe000; neither they nor
    // f32.ftz flush subnormals (measured on an H200).
    for (uint32_t i = 0; i + 4 <= run.bytes; i += 4) {
      uint32_t u;
      std::memcpy(&u, global + i, 4);
      u = f32_to_tf32(u, CvtMode{});
      std::memcpy(smem + i, &u, 4);
    }
    return;
  }
  if (run.in_bounds) {
    std::memcpy(smem, global, run.bytes);
    return;
  }
  uint8_t pattern[16];
  tma_fill_pattern(m, pattern);
  for (uint32_t i = 0; i < run.bytes; ++i) smem[i] = pattern[i % 16];
}

void tma_copy_store(const TensorMap& m, const TmaRun& run, const uint8_t* smem, uint8_t* global) {
  if (!run.in_bounds) return;
  if (m.type != TmaType::kU6x16P32) {
    std::memcpy(global, smem, run.bytes);
    return;
  }
  uint8_t packed6[12] = {};
  for (int i = 0; i < 16; ++i) {
    const int bit = 6 * i;
    const uint32_t v = static_cast<uint32_t>(smem[i] & 0x3f) << (bit & 7);
    packed6[bit >> 3] |= static_cast<uint8_t>(v);
    if (v >> 8) packed6[(bit >> 3) + 1] |= static_cast<uint8_t>(v >> 8);
  }
  std::memcpy(global, packed6, 12);
}

Error check_tma_reduce(TmaType t, TmaReduceOp op) {
  const bool i32 = t == TmaType::kU32 || t == TmaType::kS32;
  const bool i64 = t == TmaType::kU64 || t == TmaType::kS64;
  const bool half = t == TmaType::kF16 || t == TmaType::kBf16;
  bool ok = false;
  switch (op) {
    case TmaReduceOp::kAdd:
      ok = i32 || t == TmaType::kU64 || half || t == TmaType::kF32 || t == TmaType::kF32Ftz ||
           t == TmaType::kF64;
      break;
    case TmaReduceOp::kMin:
    case TmaReduceOp::kMax:
      ok = i32 || i64 || half;
      break;
    case TmaReduceOp::kInc:
    case TmaReduceOp::kDec:
      ok = t == TmaType::kU32;
      break;
    default:
      ok = i32 || i64;
  }
  return ok ? Error{}
            : "cp.reduce.async.bulk.tensor: this reduction does not exist for the map's element "
              "type";
}

namespace {

template <class T>
T load_as(const uint8_t* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
T reduce_int(TmaReduceOp op, T dst, T src) {
  using U = typename std::make_unsigned<T>::type;
  switch (op) {
    case TmaReduceOp::kAdd:
      return static_cast<T>(static_cast<U>(dst) + static_cast<U>(src));
    case TmaReduceOp::kMin:
      return std::min(dst, src);
    case TmaReduceOp::kMax:
      return std::max(dst, src);
    case TmaReduceOp::kInc:
      return static_cast<U>(dst) >= static_cast<U>(src) ? T{0} : static_cast<T>(dst + 1);
    case TmaReduceOp::kDec:
      return dst == 0 || static_cast<U>(dst) > static_cast<U>(src) ? src : static_cast<T>(dst - 1);
    case TmaReduceOp::kAnd:
      return dst & src;
    case TmaReduceOp::kOr:
      return dst | src;
    case TmaReduceOp::kXor:
      return dst ^ src;
  }
  return dst;
}

template <class T, class F>
void each(const uint8_t* src, uint8_t* dst, uint32_t bytes, F f) {
  for (uint32_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
    const T v = f(load_as<T>(dst + i), load_as<T>(src + i));
    std::memcpy(dst + i, &v, sizeof v);
  }
}

}  // namespace

void tma_reduce(TmaType t, TmaReduceOp op, const uint8_t* src, uint8_t* dst, uint32_t bytes) {
  switch (t) {
    case TmaType::kU32:
      return each<uint32_t>(src, dst, bytes,
                            [=](uint32_t d, uint32_t s) { return reduce_int(op, d, s); });
    case TmaType::kS32:
      return each<int32_t>(src, dst, bytes,
                           [=](int32_t d, int32_t s) { return reduce_int(op, d, s); });
    case TmaType::kU64:
      return each<uint64_t>(src, dst, bytes,
                            [=](uint64_t d, uint64_t s) { return reduce_int(op, d, s); });
    case TmaType::kS64:
      return each<int64_t>(src, dst, bytes,
                           [=](int64_t d, int64_t s) { return reduce_int(op, d, s); });
    case TmaType::kF32:
    case TmaType::kF32Ftz: {
      FpMode m;
      m.ftz = t == TmaType::kF32Ftz;
      return each<float>(src, dst, bytes, [=](float d, float s) { return add_f32(d, s, m); });
    }
    case TmaType::kF64:
      return each<double>(src, dst, bytes, [](double d, double s) { return add_f64(d, s); });
    case TmaType::kF16:
    case TmaType::kBf16: {
      const Elem e = t == TmaType::kF16 ? Elem::kF16 : Elem::kBf16;
      MinMaxMode m;
      m.is_max = op == TmaReduceOp::kMax;
      return each<uint16_t>(src, dst, bytes, [=](uint16_t d, uint16_t s) {
        return op == TmaReduceOp::kAdd ? add_h(e, d, s) : minmax_h(e, d, s, m);
      });
    }
    default:
      return;
  }
}

}  // namespace ptxsim::sem
