// SPDX-License-Identifier: Apache-2.0
#include "fatbin.h"

#include <dlfcn.h>

#include "base.h"

namespace ptxsim {
namespace {

constexpr uint32_t kMagic = 0xBA55ED50u;
constexpr uint64_t kFlagLz4 = 0x2000;   // LZ4 block, nvcc before 12.4
constexpr uint64_t kFlagZstd = 0x8000;  // measured: nvcc 13.0
constexpr uint64_t kMaxImage = 1ull << 31;

template <class T>
T read(const uint8_t* p) {
  T v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

[[noreturn]] void bad(const std::string& why) {
  throw SimError(Err::kInvalidKernelImage, "fatbin: " + why);
}

std::string zstd_decompress(const uint8_t* src, size_t n, size_t out_size) {
  using Fn = size_t (*)(void*, size_t, const void*, size_t);
  using IsError = unsigned (*)(size_t);
  static void* lib = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!lib) {
    bad("the PTX is zstd-compressed and libzstd.so.1 cannot be loaded; install it or build with "
        "nvcc --no-compress");
  }
  auto decompress = reinterpret_cast<Fn>(dlsym(lib, "ZSTD_decompress"));
  auto is_error = reinterpret_cast<IsError>(dlsym(lib, "ZSTD_isError"));
  if (!decompress || !is_error) bad("libzstd.so.1 lacks ZSTD_decompress");
  std::string out(out_size, '\0');
  size_t r = decompress(&out[0], out.size(), src, n);
  if (is_error(r) || r != out_size) bad("corrupt zstd payload");
  return out;
}

// LZ4 block format: token (literal length << 4 | match length - 4), 15 = more length bytes, 2-byte
// match distance.
std::string lz4_decompress(const uint8_t* src, size_t n, size_t out_size) {
  std::string out;
  out.reserve(out_size);
  size_t i = 0;
  auto length = [&](size_t base) {
    if (base != 15) return base;
    uint8_t b;
    do {
      if (i >= n) bad("corrupt LZ4 payload");
      b = src[i++];
      base += b;
    } while (b == 255);
    return base;
  };
  while (i < n && out.size() < out_size) {
    uint8_t token = src[i++];
    size_t lit = length(token >> 4);
    if (lit > n - i || lit > out_size - out.size()) bad("corrupt LZ4 payload");
    out.append(reinterpret_cast<const char*>(src + i), lit);
    i += lit;
    if (i >= n || out.size() >= out_size) break;
    if (n - i < 2) bad("corrupt LZ4 payload");
    size_t dist = src[i] | src[i + 1] << 8;
    i += 2;
    size_t len = length(token & 15) + 4;
    if (dist == 0 || dist > out.size() || len > out_size - out.size()) bad("corrupt LZ4 payload");
    for (size_t k = 0; k < len; ++k) out.push_back(out[out.size() - dist]);
  }
  if (out.size() != out_size) bad("corrupt LZ4 payload");
  return out;
}

}  // namespace

std::vector<PtxImage> extract_ptx(const void* data, size_t size, int* other) {
  auto* p = static_cast<const uint8_t*>(data);
  std::vector<PtxImage> images;
  if (other) *other = 0;
  if (size && size < 16) bad("truncated container header");
  if (read<uint32_t>(p) != kMagic) bad(format("bad magic 0x%08x", read<uint32_t>(p)));
  // spec (measured): u32 magic, u16 version = 1, u16 header size = 16, u64 bytes after the header.
  uint16_t version = read<uint16_t>(p + 4), header = read<uint16_t>(p + 6);
  uint64_t body = read<uint64_t>(p + 8);
  if (version != 1 || header < 16 || header > 256)
    bad(format("unknown container version %u", version));
  if (size && body > size - header) bad("truncated container");
  const uint8_t* q = p + header;
  const uint8_t* end = q + body;
  while (q < end) {
    if (end - q < 64) bad("truncated entry header");
    uint16_t kind = read<uint16_t>(q);
    uint32_t entry_header = read<uint32_t>(q + 4);
    uint64_t payload = read<uint64_t>(q + 8);
    uint32_t compressed = read<uint32_t>(q + 0x10);
    uint32_t arch = read<uint32_t>(q + 0x1c);
    uint64_t flags = read<uint64_t>(q + 0x28);
    uint64_t plain = read<uint64_t>(q + 0x38);
    uint64_t left = static_cast<uint64_t>(end - q);
    if (entry_header < 64 || entry_header > left || payload > left - entry_header)
      bad("truncated entry");
    if (kind == 1) {
      PtxImage image;
      image.arch = static_cast<int>(arch);
      const uint8_t* src = q + entry_header;
      if (flags & (kFlagZstd | kFlagLz4)) {
        if (compressed > payload || plain == 0 || plain > kMaxImage)
          bad("implausible compressed size");
        image.text = (flags & kFlagZstd) ? zstd_decompress(src, compressed, plain)
                                         : lz4_decompress(src, compressed, plain);
      } else {
        image.text.assign(reinterpret_cast<const char*>(src), payload);
      }
      size_t nul = image.text.find('\0');
      if (nul != std::string::npos) image.text.resize(nul);
      images.push_back(std::move(image));
    } else if (other) {
      ++*other;
    }
    q += entry_header + payload;
  }
  return images;
}

}  // namespace ptxsim
