// SPDX-License-Identifier: Apache-2.0
// A library whose images differ by device, with state that each device keeps (count) and state that
// all share (managed_*). Built with one PTX image per device of the test.
#include <cuda_runtime.h>

__device__ int count = 100;
__managed__ int managed_count = 1000;
__managed__ int managed_twice = 2000;

__global__ void probe_kernel(int* out) {
#ifdef __CUDA_ARCH__
  out[0] = __CUDA_ARCH__;
#endif
  out[1] = ++count;
  out[2] = ++managed_count;
  managed_twice += 2;
}

// out: what the kernel saw, then the host's views of both counts. Returns the error.
extern "C" int probe(int* out) {
  cudaGetLastError();
  probe_kernel<<<1, 1>>>(out);
  cudaError_t e = cudaGetLastError();
  if (e == cudaSuccess) e = cudaDeviceSynchronize();
  if (e != cudaSuccess) return e;
  e = cudaMemcpyFromSymbol(out + 3, count, sizeof(int));
  out[4] = 2 * managed_count == managed_twice ? managed_count : -1;
  return e;
}

static cudaGraphExec_t recorded;

extern "C" int record(int* out) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaStreamCreate(&stream);
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  probe_kernel<<<1, 1, 0, stream>>>(out);
  cudaStreamEndCapture(stream, &graph);
  return cudaGraphInstantiate(&recorded, graph, 0);
}

extern "C" int replay() {
  cudaError_t e = cudaGraphLaunch(recorded, 0);
  return e == cudaSuccess ? cudaDeviceSynchronize() : e;
}
