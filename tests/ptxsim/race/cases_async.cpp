// SPDX-License-Identifier: Apache-2.0
// Bulk copies, cp.async, wgmma and the proxies.
#include "driver.h"

namespace race_test {
namespace {

AgentId load(Script& s, AgentId w) {
  AgentId t = s.op(AgentKind::kBulkLoad, w);
  s.async_write(t, 0, 256, "tma");
  return t;
}

AgentId store(Script& s, AgentId w) {
  AgentId t = s.op(AgentKind::kBulkStore, w);
  s.async_read(t, 0, 16, "tma store");
  return t;
}

}  // namespace

std::vector<Case> async_cases() {
  return {
      {"bulk load, wait, read",
       "",
       [](Script& s) {
         auto [p, c] = s.pair(1024, true);
         AgentId t = s.op(AgentKind::kBulkLoad, p);
         s.arrive(p, 1024);
         s.async_write(t, 0, 256, "tma");
         s.signal(t, 1024);
         s.wait(c, 1024);
         s.ld(c, 0, 16, "ld");
       },
       {}},
      {"bulk load, read without wait",
       "",
       [](Script& s) {
         auto [p, c] = s.pair(1024, true);
         AgentId t = s.op(AgentKind::kBulkLoad, p);
         s.arrive(p, 1024);
         s.async_write(t, 0, 256, "tma");
         s.signal(t, 1024);
         s.ld(c, 0, 16, "ld");
       },
       {"mbarrier-wait: tma -> ld"}},
      {"bulk load lands after the read",
       "",
       [](Script& s) {
         auto [p, c] = s.pair(1024, true);
         AgentId t = s.op(AgentKind::kBulkLoad, p);
         s.ld(p, 0, 16, "ld");
         s.async_write(t, 0, 256, "tma");
       },
       {"mbarrier-wait: ld -> tma"}},
      {"complete_tx does not speak for the issuer",
       "",
       [](Script& s) {
         auto [p, c] = s.pair(1024, true);
         s.st(p, 512, 4, "st");
         AgentId t = load(s, p);
         s.signal(t, 1024);
         s.wait(c, 1024);
         s.ld(c, 512, 4, "ld");
       },
       {"barrier: st -> ld"}},
      {"bulk load over generic data without proxy fence",
       "",
       [](Script& s) {
         AgentId p = s.warp(0), c = s.warp(1);
         s.init(p, 1024);
         s.st(c, 0, 16, "zero");
         s.fence(p, Fence::kMbarrierInit);
         s.bar({p, c});
         load(s, p);
       },
       {"proxy-fence: zero -> tma"}},
      {"bulk load over generic data with proxy fence",
       "",
       [](Script& s) {
         AgentId p = s.warp(0), c = s.warp(1);
         s.init(p, 1024);
         s.st(c, 0, 16, "zero");
         s.fence(c, Fence::kProxyAsyncShared);
         s.fence(p, Fence::kMbarrierInit);
         s.bar({p, c});
         load(s, p);
       },
       {}},
      {"generic read, barrier, bulk load",
       "",
       [](Script& s) {
         AgentId p = s.warp(0), c = s.warp(1);
         s.ld(c, 0, 16, "ld");
         s.bar({p, c});
         load(s, p);
       },
       {}},
      {"generic read, barrier, bulk load with war-fence",
       "war-fence",
       [](Script& s) {
         AgentId p = s.warp(0), c = s.warp(1);
         s.ld(c, 0, 16, "ld");
         s.bar({p, c});
         load(s, p);
       },
       {"proxy-fence: ld -> tma"}},
      {"generic read, fence, barrier, bulk load with war-fence",
       "war-fence",
       [](Script& s) {
         AgentId p = s.warp(0), c = s.warp(1);
         s.ld(c, 0, 16, "ld");
         s.fence(c, Fence::kProxyAsyncShared);
         s.bar({p, c});
         load(s, p);
       },
       {}},
      {"store from staging buffer",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.st(a, 0, 16, "st a");
         s.st(b, 16, 16, "st b");
         s.fence(a, Fence::kProxyAsyncShared);
         s.fence(b, Fence::kProxyAsyncShared);
         s.bar({a, b});
         AgentId t = s.op(AgentKind::kBulkStore, a);
         s.async_read(t, 0, 32, "tma store");
         s.join(a, t, Join::kRead);
         s.bar({a, b});
         s.st(b, 0, 32, "reuse");
       },
       {}},
      {"store: one writer without proxy fence",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.st(a, 0, 16, "st a");
         s.st(b, 16, 16, "st b");
         s.fence(a, Fence::kProxyAsyncShared);
         s.bar({a, b});
         AgentId t = s.op(AgentKind::kBulkStore, a);
         s.async_read(t, 0, 32, "tma store");
       },
       {"proxy-fence: st b -> tma store"}},
      {"store: all lanes write, one lane fences",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         for (uint32_t l = 0; l < 4; ++l) s.st(a, 16 * l, 16, "st", -1, l);
         s.fence(a, Fence::kProxyAsyncShared, Order::kAcqRel, Scope::kGpu, 1);
         s.bar({a, b});
         AgentId t = s.op(AgentKind::kBulkStore, b);
         s.async_read(t, 0, 64, "tma store");
       },
       {"proxy-fence: st -> tma store"}},
      {"store: the lane that wrote fences",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         s.st(a, 0, 16, "st 3", -1, 3);
         s.st(a, 16, 16, "st 5", -1, 5);
         s.fence(a, Fence::kProxyAsyncShared, Order::kAcqRel, Scope::kGpu, 1 << 3);
         store(s, a);
       },
       {}},
      {"store: two partial fences cover the lanes",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         for (uint32_t l = 0; l < 2; ++l) s.st(a, 4 * l, 4, "st", -1, l);
         s.fence(a, Fence::kProxyAsyncShared, Order::kAcqRel, Scope::kGpu, 1);
         s.fence(a, Fence::kProxyAsync, Order::kAcqRel, Scope::kGpu, 2);
         AgentId t = s.op(AgentKind::kBulkStore, a);
         s.async_read(t, 0, 8, "tma store");
       },
       {}},
      {"store: a partial fence of the other space does not count",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         for (uint32_t l = 0; l < 2; ++l) s.st(a, 4 * l, 4, "st", -1, l);
         s.fence(a, Fence::kProxyAsyncShared, Order::kAcqRel, Scope::kGpu, 1);
         s.fence(a, Fence::kProxyAsyncGlobal, Order::kAcqRel, Scope::kGpu, 2);
         AgentId t = s.op(AgentKind::kBulkStore, a);
         s.async_read(t, 0, 8, "tma store");
       },
       {"proxy-fence: st -> tma store"}},
      {"store: one lane fences for all, path-fence",
       "path-fence",
       [](Script& s) {
         AgentId a = s.warp(0);
         for (uint32_t l = 0; l < 4; ++l) s.st(a, 16 * l, 16, "st", -1, l);
         s.fence(a, Fence::kProxyAsyncShared, Order::kAcqRel, Scope::kGpu, 1);
         AgentId t = s.op(AgentKind::kBulkStore, a);
         s.async_read(t, 0, 64, "tma store");
       },
       {}},
      {"store: fence before the write",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         s.fence(a, Fence::kProxyAsyncShared);
         s.st(a, 0, 16, "st");
         store(s, a);
       },
       {"proxy-fence: st -> tma store"}},
      {"store: fence behind the barrier by the issuer only",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.st(b, 0, 16, "st");
         s.bar({a, b});
         s.fence(a, Fence::kProxyAsyncShared);
         store(s, a);
       },
       {"proxy-fence: st -> tma store"}},
      {"store: fence behind the barrier, path-fence",
       "path-fence",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.st(b, 0, 16, "st");
         s.bar({a, b});
         s.fence(a, Fence::kProxyAsyncShared);
         store(s, a);
       },
       {}},
      {"store: writer fences after its barrier",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.st(b, 0, 16, "st");
         s.bar({a, b});
         s.fence(b, Fence::kProxyAsyncShared);
         store(s, a);
       },
       {"proxy-fence: st -> tma store"}},
      {"store: global-only proxy fence",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         s.st(a, 0, 16, "st");
         s.fence(a, Fence::kProxyAsyncGlobal);
         store(s, a);
       },
       {"proxy-fence: st -> tma store"}},
      {"store: fenced but no barrier",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.st(b, 0, 16, "st");
         s.fence(b, Fence::kProxyAsyncShared);
         store(s, a);
       },
       {"barrier: st -> tma store"}},
      {"store: buffer reused without wait_group.read",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         s.st(a, 0, 16, "st");
         s.fence(a, Fence::kProxyAsyncShared);
         store(s, a);
         s.st(a, 0, 16, "reuse");
       },
       {"bulk-wait: tma store -> reuse"}},
      {"store: reads late, buffer reused before",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         s.st(a, 0, 16, "st");
         s.fence(a, Fence::kProxyAsyncShared);
         AgentId t = s.op(AgentKind::kBulkStore, a);
         s.st(a, 0, 16, "reuse");
         s.async_read(t, 0, 16, "tma store");
       },
       {"bulk-wait: reuse -> tma store"}},
      {"store: reads late, another warp reuses behind a barrier",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.bar({a, b});
         AgentId t = s.op(AgentKind::kBulkStore, a);
         s.bar({a, b});
         s.st(b, 0, 16, "reuse");
         s.async_read(t, 0, 16, "tma store");
       },
       {"bulk-wait: reuse -> tma store"}},
      {"store: wait_group.read, no barrier to the reuser",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         AgentId t = store(s, a);
         s.join(a, t, Join::kRead);
         s.st(b, 0, 16, "reuse");
       },
       {"barrier: tma store -> reuse"}},
      {"store: result read after wait_group.read only",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         AgentId t = s.op(AgentKind::kBulkStore, a);
         s.async_read(t, 0, 16, "src");
         s.join(a, t, Join::kRead);
         s.global(t, Rw::kWrite, 0x1000, 16, "tma store", Order::kWeak, Scope::kNone,
                  Proxy::kAsync);
         s.global(a, Rw::kRead, 0x1000, 16, "ld");
       },
       {"bulk-wait: tma store -> ld"}},
      {"store: result read after wait_group",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         AgentId t = s.op(AgentKind::kBulkStore, a);
         s.async_read(t, 0, 16, "src");
         s.global(t, Rw::kWrite, 0x1000, 16, "tma store", Order::kWeak, Scope::kNone,
                  Proxy::kAsync);
         s.join(a, t);
         s.global(a, Rw::kRead, 0x1000, 16, "ld");
       },
       {}},
      {"store issued by all lanes of a warp",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         for (int lane = 0; lane < 2; ++lane) {
           AgentId t = s.op(AgentKind::kBulkStore, a, "tma store");
           s.global(t, Rw::kWrite, 0x1000, 16, "tma store", Order::kWeak, Scope::kNone,
                    Proxy::kAsync);
         }
       },
       {}},
      {"two stores to the same place",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         for (Label at : {"first", "second"}) {
           AgentId t = s.op(AgentKind::kBulkStore, a, at);
           s.global(t, Rw::kWrite, 0x1000, 16, at, Order::kWeak, Scope::kNone, Proxy::kAsync);
         }
       },
       {"bulk-wait: first -> second"}},
      {"global data written generically, then bulk load",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         s.global(a, Rw::kWrite, 0x1000, 16, "st");
         s.fence(a, Fence::kProxyAsyncShared);
         AgentId t = s.op(AgentKind::kBulkLoad, a);
         s.global(t, Rw::kRead, 0x1000, 16, "tma", Order::kWeak, Scope::kNone, Proxy::kAsync);
       },
       {"proxy-fence: st -> tma"}},
      {"global data written generically, fence.proxy.async.global, bulk load",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         s.global(a, Rw::kWrite, 0x1000, 16, "st");
         s.fence(a, Fence::kProxyAsyncGlobal);
         AgentId t = s.op(AgentKind::kBulkLoad, a);
         s.global(t, Rw::kRead, 0x1000, 16, "tma", Order::kWeak, Scope::kNone, Proxy::kAsync);
       },
       {}},
      {"reductions by bulk copies do not race",
       "",
       [](Script& s) {
         s.cta(1, 1, 0);
         AgentId a = s.warp(0), b = s.warp(0, 1);
         AgentId t = s.op(AgentKind::kBulkStore, a), u = s.op(AgentKind::kBulkStore, b);
         s.global(t, Rw::kAtomic, 0x1000, 16, "red", Order::kRelaxed, Scope::kGpu, Proxy::kAsync);
         s.global(u, Rw::kAtomic, 0x1000, 16, "red", Order::kRelaxed, Scope::kGpu, Proxy::kAsync);
       },
       {}},
      {"tensor map changed without its fence",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         s.global(a, Rw::kWrite, 0x1000, 8, "replace");
         AgentId t = s.op(AgentKind::kBulkLoad, a);
         s.global(t, Rw::kRead, 0x1000, 128, "tma", Order::kWeak, Scope::kNone, Proxy::kTensormap);
       },
       {"tensormap-fence: replace -> tma"}},
      {"tensor map changed, release and acquire fence",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         s.global(a, Rw::kWrite, 0x1000, 8, "replace");
         s.fence(a, Fence::kProxyTensormap, Order::kRelease);
         s.fence(a, Fence::kProxyTensormap, Order::kAcquire);
         AgentId t = s.op(AgentKind::kBulkLoad, a);
         s.global(t, Rw::kRead, 0x1000, 128, "tma", Order::kWeak, Scope::kNone, Proxy::kTensormap);
       },
       {}},
      {"barrier init used by a copy of another warp without fence",
       "",
       [](Script& s) {
         auto [a, b] = s.pair(1024);
         AgentId t = s.op(AgentKind::kBulkLoad, b);
         s.async_write(t, 0, 16, "tma");
         s.signal(t, 1024);
       },
       {"note init-fence: init -> arrive"}},
      {"barrier init without fence, strict",
       "strict-init",
       [](Script& s) {
         auto [a, b] = s.pair(1024);
         AgentId t = s.op(AgentKind::kBulkLoad, b);
         s.async_write(t, 0, 16, "tma");
         s.signal(t, 1024);
       },
       {"init-fence: init -> arrive"}},
      {"barrier init with proxy fence, strict",
       "strict-init",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.init(a, 1024);
         s.fence(a, Fence::kProxyAsyncShared);
         s.bar({a, b});
         AgentId t = s.op(AgentKind::kBulkLoad, b);
         s.async_write(t, 0, 16, "tma");
         s.signal(t, 1024);
       },
       {}},
      {"multicast: each CTA waits for its own barrier",
       "",
       [](Script& s) {
         s.cta(1, 0, 1);
         AgentId a = s.warp(0), b = s.warp(0, 1);
         s.init(a, 1024);
         s.init(b, 1024);
         s.fence(a, Fence::kMbarrierInit);
         s.fence(b, Fence::kMbarrierInit);
         for (AgentId w : {a, b}) s.cluster_arrive(w, Order::kRelaxed);
         for (AgentId w : {a, b}) s.cluster_wait(w);
         AgentId t = s.op(AgentKind::kBulkLoad, a);
         s.async_write(t, 0, 64, "tma", 0);
         s.async_write(t, 0, 64, "tma", 1);
         s.signal(t, 1024, Order::kRelease, 0);
         s.signal(t, 1024, Order::kRelease, 1);
         s.wait(a, 1024);
         s.ld(a, 0, 16, "ld 0");
         s.ld(b, 0, 16, "ld 1 early");
         s.wait(b, 1024);
         s.ld(b, 16, 16, "ld 1");
         s.ld(a, 32, 16, "ld 0 of 1", 1);
       },
       {"mbarrier-wait: tma -> ld 1 early", "mbarrier-wait: tma -> ld 0 of 1"}},
      {"cp.async, wait_group, barrier, read",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         AgentId t = s.op(AgentKind::kCpAsync, a);
         s.st(t, 0, 64, "cp.async");
         s.join(a, t);
         s.ld(a, 0, 16, "own ld");
         s.bar({a, b});
         s.ld(b, 16, 16, "ld");
       },
       {}},
      {"cp.async, own read without wait_group",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         AgentId t = s.op(AgentKind::kCpAsync, a);
         s.st(t, 0, 64, "cp.async");
         s.ld(a, 0, 16, "ld");
       },
       {"cp-async-wait: cp.async -> ld"}},
      {"cp.async, barrier before wait_group",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         AgentId t = s.op(AgentKind::kCpAsync, a);
         s.st(t, 0, 64, "cp.async");
         s.bar({a, b});
         s.join(a, t);
         s.ld(b, 0, 16, "ld");
       },
       {"barrier: cp.async -> ld"}},
      {"cp.async.mbarrier.arrive",
       "",
       [](Script& s) {
         auto [a, b] = s.pair(1024);
         AgentId t = s.op(AgentKind::kCpAsync, a), late = s.op(AgentKind::kCpAsync, a);
         s.st(t, 0, 64, "cp.async");
         AgentId r = s.op(AgentKind::kCpAsyncArrive, a);
         s.join(r, t);
         s.signal(r, 1024);
         s.wait(b, 1024);
         s.ld(b, 0, 16, "ld");
         s.st(late, 64, 64, "later cp.async");
         s.ld(b, 64, 16, "ld of the later one");
       },
       {"cp-async-wait: later cp.async -> ld of the later one"}},
      {"cp.async, proxy fence by the warp that waited, tcgen05.mma",
       "",
       [](Script& s) {
         auto [a, b] = s.pair(1024);
         AgentId t = s.op(AgentKind::kCpAsync, a), r = s.op(AgentKind::kCpAsyncArrive, a);
         s.st(t, 0, 64, "cp.async");
         s.join(r, t);
         s.signal(r, 1024);
         s.wait(b, 1024);
         s.fence(b, Fence::kProxyAsyncShared);
         AgentId m = s.op(AgentKind::kTcgenMma, b);
         s.async_read(m, 0, 64, "mma");
       },
       {}},
      {"cp.async, no proxy fence, tcgen05.mma",
       "",
       [](Script& s) {
         auto [a, b] = s.pair(1024);
         AgentId t = s.op(AgentKind::kCpAsync, a), r = s.op(AgentKind::kCpAsyncArrive, a);
         s.st(t, 0, 64, "cp.async");
         s.join(r, t);
         s.signal(r, 1024);
         s.wait(b, 1024);
         AgentId m = s.op(AgentKind::kTcgenMma, b);
         s.async_read(m, 0, 64, "mma");
       },
       {"proxy-fence: cp.async -> mma"}},
      {"cp.async, wait_group, proxy fence by the writer",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         AgentId t = s.op(AgentKind::kCpAsync, a);
         s.st(t, 0, 64, "cp.async");
         s.join(a, t);
         s.fence(a, Fence::kProxyAsyncShared);
         s.bar({a, b});
         AgentId m = s.op(AgentKind::kTcgenMma, b);
         s.async_read(m, 0, 64, "mma");
       },
       {}},
      {"cp.async, proxy fence before wait_group",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         AgentId t = s.op(AgentKind::kCpAsync, a);
         s.st(t, 0, 64, "cp.async");
         s.fence(a, Fence::kProxyAsyncShared);
         s.join(a, t);
         s.bar({a, b});
         AgentId m = s.op(AgentKind::kTcgenMma, b);
         s.async_read(m, 0, 64, "mma");
       },
       {"proxy-fence: cp.async -> mma"}},
      {"wgmma: fence, operands, wait, reuse",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         s.st(a, 0, 64, "st");
         s.fence(a, Fence::kProxyAsyncShared);
         s.fence(a, Fence::kWgmma);
         AgentId m = s.op(AgentKind::kWgmma, a, "wgmma");
         s.async_read(m, 0, 64, "wgmma");
         s.join(a, m);
         s.st(a, 0, 64, "reuse");
       },
       {}},
      {"wgmma: operands written by the other warps of the warpgroup",
       "",
       [](Script& s) {
         AgentId w[4] = {s.warp(0), s.warp(1), s.warp(2), s.warp(3)}, other = s.warp(4);
         s.st(other, 256, 16, "st elsewhere");
         s.fence(other, Fence::kProxyAsyncShared);
         for (uint32_t k = 0; k < 4; ++k) {
           s.st(w[k], 16 * k, 16, "st");
           s.fence(w[k], Fence::kProxyAsyncShared);
           s.fence(w[k], Fence::kWgmma);
         }
         AgentId m = s.op(AgentKind::kWgmma, w[3], "wgmma");
         for (AgentId x : w) s.observer().on_order(x, m);
         s.async_read(m, 0, 64, "wgmma");
         s.async_read(m, 256, 16, "wgmma");
         for (AgentId x : w) s.join(x, m);
         s.st(w[1], 16, 16, "reuse");
       },
       {"barrier: st elsewhere -> wgmma"}},
      {"wgmma without wgmma.fence",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         AgentId m = s.op(AgentKind::kWgmma, a, "wgmma");
         s.async_read(m, 0, 64, "wgmma");
       },
       {"wgmma-fence: wgmma"}},
      {"wgmma operand reused without wait_group",
       "",
       [](Script& s) {
         AgentId a = s.warp(0), b = s.warp(1);
         s.fence(a, Fence::kWgmma);
         AgentId m = s.op(AgentKind::kWgmma, a, "wgmma");
         s.async_read(m, 0, 64, "wgmma");
         s.bar({a, b});
         AgentId t = s.op(AgentKind::kBulkLoad, b);
         s.async_write(t, 0, 64, "tma");
       },
       {"wgmma-wait: wgmma -> tma"}},
      {"wgmma operand written generically without proxy fence",
       "",
       [](Script& s) {
         AgentId a = s.warp(0);
         s.st(a, 0, 64, "st");
         s.fence(a, Fence::kWgmma);
         AgentId m = s.op(AgentKind::kWgmma, a, "wgmma");
         s.async_read(m, 0, 64, "wgmma");
       },
       {"proxy-fence: st -> wgmma"}},
  };
}

}  // namespace race_test
