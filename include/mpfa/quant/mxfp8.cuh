// SPDX-License-Identifier: Apache-2.0
// The mxfp8 writer: e4m3 K and Q with a ue8m0 scale per 32 channels, V in blocks of 32 tokens. The
// first CTAs of a launch take K and Q rows (16 channels a thread), the others V blocks (a warp
// each).
#pragma once

#include "mpfa/ptx/pdl.cuh"
#include "mpfa/quant/mxfp8_v.cuh"

namespace mpfa::quant {

constexpr int kWarps = kThreads / 32;

template <class In>
__device__ __forceinline__ void quantize_mxfp8_row(const Mxfp8Params& p) {
  const int block = threadIdx.x & ((1 << p.block_shift) - 1);
  const int rows = kThreads >> p.block_shift;
  const int head_block = blockIdx.x % p.head_blocks;
  const int token = (blockIdx.x / p.head_blocks) * rows + (threadIdx.x >> p.block_shift);
  const bool is_query = head_block >= p.kv_blocks;
  const int head = is_query ? head_block - p.kv_blocks : head_block;
  const Tokens& input = is_query ? p.q : p.k;

  uint32_t packed[8] = {};
  int64_t slot = 0;
  bool live = token < p.map.num_tokens;
  bool skipped = false;
  if (live) {
    const uint8_t* source = input.data + static_cast<int64_t>(token) * input.token +
                            static_cast<int64_t>(head) * input.head + block * (2 * kBlock);
    if (input.vector) {
      load_block<true, true>(source, packed);
    } else {
      load_block<true, false>(source, packed);
    }
    if (!is_query || p.map.slots != nullptr) {
      slot = load_slot(p.map, token);
      skipped = is_skipped(p.map, slot);
    }
    live = is_query || !skipped;
  }
  float x[kBlock];
  unpack_block<In>(packed, x);
  if (is_query && skipped) {  // the query of a skipped token: NaN and infinity count as 0
#pragma unroll
    for (int i = 0; i < kBlock; ++i) x[i] = finite_or_zero(x[i]);
  }
  float amax = amax16(x);
  amax = max_f(amax, __shfl_xor_sync(kFullWarp, amax, 1));
  const uint32_t byte = ue8m0_byte(amax);
  uint32_t words[4];
  encode_e4m3_16(x, ue8m0_inverse(byte), words);
  if (!live) return;
  if (is_query) {
    const int64_t index =
        ((static_cast<int64_t>(token) * p.num_qo_heads + head) << p.block_shift) + block;
    store_words<16, true>(p.q_out + index * kBlock, words);
    if ((block & 1) == 0) p.q_scale[index >> 1] = static_cast<uint8_t>(byte);
    return;
  }
  const bool paged = p.map.slots != nullptr;
  const int64_t page = paged ? slot >> p.map.page_shift : 0;
  const int64_t offset = paged ? slot & ((1 << p.map.page_shift) - 1) : slot;
  uint8_t* out = p.k_out.data + page * p.k_out.page + static_cast<int64_t>(head) * p.k_out.head +
                 offset * p.k_out.row;
  store_words<16>(out + block * kBlock, words, p.k_out.vector);
  if ((block & 1) == 0) {
    p.k_scale.data[page * p.k_scale.page + static_cast<int64_t>(head) * p.k_scale.head +
                   offset * p.k_scale.row + (block >> 1)] = static_cast<uint8_t>(byte);
  }
}

template <class In>
__global__ void __launch_bounds__(kThreads, 3) quant_mxfp8(const __grid_constant__ Mxfp8Params p) {
  __shared__ int32_t tokens[kWarps][kMaxPageSize];
  ptx::grid_dependency_wait();
  if (blockIdx.x < static_cast<uint32_t>(p.row_ctas)) {
    quantize_mxfp8_row<In>(p);
    return;
  }
  const int warp = threadIdx.x / 32;
  const int64_t job = static_cast<int64_t>(blockIdx.x - p.row_ctas) * kWarps + warp;
  if (job >= p.v_jobs) return;
  if (p.v_row_starts != nullptr) {
    quantize_v_ragged<In>(p, job, tokens[warp]);
  } else {
    append_v<In>(p, job, tokens[warp]);
  }
}

// Sets row_ctas and v_jobs; returns the CTAs of the launch. `v_rows` is an upper bound of the
// ragged v_scale rows, 0 for an append.
inline int64_t plan_mxfp8(Mxfp8Params& p, bool has_kv, int64_t v_rows) {
  const int64_t rows = kThreads >> p.block_shift;
  const int64_t row_ctas = (p.map.num_tokens + rows - 1) / rows * p.head_blocks;
  p.row_ctas = static_cast<int32_t>(row_ctas);
  p.v_jobs = 0;
  if (has_kv) {
    if (p.v_row_starts == nullptr) {
      // Few tokens: one a warp, for parallel decode appends. Many: the 32 of a block, so that
      // hardly a warp finds nothing to do.
      const int64_t work = static_cast<int64_t>(p.map.num_tokens) * p.num_kv_heads;
      p.tokens_per_warp = work <= 8192 ? 1 : work <= 65536 ? 8 : 32;
      v_rows = (p.map.num_tokens + p.tokens_per_warp - 1) / p.tokens_per_warp;
    }
    p.v_jobs = v_rows * p.num_kv_heads;
  }
  return row_ctas + (p.v_jobs + kWarps - 1) / kWarps;
}

}  // namespace mpfa::quant
