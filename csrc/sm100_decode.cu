// SPDX-License-Identifier: Apache-2.0
// tvm-ffi module of the SM100 decode kernel for one head dimension.
#include "mpfa/sm100/decode/kernel.cuh"
#include "sm100_decode_args.h"

#ifndef MPFA_HEAD_DIM
#error "MPFA_HEAD_DIM: 64 or 128"
#endif

namespace {

using namespace mpfa::bind;
namespace decode = mpfa::sm100::decode;

constexpr int kHeadDim = MPFA_HEAD_DIM;

void launch(const AttentionTensors& t) {
  const Attention a = make_attention(t, KvFormat::kQk4pv8, kHeadDim);
  const decode::Params p = decode_params(t, a, kHeadDim);
  if (a.query_tokens == 0) return;
  launch_decode(a, decode::sm100_decode<kHeadDim>, p,
                decode::Smem<kHeadDim>::bytes(p.delta_heads, p.a.channels));
}

}  // namespace

MPFA_EXPORT_ATTENTION(launch)
