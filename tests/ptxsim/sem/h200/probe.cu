// SPDX-License-Identifier: Apache-2.0
// Runs the twins of golden.cpp on an sm_90 GPU and prints one line per operation:
//   nvcc -gencode arch=compute_90a,code=sm_90a -std=c++17 probe.cu -o probe && ./probe > golden.txt
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "twin.h"

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)

#define CHECK(call)                                                                 \
  do {                                                                              \
    const cudaError_t e = (call);                                                   \
    if (e != cudaSuccess) {                                                         \
      std::printf("error: %s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(e)); \
      std::exit(1);                                                                 \
    }                                                                               \
  } while (0)

#define OP(name, device, host)                                                                    \
  __global__ void CAT(scalar_, __LINE__)(const unsigned long long* in, unsigned long long* out) { \
    const int i = blockIdx.x * 256 + threadIdx.x;                                                 \
    const unsigned long long x = in[i], y = in[kInputs + i], z = in[2 * kInputs + i];             \
    unsigned long long r = 0;                                                                     \
    (void)x, (void)y, (void)z;                                                                    \
    device out[i] = r;                                                                            \
  }
#define APPROX(name, op, ftz) OPF1F(name) 0)
#define APPROXD(name, ftz, full) OPF2F(name) 0)
#define APPROXH(name, op, e, ftz) OPH1H(name) 0)
#include "ops.inc"
#undef OP
#undef APPROX
#undef APPROXD
#undef APPROXH
struct Scalar {
  const char* name;
  void (*kernel)(const unsigned long long*, unsigned long long*);
  bool approximate;
};
#define OP(name, device, host) {name, CAT(scalar_, __LINE__), false},
#define APPROX(name, op, ftz) {#name, CAT(scalar_, __LINE__), true},
#define APPROXD(name, ftz, full) {#name, CAT(scalar_, __LINE__), true},
#define APPROXH(name, op, e, ftz) {#name, CAT(scalar_, __LINE__), true},
const Scalar kScalars[] = {
#include "ops.inc"
};

// asm statements by register counts of C/D, A and B.
#define BODY_4_4_2(ins)                                                                       \
  asm volatile(ins " {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"                  \
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), \
                 "r"(c[1]), "r"(c[2]), "r"(c[3]));
#define BODY_4_2_1(ins)                                          \
  asm volatile(ins " {%0,%1,%2,%3},{%4,%5},{%6},{%7,%8,%9,%10};" \
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])  \
               : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
#define BODY_2_4_2(ins)                                                                       \
  asm volatile(ins " {%0,%1},{%2,%3,%4,%5},{%6,%7},{%8,%9};"                                  \
               : "=r"(d[0]), "=r"(d[1])                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), \
                 "r"(c[1]));
#define BODY_2_2_1(ins)                             \
  asm volatile(ins " {%0,%1},{%2,%3},{%4},{%5,%6};" \
               : "=r"(d[0]), "=r"(d[1])             \
               : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(c[0]), "r"(c[1]));
#define BODY_2_1_1(ins)                          \
  asm volatile(ins " {%0,%1},{%2},{%3},{%4,%5};" \
               : "=r"(d[0]), "=r"(d[1])          \
               : "r"(a[0]), "r"(b[0]), "r"(c[0]), "r"(c[1]));
#define MMA(ins, m, k, ta, tb, acc, na, nb, nc)                                                   \
  __global__ void CAT(mma_, __LINE__)(const unsigned* in, unsigned* out) {                        \
    const int l = threadIdx.x;                                                                    \
    const unsigned* p = in + blockIdx.x * 16 * 32;                                                \
    unsigned a[8], b[4], c[4], d[4] = {};                                                         \
    for (int i = 0; i < 8; ++i) a[i] = p[i * 32 + l];                                             \
    for (int i = 0; i < 4; ++i) b[i] = p[(8 + i) * 32 + l];                                       \
    for (int i = 0; i < 4; ++i) c[i] = p[(12 + i) * 32 + l];                                      \
    BODY_##nc##_##na##_##nb(ins) for (int i = 0; i < 4; ++i) out[(blockIdx.x * 4 + i) * 32 + l] = \
        d[i];                                                                                     \
  }
