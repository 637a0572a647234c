// SPDX-License-Identifier: Apache-2.0
// Host code, streams, symbols, events, a graph and printf, as an executable and as a shared library.
#include <cstdio>
#include <vector>

__constant__ float scale[2];
__device__ int counter;

template <class T>
__global__ void vector_add(const T* a, const T* b, T* c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] * T(scale[0]) + b[i] * T(scale[1]);
  if (i == 0) atomicAdd(&counter, 1);
}

extern __shared__ double scratch[];

__global__ void block_sum(const float* a, double* out, int n) {
  double v = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) v += a[i];
  scratch[threadIdx.x] = v;
  __syncthreads();
  for (int s = blockDim.x / 2; s > 0; s /= 2) {
    if (threadIdx.x < s) scratch[threadIdx.x] += scratch[threadIdx.x + s];
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    *out = scratch[0];
    printf("sum %.1f of %d values, %s\n", scratch[0], n, "from the device");
  }
}

__global__ void fails(int* p) { *p = 1; }

extern "C" int add(const float* a, const float* b, float* c, int n) {
  float s[2] = {2.0f, 0.5f};
  cudaMemcpyToSymbol(scale, s, sizeof(s));
  vector_add<float><<<(n + 127) / 128, 128>>>(a, b, c, n);
  return cudaGetLastError();
}

extern "C" int launch_failure() {
  fails<<<1, 32>>>(nullptr);
  return cudaDeviceSynchronize();
}

#define CHECK(call)                                                            \
  do {                                                                         \
    cudaError_t e = (call);                                                    \
    if (e != cudaSuccess) {                                                    \
      printf("%s: %s\n", #call, cudaGetErrorString(e));                        \
      return 1;                                                                \
    }                                                                          \
  } while (0)

int main() {
  const int n = 1000;
  std::vector<float> a(n), b(n), c(n);
  for (int i = 0; i < n; ++i) {
    a[i] = float(i);
    b[i] = float(2 * i);
  }
  float *da, *db, *dc;
  double* sum;
  CHECK(cudaMalloc(&da, n * 4));
  CHECK(cudaMalloc(&db, n * 4));
  CHECK(cudaMalloc(&dc, n * 4));
  CHECK(cudaMalloc(&sum, 8));
  CHECK(cudaMemcpy(da, a.data(), n * 4, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(db, b.data(), n * 4, cudaMemcpyHostToDevice));
  CHECK(cudaFuncSetAttribute(block_sum, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536));
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  float s[2] = {1.0f, 1.0f};
  cudaMemcpyToSymbolAsync(scale, s, sizeof(s), 0, cudaMemcpyHostToDevice, stream);
  vector_add<float><<<(n + 127) / 128, 128, 0, stream>>>(da, db, dc, n);
  block_sum<<<1, 256, 65536, stream>>>(dc, sum, n);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 3; ++i) CHECK(cudaGraphLaunch(exec, stream));
  CHECK(cudaStreamSynchronize(stream));
  CHECK(cudaMemcpy(c.data(), dc, n * 4, cudaMemcpyDeviceToHost));
  double total = 0;
  int launches = 0;
  CHECK(cudaMemcpy(&total, sum, 8, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpyFromSymbol(&launches, counter, 4));
  for (int i = 0; i < n; ++i) {
    if (c[i] != 3.0f * i) return printf("wrong at %d: %f\n", i, c[i]);
  }
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceProperties(&prop, 0));
  printf("%s total %.1f launches %d\n", prop.name, total, launches);
  block_sum<<<1, 256, 300000>>>(dc, sum, n);
  printf("too much shared memory: %s\n", cudaGetErrorName(cudaGetLastError()));
  return total == 3.0 * n * (n - 1) / 2 && launches == 3 ? 0 : 1;
}
