// SPDX-License-Identifier: Apache-2.0
// Inputs shared by the GPU probe and the simulator's golden program. Everything is a pure function
// of indices, so goldens hold results only.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>

constexpr int kInputs = 65536;  // inputs per scalar operation
constexpr int kSets = 32;       // instances per matrix instruction, first half small exact values

inline uint64_t mix(uint64_t z) {
  z += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// FNV-1a over 32- or 64-bit results.
struct Hash {
  uint64_t state = 1469598103934665603ull;
  template <class T>
  void add(const T* p, size_t n) {
    const auto* b = reinterpret_cast<const unsigned char*>(p);
    for (size_t i = 0; i < n * sizeof(T); ++i) state = (state ^ b[i]) * 1099511628211ull;
  }
  void print(const char* name) const {
    std::printf("%s %016llx\n", name, static_cast<unsigned long long>(state));
  }
};

// Word i of operand `o`: specials, ties, subnormals, middle ranges of f16, f32 and f64, raw bits.
inline uint64_t input_word(int i, int o) {
  static const uint32_t kLow[32] = {
      0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345, 0x7f812345,
      1,          0x80000001, 0x007fffff, 0x00800000, 0x7f7fffff, 0x3f800000, 0xbf800000,
      0x43e00000, 0x47800000, 0x477fe000, 0x477ff000, 0x33800000, 0x38800000, 0x3fc00000,
      0xc0200000, 0x4f000000, 0xcf000000, 0x5f000000, 0x00004000, 0x7c007c00, 0x7e003c00,
      0xfc00fe01, 0x7f807f81, 0x80008000, 0x00010001};
  static const uint32_t kHigh[16] = {0,          0x80000000, 0x7ff00000, 0xfff00000,
                                     0x7ff80000, 0xfff80001, 0x7ff00001, 0x3ff00000,
                                     0xbff00000, 0x41e00000, 0xc1e00000, 0x43e00000,
                                     0x43f00000, 0x00100000, 0x36a00000, 0x47efffff};
  const uint64_t r = mix(uint64_t(i) * 3 + uint64_t(o)), s = mix(r);
  const uint64_t s8 = s >> 8, s16 = s >> 16, s24 = s >> 24;
  switch (s % 10) {
    case 0:
      return uint64_t(kHigh[s16 % 16]) << 32 | kLow[s8 % 32];
    case 1:
    case 2:
    case 3:
      return (r & 0x800fffff807fffffull) | (1003 + s8 % 40) << 52 | (107 + s16 % 40) << 23;
    case 4:
      return (r & 0x800ff000807f0000ull) | (1011 + s8 % 30) << 52 | (111 + s16 % 34) << 23;
    case 5:
      return (r & 0x800fffff807fffffull) | (s8 % 60) << 52 | (s16 % 26) << 23;
    case 6:
      return (r & 0x800fffff83ff83ffull) | (873 + s8 % 60) << 52 | (s16 % 31) << 10 |
             (s24 % 31) << 26;
    case 7:
      return r & 0xffff;
    default:
      return r;
  }
}

// One element code. Types: h f16, b bf16, t tf32, 4 e4m3, 5 e5m2, s s8, u u8, i s4.
inline uint32_t elem_code(char type, int real, uint64_t r) {
  static const uint16_t kF16[8] = {0, 0x3c00, 0xbc00, 0x4000, 0xc000, 0x3800, 0x4200, 0xc400};
  static const uint16_t kBf16[8] = {0, 0x3f80, 0xbf80, 0x4000, 0xc000, 0x3f00, 0x4040, 0xc080};
  static const uint8_t kE4m3[8] = {0, 0x38, 0xb8, 0x40, 0xc0, 0x30, 0x44, 0xc8};
  static const uint8_t kE5m2[8] = {0, 0x3c, 0xbc, 0x40, 0xc0, 0x38, 0x42, 0xc4};
  switch (type) {
    case 'h':
      return real ? uint32_t((r & 0x83ff) | (8 + (r >> 20) % 12) << 10) : kF16[r % 8];
    case 'b':
      return real ? uint32_t((r & 0x807f) | (118 + (r >> 20) % 16) << 7) : kBf16[r % 8];
    case 't':
      return real ? uint32_t((r & 0x807fffff) | (118 + (r >> 32) % 16) << 23)
                  : uint32_t(kBf16[r % 8]) << 16;
    case '4':
      if (!real) return kE4m3[r % 8];
      return (r & 0x7f) == 0x7f ? uint32_t(r & 0xff) ^ 1 : uint32_t(r & 0xff);
    case '5':
      if (!real) return kE5m2[r % 8];
      return (r & 0x7c) == 0x7c ? uint32_t(r & 0xbf) : uint32_t(r & 0xff);
    case 's':
      return real ? uint32_t(r & 0xff) : r % 2 ? 3 : 250;
    case 'u':
      return real ? uint32_t(r & 0xff) : uint32_t(r % 9);
    default:
      return uint32_t(r & 0xf);
  }
}

inline uint32_t pack_word(char type, int real, uint64_t seed) {
  const int bits = type == 'h' || type == 'b' ? 16 : type == 't' ? 32 : type == 'i' ? 4 : 8;
  uint32_t w = 0;
  for (int e = 0; e < 32 / bits; ++e) {
    w |= elem_code(type, real, mix(seed * 64 + uint64_t(e))) << (bits * e);
  }
  return w;
}

// Accumulator register: f f32, h f16x2, i s32.
inline uint32_t acc_word(char acc, int real, uint64_t seed) {
  const uint64_t r = mix(seed ^ 0xabcdef);
  if (acc == 'h') return elem_code('h', real, r) | elem_code('h', real, mix(r)) << 16;
  const int small = int(r % 33) - 16;
  if (acc == 'i') return real ? uint32_t(r) : uint32_t(small);
  if (real) return uint32_t((r & 0x807fffff) | (120 + (r >> 40) % 12) << 23);
  const float v = float(small);
  uint32_t u;
  std::memcpy(&u, &v, 4);
  return u;
}

inline double f64_word(uint64_t seed) { return double(int64_t(mix(seed)) >> 40) / 1024.0; }

// Register r (0-7 A, 8-11 B, 12-15 C) of instance `set` of matrix instruction `op`.
inline uint32_t mma_word(int op, int set, int r, int lane, char ta, char tb, char acc) {
  const uint64_t seed = uint64_t(((op * kSets + set) * 16 + r) * 32 + lane);
  const int real = set >= kSets / 2;
  return r < 8    ? pack_word(ta, real, seed)
         : r < 12 ? pack_word(tb, real, seed)
                  : acc_word(acc, real, seed);
}

// ---- wgmma: variant, descriptors relative to the window base, element types
// --------------------------
struct WgmmaCase {
  int variant;
  uint64_t a, b;
  char ta, tb;
  int real;
};
constexpr uint64_t desc(unsigned start, unsigned lbo, unsigned sbo, unsigned mode,
                        unsigned base_offset = 0) {
  return (start >> 4) | uint64_t(lbo >> 4) << 16 | uint64_t(sbo >> 4) << 32 |
         uint64_t(base_offset) << 49 | uint64_t(mode) << 62;
}
constexpr unsigned kB = 16384;
const WgmmaCase kWgmmaCases[] = {
    {0, desc(0, 16, 1024, 1), desc(kB, 16, 1024, 1), 'h', 'h', 0},
    {0, desc(0, 16, 1024, 1), desc(kB, 16, 1024, 1), 'h', 'h', 1},
    {0, desc(32, 16, 1024, 1), desc(kB + 96, 16, 1024, 1), 'h', 'h', 0},
    {0, desc(0, 16, 512, 2), desc(kB, 16, 512, 2), 'h', 'h', 0},
    {0, desc(0, 16, 256, 3), desc(kB, 16, 256, 3), 'h', 'h', 0},
    {0, desc(0, 1024, 128, 0), desc(kB, 1024, 128, 0), 'h', 'h', 0},
    {0, desc(384, 16, 1024, 1, 0), desc(kB, 16, 1024, 1), 'h', 'h', 0},
    {0, desc(384, 16, 1024, 1, 3), desc(kB, 16, 1024, 1), 'h', 'h', 0},
    {0, desc(384, 16, 1024, 1, 5), desc(kB, 16, 1024, 1), 'h', 'h', 0},
    {1, desc(0, 2048, 1024, 1), desc(kB, 2048, 1024, 1), 'h', 'h', 0},
    {1, desc(0, 512, 1024, 2), desc(kB, 512, 1024, 2), 'h', 'h', 0},
    {1, desc(0, 256, 1024, 3), desc(kB, 256, 1024, 3), 'h', 'h', 0},
    {1, desc(0, 1024, 128, 0), desc(kB, 1024, 128, 0), 'h', 'h', 0},
    {2, 0, desc(kB, 16, 1024, 1), 't', 't', 0},
    {2, 0, desc(kB, 16, 1024, 1), 't', 't', 1},
    {3, desc(0, 16, 1024, 1), desc(kB, 16, 1024, 1), '4', '5', 0},
    {3, desc(0, 16, 1024, 1), desc(kB, 16, 1024, 1), '4', '5', 1},
    {3, desc(64, 16, 1024, 1), desc(kB, 1024, 128, 0), '4', '5', 0},
    {4, desc(0, 16, 1024, 1), desc(kB, 16, 1024, 1), 's', 's', 0},
    {4, desc(0, 16, 1024, 1), desc(kB, 16, 1024, 1), 's', 's', 1},
    {5, 0, desc(kB, 2048, 1024, 1), 'b', 'b', 0},
    {5, 0, desc(kB, 2048, 1024, 1), 'b', 'b', 1},
};
inline void wgmma_image(const WgmmaCase& c, unsigned char* image) {  // 64 KiB
  for (unsigned i = 0; i < 65536; i += 4) {
    const uint32_t w = pack_word(i < kB ? c.ta : c.tb, c.real, 777000 + i);
    std::memcpy(image + i, &w, 4);
  }
}
inline uint32_t wgmma_word(const WgmmaCase& c, int r, int thread) {  // 0-31 D, 32-35 A
  if (r < 32)
    return acc_word(c.variant == 4 ? 'i' : 'f', c.real, uint64_t(9000 + r * 128 + thread));
  return pack_word(c.ta, c.real, uint64_t(5550000 + r * 128 + thread));
}

// ---- TMA tile loads
// ----------------------------------------------------------------------------------
struct TmaCase {
  int type;
  unsigned d0, d1, stride, b0, b1, es;
  int swizzle, oob, c0, c1, bytes, offset;
};
const TmaCase kTmaCases[] = {
    {0, 100, 30, 112, 32, 20, 1, 0, 0, 0, 0, 640, 0},
    {0, 100, 30, 112, 32, 20, 1, 0, 0, 16, 3, 640, 0},
    {0, 100, 30, 112, 32, 20, 1, 1, 0, 80, 15, 640, 0},
    {0, 100, 30, 112, 64, 20, 1, 2, 0, -16, -2, 1280, 0},
    {0, 200, 30, 208, 128, 20, 1, 3, 0, 96, 20, 2560, 0},
    {0, 200, 30, 208, 128, 20, 3, 3, 0, 16, 1, 896, 0},
    {0, 200, 30, 208, 128, 16, 1, 3, 0, 0, 0, 2048, 384},
    {0, 200, 30, 208, 64, 16, 1, 2, 0, 0, 0, 1024, 128},
    {0, 200, 30, 208, 32, 16, 1, 1, 0, 0, 0, 512, 128},
    {6, 50, 20, 112, 64, 8, 1, 3, 1, -8, 15, 1024, 0},
    {9, 50, 20, 112, 64, 8, 1, 3, 1, -8, 15, 1024, 0},
    {7, 20, 20, 96, 32, 8, 1, 3, 1, 4, 15, 1024, 0},
    {8, 10, 20, 96, 16, 8, 1, 3, 1, 4, 15, 1024, 0},
    {10, 20, 20, 96, 32, 8, 1, 0, 0, 0, 0, 1024, 0},
    {11, 20, 20, 96, 32, 8, 1, 0, 0, 0, 0, 1024, 0},
    {12, 20, 20, 96, 32, 8, 1, 0, 0, 0, 0, 1024, 0},
    {11, 20, 20, 96, 32, 8, 1, 0, 1, 4, 15, 1024, 0},
    {10, 20, 20, 96, 32, 8, 1, 0, 1, 4, 15, 1024, 0},
    {2, 40, 12, 192, 16, 6, 1, 0, 0, -4, 9, 384, 0},
};
constexpr int kTmaImage = 16384;
inline unsigned char tma_byte(int i) {
  return static_cast<unsigned char>(input_word(i / 8, 3) >> (8 * (i % 8)));
}
