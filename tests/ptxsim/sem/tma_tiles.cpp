// SPDX-License-Identifier: Apache-2.0
// Tensor maps: argument checks, and tile / gather4 copies against an element-by-element model.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "sem/narrow.h"
#include "sem/tma.h"

using namespace ptxsim::sem;

// Physical 16-byte chunk (and 8-byte half) of logical chunk `c` of 128-byte line `line`, from the
// manual's swizzle tables 5.5.7 (rows are 128-byte lines, columns 16-byte chunks).
uint32_t table_swizzle(TmaSwizzle s, uint32_t address) {
  const uint32_t line = address / 128, chunk = address / 16 % 8, byte = address % 16;
  static const int k128[8][8] = {{0, 1, 2, 3, 4, 5, 6, 7}, {1, 0, 3, 2, 5, 4, 7, 6},
                                 {2, 3, 0, 1, 6, 7, 4, 5}, {3, 2, 1, 0, 7, 6, 5, 4},
                                 {4, 5, 6, 7, 0, 1, 2, 3}, {5, 4, 7, 6, 1, 0, 3, 2},
                                 {6, 7, 4, 5, 2, 3, 0, 1}, {7, 6, 5, 4, 3, 2, 1, 0}};
  static const int kAtom32[4][8] = {{0, 1, 2, 3, 4, 5, 6, 7},
                                    {2, 3, 0, 1, 6, 7, 4, 5},
                                    {4, 5, 6, 7, 0, 1, 2, 3},
                                    {6, 7, 4, 5, 2, 3, 0, 1}};
  static const int kAtom64[2][8] = {{0, 1, 2, 3, 4, 5, 6, 7}, {4, 5, 6, 7, 0, 1, 2, 3}};
  // The tables list which logical chunk sits at a position; they are involutions.
  uint32_t c = chunk, b = byte;
  switch (s) {
    case TmaSwizzle::kNone:
      break;
    case TmaSwizzle::k32B:
      c = uint32_t(k128[line % 2][chunk]);
      break;
    case TmaSwizzle::k64B:
      c = uint32_t(k128[line % 4][chunk]);
      break;
    case TmaSwizzle::k128B:
      c = uint32_t(k128[line % 8][chunk]);
      break;
    case TmaSwizzle::k128BAtom32B:
      c = uint32_t(kAtom32[line % 4][chunk]);
      break;
    case TmaSwizzle::k128BAtom32BFlip8B:
      c = uint32_t(kAtom32[line % 4][chunk]);
      if (line % 2) b = (byte + 8) % 16;
      break;
    case TmaSwizzle::k128BAtom64B:
      c = uint32_t(kAtom64[line % 2][chunk]);
      break;
  }
  return line * 128 + c * 16 + b;
}

void check_swizzle_tables() {
  for (int s = 0; s < 7; ++s) {
    for (uint32_t a = 0; a < 4096; ++a) {
      CHECK(tma_swizzle(TmaSwizzle(s), a) == table_swizzle(TmaSwizzle(s), a),
            "swizzle %d address %u", s, a);
    }
  }
}

struct Case {
  TensorMap map;
  std::vector<uint8_t> tensor;
};

