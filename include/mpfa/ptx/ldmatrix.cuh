// SPDX-License-Identifier: Apache-2.0
// Matrix fragments from shared memory. PTX ISA, "ldmatrix".
#pragma once

#include <cstdint>

namespace mpfa::ptx {

#if defined(__CUDACC__)

// Four 8 x 16-byte matrices; lanes 8i..8i+7 give the row addresses of matrix i. Register i of lane
// 4g + t holds bytes 4t..4t+3 of row g of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}

// Two 16 x 16-byte matrices, transposed by bytes; lanes 16i..16i+15 give the row addresses of
// matrix i. Lane 4g + t gets rows 4t..4t+3 of column g (register 2i) and of column g + 8 (2i + 1).
// Only sm_120a/f and sm_121a/f (and sm_100a) have it.
__device__ __forceinline__ void ldmatrix_trans_b8_x2(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
