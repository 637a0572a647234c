// SPDX-License-Identifier: Apache-2.0
// Fatbin containers: find the PTX images in what nvcc links into a program.
#ifndef PTXSIM_FATBIN_H_
#define PTXSIM_FATBIN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ptxsim {

struct PtxImage {
  int arch = 0;      // 100 for compute_100
  std::string text;  // decompressed, no trailing NULs
};

// Extracts every PTX entry of the container(s) at `data`. `size` = readable bytes, or 0 when the
// header's own length is to be trusted (images linked into the running program). Throws SimError
// (kInvalidKernelImage) on a bad magic, a truncated entry, an unknown compression or a corrupt
// payload. Entries that are not PTX (cubins) are counted in *other when given.
std::vector<PtxImage> extract_ptx(const void* data, size_t size, int* other = nullptr);

}  // namespace ptxsim

#endif  // PTXSIM_FATBIN_H_
