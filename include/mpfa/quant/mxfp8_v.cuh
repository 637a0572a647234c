// SPDX-License-Identifier: Apache-2.0
// V of the mxfp8 format: blocks of 32 tokens, one ue8m0 scale per channel. A warp owns a block of
// one head. Paged: who owns what, and how v_tail changes, is decided here from the slots alone.
#pragma once

#include "mpfa/quant/io.cuh"

namespace mpfa::quant {

constexpr int kVBlock = 32;  // tokens
constexpr uint32_t kFullWarp = 0xffffffffu;
constexpr int kLaneChannels = 8;   // 16 bytes of a row for each lane
constexpr int kPassChannels = 64;  // channels of a block in registers at a time

// bf16 bits of a pair of input values.
template <class In>
__device__ __forceinline__ uint32_t bf16_pair(uint32_t pair);
template <>
__device__ __forceinline__ uint32_t bf16_pair<Bf16>(uint32_t pair) {
  return pair;
}
template <>
__device__ __forceinline__ uint32_t bf16_pair<Fp16>(uint32_t pair) {
  float low, high;
  Fp16::unpack(pair, low, high);
  return bf16_bits(low) | bf16_bits(high) << 16;
}

// Eight 16-bit values at p as four pairs. Not through the read-only path: v_tail is written in the
// same launch.
__device__ __forceinline__ void load_row8(const uint8_t* p, bool vector, uint32_t* w) {
  if (vector) {
    const uint4 a = *reinterpret_cast<const uint4*>(p);
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
  } else {
    const uint16_t* e = reinterpret_cast<const uint16_t*>(p);
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = e[2 * i] | static_cast<uint32_t>(e[2 * i + 1]) << 16;
  }
}

// Where a block comes from and goes to; row r is tail row r below `tail_rows`, else token
// tokens[r - tail_rows] (negative: the row is empty).
struct VBlock {
  const uint8_t* tail = nullptr;
  int64_t tail_stride = 0;
  bool tail_vector = false;
  int tail_rows = 0;
  const int32_t* tokens = nullptr;  // in shared memory
  int num_rows = 0;                 // rows with data; the rest counts as zero
  int write_rows = kVBlock;         // rows of codes to store
  uint8_t* codes = nullptr;
  int64_t codes_stride = 0;
  bool codes_vector = false;
  uint8_t* scale = nullptr;
  bool scale_vector = false;
};

template <class In>
__device__ __forceinline__ void quantize_v_block(const Tokens& v, int head, int dim,
                                                 const VBlock& b) {
  const int lane = threadIdx.x & 31;
  constexpr int lanes_per_row = kPassChannels / kLaneChannels;
  constexpr int groups = 32 / lanes_per_row;  // rows that a warp loads at a time
  const int sub = lane / lanes_per_row;
  constexpr int kSteps = kVBlock / groups;

  for (int base = 0; base < dim; base += kPassChannels) {
    const int channel = base + (lane % lanes_per_row) * kLaneChannels;
    uint32_t data[kSteps][4];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = i * groups + sub;
      data[i][0] = data[i][1] = data[i][2] = data[i][3] = 0;
      if (row < b.tail_rows) {
        load_row8(b.tail + row * b.tail_stride + channel * 2, b.tail_vector, data[i]);
      } else if (row < b.num_rows) {
        const int token = b.tokens[row - b.tail_rows];
        if (token >= 0) {
          load_row8(v.data + static_cast<int64_t>(token) * v.token +
                        static_cast<int64_t>(head) * v.head + channel * 2,
                    v.vector, data[i]);
#pragma unroll
          for (int j = 0; j < 4; ++j) data[i][j] = bf16_pair<In>(data[i][j]);
        }
      }
    }
    // Bits of a magnitude order as integers: two channels at a time.
    uint32_t most[4] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) most[j] = __vmaxu2(most[j], data[i][j] & 0x7fff7fffu);
    }
    for (int m = lanes_per_row; m < 32; m *= 2) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        most[j] = __vmaxu2(most[j], __shfl_xor_sync(kFullWarp, most[j], m));
      }
    }
    float amax[kLaneChannels];
#pragma unroll
    for (int j = 0; j < 4; ++j) Bf16::unpack(most[j], amax[2 * j], amax[2 * j + 1]);
    uint32_t scale[2] = {};
    float factor[kLaneChannels];