// A random legal map over an own buffer; the address is patched in.
Case random_case(Rng& rng, TmaType type) {
  Case c;
  TensorMap& m = c.map;
  m.type = type;
  m.rank = 1 + rng.below(5);
  const int bits = tma_elem_bits(type);
  const bool pad = type == TmaType::kU4x16P64 || type == TmaType::kU6x16P32;
  static const TmaSwizzle kPad[] = {TmaSwizzle::kNone, TmaSwizzle::k128B, TmaSwizzle::k128BAtom32B};
  m.swizzle = pad ? kPad[rng.below(3)] : TmaSwizzle(rng.below(7));
  const int span[] = {512, 32, 64, 128, 128, 128, 128};
  uint64_t stride = 0;
  for (int i = 0; i < m.rank; ++i) {
    if (i == 0) {
      if (pad) {
        m.dim[0] = uint64_t(128 * (1 + rng.below(3)));
        m.box[0] = 128;
      } else {
        const int unit = std::max(1, 128 / bits);  // elements per 16 bytes
        const int most = span[int(m.swizzle)] * 8 / bits / unit;
        m.box[0] =
            uint32_t(std::min(256 / unit, 1 + rng.below(std::max(1, most)))) * uint32_t(unit);
        m.dim[0] = uint64_t(1 + rng.below(200));
        if (type == TmaType::kU4x16) m.dim[0] *= 2;
      }
      stride = (m.dim[0] * uint64_t(bits) / 8 + 31) / 32 * 32 + uint64_t(32 * rng.below(2));
      m.estride[0] = 1;
    } else {
      m.stride[i] = stride;
      m.dim[i] = uint64_t(1 + rng.below(7));
      m.box[i] = uint32_t(1 + rng.below(6));
      m.estride[i] = uint32_t(1 + (rng.below(4) == 0 ? rng.below(3) : 0));
      stride *= m.dim[i];
    }
  }
  c.tensor.resize(stride + 64);
  for (auto& b : c.tensor) b = uint8_t(rng.next());
  return c;
}

bool element_in(const TensorMap& m, const int64_t* c) {
  for (int i = 0; i < m.rank; ++i) {
    if (c[i] < 0 || c[i] >= int64_t(m.dim[i])) return false;
  }
  return true;
}

// Reference load of the whole box, element by element, into an image where -1 marks untouched
// bytes.
std::vector<int> reference_load(const TensorMap& m, const std::vector<uint8_t>& t,
                                const int32_t* coords, uint32_t smem, size_t size) {
  std::vector<int> image(size, -1);
  const int bits = tma_elem_bits(m.type);
  const bool pad = m.type == TmaType::kU4x16P64 || m.type == TmaType::kU6x16P32;
  uint32_t count[5] = {m.box[0], 1, 1, 1, 1};
  for (int i = 1; i < m.rank; ++i) count[i] = (m.box[i] + m.estride[i] - 1) / m.estride[i];
  uint64_t row = 0;
  const uint64_t row_bytes = pad ? 128 : uint64_t(m.box[0]) * uint64_t(bits) / 8;
  std::vector<uint8_t> logical;
  for (uint32_t j4 = 0; j4 < count[4]; ++j4)
    for (uint32_t j3 = 0; j3 < count[3]; ++j3)
      for (uint32_t j2 = 0; j2 < count[2]; ++j2)
        for (uint32_t j1 = 0; j1 < count[1]; ++j1, ++row) {
          const uint32_t j[5] = {0, j1, j2, j3, j4};
          // Gather the row's bits, element by element.
          std::vector<uint8_t> bitsv(size_t(m.box[0]) * size_t(bits), 0);
          for (uint32_t e = 0; e < m.box[0]; ++e) {
            int64_t c[5];
            uint64_t off = 0;
            c[0] = int64_t(coords[0]) + e;
            for (int i = 1; i < m.rank; ++i) {
              c[i] = int64_t(coords[i]) + int64_t(j[i]) * m.estride[i];
              off += uint64_t(c[i]) * m.stride[i];
            }
            const bool in = element_in(m, c);
            for (int b = 0; b < bits; ++b) {
              if (in) {
                const uint64_t at = off * 8 + uint64_t(c[0]) * uint64_t(bits) + uint64_t(b);
                bitsv[size_t(e) * size_t(bits) + size_t(b)] = (t[at / 8] >> (at % 8)) & 1;
              } else if (m.oob_nan) {
                bitsv[size_t(e) * size_t(bits) + size_t(b)] = (0x7ff7 >> (b % 16)) & 1;
              }
            }
            if (in && (m.type == TmaType::kTf32 || m.type == TmaType::kTf32Ftz)) {
              uint32_t u = 0;
              for (int b = 0; b < 32; ++b) u |= uint32_t(bitsv[size_t(e) * 32 + size_t(b)]) << b;
              u = (u & 0x7fffffffu) > 0x7f800000u ? 0x7fffe000u
                                                  : (u + 0xfffu + ((u >> 13) & 1)) & 0xffffe000u;
              for (int b = 0; b < 32; ++b) bitsv[size_t(e) * 32 + size_t(b)] = (u >> b) & 1;
            }
          }
          for (size_t k = 0; k < bitsv.size(); k += 8) {
            int byte = 0;
            for (int b = 0; b < 8; ++b) byte |= bitsv[k + size_t(b)] << b;
            uint64_t pos = k / 8;
            if (pad) {  // 16 elements per 16-byte slot
              const uint64_t group = uint64_t(16 * bits / 8);
              pos = pos / group * 16 + pos % group;
            }
            image[table_swizzle(m.swizzle, smem + uint32_t(row * row_bytes + pos))] = byte;
          }
        }
  return image;
}

