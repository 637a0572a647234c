// SPDX-License-Identifier: Apache-2.0
// Rate of the warp MMA instructions with every operand in registers: the microbenchmark of the
// MXFP8 RFC's table, plus BF16 and NVFP4. benchmarks/mma_peak.py builds and runs it; by hand:
//
//   nvcc -std=c++17 -O3 -gencode arch=compute_120a,code=sm_120a -Iinclude benchmarks/mma_peak.cu
//
// Each warp holds 8 or 16 accumulators and adds A * B to each of them once an iteration. All inputs
// are 1, so that every element must end as K * iterations, which is exact in each type for the
// iteration counts allowed; the result of the timed launches themselves is compared. Two iteration
// counts are timed and subtracted, which removes launch, prologue and epilogue.
//
// Prints one JSON object a line: kind, ilp, k, loops, checked, wrong (elements), and on a GPU also
// tflops and cycles (clocks per warp instruction and SM sub-partition).
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "mpfa/ptx/mma_peak.cuh"

namespace {

// f16 counts in steps of 32 up to 65504, so K = 32 is exact up to 2047 iterations.
constexpr int kMaxLoops = 2047;

struct Options {
  std::string kind;  // empty: all
  int ilp = 0;       // 0: 8 and 16
  int loops[2] = {512, 2046};
  int blocks_per_sm = 2;
  int threads = 256;
  int repeats = 11;
  bool check_only = false;
  bool corrupt = false;
};

void require(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "mma_peak: %s: %s\n", what, cudaGetErrorString(status));
  std::exit(3);
}

// kOne: the register that holds ones of the input type; kScale: the scale register of 1.
template <int kDepth, uint32_t kOneBits, uint32_t kScaleBits = 0>
struct F32Sum {
  static constexpr int kK = kDepth;
  static constexpr uint32_t kOne = kOneBits, kScale = kScaleBits;
  float c[4] = {0, 0, 0, 0};
  __device__ float value(int i) const { return c[i]; }
};

template <int kDepth, uint32_t kOneBits>
struct F16Sum {
  static constexpr int kK = kDepth;
  static constexpr uint32_t kOne = kOneBits, kScale = 0;
  uint32_t c[2] = {0, 0};
  __device__ float value(int i) const {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(c[i >> 1] >> (16 * (i & 1)))));
  }
};

struct F16F16 : F16Sum<16, 0x3c003c00> {
  __device__ __forceinline__ void add(uint4 a, uint2 b, uint32_t) {
    mpfa::ptx::mma_f16_f16(c, a, b);
  }
};

struct F16F32 : F32Sum<16, 0x3c003c00> {
  __device__ __forceinline__ void add(uint4 a, uint2 b, uint32_t) {
    mpfa::ptx::mma_f16_f32(c, a, b);
  }
};

struct Bf16F32 : F32Sum<16, 0x3f803f80> {
  __device__ __forceinline__ void add(uint4 a, uint2 b, uint32_t) {
    mpfa::ptx::mma_bf16_f32(c, a, b);
  }
};

struct E4m3F32 : F32Sum<32, 0x38383838> {
  __device__ __forceinline__ void add(uint4 a, uint2 b, uint32_t) {
    mpfa::ptx::mma_e4m3_f32(c, a, b);
  }
};

struct E4m3F16 : F16Sum<32, 0x38383838> {
  __device__ __forceinline__ void add(uint4 a, uint2 b, uint32_t) {
    mpfa::ptx::mma_e4m3_f16(c, a, b);
  }
};

// why a trap: the host side cannot know which targets were compiled; it launches these on major 12
// only.
struct Mxf8F32 : F32Sum<32, 0x38383838, 0x7f7f7f7f> {
  __device__ __forceinline__ void add(uint4 a, uint2 b, uint32_t scale) {
#if defined(MPFA_PEAK_BLOCK_SCALED)
    mpfa::ptx::mma_mxf8(c, a, b, scale);
#else
    __trap();
#endif
  }
};

struct Nvf4F32 : F32Sum<64, 0x22222222, 0x38383838> {
  __device__ __forceinline__ void add(uint4 a, uint2 b, uint32_t scale) {
#if defined(MPFA_PEAK_BLOCK_SCALED)
    mpfa::ptx::mma_nvf4(c, a, b, scale);
#else
    __trap();
#endif
  }
};

