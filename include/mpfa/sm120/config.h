// SPDX-License-Identifier: Apache-2.0
// Tile sizes, shared memory and limits of the SM120 attention kernel, all derived from head_dim.
#pragma once

#include <cstdint>
#include <type_traits>

#include "mpfa/core/attention.h"

namespace mpfa::sm120 {

template <int HeadDim>
struct Config {
  static_assert(HeadDim == 64 || HeadDim == 128,
                "head_dim 256 does not fit: docs/kernels/sm120.md");
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kMmaWarps = 8;
  static constexpr int kRowsPerWarp = 16;                    // one MMA
  static constexpr int kKvBlock = HeadDim == 64 ? 128 : 64;  // keys per stage
  // One producer warp. why a warpgroup for it: a sub-partition has 16384 registers, so nine warps
  // could have only 168 each (three on one sub-partition); setmaxnreg moves whole warpgroups.
  static constexpr int kThreads = (kMmaWarps + 4) * 32;
  static constexpr int kMmaRegisters = 240;
  static constexpr int kProducerRegisters = 24;
  static_assert((2 * kMmaRegisters + kProducerRegisters) * 32 <= 16384, "per sub-partition");

  static constexpr int kScaleBlock = 32;                       // values per ue8m0 scale
  static constexpr int kChannelBlocks = HeadDim / 32;          // k-blocks of Q K^T
  static constexpr int kTokenBlocks = kKvBlock / 32;           // k-blocks of P V
  static constexpr int kScoreTiles = kKvBlock / 8;             // n-tiles of S
  static constexpr int kOutTiles = HeadDim / 8;                // n-tiles of O
  static constexpr int kSwizzleMask = HeadDim == 128 ? 7 : 3;  // 16-byte chunks of a row

  static constexpr int kOperandBytes = kKvBlock * HeadDim;  // of K, and of V
  static constexpr int kScaleBytes = kKvBlock * kChannelBlocks;
  static_assert(kScaleBytes == HeadDim * kTokenBlocks, "K and V have equally many scales");
  static constexpr int kStages = 5;
  using KeyScale = std::conditional_t<kChannelBlocks == 4, uint32_t, uint16_t>;  // of a token
  using ValueScale = std::conditional_t<kTokenBlocks == 4, uint32_t, uint16_t>;  // of a channel
};

// Shared memory: operands first, so that each tile keeps the alignment of the swizzle pattern.
template <class C>
struct SharedMemory {
  uint8_t k[C::kStages][C::kOperandBytes];      // [token][channel], swizzled by TMA
  uint8_t v[C::kStages][C::kOperandBytes];      // [token][channel], swizzled by TMA
  uint8_t k_scale[C::kStages][C::kScaleBytes];  // [token][channel block]
  uint8_t v_scale[C::kStages][C::kScaleBytes];  // [channel][token block]
  uint64_t full[C::kStages];                    // the stage is loaded
  uint64_t empty[C::kStages];                   // all MMA warps have read it
  uint64_t tail;                                // K and V of a stage whose V rows must be cleared
};

// CUDA programming guide, "compute capability 12.x": opt-in maximum per block.
constexpr int kMaxSharedBytes = 99 * 1024;
static_assert(sizeof(SharedMemory<Config<64>>) <= kMaxSharedBytes, "99 KB of shared memory");
static_assert(sizeof(SharedMemory<Config<128>>) <= kMaxSharedBytes, "99 KB of shared memory");

struct Params {
  TensorMap k_map;
  TensorMap v_map;
  AttentionParams attention;
  int32_t page_shift;  // log2 of the page size; not used when ragged
  int32_t page_mask;   // page size - 1; ragged: all ones, everything is page 0
  int32_t num_pages;   // of the cache; ragged: 1
  int32_t box_rows;    // tokens of one copy: min(page size, kKvBlock)
};

// P' = 2^8 at the row's largest key so far, which is an e4m3 value; a block whose own maximum is
// lower is scaled up towards 2^8 (to at most 2^8.5 = 362 < 448) and SFA takes it back.
constexpr int kPExponent = 8;
#if defined(MPFA_SM120_FIXED_P_SCALE)
constexpr bool kFixedScale = true;  // P' = 2^8 P in every block, SFA constant
#else
constexpr bool kFixedScale = false;
#endif

}  // namespace mpfa::sm120
