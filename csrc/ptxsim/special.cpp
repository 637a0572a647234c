// SPDX-License-Identifier: Apache-2.0
#include "special.h"

namespace ptxsim {

int special_register(const std::string& name) {
  static const std::unordered_map<std::string, int> ids = {
      {"%tid.x", kTidX},
      {"%tid.y", kTidY},
      {"%tid.z", kTidZ},
      {"%ntid.x", kNtidX},
      {"%ntid.y", kNtidY},
      {"%ntid.z", kNtidZ},
      {"%ctaid.x", kCtaidX},
      {"%ctaid.y", kCtaidY},
      {"%ctaid.z", kCtaidZ},
      {"%nctaid.x", kNctaidX},
      {"%nctaid.y", kNctaidY},
      {"%nctaid.z", kNctaidZ},
      {"%laneid", kLaneId},
      {"%warpid", kWarpId},
      {"%nwarpid", kNwarpId},
      {"%smid", kSmId},
      {"%nsmid", kNsmId},
      {"%gridid", kGridId},
      {"%clusterid.x", kClusterIdX},
      {"%clusterid.y", kClusterIdY},
      {"%clusterid.z", kClusterIdZ},
      {"%nclusterid.x", kNclusterIdX},
      {"%nclusterid.y", kNclusterIdY},
      {"%nclusterid.z", kNclusterIdZ},
      {"%cluster_ctaid.x", kClusterCtaidX},
      {"%cluster_ctaid.y", kClusterCtaidY},
      {"%cluster_ctaid.z", kClusterCtaidZ},
      {"%cluster_nctaid.x", kClusterNctaidX},
      {"%cluster_nctaid.y", kClusterNctaidY},
      {"%cluster_nctaid.z", kClusterNctaidZ},
      {"%cluster_ctarank", kClusterCtarank},
      {"%cluster_nctarank", kClusterNctarank},
      {"%is_explicit_cluster", kIsExplicitCluster},
      {"%lanemask_eq", kLanemaskEq},
      {"%lanemask_le", kLanemaskLe},
      {"%lanemask_lt", kLanemaskLt},
      {"%lanemask_ge", kLanemaskGe},
      {"%lanemask_gt", kLanemaskGt},
      {"%dynamic_smem_size", kDynamicSmem},
      {"%total_smem_size", kTotalSmem},
      {"%aggr_smem_size", kAggrSmem},
      {"%reserved_smem_offset_begin", kReservedSmemBegin},
      {"%reserved_smem_offset_end", kReservedSmemEnd},
      {"%reserved_smem_offset_cap", kReservedSmemCap},
      {"%clock", kClock},
      {"%clock_hi", kClockHi},
      {"%clock64", kClock64},
      {"%globaltimer", kGlobalTimer},
      {"%globaltimer_lo", kGlobalTimerLo},
      {"%globaltimer_hi", kGlobalTimerHi},
  };
  auto it = ids.find(name);
  return it == ids.end() ? -1 : it->second;
}

uint64_t special_value(const Warp& w, int id, int lane) {
  const Cta& cta = *w.cta;
  const Cluster& cl = *w.cl;
  const Grid& g = *cl.grid;
  uint32_t t = w.id * kLanes + static_cast<uint32_t>(lane);
  uint32_t per_cluster = g.cluster[0] * g.cluster[1] * g.cluster[2];
  uint32_t bit = 1u << lane;
  switch (id) {
    case kTidX:
      return t % g.block[0];
    case kTidY:
      return t / g.block[0] % g.block[1];
    case kTidZ:
      return t / (g.block[0] * g.block[1]);
    case kNtidX:
    case kNtidY:
    case kNtidZ:
      return g.block[id - kNtidX];
    case kCtaidX:
    case kCtaidY:
    case kCtaidZ:
      return cta.id[id - kCtaidX];
    case kNctaidX:
    case kNctaidY:
    case kNctaidZ:
      return g.grid[id - kNctaidX];
    case kLaneId:
      return static_cast<uint64_t>(lane);
    case kWarpId:
      return w.id;
    case kNwarpId:
      return 64;
    case kSmId:
      return cta.linear % static_cast<uint32_t>(config().sms);
    case kNsmId:
      return static_cast<uint64_t>(config().sms);
    case kGridId:
      return g.launch;
    case kClusterIdX:
    case kClusterIdY:
    case kClusterIdZ:
      return cl.id[id - kClusterIdX];
    case kNclusterIdX:
    case kNclusterIdY:
    case kNclusterIdZ:
      return g.clusters[id - kNclusterIdX];
    case kClusterCtaidX:
      return cta.rank % g.cluster[0];
    case kClusterCtaidY:
      return cta.rank / g.cluster[0] % g.cluster[1];
    case kClusterCtaidZ:
      return cta.rank / (g.cluster[0] * g.cluster[1]);
    case kClusterNctaidX:
    case kClusterNctaidY:
    case kClusterNctaidZ:
      return g.cluster[id - kClusterNctaidX];
    case kClusterCtarank:
      return cta.rank;
    case kClusterNctarank:
      return per_cluster;
    case kIsExplicitCluster:
      return g.explicit_cluster ? kFull : 0;
    case kLanemaskEq:
      return bit;
    case kLanemaskLe:
      return bit | (bit - 1);
    case kLanemaskLt:
      return bit - 1;
    case kLanemaskGe:
      return ~(bit - 1);
    case kLanemaskGt:
      return ~(bit | (bit - 1));
    case kDynamicSmem:
      return g.smem_dynamic;
    case kTotalSmem:
    case kAggrSmem:
      return g.kernel->smem_static + g.smem_dynamic;
    case kReservedSmemBegin:
      return 0;
    case kReservedSmemEnd:
    case kReservedSmemCap:
      return kSmemBase;
    default:
      return 0;
  }
}

}  // namespace ptxsim
