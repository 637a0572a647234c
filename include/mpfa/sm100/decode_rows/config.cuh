// SPDX-License-Identifier: Apache-2.0
// The paper's decode scheme (section 5.3): query rows replicated over the 128 rows of the score
// MMA, four diagonal 32 x 32 tiles. Kept for comparison with include/mpfa/sm100/decode, whose
// loads, channel warps and shared memory it uses. head_dim 128.
#pragma once

#include "mpfa/sm100/decode/context.cuh"
#include "mpfa/sm100/decode/query.cuh"

namespace mpfa::sm100::decode_rows {

using decode::Config;
using decode::kBlock;
using decode::kSoftmaxThreads;
using decode::kSoftmaxWarps;
using decode::Params;
using decode::Tile;

constexpr int kDim = 128;
using Context = decode::Context<kDim>;
using C = Config<kDim>;
using B = decode::Barriers<kDim>;

// (query token, head) pairs of a tile: lane l of every warp holds pair l % pairs, and warp w the
// keys 32 w .. 32 w + 31 of a block. With four pairs that is the paper's 4 rows x 32 replicas.
constexpr int kMaxRows = 32;

// Tensor Memory columns.
constexpr uint32_t kTmemScores = 0;  // two buffers of 128
constexpr uint32_t kTmemOut = 256;
constexpr uint32_t kTmemProbs = 384;   // e4m3, 4 keys per column; off the diagonal it stays 0
constexpr uint32_t kTmemScaleK = 416;  // two buffers of 8
constexpr uint32_t kTmemScaleQ = 432;
constexpr uint32_t kTmemColumns = 512;

// Shared memory of the swapped kernel with other contents: Q of 128 rows where P^T was, its
// channels where Q was, and the statistics in the area of the state.
constexpr uint32_t kSmemQ = decode::Smem<kDim>::kP;
constexpr uint32_t kSmemChannelsQ = decode::Smem<kDim>::kQ;
static_assert(kBlock * C::kRowQK <= C::kBytesP, "128 query rows");
static_assert(kBlock * decode::kMaxChannels * 2 <= C::kBytesQ, "channels of 128 query rows");

constexpr int kMergeColumns = 16;
struct State {
  float running[kSoftmaxWarps][kMaxRows];
  float total[kSoftmaxWarps][kMaxRows];
  float weight[kSoftmaxWarps][kMaxRows];
  float divisor[kMaxRows];
  float keep[kMaxRows];
};
static_assert(sizeof(State) <= sizeof(decode::SoftmaxState), "area of the state");
// O of the four warps, 16 channels at a time; Q is no longer needed then.
static_assert(kSoftmaxWarps * kMaxRows * kMergeColumns * 4 <= C::kBytesP, "merge buffer");

}  // namespace mpfa::sm100::decode_rows