// The operands of one lane.
struct Inputs {
  uint4 a;
  uint2 b;
  uint32_t scale;
};

// inputs: [32], read from memory so that the loop holds them in registers (kernel arguments would
// be reloaded in it); out: [blocks * threads, kIlp, 4]; clocks: [blocks].
template <class Kind, int kIlp>
__global__ void __launch_bounds__(256)
    mma_peak(const Inputs* inputs, int loops, float* out, long long* clocks) {
  const Inputs in = inputs[threadIdx.x % 32];
  Kind sum[kIlp];
  __syncthreads();
  const long long begin = clock64();
#pragma unroll 1
  for (int n = 0; n < loops; ++n) {
#pragma unroll
    for (int i = 0; i < kIlp; ++i) sum[i].add(in.a, in.b, in.scale);
  }
  float* mine = out + (size_t{blockIdx.x} * blockDim.x + threadIdx.x) * (kIlp * 4);
#pragma unroll
  for (int i = 0; i < kIlp; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) mine[i * 4 + j] = sum[i].value(j);
  }
  __syncthreads();
  if (threadIdx.x == 0) clocks[blockIdx.x] = clock64() - begin;
}

struct Sample {
  double ms = 0, clocks = 0;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Number of cases run: 0 or 1.
template <class Kind, int kIlp>
int run(const char* name, const Options& options, const cudaDeviceProp& device) {
  if (!options.kind.empty() && options.kind != name) return 0;
  if (options.ilp && options.ilp != kIlp) return 0;
  const int blocks = options.check_only ? 1 : options.blocks_per_sm * device.multiProcessorCount;
  const size_t count = size_t(blocks) * options.threads * kIlp * 4;
  float* out = nullptr;
  long long* clocks = nullptr;
  require(cudaMalloc(&out, count * sizeof(float)), "cudaMalloc");
  require(cudaMalloc(&clocks, blocks * sizeof(long long)), "cudaMalloc");
  cudaEvent_t begin, end;
  require(cudaEventCreate(&begin), "cudaEventCreate");
  require(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> host(count);
  std::vector<long long> host_clocks(blocks);
  const uint32_t one = Kind::kOne;
  std::vector<Inputs> lanes(32, Inputs{{one, one, one, one}, {one, one}, Kind::kScale});
  if (options.corrupt) lanes[5].a.y = 0;
  Inputs* inputs = nullptr;
  require(cudaMalloc(&inputs, lanes.size() * sizeof(Inputs)), "cudaMalloc");
  require(cudaMemcpy(inputs, lanes.data(), lanes.size() * sizeof(Inputs), cudaMemcpyHostToDevice),
          "copy");
  size_t wrong = 0;
  double first_wrong = 0;

  auto launch = [&](int loops) {
    Sample sample;
    require(cudaMemset(out, 0xff, count * sizeof(float)), "cudaMemset");
    require(cudaEventRecord(begin), "cudaEventRecord");
    mma_peak<Kind, kIlp><<<blocks, options.threads>>>(inputs, loops, out, clocks);
    require(cudaGetLastError(), "launch");
    require(cudaEventRecord(end), "cudaEventRecord");
    require(cudaEventSynchronize(end), "run");
    float ms = 0;
    require(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    require(cudaMemcpy(host.data(), out, count * sizeof(float), cudaMemcpyDeviceToHost), "copy");
    require(
        cudaMemcpy(host_clocks.data(), clocks, blocks * sizeof(long long), cudaMemcpyDeviceToHost),
        "copy");
    for (float value : host) {
      if (value == float(Kind::kK) * loops) continue;
      if (!wrong++) first_wrong = value;
    }
    sample.ms = ms;
    sample.clocks = median({host_clocks.begin(), host_clocks.end()});
    return sample;
  };

  std::vector<double> ms[2], cycles[2];
  const int repeats = options.check_only ? 1 : options.repeats;
  if (!options.check_only) launch(options.loops[1]);  // clocks ramp up
  for (int n = 0; n < repeats; ++n) {
    for (int i = 0; i < 2; ++i) {
      const Sample sample = launch(options.loops[i]);
      ms[i].push_back(sample.ms);
      cycles[i].push_back(sample.clocks);
    }
  }
  std::printf(
      "{\"kind\": \"%s\", \"ilp\": %d, \"k\": %d, \"loops\": [%d, %d], \"checked\": %zu, "
      "\"wrong\": %zu",
      name, kIlp, Kind::kK, options.loops[0], options.loops[1], 2 * repeats * count, wrong);
  if (wrong) std::printf(", \"first_wrong\": %g", first_wrong);
  if (!options.check_only) {
    const double more = double(options.loops[1] - options.loops[0]) * kIlp;
    const double warps = double(blocks) * options.threads / 32;
    const double seconds = (median(ms[1]) - median(ms[0])) * 1e-3;
    const double flop = 2.0 * 16 * 8 * Kind::kK * more * warps;
    // why / 4: an SM has four sub-partitions and the warps are spread over them evenly.
    const double resident = options.blocks_per_sm * options.threads / 32 / 4.0;
    std::printf(", \"tflops\": %.2f, \"cycles\": %.3f", flop / seconds * 1e-12,
                (median(cycles[1]) - median(cycles[0])) / (more * resident));
  }
  std::printf("}\n");
  std::fflush(stdout);
  require(cudaFree(inputs), "cudaFree");
  require(cudaFree(out), "cudaFree");
  require(cudaFree(clocks), "cudaFree");
  require(cudaEventDestroy(begin), "cudaEventDestroy");
  require(cudaEventDestroy(end), "cudaEventDestroy");
  return 1;
}

template <class Kind>
int run_both(const char* name, const Options& options, const cudaDeviceProp& device) {
  return run<Kind, 8>(name, options, device) + run<Kind, 16>(name, options, device);
}

int number(const char* option, const char* word, int least, int most) {
  char* rest = nullptr;
  const long value = std::strtol(word, &rest, 10);
  if (*word == 0 || *rest != 0 || value < least || value > most) {
    std::fprintf(stderr, "mma_peak: %s: %s is not in %d..%d\n", option, word, least, most);
    std::exit(2);
  }
  return static_cast<int>(value);
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool more = i + 1 < argc;
    if (word == "--check") {
      options.check_only = true;
      options.threads = 32;
      options.loops[0] = 1;
      options.loops[1] = 5;
    } else if (word == "--corrupt") {
      options.corrupt = true;
    } else if (word == "--kind" && more) {
      options.kind = argv[++i];
    } else if (word == "--ilp" && more) {
      options.ilp = number("--ilp", argv[++i], 8, 16);
    } else if (word == "--repeats" && more) {
      options.repeats = number("--repeats", argv[++i], 1, 1000);
    } else if (word == "--loops" && i + 2 < argc) {
      options.loops[0] = number("--loops", argv[++i], 1, kMaxLoops);
      options.loops[1] = number("--loops", argv[++i], options.loops[0] + 1, kMaxLoops);
    } else {
      std::fprintf(stderr,
                   "usage: mma_peak [--check] [--corrupt] [--kind NAME] [--ilp 8|16] [--repeats N] "
                   "[--loops LESS MORE]\n");
      std::exit(2);
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  int current = 0;
  cudaDeviceProp device;
  require(cudaGetDevice(&current), "cudaGetDevice");
  require(cudaGetDeviceProperties(&device, current), "cudaGetDeviceProperties");
  int cases = run_both<F16F16>("f16_f16", options, device);
  cases += run_both<F16F32>("f16_f32", options, device);
  cases += run_both<Bf16F32>("bf16_f32", options, device);
  cases += run_both<E4m3F32>("e4m3_f32", options, device);
  cases += run_both<E4m3F16>("e4m3_f16", options, device);
  if (device.major == 12) {
    cases += run_both<Mxf8F32>("mxf8_f32", options, device);
    cases += run_both<Nvf4F32>("nvf4_f32", options, device);
  }
  if (cases == 0) {
    std::fprintf(stderr, "mma_peak: no case of kind '%s' and ilp %d on compute capability %d.%d\n",
                 options.kind.c_str(), options.ilp, device.major, device.minor);
    return 2;
  }
  return 0;
}
