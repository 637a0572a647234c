// SPDX-License-Identifier: Apache-2.0
// Shapes, shared memory and Tensor Memory of the SM100 decode kernel.
#pragma once

#include "mpfa/core/attention.h"
#include "mpfa/core/mask.cuh"
#include "mpfa/core/ring.cuh"
#include "mpfa/ptx/umma_desc.cuh"

namespace mpfa::sm100::decode {

constexpr int kBlock = 128;       // keys per step = rows of the score MMA
constexpr int kMaxColumns = 64;   // (query token, head) pairs of a tile
constexpr int kColumnStep = 16;   // the PV MMA needs N % 16 == 0 with M = 128
constexpr int kMaxChannels = 16;  // compensation channels
constexpr int kMaxPieces = 8;     // pages of a block; pages have at least 16 tokens

// Warps: 0..3 softmax (lane = key, then lane = channel), 4 loads, 5 issues the tensor instructions,
// 6 and 7 arrange compensation channels as an MMA operand.
constexpr int kSoftmaxWarps = 4;
constexpr int kSoftmaxThreads = 32 * kSoftmaxWarps;
constexpr int kLoadWarp = 4;
constexpr int kMmaWarp = 5;
constexpr int kChannelWarp = 6;
constexpr int kChannelThreads = 64;
constexpr int kThreads = 256;
constexpr int kCtasPerSm = 2;

// P is stored as e4m3(448 p); the row sum is not scaled.
constexpr float kScaleP = 448.0f;

// Tensor Memory columns. Two score buffers: S(j+1) is computed while the softmax works on S(j).
constexpr uint32_t kTmemScores = 0;
constexpr uint32_t kTmemOut = 2 * kMaxColumns;
constexpr uint32_t kTmemScaleK = kTmemOut + kMaxColumns;  // two buffers of 8
constexpr uint32_t kTmemScaleQ = kTmemScaleK + 16;
constexpr uint32_t kTmemColumns = 256;
static_assert(kTmemScaleQ + 8 <= kTmemColumns, "Tensor Memory plan");
static_assert(kTmemColumns * kCtasPerSm <= 512, "Tensor Memory of all CTAs of an SM");

constexpr uint32_t align_up(uint32_t n, uint32_t to) { return (n + to - 1) / to * to; }

template <int D>
struct Config {
  static_assert(D == 64 || D == 128, "head dimensions of this kernel");
  static constexpr int kStages = D == 128 ? 3 : 5;
  static constexpr uint32_t kRowQK = D / 2;  // bytes of a key or query row
  static constexpr uint32_t kRowV = D;
  static constexpr ptx::Swizzle kSwizzleQK = D == 128 ? ptx::Swizzle::k64B : ptx::Swizzle::k32B;
  static constexpr ptx::Swizzle kSwizzleV = D == 128 ? ptx::Swizzle::k128B : ptx::Swizzle::k64B;
  static constexpr int kAtoms = D / 64;  // scale atoms, and K steps of the score MMA
  static constexpr uint32_t kAtomBytes = 512;
  static constexpr uint32_t kBytesK = kBlock * kRowQK;
  static constexpr uint32_t kBytesScale = kAtoms * kAtomBytes;
  static constexpr uint32_t kBytesV = kBlock * kRowV;
  static constexpr uint32_t kBytesP = kMaxColumns * kBlock;
  static constexpr uint32_t kBytesQ = kMaxColumns * kRowQK;
};

// Statistics of the softmax and per-column tables; only the softmax warps touch them.
struct SoftmaxState {
  float peak[2][kColumnStep][kSoftmaxWarps];  // by parity of the pass: maximum over a warp's keys
  float running[kSoftmaxWarps][kMaxColumns];  // m; the warps hold equal values
  float total[kSoftmaxWarps][kMaxColumns];    // l over the keys of one warp
  float divisor[kMaxColumns];                 // of the output: 448 l
  float keep[kMaxColumns];                    // and its factor under a sink
  float row_term[kMaxColumns];
  KeyRange keys[kMaxColumns];
  int32_t head[kMaxColumns];  // inside the head group
};

// Barriers, one 8-byte word each. "full" ends with data landed, "empty" with the last reader done.
enum Barrier : uint32_t {
  kQueryFull = 0,  // 128 softmax threads wrote Q, its scales and its channels
  kOutFull,        // commit: PV of a block is complete
  kProbsFull,      // 128 softmax threads: P is written, O rescaled, S read
  kScoresFull,     // 2 x commit
  kKeysFull = kScoresFull + 2,
};

template <int D>
struct Barriers {
  static constexpr uint32_t kStages = Config<D>::kStages;
  static constexpr uint32_t kKeysEmpty = kKeysFull + kStages;        // 1 commit + 4 softmax warps
  static constexpr uint32_t kValuesFull = kKeysEmpty + kStages;      // 1 + bytes
  static constexpr uint32_t kValuesEmpty = kValuesFull + kStages;    // commit
  static constexpr uint32_t kChannelsFull = kValuesEmpty + kStages;  // 64 channel threads
  static constexpr uint32_t kCount = kChannelsFull + kStages;
};

// Byte offsets in dynamic shared memory, which starts at a multiple of 1024 bytes (SW128).
// Delta and channels sit at the end: their size depends on the model.
template <int D>
struct Smem {
  using C = Config<D>;
  static constexpr uint32_t kV = 0;
  static constexpr uint32_t kP = kV + C::kStages * C::kBytesV;
  static constexpr uint32_t kK = kP + C::kBytesP;
  static constexpr uint32_t kQ = kK + C::kStages * C::kBytesK;
  static constexpr uint32_t kScaleK = kQ + C::kBytesQ;
  static constexpr uint32_t kScaleQ = kScaleK + C::kStages * C::kBytesScale;
  static constexpr uint32_t kState = kScaleQ + C::kBytesScale;
  static constexpr uint32_t kBarriers = kState + align_up(sizeof(SoftmaxState), 16);
  static constexpr uint32_t kTmemAddress = kBarriers + 8 * Barriers<D>::kCount;
  static constexpr uint32_t kComp = align_up(kTmemAddress + 4, 128);
  static_assert(kP % 1024 == 0 && kK % 1024 == 0 && kQ % 512 == 0 && kScaleK % 128 == 0,
                "operands are aligned to their swizzle pattern");

