// SPDX-License-Identifier: Apache-2.0
// Arguments of the quantise kernels. Strides are in bytes; products with them are 64 bits wide, as
// caches exceed 2^31 elements.
#pragma once

#include <cstdint>

namespace mpfa::quant {

// A cache tensor [page, head, row, last] or a ragged one seen as a single page. `vector` says that
// every address a kernel forms is aligned for its widest store.
struct Pages {
  uint8_t* data = nullptr;
  uint32_t page = 0;
  uint32_t head = 0;
  uint32_t row = 0;
  bool vector = false;
};

// bf16/fp16 input [token, head, D], last dimension contiguous.
struct Tokens {
  const uint8_t* data = nullptr;
  uint32_t head = 0;
  uint32_t token = 0;
  bool vector = false;
};

// fp32 means [row, head, D], every head 16-byte aligned; row stride 0 when static.
struct Means {
  const float* data = nullptr;
  int64_t row = 0;  // elements
  int64_t head = 0;
};

// Which slot and which statistics row a token has.
struct TokenMap {
  const void* slots = nullptr;      // int32 or int64 [T]; null: token t goes to row t of page 0
  const int32_t* rows = nullptr;    // [T] statistics row, or null
  const int32_t* indptr = nullptr;  // [num_rows + 1]: the row is the request that holds the token
  int64_t num_slots = 0;            // slots at or above are skipped, like negative ones
  int32_t num_tokens = 0;
  int32_t num_rows = 1;
  int32_t page_shift = 31;  // log2(page_size); ragged tensors are one page
  bool slots_are_64 = false;
};

struct Qk4pv8Params {
  TokenMap map;
  Tokens k, v, q;
  Means q_mean, k_mean;
  const int32_t* channel_index = nullptr;  // [Hkv, channels]
  int64_t channel_stride = 0;
  int32_t channels = 0;
  int32_t num_kv_heads = 0;
  int32_t group_size = 1;
  int32_t kv_blocks = 0;    // KV heads to process: num_kv_heads or 0
  int32_t head_blocks = 0;  // kv_blocks + query heads to process
  int32_t passes = 1;       // groups of kRowThreads/(D/16) tokens that a CTA takes
  bool vector = false;      // every address is aligned for vector loads and stores
  bool has_mean = false;
  bool per_request = false;      // statistics have a row per request
  bool means_in_shared = false;  // the launch has shared memory for the means of a head
  bool scale_atoms = false;      // k_scale.row is then the stride of 64-channel atoms
  Pages k_out, k_scale, v_out, delta, outliers;
  uint32_t delta_group = 0;  // byte stride of the query heads of a KV head
  // QuantizedQuery, contiguous [T, Hq, ...].
  uint8_t* q_out = nullptr;
  uint8_t* q_scale = nullptr;
  uint16_t* a_comp = nullptr;  // [T, Hq, 16]
  float* row_term = nullptr;   // [T, Hq]
};

struct Mxfp8Params {
  TokenMap map;
  Tokens k, v, q;
  int32_t num_kv_heads = 0;
  int32_t num_qo_heads = 0;
  int32_t kv_blocks = 0;
  int32_t head_blocks = 0;
  int32_t block_shift = 0;  // log2(D / 16)
  int32_t row_ctas = 0;     // first CTAs: K and Q rows; the rest: V blocks
  Pages k_out, k_scale, v_out, v_scale, v_tail;
  uint8_t* q_out = nullptr;
  uint8_t* q_scale = nullptr;
  // V, append: a warp takes this many consecutive tokens and the blocks that start in them (1..32).
  int32_t tokens_per_warp = 1;
  // V, ragged: first v_scale row of each request, [num_requests + 1], and the requests' tokens.
  const int32_t* v_row_starts = nullptr;
  const int32_t* v_indptr = nullptr;
  int32_t num_requests = 0;
  int64_t v_jobs = 0;  // warps of V work over all heads
};

constexpr int kCompSlots = 16;  // width of a_comp
constexpr int kThreads = 256;   // of a CTA of quant_mxfp8
#ifndef MPFA_QUANT_THREADS
#define MPFA_QUANT_THREADS 128  // a tuning knob; benchmarks/append.py --variants builds others
#endif
constexpr int kRowThreads = MPFA_QUANT_THREADS;  // of a CTA of quant_qk4pv8
constexpr int kMaxPageSize = 128;

}  // namespace mpfa::quant
