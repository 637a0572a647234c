// SPDX-License-Identifier: Apache-2.0
// What a launcher hands to an attention kernel: operands as addresses with byte strides, the plan,
// and the scalars. csrc/attention_args.h fills it from checked tensors; kernels may take it whole
// or copy what they need into parameters of their own.
#pragma once

#include <cstdint>

#include "mpfa/core/work.cuh"

namespace mpfa {

// A tensor [token, query head, last]; the last dimension is contiguous.
struct TokenOperand {
  const uint8_t* data = nullptr;  // null = absent
  int64_t token = 0;
  int64_t head = 0;

  MPFA_HOST_DEVICE const uint8_t* row(int64_t t, int64_t h) const {
    return data + t * token + h * head;
  }
};

// A tensor of the cache or of ragged K/V, addressed alike:
//   tensor        paged: page, KV head, row            ragged: page 0, KV head, row
//   k, v          token in the page                    token of the batch
//   k_scale       token in the page; with 128-token    token of the batch
//                 qk4pv8 pages the 64-channel atom
//   v_scale       32-token block of the page           row of plan.v_block_indptr
//   aux_delta     query head inside the KV head        the same (last dimension: tokens)
//   aux_channels  token in the page                    token of the batch
struct KvOperand {
  const uint8_t* data = nullptr;  // null = absent
  int64_t page = 0;
  int64_t head = 0;
  int64_t row = 0;

  MPFA_HOST_DEVICE const uint8_t* at(int64_t p, int64_t h, int64_t r) const {
    return data + p * page + h * head + r * row;
  }
};

// Bytes of a CUtensorMap; include/ does not depend on the driver's headers. Of K or V: dimensions
// (byte, row, KV head, page); ragged operands are one page.
struct alignas(64) TensorMap {
  uint8_t bytes[128];
};

enum class OutType : int32_t { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

struct AttentionParams {
  PlanView plan;
  TokenOperand q;         // e4m3 [D] or two e2m1 per byte [D/2]
  TokenOperand q_scale;   // ue8m0 [D/32] or e4m3 [D/16]
  TokenOperand a_comp;    // bf16 [comp_slots]
  TokenOperand row_term;  // fp32, one value
  KvOperand k, k_scale, v, v_scale, aux_delta, aux_channels;
  float* partial_o = nullptr;           // [rows, num_qo_heads, D], dense
  float* partial_lse = nullptr;         // [rows, num_qo_heads], dense
  uint8_t* out = nullptr;               // [nnz_qo, num_qo_heads, D] of out_type
  int64_t out_token = 0, out_head = 0;  // bytes
  float* lse = nullptr;                 // [nnz_qo, num_qo_heads]
  int64_t lse_token = 0, lse_head = 0;  // elements
  const float* sinks = nullptr;         // [num_qo_heads] natural log, or null
  OutType out_type = OutType::kBf16;
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t group_size = 0;   // query heads per KV head
  int32_t page_size = 0;    // tokens; 0 = ragged
  int32_t comp_slots = 0;   // R, width of a_comp; 0 = no compensation
  int32_t channels = 0;     // c, width of aux_channels
  int32_t window_left = 0;  // -1 = no window
  int32_t causal = 0;
  int32_t num_workers = 0;
  float sm_scale = 0.0f;
  float sm_scale_log2 = 0.0f;    // sm_scale * log2(e)
  float logits_soft_cap = 0.0f;  // 0 = none
  float soft_cap_ratio = 0.0f;   // sm_scale / logits_soft_cap
};

}  // namespace mpfa