#include "mma.inc"
#undef MMA
struct Matrix {
  const char* name;
  char a, b, acc;
  void (*kernel)(const unsigned*, unsigned*);
};
#define MMA(ins, m, k, ta, tb, acc, na, nb, nc) {ins, ta, tb, acc, CAT(mma_, __LINE__)},
const Matrix kMatrices[] = {
#include "mma.inc"
};

__global__ void f64mma(const double* in, double* out) {
  int l = threadIdx.x;
  double a[8], b[4], c[4], d[4];
  for (int i = 0; i < 8; ++i) a[i] = in[i * 32 + l];
  for (int i = 0; i < 4; ++i) {
    b[i] = in[(8 + i) * 32 + l];
    c[i] = in[(12 + i) * 32 + l];
  }
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1},{%2},{%3},{%4,%5};"
               : "=d"(d[0]), "=d"(d[1])
               : "d"(a[0]), "d"(b[0]), "d"(c[0]), "d"(c[1]));
  out[l] = d[0];
  out[32 + l] = d[1];
  asm volatile(
      "mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0,%1,%2,%3},{%4,%5},{%6},{%7,%8,%9,%10};"
      : "=d"(d[0]), "=d"(d[1]), "=d"(d[2]), "=d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(b[0]), "d"(c[0]), "d"(c[1]), "d"(c[2]), "d"(c[3]));
  for (int i = 0; i < 4; ++i) out[(2 + i) * 32 + l] = d[i];
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64.rz "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=d"(d[0]), "=d"(d[1]), "=d"(d[2]), "=d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]), "d"(c[0]), "d"(c[1]),
        "d"(c[2]), "d"(c[3]));
  for (int i = 0; i < 4; ++i) out[(6 + i) * 32 + l] = d[i];
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7,%8,%9,%10,%11},{%12,%13,%14,%15},{%16,%17,%18,%19};"
      : "=d"(d[0]), "=d"(d[1]), "=d"(d[2]), "=d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]),
        "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]), "d"(c[0]), "d"(c[1]), "d"(c[2]), "d"(c[3]));
  for (int i = 0; i < 4; ++i) out[(10 + i) * 32 + l] = d[i];
}

__global__ void matrices(const unsigned char* img, unsigned* out) {  // img 512 B as 32 rows of 16
  __shared__ __align__(16) unsigned char s[512], t[512];
  int l = threadIdx.x;
  for (int i = l; i < 512; i += 32) s[i] = img[i];
  __syncthreads();
  unsigned addr = (unsigned)__cvta_generic_to_shared(s + 16 * l),
           ta = (unsigned)__cvta_generic_to_shared(t + 16 * l), r[4] = {};
  int o = 0;
#define PUT(n)                                              \
  for (int i = 0; i < n; ++i) out[(o + i) * 32 + l] = r[i]; \
  o += n;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0},[%1];" : "=r"(r[0]) : "r"(addr));
  PUT(1)
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1},[%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(addr));
  PUT(2)
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr));
  PUT(4)
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr));
  PUT(4)
  unsigned m;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(m) : "r"(r[0]));
  out[o++ * 32 + l] = m;
  for (int tr = 0; tr < 2; ++tr) {
    for (int i = l; i < 512; i += 32) t[i] = 0;
    __syncwarp();
    if (tr)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(ta),
                   "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                   : "memory");
    else
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(ta),
                   "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                   : "memory");
    __syncwarp();
    for (int i = 0; i < 4; ++i) out[(o + i) * 32 + l] = ((unsigned*)t)[i * 32 + l];
    o += 4;
  }
}