void check_tiles() {
  Rng rng(11);
  int out_of_bounds = 0;
  for (int iter = 0; iter < 1500; ++iter) {
    const TmaType type = TmaType(iter % 16);
    Case c = random_case(rng, type);
    std::vector<uint8_t> aligned(c.tensor.size() + 64);
    uint8_t* base = aligned.data() + (64 - reinterpret_cast<uintptr_t>(aligned.data()) % 64) % 64;
    std::memcpy(base, c.tensor.data(), c.tensor.size());
    TensorMap& m = c.map;
    m.address = reinterpret_cast<uint64_t>(base);
    const bool is_float = type >= TmaType::kF16 && type <= TmaType::kTf32Ftz;
    m.oob_nan = is_float && rng.below(3) == 0;
    const Error legal = check_tensor_map(m);
    CHECK(legal.empty(), "random map refused: %s", legal.c_str());
    alignas(64) uint8_t opaque[128];
    pack_tensor_map(m, opaque);
    TensorMap back;
    const Error e0 = decode_tensor_map(opaque, &back);
    CHECK(e0.empty() && std::memcmp(&back.dim, &m.dim, sizeof m.dim) == 0 &&
              back.swizzle == m.swizzle && back.type == m.type && back.oob_nan == m.oob_nan &&
              back.box[0] == m.box[0],
          "map round trip %s", e0.c_str());

    int32_t coords[5] = {};
    for (int i = 0; i < m.rank; ++i) {
      coords[i] = rng.below(int(m.dim[i]) + 4) - 3;
      if (i == 0 && (type == TmaType::kU4x16P64 || type == TmaType::kU6x16P32))
        coords[0] = 128 * (rng.below(4) - 1);
      if (i == 0 && type != TmaType::kU4x16P64 && type != TmaType::kU6x16P32) {
        const int unit = 128 / tma_elem_bits(type);  // the box starts on 16 bytes
        coords[0] = unit * (rng.below(int(m.dim[0]) / unit + 4) - 2);
      }
    }
    const uint32_t smem = uint32_t(128 * (8 + rng.below(9)));
    TmaTile tile;
    const Error e = tma_tile(m, TmaDir::kLoad, coords, smem, &tile);
    CHECK(e.empty(), "tile refused: %s", e.c_str());
    const std::vector<int> want =
        reference_load(m, c.tensor, coords, smem, smem + tile.smem_bytes + 2048);
    std::vector<int> got(want.size(), -1);
    uint64_t payload = 0;
    std::vector<uint8_t> scratch;
    for (const TmaRun& r : tile.runs) {
      scratch.assign(r.bytes, 0);
      if (r.in_bounds) {
        CHECK(r.global >= m.address && r.global + r.gbytes <= m.address + c.tensor.size(),
              "run leaves the tensor");
      } else {
        ++out_of_bounds;
      }
      tma_copy_load(m, r, reinterpret_cast<const uint8_t*>(r.global), scratch.data());
      for (uint32_t i = 0; i < r.bytes; ++i) {
        CHECK(r.smem + i < got.size() && got[r.smem + i] == -1, "overlapping run at 0x%x",
              r.smem + i);
        if (r.smem + i < got.size()) got[r.smem + i] = scratch[i];
      }
      payload += r.bytes;
    }
    CHECK(payload == tile.tx_bytes, "type %d: tx %u, runs %llu", int(type), tile.tx_bytes,
          (unsigned long long)payload);
    for (size_t i = 0; i < want.size(); ++i) {
      if (want[i] != got[i]) {
        CHECK(false, "iteration %d type %d swizzle %d rank %d smem byte 0x%zx: %d, want %d", iter,
              int(type), int(m.swizzle), m.rank, i, got[i], want[i]);
        break;
      }
    }
    CHECK(true, "compared");

    // Store: what was loaded in bounds returns to the same place; out of bounds nothing is written.
    if (type == TmaType::kU4x16P64) {
      CHECK(!tma_tile(m, TmaDir::kStore, coords, smem, &tile).empty(),
            "16U4_ALIGN16B store accepted");
      continue;
    }
    for (int i = 0; i < m.rank; ++i) coords[i] = std::max(coords[i], 0);
    CHECK(tma_tile(m, TmaDir::kStore, coords, smem, &tile).empty(), "store refused");
    std::vector<uint8_t> image(smem + tile.smem_bytes + 2048);
    for (auto& b : image) b = uint8_t(rng.next());
    std::vector<uint8_t> before(base, base + c.tensor.size());
    for (const TmaRun& r : tile.runs) {
      tma_copy_store(m, r, image.data() + r.smem, reinterpret_cast<uint8_t*>(r.global));
    }
    if (type == TmaType::kU6x16P32) {
      // Containers with their two top bits dropped, read back by a load of the same box.
      std::vector<uint8_t> now(base, base + c.tensor.size());
      TmaTile again;
      CHECK(tma_tile(m, TmaDir::kLoad, coords, smem, &again).empty(), "reload");
      CHECK(again.runs.size() == tile.runs.size(), "runs");
      for (size_t i = 0; i < again.runs.size(); ++i) {
        if (!again.runs[i].in_bounds) continue;
        const uint8_t* p = reinterpret_cast<const uint8_t*>(again.runs[i].global);
        for (int k = 0; k < 16; ++k) {
          const int bit = 6 * k;
          const uint32_t w =
              uint32_t(p[bit / 8]) | (bit / 8 + 1 < 12 ? uint32_t(p[bit / 8 + 1]) << 8 : 0);
          CHECK(((w >> (bit % 8)) & 0x3f) == (image[tile.runs[i].smem + size_t(k)] & 0x3f),
                "6-bit store element %d", k);
        }
      }
      continue;
    }
    const std::vector<uint8_t> after(base, base + c.tensor.size());
    // Expected memory: the reference load of `after` equals the image where in bounds.
    const TensorMap zero = [&] {
      TensorMap z = m;
      z.oob_nan = false;
      if (z.type == TmaType::kTf32 || z.type == TmaType::kTf32Ftz) z.type = TmaType::kU32;
      return z;
    }();
    const std::vector<int> view = reference_load(zero, after, coords, smem, image.size());
    std::vector<uint8_t> touched(image.size(), 0);
    for (const TmaRun& r : tile.runs) {
      for (uint32_t i = 0; r.in_bounds && i < r.bytes; ++i) touched[r.smem + i] = 1;
    }
    for (size_t i = 0; i < view.size(); ++i) {
      if (touched[i]) CHECK(view[i] == image[i], "store byte 0x%zx type %d", i, int(type));
    }
    size_t changed = 0, stored = 0;
    for (size_t i = 0; i < before.size(); ++i) changed += before[i] != after[i];
    for (uint8_t b : touched) stored += b;
    CHECK(changed <= stored, "store wrote outside the box");
  }
  CHECK(out_of_bounds > 1000, "the cases hardly leave the tensor (%d runs)", out_of_bounds);
}