  // Channels of Q bf16 [columns][16] as an operand, then stages of Delta bf16 [heads][128] and of
  // the channels of K: bf16 [128][c] as in the page, then in place [128][16] as an operand.
  MPFA_HOST_DEVICE static constexpr uint32_t comp_bytes(int channels) {
    return channels > 0 ? kMaxColumns * kMaxChannels * 2 : 0;
  }
  MPFA_HOST_DEVICE static constexpr uint32_t delta_bytes(int heads) { return heads * kBlock * 2; }
  MPFA_HOST_DEVICE static constexpr uint32_t channel_bytes(int channels) {
    return channels > 0 ? kBlock * kMaxChannels * 2 : 0;
  }
  // `heads`: query heads that share a tile's Delta rows, 0 without Delta.
  static constexpr uint32_t bytes(int heads, int channels) {
    return kComp + comp_bytes(channels) +
           C::kStages * (delta_bytes(heads) + channel_bytes(channels));
  }
};

// 228 KB per SM, of which each CTA costs 1 KB more than it asks for.
constexpr uint32_t kSmemPerCta = 228 * 1024 / kCtasPerSm - 1024;
static_assert(Smem<128>::bytes(8, 0) <= kSmemPerCta, "two CTAs per SM with Delta of 8 heads");
static_assert(Smem<128>::bytes(8, 15) <= kSmemPerCta, "and with 15 channels");
static_assert(Smem<128>::bytes(0, 16) <= kSmemPerCta, "and with 16 channels alone");
static_assert(Smem<64>::bytes(8, 15) <= kSmemPerCta, "head_dim 64");
static_assert(Smem<128>::bytes(kMaxColumns, kMaxChannels) <= 227 * 1024, "the largest launch");

// A bf16 operand of 16 slots: K-major without swizzle, core matrices of 8 rows x 16 bytes, the two
// halves of a group of 8 rows behind each other.
constexpr uint32_t kSlotsLbo = 128;
constexpr uint32_t kSlotsSbo = 256;
MPFA_HOST_DEVICE constexpr uint32_t slots_offset(uint32_t row, uint32_t half) {
  return row / 8 * kSlotsSbo + half * kSlotsLbo + row % 8 * 16;
}

struct Params {
  AttentionParams a;
  TensorMap map_k, map_v;   // boxes of one page
  int32_t delta_heads = 0;  // heads of a Delta stage; 0 = no Delta
};

}  // namespace mpfa::sm100::decode
