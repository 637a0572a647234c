// SPDX-License-Identifier: Apache-2.0
// Tensor maps (cuTensorMapEncodeTiled) and the address lists of cp{.reduce}.async.bulk.tensor in
// tile, gather4 and scatter4 mode (PTX ISA 5.5, 9.7.9.25).
#pragma once

#include <cstdint>
#include <vector>

#include "types.h"

namespace ptxsim::sem {

// Values of CUtensorMapDataType / PTX tensormap.replace .elemtype.
enum class TmaType : uint8_t {
  kU8 = 0,
  kU16,
  kU32,
  kS32,
  kU64,
  kS64,
  kF16,
  kF32,
  kF64,
  kBf16,
  kF32Ftz,
  kTf32,
  kTf32Ftz,
  kU4x16,     // 16U4_ALIGN8B: packed nibbles
  kU4x16P64,  // 16U4_ALIGN16B: 8 B of nibbles + 8 B pad per 16 elements in shared memory
  kU6x16P32,  // 16U6_ALIGN16B: 12 B + 4 B pad; stores drop the 2 top bits of 8-bit containers
};

// Values of CUtensorMapSwizzle.
enum class TmaSwizzle : uint8_t {
  kNone = 0,
  k32B,
  k64B,
  k128B,
  k128BAtom32B,
  k128BAtom32BFlip8B,
  k128BAtom64B,
};

struct TensorMap {
  TmaType type = TmaType::kU8;
  int rank = 0;
  uint64_t address = 0;
  uint64_t dim[5] = {};     // elements
  uint64_t stride[5] = {};  // bytes; stride[0] is unused (dimension 0 is dense)
  uint32_t box[5] = {};     // elements
  uint32_t estride[5] = {};
  uint8_t interleave = 0;
  TmaSwizzle swizzle = TmaSwizzle::kNone;
  uint8_t l2_promotion = 0;
  bool oob_nan = false;
};

int tma_elem_bits(TmaType t);

// Checks every rule the driver documents for cuTensorMapEncodeTiled; names the argument and value.
Error check_tensor_map(const TensorMap& m);

// global_stride has rank - 1 entries (bytes), as in the driver call. Enumerators are passed as the
// integers the driver receives. `out` needs 128 bytes; its alignment (64) is checked.
Error encode_tensor_map(void* out, int type, int rank, uint64_t address, const uint64_t* global_dim,
                        const uint64_t* global_stride, const uint32_t* box_dim,
                        const uint32_t* element_stride, int interleave, int swizzle,
                        int l2_promotion, int oob_fill);
void pack_tensor_map(const TensorMap& m, void* out);
// Rejects 128 bytes that pack_tensor_map did not write (magic value, field ranges,
// check_tensor_map).
Error decode_tensor_map(const void* in, TensorMap* m);

// tensormap.replace: field names as in PTX; `index` is the dimension of the array fields.
enum class TmaField : uint8_t {
  kGlobalAddress,
  kRank,  // PTX passes rank - 1
  kBoxDim,
  kGlobalDim,
  kGlobalStride,
  kElementStride,
  kElemType,
  kInterleave,
  kSwizzleMode,       // PTX numbering: 0 none, 1 32B, 2 64B, 3 128B, 4 96B
  kSwizzleAtomicity,  // 0 16B, 1 32B, 2 32B + 8B flip, 3 64B
  kFillMode,
};
Error replace_tensor_map_field(void* map, TmaField field, int index, uint64_t value);

// XOR of a shared-memory byte address (absolute bits of the CTA's shared window).
uint32_t tma_swizzle(TmaSwizzle s, uint32_t smem_address);

// One contiguous piece of a tile: `bytes` bytes at global address `global` (offset already added to
// the map's address) and shared address `smem`. Out-of-bounds pieces have in_bounds = false;
// `global` is then meaningless: loads write the fill value, stores skip them.
struct TmaRun {
  uint64_t global = 0;
  uint32_t smem = 0;
  uint32_t bytes = 0;   // bytes in shared memory
  uint32_t gbytes = 0;  // bytes in global memory (differs from `bytes` for 6-bit stores only)
  bool in_bounds = true;
};

enum class TmaDir : uint8_t { kLoad, kStore, kReduce };
enum class TmaReduceOp : uint8_t { kAdd, kMin, kMax, kInc, kDec, kAnd, kOr, kXor };

struct TmaTile {
  std::vector<TmaRun> runs;
  uint32_t tx_bytes = 0;    // what complete_tx adds: payload incl. out-of-bounds, excl. padding
  uint32_t smem_bytes = 0;  // footprint in shared memory incl. padding
};

// coords: rank entries, dimension 0 first, may be negative for loads. smem: absolute shared window
// address of the destination/source, 128-byte aligned; the box starts on 16 bytes of its row. Runs
// are in shared-memory row order and never overlap. Checks alignment, the direction rules of packed
// types and negative store coordinates.
Error tma_tile(const TensorMap& m, TmaDir dir, const int32_t* coords, uint32_t smem, TmaTile* out);
// tile::gather4 / tile::scatter4: coords = {column, row0, row1, row2, row3}; the map is 2-D, box[1]
// = 1.
Error tma_gather4(const TensorMap& m, TmaDir dir, const int32_t coords[5], uint32_t smem,
                  TmaTile* out);

// im2col is not modelled: tma_tile never sees such a map because only tiled maps can be encoded.

// 16-byte pattern of the out-of-bounds fill: zeros, or 0x7ff7 repeated for the NaN mode.
void tma_fill_pattern(const TensorMap& m, uint8_t pattern[16]);

// Byte shuffles of one run. Loads: dst is shared memory. Stores of kU6x16P32 pack 16 containers ->
// 12 B.
void tma_copy_load(const TensorMap& m, const TmaRun& run, const uint8_t* global, uint8_t* smem);
void tma_copy_store(const TensorMap& m, const TmaRun& run, const uint8_t* smem, uint8_t* global);

// cp.reduce: which (op, type) pairs exist, and dst = dst op src over `bytes` bytes of elements.
Error check_tma_reduce(TmaType type, TmaReduceOp op);
void tma_reduce(TmaType type, TmaReduceOp op, const uint8_t* src, uint8_t* dst, uint32_t bytes);

}  // namespace ptxsim::sem