void check_gather4() {
  std::vector<uint8_t> buf(64 * 256 + 64);
  uint8_t* base = buf.data() + (64 - reinterpret_cast<uintptr_t>(buf.data()) % 64) % 64;
  for (int i = 0; i < 64 * 256; ++i) base[i] = uint8_t(i / 256 * 3 + i % 256);
  TensorMap m;
  m.type = TmaType::kU8;
  m.rank = 2;
  m.address = reinterpret_cast<uint64_t>(base);
  m.dim[0] = 256;
  m.dim[1] = 64;
  m.stride[1] = 256;
  m.box[0] = 128;
  m.box[1] = 1;
  m.estride[0] = m.estride[1] = 1;
  m.swizzle = TmaSwizzle::k128B;
  const int32_t coords[5] = {64, 5, 63, 0, 64};  // the last row is outside
  TmaTile tile;
  CHECK(tma_gather4(m, TmaDir::kLoad, coords, 1024, &tile).empty(), "gather4");
  CHECK(tile.tx_bytes == 512, "gather4 bytes %u", tile.tx_bytes);
  std::vector<uint8_t> smem(2048, 0xee);
  for (const TmaRun& r : tile.runs)
    tma_copy_load(m, r, reinterpret_cast<const uint8_t*>(r.global), smem.data() + r.smem);
  for (int r = 0; r < 4; ++r) {
    for (int i = 0; i < 128; ++i) {
      const uint8_t want = coords[1 + r] < 64 ? base[coords[1 + r] * 256 + 64 + i] : 0;
      CHECK(smem[table_swizzle(TmaSwizzle::k128B, uint32_t(1024 + r * 128 + i))] == want,
            "gather4 row %d byte %d", r, i);
    }
  }
  m.box[1] = 2;
  CHECK(!tma_gather4(m, TmaDir::kLoad, coords, 1024, &tile).empty(),
        "gather4 with boxDim[1] = 2 accepted");
}

