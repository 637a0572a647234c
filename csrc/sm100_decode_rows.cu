// SPDX-License-Identifier: Apache-2.0
// tvm-ffi module of the replicated-row decode kernel, for comparison; head_dim 128, tiles of up to
// 32 rows.
#include "mpfa/sm100/decode_rows/kernel.cuh"
#include "sm100_decode_args.h"

namespace {

using namespace mpfa::bind;
namespace decode = mpfa::sm100::decode;

constexpr int kHeadDim = mpfa::sm100::decode_rows::kDim;

void launch(const AttentionTensors& t) {
  const Attention a = make_attention(t, KvFormat::kQk4pv8, kHeadDim);
  const decode::Params p = decode_params(t, a, kHeadDim);
  if (a.query_tokens == 0) return;
  launch_decode(a, mpfa::sm100::decode_rows::sm100_decode_rows, p,
                decode::Smem<kHeadDim>::bytes(p.delta_heads, p.a.channels));
}

}  // namespace

MPFA_EXPORT_ATTENTION(launch)