extern __shared__ __align__(1024) unsigned char dyn[];
template <int V>
__global__ void wg(const unsigned char* img, unsigned long long da, unsigned long long db,
                   const unsigned* in, unsigned* out, unsigned* basep) {
  unsigned base = (unsigned)__cvta_generic_to_shared(dyn);
  int t = threadIdx.x;
  for (int i = t; i < 65536; i += 128) dyn[i] = img[i];
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  if (t == 0) *basep = base;
  da += base >> 4;
  db += base >> 4;
  unsigned d[32], a[4];
  for (int i = 0; i < 32; ++i) d[i] = in[i * 128 + t];
  for (int i = 0; i < 4; ++i) a[i] = in[(32 + i) * 128 + t];
#define DL                                                                                       \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%" \
  "25,%26,%27,%28,%29,%30,%31}"
#define DO                                                                                        \
  "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), \
      "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]),    \
      "+r"(d[15]), "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]),  \
      "+r"(d[22]), "+r"(d[23]), "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]),  \
      "+r"(d[29]), "+r"(d[30]), "+r"(d[31])
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  if (V == 0)
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " DL ",%32,%33,1,1,1,0,0;"
                 : DO
                 : "l"(da), "l"(db));
  if (V == 1)
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " DL ",%32,%33,1,-1,1,1,1;"
                 : DO
                 : "l"(da), "l"(db));
  if (V == 2)
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 " DL
                 ",{%32,%33,%34,%35},%36,1,1,1;"
                 : DO
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(db));
  if (V == 3)
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 " DL ",%32,%33,1,1,1;"
                 : DO
                 : "l"(da), "l"(db));
  if (V == 4)
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 " DL ",%32,%33,1;"
                 : DO
                 : "l"(da), "l"(db));
  if (V == 5)
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " DL
                 ",{%32,%33,%34,%35},%36,1,1,1,1;"
                 : DO
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(db));
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 32; ++i) out[i * 128 + t] = d[i];
}

__global__ void tma(const __grid_constant__ CUtensorMap map, int c0, int c1, int bytes, int off,
                    unsigned char* out) {
  __shared__ __align__(8) unsigned long long bar;
  unsigned b = (unsigned)__cvta_generic_to_shared(&bar),
           dst = (unsigned)__cvta_generic_to_shared(dyn) + off;
  int t = threadIdx.x;
  for (int i = t; i < 16384; i += 32) dyn[i] = 0xee;
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncwarp();
  if (t == 0) {
    asm volatile(
        "mbarrier.init.shared.b64 "
        "[%0],1;\nfence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::"r"(b)
        : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(b), "r"(bytes) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0],[%1,{%2,%3}],[%4];" ::"r"(dst),
        "l"(&map), "r"(c0), "r"(c1), "r"(b)
        : "memory");
  }
  __syncwarp();
  unsigned done = 0;
  for (int i = 0; i < 10000000 && !done; ++i)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p,[%1],0; selp.u32 %0,1,0,p;}"
                 : "=r"(done)
                 : "r"(b)
                 : "memory");
  for (int i = t; i < 16384; i += 32) out[i] = done ? dyn[i] : 0xdd;
}

template <class T>
std::vector<T> fetch(const T* device, size_t n) {
  std::vector<T> v(n);
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(v.data(), device, n * sizeof(T), cudaMemcpyDeviceToHost));
  return v;
}
template <class T>
T* upload(const std::vector<T>& v) {
  T* p = nullptr;
  CHECK(cudaMalloc(&p, v.size() * sizeof(T)));
  CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}
template <class T>
T* space(size_t n) {
  return upload(std::vector<T>(n));
}
template <class T>
void print_hash(const std::string& name, const std::vector<T>& v) {
  Hash h;
  h.add(v.data(), v.size());
  h.print(name.c_str());
}

void scalars() {
  std::vector<unsigned long long> in(3 * kInputs);
  for (int o = 0; o < 3; ++o) {
    for (int i = 0; i < kInputs; ++i) in[size_t(o * kInputs + i)] = input_word(i, o);
  }
  auto* din = upload(in);
  auto* dout = space<unsigned long long>(kInputs);
  for (const Scalar& s : kScalars) {
    s.kernel<<<kInputs / 256, 256>>>(din, dout);
    const auto out = fetch(dout, kInputs);
    if (!s.approximate) {
      print_hash(s.name, out);
      continue;
    }
    for (int i = 0; i < kInputs; i += 1024) std::printf("%s#%d %llx\n", s.name, i, out[size_t(i)]);
  }
}

