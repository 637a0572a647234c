// SPDX-License-Identifier: Apache-2.0
// Shapes and shared memory of the SM90 decode kernel.
#pragma once

#include "mpfa/core/attention.h"
#include "mpfa/core/mask.cuh"
#include "mpfa/core/ring.cuh"

namespace mpfa::sm90::decode {

constexpr int kBlock = 128;  // keys of a stage
constexpr int kSlice = 16;   // keys of a warp's step = rows of the score MMA
constexpr int kSlices = kBlock / kSlice;
constexpr int kMaxChannels = 16;
constexpr uint32_t kFullWarp = 0xffffffffu;

// Codes of K become e4m3 bytes whose exponent is not rebased: K / 64.
constexpr int kKeyShift = 6;
// P = 2^(kProbBias + lambda (S - m)): 2^7 for a key that equals m, at most 2^15 before m moves.
constexpr float kProbBias = 7.0f;
constexpr float kProbLimit = 15.0f;

constexpr uint32_t align_up(uint32_t n, uint32_t to) { return (n + to - 1) / to * to; }

// Tiles: MMA column tiles of 8 (query token, head) pairs that a warp takes at once. A tile of the
// plan with more columns is walked several times.
template <int D, int Tiles>
struct Config {
  static_assert(D == 64 || D == 128, "head dimensions of this kernel");
  static_assert(Tiles == 1 || Tiles == 2 || Tiles == 4, "column tiles of this kernel");
  static constexpr int kHeadDim = D;
  static constexpr int kTiles = Tiles;
  static constexpr int kColumns = 8 * Tiles;
  // Consumers; two more warps load. Slices w, w + kWarps, ... of a block are warp w's.
  static constexpr int kWarps = Tiles == 1 ? 8 : 4;
  static constexpr int kConsumers = 32 * kWarps;
  static constexpr int kThreads = kConsumers + 64;
  // The registers of 32 columns leave room for one.
  static constexpr int kCtasPerSm = Tiles == 4 ? 1 : 2;
  static constexpr int kStages = 3;
  static constexpr bool kQueryInRegisters = Tiles <= 2;
  // Columns whose O the warps add up at once.
  static constexpr int kMergeColumns = Tiles == 1 ? 4 : 8;

  static constexpr int kSteps = D / 16;       // k steps of the score MMA = row tiles of the output
  static constexpr int kWords = D / 32;       // 32-bit words of K that a lane takes of a row
  static constexpr int kLaneDims = D / 8;     // channels of V that a lane takes of a row
  static constexpr int kLaneBlocks = D / 64;  // scales of K that a lane takes of a row

  // A row in a stage. V and K are swizzled by TMA over a row's own bytes.
  static constexpr uint32_t kRowK = D / 2, kRowV = D, kRowScale = D / 16;
  static constexpr uint32_t kBytesV = kBlock * kRowV;
  static constexpr uint32_t kBytesK = kBlock * kRowK;
  static constexpr uint32_t kBytesScale = kBlock * kRowScale;
  // Delta bf16 [heads][128], then channels bf16 [128][c].
  MPFA_HOST_DEVICE static constexpr uint32_t delta_bytes(int heads) { return heads * kBlock * 2; }
  MPFA_HOST_DEVICE static constexpr uint32_t side_bytes(int heads, int channels) {
    return delta_bytes(heads) + kBlock * 2 * channels;
  }

  // Byte of element bytes [at, ...) of a row of `kRow` bytes under TMA's swizzle of that span.
  template <uint32_t kRow>
  MPFA_HOST_DEVICE static constexpr uint32_t swizzled(uint32_t row, uint32_t at) {
    constexpr uint32_t kPieces = kRow / 16;
    return row * kRow + (at ^ ((row * kRow / 128 % kPieces) << 4));
  }
};

// Passes that the load warps may be ahead of the consumers.
constexpr int kTileSlots = 4;

// Barriers, one 8-byte word each.
template <class C>
struct Barriers {
  static constexpr uint32_t kFull = 0;  // per stage; bytes of K and V, and cp.async of 64 lanes
  static constexpr uint32_t kEmpty = C::kStages;                  // the consumer warps
  static constexpr uint32_t kTileFull = 2 * C::kStages;           // one thread wrote the tile
  static constexpr uint32_t kTileEmpty = kTileFull + kTileSlots;  // the consumer warps
  static constexpr uint32_t kCount = kTileEmpty + kTileSlots;
  static constexpr uint32_t kFullArrivals = 2 * (1 + 32);
};

// A tensor of the cache as KvOperand, with strides that one 32-bit multiplication takes.
struct CacheOperand {
  const uint8_t* data = nullptr;
  int64_t head = 0;
  uint32_t page = 0;
  uint32_t row = 0;
};

enum class QueryType : int32_t { kQuantized = 0, kBf16 = 1, kFp16 = 2 };
// How k_scale lies: atoms of 128 rows x 64 channels, rows behind each other, rows apart.
enum class ScaleLayout : int32_t { kAtoms = 0, kDense = 1, kStrided = 2 };

// A part of the plan's metadata.
struct PlanRange {
  const void* data = nullptr;
  int32_t bytes = 0;
};
constexpr int kPlanRanges = 5;

struct Params {
  AttentionParams a;
  TensorMap map_k, map_v;  // boxes of one page
  CacheOperand k_scale, delta, channels;
  QueryType query_type = QueryType::kQuantized;
  int32_t query_vectors = 0;  // rows of q are aligned to 16 bytes
  // Of a query that is not quantised; strides in elements, 0 between requests when static.
  const float* q_mean = nullptr;  // [requests, query heads, D] or null
  const float* k_mean = nullptr;  // [requests, KV heads, D]
  int64_t q_mean_request = 0, q_mean_head = 0;
  int64_t k_mean_request = 0, k_mean_head = 0;
  const int32_t* channel_index = nullptr;  // [KV heads, channels]
  PlanRange plan[kPlanRanges];             // what the first loads read
  int32_t page_shift = 0;                  // log2 page_size
  ScaleLayout scale_layout = ScaleLayout::kDense;
  int32_t delta_heads = 0;  // heads of a stage's Delta; 0 = no Delta
  uint32_t side_bytes = 0;  // Delta and channels of a stage
};

}  // namespace mpfa::sm90::decode
