// SPDX-License-Identifier: Apache-2.0
// Ordering between warps: bar, mbarrier, cluster barrier, fences and atomics, scopes, byte masks.
#include "driver.h"

namespace race_test {

std::vector<Case> barrier_cases() {
  return {
      {"write then read without barrier",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.st(a, 0, 4, "st");
         s.ld(b, 0, 4, "ld");
       },
       {"barrier: st -> ld"}},
      {"write, bar.sync, read",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.st(a, 0, 4, "st");
         s.bar({a, b});
         s.ld(b, 0, 4, "ld");
       },
       {}},
      {"read then write without barrier",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.ld(a, 0, 4, "ld");
         s.st(b, 0, 4, "st");
       },
       {"barrier: ld -> st"}},
      {"write then write without barrier",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.st(a, 0, 4, "st0");
         s.st(b, 0, 4, "st1");
       },
       {"barrier: st0 -> st1"}},
      {"two reads do not conflict",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.ld(a, 0, 4, "ld0");
         s.ld(b, 0, 4, "ld1");
       },
       {}},
      {"neighbouring bytes of one cell",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         for (uint32_t k = 0; k < 16; k += 2) {
           s.st(a, k, 1, "even");
           s.st(b, k + 1, 1, "odd");
         }
       },
       {}},
      {"one overlapping byte",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.st(a, 0, 8, "low");
         s.st(b, 7, 8, "high");
       },
       {"barrier: low -> high"}},
      {"access across two cells",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.st(a, 8, 16, "st");
         s.ld(b, 20, 4, "ld");
         s.ld(b, 24, 4, "ld behind");
       },
       {"barrier: st -> ld"}},
      {"one report for a pair of sites",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         for (uint32_t k = 0; k < 64; k += 4) {
           s.st(a, k, 4, "st");
           s.ld(b, k, 4, "ld");
         }
       },
       {"barrier: st -> ld"}},
      {"readers of both sides are remembered",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1), c = s.warp(2);
         s.ld(a, 0, 4, "ld0");
         s.ld(b, 0, 4, "ld1");
         s.bar({b, c});
         s.st(c, 0, 4, "st");
       },
       {"barrier: ld0 -> st"}},
      {"missing second barrier of a reused buffer",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.st(a, 0, 4, "st");
         s.bar({a, b});
         s.ld(b, 0, 4, "ld");
         s.st(a, 0, 4, "st next");
       },
       {"barrier: ld -> st next"}},
      {"named barriers are separate",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1), c = s.warp(2);
         s.st(a, 0, 4, "st");
         s.bar({a, b}, 1);
         s.bar({b, c}, 2);
         s.ld(c, 0, 4, "ld after b");
         AgentId d = s.warp(3);
         s.bar({c, d}, 3);
         s.ld(d, 0, 4, "ld after c");
         AgentId e = s.warp(4), f = s.warp(5);
         s.bar({e, f}, 3);
         s.ld(e, 0, 4, "ld elsewhere");
       },
       {"barrier: st -> ld elsewhere"}},
      {"bar.arrive orders one way",
       "",
       [](Script& s) {
         AgentId p = s.warp(0), c = s.warp(1);
         s.st(p, 0, 4, "st");
         s.bar_arrive(p, 1);
         s.bar_arrive(c, 1);
         s.bar_wait(c, 1);
         s.ld(c, 0, 4, "ld");
         s.st(p, 0, 4, "st next");
       },
       {"barrier: ld -> st next"}},
      {"writes after bar.arrive are not covered",
       "",
       [](Script& s) {
         AgentId p = s.warp(0), c = s.warp(1);
         s.bar_arrive(p, 1);
         s.st(p, 0, 4, "st");
         s.bar_arrive(c, 1);
         s.bar_wait(c, 1);
         s.ld(c, 0, 4, "ld");
       },
       {"barrier: st -> ld"}},
      {"mbarrier arrive and wait",
       "",
       [](Script& s) {
         auto [p, c] = s.pair(64);
         s.st(p, 0, 4, "st");
         s.signal(p, 64);
         s.wait(c, 64);
         s.ld(c, 0, 4, "ld");
       },
       {}},
      {"mbarrier without wait",
       "",
       [](Script& s) {
         auto [p, c] = s.pair(64);
         s.st(p, 0, 4, "st");
         s.signal(p, 64);
         s.ld(c, 0, 4, "ld");
       },
       {"barrier: st -> ld"}},
      {"mbarrier: wait for the phase before",
       "",
       [](Script& s) {
         auto [p, c] = s.pair(64);
         s.signal(p, 64);
         s.st(p, 0, 4, "st");
         s.arrive(p, 64);
         s.wait(c, 64);
         s.ld(c, 0, 4, "ld");
       },
       {"barrier: st -> ld"}},
      {"mbarrier: the first of two arrivals counts too",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1), c = s.warp(2);
         s.init(a, 64);
         s.bar({a, b, c});
         s.st(a, 0, 4, "st");
         s.arrive(a, 64);
         s.signal(b, 64);
         s.wait(c, 64);
         s.ld(c, 0, 4, "ld");
       },
       {}},
      {"mbarrier: a later wait covers earlier phases",
       "",
       [](Script& s) {
         auto [p, c] = s.pair(64);
         s.st(p, 0, 4, "st");
         s.signal(p, 64);
         s.signal(p, 64);
         s.wait(c, 64);
         s.ld(c, 0, 4, "ld");
       },
       {}},
      {"relaxed arrive releases nothing",
       "",
       [](Script& s) {
         auto [p, c] = s.pair(64);
         s.st(p, 0, 4, "st");
         s.signal(p, 64, Order::kRelaxed);
         s.wait(c, 64);
         s.ld(c, 0, 4, "ld");
       },
       {"barrier: st -> ld"}},
      {"fence, then relaxed arrive",
       "",
       [](Script& s) {
         auto [p, c] = s.pair(64);
         s.st(p, 0, 4, "st");
         s.fence(p, Fence::kThread, Order::kAcqRel, Scope::kCta);
         s.signal(p, 64, Order::kRelaxed);
         s.wait(c, 64);
         s.ld(c, 0, 4, "ld");
       },
       {}},
      {"write between the fence and the relaxed arrive",
       "",
       [](Script& s) {
         auto [p, c] = s.pair(64);
         s.fence(p, Fence::kThread, Order::kAcqRel, Scope::kCta);
         s.st(p, 0, 4, "st");
         s.signal(p, 64, Order::kRelaxed);
         s.wait(c, 64);
         s.ld(c, 0, 4, "ld");
       },
       {"barrier: st -> ld"}},
      {"relaxed wait, then acquire fence",
       "",
       [](Script& s) {
         auto [p, c] = s.pair(64);
         s.st(p, 0, 4, "st");
         s.st(p, 16, 4, "st2");
         s.signal(p, 64);
         s.wait(c, 64, Order::kRelaxed);
         s.ld(c, 0, 4, "too early");
         s.fence(c, Fence::kThread, Order::kAcquire, Scope::kCta);
         s.ld(c, 16, 4, "ld");
       },
       {"barrier: st -> too early"}},
      {"barrier.cluster over distributed shared memory",
       "",
       [](Script& s) {
         s.cta(1, 0, 1);
         AgentId a = s.warp(0), b = s.warp(0, 1);
         s.st(a, 0, 4, "remote st", 1);
         s.cluster_arrive(a);
         s.cluster_arrive(b);
         s.cluster_wait(a);
         s.cluster_wait(b);
         s.ld(b, 0, 4, "ld");
       },
       {}},
      {"distributed shared memory without barrier.cluster",
       "",
       [](Script& s) {
         s.cta(1, 0, 1);
         AgentId a = s.warp(0), b = s.warp(0, 1);
         s.st(a, 0, 4, "remote st", 1);
         s.st(a, 0, 4, "own st");
         s.ld(b, 0, 4, "ld");
       },
       {"barrier: remote st -> ld"}},
      {"relaxed barrier.cluster.arrive",
       "",
       [](Script& s) {
         s.cta(1, 0, 1);
         AgentId a = s.warp(0), b = s.warp(0, 1);
         s.st(a, 0, 4, "remote st", 1);
         s.cluster_arrive(a, Order::kRelaxed);
         s.cluster_arrive(b, Order::kRelaxed);
         s.cluster_wait(a);
         s.cluster_wait(b);
         s.ld(b, 0, 4, "ld");
       },
       {"barrier: remote st -> ld"}},
      {"init, use by another warp without barrier",
       "",
       [](Script& s) {
         AgentId p = s.warp(0), c = s.warp(1);
         s.init(p, 64);
         s.arrive(c, 64);
       },
       {"mbarrier-init: init -> arrive"}},
      {"init, fence.mbarrier_init, relaxed barrier.cluster",
       "",
       [](Script& s) {
         s.cta(1, 0, 1);
         AgentId a = s.warp(0), b = s.warp(0, 1);
         s.init(a, 64);
         s.fence(a, Fence::kMbarrierInit, Order::kRelease, Scope::kCluster);
         s.cluster_arrive(a, Order::kRelaxed);
         s.cluster_arrive(b, Order::kRelaxed);
         s.cluster_wait(a);
         s.cluster_wait(b);
         s.arrive(b, 64, Order::kRelease, "remote arrive", 0);
       },
       {}},
      {"init, relaxed barrier.cluster without fence",
       "",
       [](Script& s) {
         s.cta(1, 0, 1);
         AgentId a = s.warp(0), b = s.warp(0, 1);
         s.init(a, 64);
         s.cluster_arrive(a, Order::kRelaxed);
         s.cluster_arrive(b, Order::kRelaxed);
         s.cluster_wait(a);
         s.cluster_wait(b);
         s.arrive(b, 64, Order::kRelease, "remote arrive", 0);
       },
       {"note mbarrier-init: init -> remote arrive"}},
      {"init, relaxed barrier.cluster without fence, strict",
       "strict-init",
       [](Script& s) {
         s.cta(1, 0, 1);
         AgentId a = s.warp(0), b = s.warp(0, 1);
         s.init(a, 64);
         s.cluster_arrive(a, Order::kRelaxed);
         s.cluster_arrive(b, Order::kRelaxed);
         s.cluster_wait(a);
         s.cluster_wait(b);
         s.arrive(b, 64, Order::kRelease, "remote arrive", 0);
       },
       {"mbarrier-init: init -> remote arrive"}},
      {"inval by another warp without barrier",
       "",
       [](Script& s) {
         AgentId p = s.warp(0), c = s.warp(1);
         s.init(p, 64);
         s.inval(c, 64);
       },
       {"mbarrier-init: init -> inval"}},
      {"release and acquire through a flag",
       "",
       [](Script& s) {
         s.cta(1, 1, 0);
         AgentId a = s.warp(0), b = s.warp(0, 1);
         s.global(a, Rw::kWrite, 0x1000, 16, "data");
         s.global(a, Rw::kWrite, 0x2000, 4, "flag", Order::kRelease, Scope::kGpu);
         s.global(b, Rw::kRead, 0x2000, 4, "poll", Order::kAcquire, Scope::kGpu);
         s.global(b, Rw::kRead, 0x1000, 16, "use");
       },
       {}},
      {"flag read relaxed",
       "",
       [](Script& s) {
         s.cta(1, 1, 0);
         AgentId a = s.warp(0), b = s.warp(0, 1);
         s.global(a, Rw::kWrite, 0x1000, 16, "data");
         s.global(a, Rw::kWrite, 0x2000, 4, "flag", Order::kRelease, Scope::kGpu);
         s.global(b, Rw::kRead, 0x2000, 4, "poll", Order::kRelaxed, Scope::kGpu);
         s.global(b, Rw::kRead, 0x1000, 16, "use");
       },
       {"barrier: data -> use"}},
      {"weak flag",
       "",
       [](Script& s) {
         s.cta(1, 1, 0);
         AgentId a = s.warp(0), b = s.warp(0, 1);
         s.global(a, Rw::kWrite, 0x2000, 4, "flag");
         s.global(b, Rw::kRead, 0x2000, 4, "poll", Order::kAcquire, Scope::kGpu);
       },
       {"barrier: flag -> poll"}},
      {"threadfence and atomics: last block reads all",
       "",
       [](Script& s) {
         s.cta(1, 1, 0);
         s.cta(2, 2, 0);
         AgentId w[3] = {s.warp(0), s.warp(0, 1), s.warp(0, 2)};
         for (uint64_t k = 0; k < 3; ++k) {
           s.global(w[k], Rw::kWrite, 0x1000 + 16 * k, 16, "partial");
           s.fence(w[k], Fence::kThread, Order::kSeqCst, Scope::kGpu);
           s.global(w[k], Rw::kAtomic, 0x2000, 4, "count", Order::kRelaxed, Scope::kGpu);
         }
         s.fence(w[2], Fence::kThread, Order::kSeqCst, Scope::kGpu);
         s.global(w[2], Rw::kRead, 0x1000, 48, "sum");
       },
       {}},
      {"no threadfence before the atomic",
       "",
       [](Script& s) {
         s.cta(1, 1, 0);
         AgentId a = s.warp(0), b = s.warp(0, 1);
         s.global(a, Rw::kWrite, 0x1000, 16, "partial");
         s.global(a, Rw::kAtomic, 0x2000, 4, "count", Order::kRelaxed, Scope::kGpu);
         s.global(b, Rw::kAtomic, 0x2000, 4, "count", Order::kRelaxed, Scope::kGpu);
         s.fence(b, Fence::kThread, Order::kSeqCst, Scope::kGpu);
         s.global(b, Rw::kRead, 0x1000, 16, "sum");
       },
       {"barrier: partial -> sum"}},
      {"cta scope does not reach another CTA",
       "",
       [](Script& s) {
         s.cta(1, 1, 0);
         AgentId a = s.warp(0), b = s.warp(0, 1);
         s.global(a, Rw::kWrite, 0x1000, 16, "data");
         s.global(a, Rw::kAtomic, 0x2000, 4, "flag", Order::kRelease, Scope::kCta);
         s.global(b, Rw::kAtomic, 0x2000, 4, "poll", Order::kAcquire, Scope::kGpu);
         s.global(b, Rw::kRead, 0x1000, 16, "use");
       },
       {"barrier: flag -> poll", "barrier: data -> use"}},
      {"plain store breaks the release chain",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1), c = s.warp(2);
         s.global(a, Rw::kWrite, 0x1000, 16, "data");
         s.global(a, Rw::kWrite, 0x2000, 4, "flag", Order::kRelease, Scope::kGpu);
         s.global(b, Rw::kWrite, 0x2000, 4, "overwrite", Order::kRelaxed, Scope::kGpu);
         s.global(c, Rw::kRead, 0x2000, 4, "poll", Order::kAcquire, Scope::kGpu);
         s.global(c, Rw::kRead, 0x1000, 16, "use");
       },
       {"barrier: data -> use"}},
      {"flag in shared memory",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.st(a, 0, 4, "data");
         s.shared_strong(a, Rw::kWrite, 64, Order::kRelease, Scope::kCta, "flag");
         s.shared_strong(b, Rw::kRead, 64, Order::kAcquire, Scope::kCta, "poll");
         s.ld(b, 0, 4, "use");
       },
       {}},
      {"weak read of what others change by atomics",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.global(a, Rw::kAtomic, 0x2000, 4, "cas", Order::kRelaxed, Scope::kGpu);
         s.global(b, Rw::kRead, 0x2000, 4, "ld");
         s.global(b, Rw::kWrite, 0x2000, 4, "st");
       },
       {"note barrier: cas -> ld", "barrier: cas -> st"}},
      {"weak read of what others change by atomics, strict",
       "strict-atomics",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.global(b, Rw::kRead, 0x2000, 4, "ld");
         s.global(a, Rw::kAtomic, 0x2000, 4, "cas", Order::kRelaxed, Scope::kGpu);
       },
       {"barrier: ld -> cas"}},
      {"repeated reads do not hide a write in between",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.ld(a, 0, 16, "ld");
         s.ld(a, 4, 4, "ld again");
         s.st(b, 4, 4, "st");
         s.ld(a, 4, 4, "ld after");
         s.ld(a, 8, 4, "ld beside");
       },
       {"barrier: ld -> st", "barrier: st -> ld after"}},
      {"mbarrier.complete_tx by a thread",
       "",
       [](Script& s) {
         auto [p, c] = s.pair(64);
         s.st(p, 0, 4, "st");
         s.complete_tx(p, 64, 16);
         s.complete(64);
         s.wait(c, 64);
         s.ld(c, 0, 4, "ld");
       },
       {}},
      {"mbarrier.complete_tx by a thread, strict",
       "strict-complete-tx",
       [](Script& s) {
         auto [p, c] = s.pair(64);
         s.st(p, 0, 4, "st");
         s.complete_tx(p, 64, 16);
         s.complete(64);
         s.wait(c, 64);
         s.ld(c, 0, 4, "ld");
       },
       {"barrier: st -> ld"}},
      {"mbarrier.expect_tx releases nothing",
       "",
       [](Script& s) {
         auto [p, c] = s.pair(64);
         s.st(p, 0, 4, "st");
         s.complete_tx(p, 64, -16);
         s.complete(64);
         s.wait(c, 64);
         s.ld(c, 0, 4, "ld");
       },
       {"barrier: st -> ld"}},
      {"kernel boundary orders everything",
       "",
       [](Script& s) {
         s.global(s.warp(0), Rw::kWrite, 0x1000, 16, "first launch");
         s.relaunch();
         s.warp(0);
         s.global(s.warp(1), Rw::kRead, 0x1000, 16, "second launch");
       },
       {}},
      {"CTAs race on global memory",
       "",
       [](Script& s) {
         s.cta(1, 1, 0);
         AgentId a = s.warp(0), b = s.warp(0, 1);
         s.global(a, Rw::kWrite, 0x1008, 8, "st0");
         s.global(b, Rw::kWrite, 0x1000, 8, "neighbour");
         s.global(b, Rw::kWrite, 0x100c, 4, "st1");
       },
       {"barrier: st0 -> st1"}},
      {"shared memory of two CTAs is separate",
       "",
       [](Script& s) {
         s.cta(1, 1, 0);
         AgentId a = s.warp(0), b = s.warp(0, 1);
         s.st(a, 0, 4, "st0");
         s.st(b, 0, 4, "st1");
       },
       {}},
  };
}

}  // namespace race_test
