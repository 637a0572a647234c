// SPDX-License-Identifier: Apache-2.0
// Two kernels in one stream, the second launched with the programmatic attribute: it may begin
// before the first has finished, and sees what that wrote behind griddepcontrol.wait only.
#include <cuda_runtime.h>

enum Option { kWait = 1, kWaitLate = 2, kReadBack = 4, kOneWarpWaits = 8, kPlain = 16 };

// data[i] = 3 i + what scratch[i] holds, behind the trigger.
__global__ void primary(int* data, const int* scratch, int n) {
  asm volatile("griddepcontrol.launch_dependents;");
  int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) data[i] = 3 * i + scratch[i];
}

// out[i] = data[n - 1 - i] + 1; scratch[i] = 7 for the next round.
__global__ void secondary(const int* data, int* scratch, int* out, int n, int options) {
  if (options & kWait) asm volatile("griddepcontrol.wait;" ::: "memory");
  if (options & kOneWarpWaits) {
    if (threadIdx.x < 32) asm volatile("griddepcontrol.wait;" ::: "memory");
    __syncthreads();
  }
  int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n && !(options & kReadBack)) out[i] = data[n - 1 - i] + 1;
  if (i < n && (options & kReadBack)) scratch[i] = 7;
  if (options & kWaitLate) asm volatile("griddepcontrol.wait;" ::: "memory");
}

extern "C" int dependent(int* data, int* scratch, int* out, int n, int options) {
  unsigned blocks = static_cast<unsigned>(n + 63) / 64;
  primary<<<blocks, 64>>>(data, scratch, n);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = !(options & kPlain);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(64);
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, secondary, static_cast<const int*>(data), scratch, out, n, options);
  return static_cast<int>(cudaDeviceSynchronize());
}