#pragma unroll
    for (int j = 0; j < kLaneChannels; ++j) {
      const uint32_t byte = ue8m0_byte(amax[j]);
      scale[j / 4] |= byte << (8 * (j % 4));
      factor[j] = ue8m0_inverse(byte);
    }
    if (sub == 0) store_words<8>(b.scale + channel, scale, b.scale_vector);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = i * groups + sub;
      if (row >= b.write_rows) continue;
      float x[kLaneChannels];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        Bf16::unpack(data[i][j], x[2 * j], x[2 * j + 1]);
        x[2 * j] = mul_rn(x[2 * j], factor[2 * j]);
        x[2 * j + 1] = mul_rn(x[2 * j + 1], factor[2 * j + 1]);
      }
      const uint32_t words[2] = {e4m3_x4(x[0], x[1], x[2], x[3]), e4m3_x4(x[4], x[5], x[6], x[7])};
      store_words<8>(b.codes + row * b.codes_stride + channel, words, b.codes_vector);
    }
  }
}

// ---- paged append ----
//
// Tokens of a page come in order with consecutive slots, not necessarily side by side in the call.
// - A token at block offset 0, or the first one of its page in this call, owns its block: its warp
//   quantises all 32 rows, the ones before it from v_tail.
// - The first token of a page also writes v_tail of that page, after its block has read it; no
//   other warp touches that v_tail. Row r ends with the last token of the call whose offset is r
//   modulo 32.

// Is `slot` among tokens [0, end)? Called by the whole warp.
__device__ __forceinline__ bool slot_before(const TokenMap& map, int end, int64_t slot) {
  constexpr int kUnroll = 8;
  const int lane = threadIdx.x & 31;
  for (int base = 0; base < end; base += 32 * kUnroll) {
    bool found = false;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int token = base + i * 32 + lane;
      found = found || (token < end && load_slot(map, token) == slot);
    }
    if (__any_sync(kFullWarp, found)) return true;
  }
  return false;
}

// tokens[i] = token whose slot is slot + i, or -1, for 0 <= i < count. `first` holds `slot`.
__device__ __forceinline__ void collect_tokens(const TokenMap& map, int first, int64_t slot,
                                               int count, int32_t* tokens) {
  const int lane = threadIdx.x & 31;
  int run = 0;  // slots that follow one another from `first` on
  for (int base = 0; base < count; base += 32) {
    const int i = base + lane;
    const int token = first + i;
    const bool next =
        run == base && i < count && token < map.num_tokens && load_slot(map, token) == slot + i;
    const uint32_t hits = __ballot_sync(kFullWarp, next);
    const int taken = hits == kFullWarp ? 32 : __ffs(~hits) - 1;
    if (i < count) tokens[i] = lane < taken ? token : -1;
    run += taken;
  }
  __syncwarp();
  if (run < count) {
    constexpr int kUnroll = 8;
    for (int base = first + run; base < map.num_tokens; base += 32 * kUnroll) {
      int64_t distance[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int token = base + i * 32 + lane;
        distance[i] = token < map.num_tokens ? load_slot(map, token) - slot : -1;
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (distance[i] >= run && distance[i] < count) tokens[distance[i]] = base + i * 32 + lane;
      }
    }
    __syncwarp();
  }
}

template <class In>
__device__ __forceinline__ void write_v_tail(const Mxfp8Params& p, int head, int dim, int64_t page,
                                             int offset, int last, const int32_t* tokens) {
  const int lane = threadIdx.x & 31;
  const int lanes_per_row = dim / kLaneChannels;
  uint8_t* tail = p.v_tail.data + page * p.v_tail.page + static_cast<int64_t>(head) * p.v_tail.head;
  const int begin = last >= kVBlock ? last - (kVBlock - 1) : 0;
  for (int i = begin + lane / lanes_per_row; i <= last; i += 32 / lanes_per_row) {
    const int token = tokens[i];
    if (token < 0) continue;
    const int channel = lane % lanes_per_row * kLaneChannels;
    uint32_t w[4];
    load_row8(p.v.data + static_cast<int64_t>(token) * p.v.token +
                  static_cast<int64_t>(head) * p.v.head + channel * 2,
              p.v.vector, w);
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = bf16_pair<In>(w[j]);
    store_words<16>(
        tail + static_cast<int64_t>((offset + i) % kVBlock) * p.v_tail.row + channel * 2, w,
        p.v_tail.vector);
  }
}