void check_errors() {
  alignas(64) uint8_t out[192];
  const uint64_t dim[5] = {256, 64, 4, 4, 4}, stride[4] = {256, 16384, 65536, 262144};
  const uint32_t box[5] = {128, 64, 1, 1, 1}, es[5] = {1, 1, 1, 1, 1};
  auto enc = [&](int type, int rank, uint64_t addr, const uint64_t* d, const uint64_t* s,
                 const uint32_t* b, const uint32_t* e, int il, int sw, int l2, int oob) {
    return encode_tensor_map(out, type, rank, addr, d, s, b, e, il, sw, l2, oob);
  };
  CHECK(enc(0, 2, 4096, dim, stride, box, es, 0, 3, 2, 0).empty(), "plain map refused");
  struct Bad {
    const char* word;
    Error e;
  };
  uint64_t d2[5] = {0, 64, 4, 4, 4}, s2[4] = {250, 1, 1, 1},
           d3[5] = {uint64_t{1} << 33, 64, 1, 1, 1};
  uint64_t s3[4] = {uint64_t{1} << 40, 0, 0, 0};
  uint32_t b2[5] = {257, 64, 1, 1, 1}, b3[5] = {24, 64, 1, 1, 1}, b4[5] = {0, 1, 1, 1, 1},
           e2[5] = {1, 9, 1, 1, 1};
  uint64_t dp[5] = {192, 64, 1, 1, 1}, dodd[5] = {255, 64, 1, 1, 1};
  const Bad bads[] = {
      {"tensorRank", enc(0, 0, 4096, dim, stride, box, es, 0, 0, 0, 0)},
      {"tensorRank", enc(0, 6, 4096, dim, stride, box, es, 0, 0, 0, 0)},
      {"tensorDataType", enc(16, 2, 4096, dim, stride, box, es, 0, 0, 0, 0)},
      {"globalAddress", enc(0, 2, 4100, dim, stride, box, es, 0, 0, 0, 0)},
      {"globalAddress", enc(14, 2, 4096 + 16, dim, stride, box, es, 0, 0, 0, 0)},
      {"globalDim[0]", enc(0, 2, 4096, d2, stride, box, es, 0, 0, 0, 0)},
      {"globalDim[0]", enc(0, 2, 4096, d3, stride, box, es, 0, 0, 0, 0)},
      {"globalDim[0]", enc(14, 2, 4096, dp, stride, box, es, 0, 0, 0, 0)},
      {"globalDim[0]", enc(13, 2, 4096, dodd, stride, box, es, 0, 0, 0, 0)},
      {"globalStrides[0]", enc(0, 2, 4096, dim, s2, box, es, 0, 0, 0, 0)},
      {"globalStrides[0]", enc(0, 2, 4096, dim, s3, box, es, 0, 0, 0, 0)},
      {"boxDim[0]", enc(0, 2, 4096, dim, stride, b2, es, 0, 0, 0, 0)},
      {"boxDim[0]", enc(0, 2, 4096, dim, stride, b3, es, 0, 0, 0, 0)},
      {"boxDim[0]", enc(0, 2, 4096, dim, stride, b4, es, 0, 0, 0, 0)},
      {"swizzle size", enc(1, 2, 4096, dim, stride, box, es, 0, 3, 0, 0)},
      {"elementStrides[1]", enc(0, 2, 4096, dim, stride, box, e2, 0, 0, 0, 0)},
      {"swizzle", enc(0, 2, 4096, dim, stride, box, es, 0, 7, 0, 0)},
      {"swizzle", enc(14, 2, 4096, dim, stride, box, es, 0, 1, 0, 0)},
      {"l2Promotion", enc(0, 2, 4096, dim, stride, box, es, 0, 0, 4, 0)},
      {"oobFill", enc(0, 2, 4096, dim, stride, box, es, 0, 0, 0, 2)},
      {"oobFill", enc(2, 2, 4096, dim, stride, box, es, 0, 0, 0, 1)},
      {"interleave", enc(0, 3, 4096, dim, stride, box, es, 1, 0, 0, 0)},
      {"globalDim is null", enc(0, 2, 4096, nullptr, stride, box, es, 0, 0, 0, 0)},
      {"globalStrides is null", enc(0, 2, 4096, dim, nullptr, box, es, 0, 0, 0, 0)},
      {"64-byte", encode_tensor_map(out + 16, 0, 2, 4096, dim, stride, box, es, 0, 0, 0, 0)},
  };
  for (const Bad& b : bads)
    CHECK(b.e.find(b.word) != std::string::npos, "expected '%s' in '%s'", b.word, b.e.c_str());

  CHECK(enc(6, 2, 4096, dim, stride, box, es, 0, 0, 0, 0).empty(), "f16 map");
  TensorMap m;
  // CUTLASS clears bit 21 of 64-bit word 1 on the host for small tensors.
  uint64_t w1;
  std::memcpy(&w1, out + 8, 8);
  w1 ^= uint64_t{1} << 21;
  std::memcpy(out + 8, &w1, 8);
  CHECK(decode_tensor_map(out, &m).empty() && m.address == 4096 && m.dim[1] == 64,
        "word 1 must be ignored");
  CHECK(replace_tensor_map_field(out, TmaField::kGlobalAddress, 0, 8192).empty(),
        "replace address");
  CHECK(replace_tensor_map_field(out, TmaField::kGlobalDim, 1, 77).empty(), "replace dim");
  CHECK(replace_tensor_map_field(out, TmaField::kGlobalStride, 0, 512).empty(), "replace stride");
  CHECK(replace_tensor_map_field(out, TmaField::kElemType, 0, 10).empty(), "replace type");
  CHECK(replace_tensor_map_field(out, TmaField::kBoxDim, 0, 64).empty(), "replace box");
  CHECK(replace_tensor_map_field(out, TmaField::kSwizzleAtomicity, 0, 1).empty(),
        "replace atomicity first");
  CHECK(!decode_tensor_map(out, &m).empty(), "atomicity without the 128B mode accepted");
  CHECK(replace_tensor_map_field(out, TmaField::kSwizzleMode, 0, 3).empty(), "replace swizzle");
  CHECK(decode_tensor_map(out, &m).empty() && m.address == 8192 && m.dim[1] == 77 &&
            m.stride[1] == 512 && m.type == TmaType::kBf16 &&
            m.swizzle == TmaSwizzle::k128BAtom32B && m.box[0] == 64,
        "replaced fields");
  CHECK(!replace_tensor_map_field(out, TmaField::kSwizzleMode, 0, 5).empty(),
        "swizzle mode 5 accepted");
  std::memset(out, 0x5a, 128);
  CHECK(!decode_tensor_map(out, &m).empty(), "garbage accepted");

  TmaTile tile;
  CHECK(enc(0, 2, 4096, dim, stride, box, es, 0, 3, 0, 0).empty() &&
            decode_tensor_map(out, &m).empty(),
        "map");
  int32_t c[5] = {0, 0, 0, 0, 0};
  CHECK(!tma_tile(m, TmaDir::kLoad, c, 1040, &tile).empty(), "shared alignment");
  c[0] = 8;
  CHECK(!tma_tile(m, TmaDir::kLoad, c, 1024, &tile).empty(), "box start inside 16 bytes");
  c[0] = 0;
  c[1] = -1;
  CHECK(tma_tile(m, TmaDir::kLoad, c, 1024, &tile).empty(), "negative load coordinate");
  CHECK(!tma_tile(m, TmaDir::kStore, c, 1024, &tile).empty(), "negative store coordinate");
}