void matrix_ops() {
  auto* dout = space<unsigned>(kSets * 4 * 32);
  int index = 0;
  for (const Matrix& m : kMatrices) {
    std::vector<unsigned> in(kSets * 16 * 32);
    for (int i = 0; i < kSets * 16 * 32; ++i) {
      in[size_t(i)] = mma_word(index, i / 512, i / 32 % 16, i % 32, m.a, m.b, m.acc);
    }
    m.kernel<<<kSets, 32>>>(upload(in), dout);
    print_hash(m.name, fetch(dout, kSets * 4 * 32));
    ++index;
  }
  std::vector<double> in(16 * 32);
  for (int i = 0; i < 16 * 32; ++i) in[size_t(i)] = f64_word(uint64_t(i));
  auto* dd = space<double>(14 * 32);
  f64mma<<<1, 32>>>(upload(in), dd);
  print_hash("mma.f64", fetch(dd, 14 * 32));
  std::vector<unsigned char> bytes(512);
  for (int i = 0; i < 512; ++i) bytes[size_t(i)] = static_cast<unsigned char>(mix(uint64_t(i)));
  auto* dm = space<unsigned>(20 * 32);
  matrices<<<1, 32>>>(upload(bytes), dm);
  print_hash("ldmatrix/movmatrix/stmatrix", fetch(dm, 20 * 32));
}

void wgmma_ops() {
  using Kernel = void (*)(const unsigned char*, unsigned long long, unsigned long long,
                          const unsigned*, unsigned*, unsigned*);
  const Kernel kernels[] = {wg<0>, wg<1>, wg<2>, wg<3>, wg<4>, wg<5>};
  for (Kernel k : kernels)
    CHECK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, 66560));
  auto* dout = space<unsigned>(32 * 128);
  auto* base = space<unsigned>(1);
  int n = 0;
  for (const WgmmaCase& c : kWgmmaCases) {
    std::vector<unsigned char> image(65536);
    wgmma_image(c, image.data());
    std::vector<unsigned> in(36 * 128);
    for (int i = 0; i < 36 * 128; ++i) in[size_t(i)] = wgmma_word(c, i / 128, i % 128);
    kernels[c.variant]<<<1, 128, 65536>>>(upload(image), c.a, c.b, upload(in), dout, base);
    print_hash("wgmma#" + std::to_string(n++), fetch(dout, 32 * 128));
    if (fetch(base, 1)[0] % 1024 != 0) std::printf("error: the window is not aligned\n");
  }
}

void tma_loads() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                         &found));
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  std::vector<unsigned char> bytes(65536);
  for (int i = 0; i < 65536; ++i) bytes[size_t(i)] = tma_byte(i);
  auto* tensor = upload(bytes);
  auto* dout = space<unsigned char>(kTmaImage);
  int n = 0;
  for (const TmaCase& c : kTmaCases) {
    CUtensorMap map;
    const cuuint64_t dim[2] = {c.d0, c.d1}, stride[1] = {c.stride};
    const cuuint32_t box[2] = {c.b0, c.b1}, es[2] = {1, c.es};
    const CUresult r =
        encode(&map, static_cast<CUtensorMapDataType>(c.type), 2, tensor, dim, stride, box, es,
               CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(c.swizzle),
               CU_TENSOR_MAP_L2_PROMOTION_NONE, static_cast<CUtensorMapFloatOOBfill>(c.oob));
    if (r != CUDA_SUCCESS) std::printf("error: tma case %d: %d\n", n, int(r));
    tma<<<1, 32, kTmaImage>>>(map, c.c0, c.c1, c.bytes, c.offset, dout);
    print_hash("tma#" + std::to_string(n++), fetch(dout, kTmaImage));
  }
}

int main() {
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceProperties(&prop, 0));
  int driver = 0;
  CHECK(cudaDriverGetVersion(&driver));
  std::printf("# %s, CUDA driver %d, nvcc %d.%d.%d\n", prop.name, driver, __CUDACC_VER_MAJOR__,
              __CUDACC_VER_MINOR__, __CUDACC_VER_BUILD__);
  scalars();
  matrix_ops();
  wgmma_ops();
  tma_loads();
  return 0;
}