// The block that `token` owns, if it owns one. Called by the whole warp with equal arguments.
template <class In>
__device__ __forceinline__ void append_v_block(const Mxfp8Params& p, int head, int dim, int token,
                                               int64_t slot, bool follows, int32_t* tokens) {
  const int page_size = 1 << p.map.page_shift;
  const int64_t page = slot >> p.map.page_shift;
  const int offset = static_cast<int>(slot & (page_size - 1));
  const int row = offset % kVBlock;
  const bool page_first = offset == 0 || (!follows && !slot_before(p.map, token, slot - 1));
  if (row != 0 && !page_first) return;

  const int count = page_first ? page_size - offset : kVBlock;
  __syncwarp();
  collect_tokens(p.map, token, slot, count, tokens);
  int last = 0;  // index of the last token of this page (this block) in the call
  for (int i = threadIdx.x & 31; i < count; i += 32) last = tokens[i] >= 0 ? i : last;
  last = __reduce_max_sync(kFullWarp, last);

  VBlock b;
  b.tail = p.v_tail.data + page * p.v_tail.page + static_cast<int64_t>(head) * p.v_tail.head;
  b.tail_stride = p.v_tail.row;
  b.tail_vector = p.v_tail.vector;
  b.tail_rows = row;
  b.tokens = tokens;
  b.num_rows = row + last + 1 < kVBlock ? row + last + 1 : kVBlock;
  b.codes = p.v_out.data + page * p.v_out.page + static_cast<int64_t>(head) * p.v_out.head +
            static_cast<int64_t>(offset - row) * p.v_out.row;
  b.codes_stride = p.v_out.row;
  b.codes_vector = p.v_out.vector;
  b.scale = p.v_scale.data + page * p.v_scale.page + static_cast<int64_t>(head) * p.v_scale.head +
            static_cast<int64_t>(offset / kVBlock) * p.v_scale.row;
  b.scale_vector = p.v_scale.vector;
  quantize_v_block<In>(p.v, head, dim, b);
  if (page_first) {
    __syncwarp();
    write_v_tail<In>(p, head, dim, page, offset, last, tokens);
  }
}

template <class In>
__device__ __forceinline__ void append_v(const Mxfp8Params& p, int64_t job, int32_t* tokens) {
  const int lane = threadIdx.x & 31;
  const int dim = kBlock << p.block_shift;
  const int head = static_cast<int>(job % p.num_kv_heads);
  const int first = static_cast<int>(job / p.num_kv_heads) * p.tokens_per_warp;
  const int token = first + lane;
  int64_t slot = -1;
  bool follows = false;
  if (lane < p.tokens_per_warp && token < p.map.num_tokens) {
    slot = load_slot(p.map, token);
    if (is_skipped(p.map, slot)) slot = -1;
    follows = slot > 0 && token > 0 && load_slot(p.map, token - 1) == slot - 1;
  }
  uint32_t candidates = __ballot_sync(kFullWarp, slot >= 0 && (slot % kVBlock == 0 || !follows));
  while (candidates != 0) {
    const int source = __ffs(candidates) - 1;
    candidates &= candidates - 1;
    append_v_block<In>(p, head, dim, first + source, __shfl_sync(kFullWarp, slot, source),
                       __shfl_sync(kFullWarp, follows, source), tokens);
  }
}

// ---- ragged ----

template <class In>
__device__ __forceinline__ void quantize_v_ragged(const Mxfp8Params& p, int64_t job,
                                                  int32_t* tokens) {
  const int lane = threadIdx.x & 31;
  const int head = static_cast<int>(job % p.num_kv_heads);
  const int row = static_cast<int>(job / p.num_kv_heads);
  if (row >= __ldg(p.v_row_starts + p.num_requests)) return;
  const int request = find_request(p.v_row_starts, p.num_requests, row);
  const int begin = __ldg(p.v_indptr + request) + (row - __ldg(p.v_row_starts + request)) * kVBlock;
  const int left = __ldg(p.v_indptr + request + 1) - begin;
  tokens[lane] = begin + lane;
  __syncwarp();
  VBlock b;
  b.tokens = tokens;
  b.num_rows = b.write_rows = left < kVBlock ? left : kVBlock;
  b.codes = p.v_out.data + static_cast<int64_t>(head) * p.v_out.head +
            static_cast<int64_t>(begin) * p.v_out.row;
  b.codes_stride = p.v_out.row;
  b.codes_vector = p.v_out.vector;
  b.scale = p.v_scale.data + static_cast<int64_t>(head) * p.v_scale.head +
            static_cast<int64_t>(row) * p.v_scale.row;
  b.scale_vector = p.v_scale.vector;
  quantize_v_block<In>(p.v, head, kBlock << p.block_shift, b);
}

}  // namespace mpfa::quant