void check_reduce() {
  uint32_t d[4] = {5, 0xffffffffu, 7, 0}, s[4] = {3, 2, 7, 9};
  auto run = [&](TmaType t, TmaReduceOp op) {
    uint32_t x[4];
    std::memcpy(x, d, sizeof d);
    tma_reduce(t, op, reinterpret_cast<uint8_t*>(s), reinterpret_cast<uint8_t*>(x), sizeof x);
    return std::vector<uint32_t>(x, x + 4);
  };
  using V = std::vector<uint32_t>;
  CHECK((run(TmaType::kU32, TmaReduceOp::kAdd) == V{8, 1, 14, 9}), "add");
  CHECK((run(TmaType::kU32, TmaReduceOp::kMax) == V{5, 0xffffffffu, 7, 9}), "max u32");
  CHECK((run(TmaType::kS32, TmaReduceOp::kMax) == V{5, 2, 7, 9}), "max s32");
  CHECK((run(TmaType::kU32, TmaReduceOp::kMin) == V{3, 2, 7, 0}), "min");
  CHECK((run(TmaType::kU32, TmaReduceOp::kInc) == V{0, 0, 0, 1}), "inc");
  CHECK((run(TmaType::kU32, TmaReduceOp::kDec) == V{3, 2, 6, 9}), "dec");
  CHECK((run(TmaType::kU32, TmaReduceOp::kXor) == V{6, 0xfffffffdu, 0, 9}), "xor");
  uint16_t h[2] = {0x3c00, 0x4000}, g[2] = {0x3c00, 0xc000};
  tma_reduce(TmaType::kF16, TmaReduceOp::kAdd, reinterpret_cast<uint8_t*>(g),
             reinterpret_cast<uint8_t*>(h), 4);
  CHECK(h[0] == 0x4000 && h[1] == 0, "f16 add");
  CHECK(check_tma_reduce(TmaType::kF32, TmaReduceOp::kAdd).empty() &&
            !check_tma_reduce(TmaType::kF32, TmaReduceOp::kMax).empty() &&
            !check_tma_reduce(TmaType::kU4x16, TmaReduceOp::kAdd).empty() &&
            !check_tma_reduce(TmaType::kS32, TmaReduceOp::kInc).empty(),
        "legal pairs");
}

int main() {
  check_swizzle_tables();
  check_tiles();
  check_gather4();
  check_errors();
  check_reduce();
  return check_report("tma_tiles");
}
