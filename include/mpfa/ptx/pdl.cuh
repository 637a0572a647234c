// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch. PTX ISA, "griddepcontrol" (sm_90).
#pragma once

namespace mpfa::ptx {

#if defined(__CUDACC__)

// Waits until the grids that this one depends on have finished and their writes are visible.
// Without the launch attribute it returns at once.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next grid on the stream start while this one still runs.
__device__ __forceinline__ void grid_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
