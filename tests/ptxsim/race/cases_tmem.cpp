// SPDX-License-Identifier: Apache-2.0
// Tensor memory: pipes, commits, waits, tcgen05.fence.
#include "driver.h"

namespace race_test {
namespace {

// A warp that issues (`m`) and one that reads (`e`), barrier at 1024 initialised.
struct Pair {
  AgentId m, e;
  explicit Pair(Script& s) : m(s.warp(0)), e(s.warp(4)) {
    s.init(m, 1024);
    s.fence(m, Fence::kMbarrierInit);
    s.bar({m, e});
  }
};

AgentId mma(Script& s, AgentId w, Label at) {
  AgentId m = s.op(AgentKind::kTcgenMma, w);
  s.tmem_write(m, 3, 0, 32, at);
  return m;
}

void commit(Script& s, AgentId w, uint32_t bar) {
  AgentId c = s.op(AgentKind::kTcgenCommit, w);
  s.signal(c, bar);
}

}  // namespace

std::vector<Case> tmem_cases() {
  return {
      {"mma, commit, wait, ld",
       "",
       [](Script& s) {
         Pair p(s);
         mma(s, p.m, "mma");
         commit(s, p.m, 1024);
         s.wait(p.e, 1024);
         s.tmem_read(s.op(AgentKind::kTcgenLd, p.e), 3, 0, 32, "ld");
       },
       {}},
      {"mma, commit, ld without wait",
       "",
       [](Script& s) {
         Pair p(s);
         mma(s, p.m, "mma");
         commit(s, p.m, 1024);
         s.tmem_read(s.op(AgentKind::kTcgenLd, p.e), 3, 0, 32, "ld");
       },
       {"tcgen05-commit: mma -> ld"}},
      {"mma, plain arrive instead of commit, ld",
       "",
       [](Script& s) {
         Pair p(s);
         mma(s, p.m, "mma");
         s.signal(p.m, 1024);
         s.wait(p.e, 1024);
         s.tmem_read(s.op(AgentKind::kTcgenLd, p.e), 3, 0, 32, "ld");
       },
       {"tcgen05-commit: mma -> ld"}},
      {"mma after its commit",
       "",
       [](Script& s) {
         Pair p(s);
         commit(s, p.m, 1024);
         mma(s, p.m, "mma");
         s.wait(p.e, 1024);
         s.tmem_read(s.op(AgentKind::kTcgenLd, p.e), 3, 0, 32, "ld");
       },
       {"tcgen05-commit: mma -> ld"}},
      {"mma chain of one issuer",
       "",
       [](Script& s) {
         AgentId w = s.warp(0);
         for (int k = 0; k < 3; ++k) {
           AgentId c = s.op(AgentKind::kTcgenCp, w);
           s.tmem_write(c, 3, 64, 4, "cp");
           AgentId m = s.op(AgentKind::kTcgenMma, w);
           s.tmem_read(m, 3, 64, 4, "mma scale");
           s.tmem_write(m, 3, 0, 32, "mma");
         }
       },
       {}},
      {"two issuers without order",
       "",
       [](Script& s) {
         AgentId v = s.warp(0), w = s.warp(1);
         AgentId c = s.op(AgentKind::kTcgenCp, v);
         AgentId m = s.op(AgentKind::kTcgenMma, w);
         s.observer().on_order(c, m);  // the queue of the model is no guarantee
         s.tmem_write(c, 3, 64, 4, "cp");
         s.tmem_read(m, 3, 64, 4, "mma");
       },
       {"tcgen05-commit: cp -> mma"}},
      {"pipelined across threads with tcgen05.fence",
       "",
       [](Script& s) {
         Pair p(s);
         AgentId c = s.op(AgentKind::kTcgenCp, p.m);
         s.tmem_write(c, 3, 64, 4, "cp");
         s.fence(p.m, Fence::kTcgenBeforeSync);
         s.signal(p.m, 1024, Order::kRelaxed);
         s.wait(p.e, 1024, Order::kRelaxed);
         s.fence(p.e, Fence::kTcgenAfterSync);
         AgentId m = s.op(AgentKind::kTcgenMma, p.e);
         s.tmem_read(m, 3, 64, 4, "mma");
         // Not complete yet, so a load has no such guarantee.
         s.tmem_read(s.op(AgentKind::kTcgenLd, p.e), 3, 64, 4, "ld");
       },
       {"tcgen05-commit: cp -> ld"}},
      {"pipelined across threads without ::after_thread_sync",
       "",
       [](Script& s) {
         Pair p(s);
         AgentId c = s.op(AgentKind::kTcgenCp, p.m);
         s.tmem_write(c, 3, 64, 4, "cp");
         s.fence(p.m, Fence::kTcgenBeforeSync);
         s.signal(p.m, 1024);
         s.wait(p.e, 1024);
         AgentId m = s.op(AgentKind::kTcgenMma, p.e);
         s.tmem_read(m, 3, 64, 4, "mma");
       },
       {"tcgen05-commit: cp -> mma"}},
      {"ld, wait::ld, arrive, mma overwrites",
       "",
       [](Script& s) {
         Pair p(s);
         AgentId l = s.op(AgentKind::kTcgenLd, p.e);
         s.tmem_read(l, 3, 0, 32, "ld");
         s.join(p.e, l);
         s.signal(p.e, 1024);
         s.wait(p.m, 1024);
         mma(s, p.m, "mma");
       },
       {}},
      {"ld without wait::ld, arrive, mma overwrites",
       "",
       [](Script& s) {
         Pair p(s);
         AgentId l = s.op(AgentKind::kTcgenLd, p.e);
         s.tmem_read(l, 3, 0, 32, "ld");
         s.signal(p.e, 1024);
         s.wait(p.m, 1024);
         mma(s, p.m, "mma");
       },
       {"tcgen05-wait: ld -> mma"}},
      {"wait::ld after the arrive",
       "",
       [](Script& s) {
         Pair p(s);
         AgentId l = s.op(AgentKind::kTcgenLd, p.e);
         s.tmem_read(l, 3, 0, 32, "ld");
         s.signal(p.e, 1024);
         s.join(p.e, l);
         s.wait(p.m, 1024);
         mma(s, p.m, "mma");
       },
       {"barrier: ld -> mma"}},
      {"wait::ld, arrive, but the issuer does not wait",
       "",
       [](Script& s) {
         Pair p(s);
         AgentId l = s.op(AgentKind::kTcgenLd, p.e);
         s.tmem_read(l, 3, 0, 32, "ld");
         s.join(p.e, l);
         s.signal(p.e, 1024);
         mma(s, p.m, "mma");
       },
       {"barrier: ld -> mma"}},
      {"mma lands before an unordered ld of it",
       "",
       [](Script& s) {
         Pair p(s);
         mma(s, p.m, "mma");
         s.bar({p.m, p.e});
         s.tmem_read(s.op(AgentKind::kTcgenLd, p.e), 3, 31, 1, "ld");
         s.tmem_read(s.op(AgentKind::kTcgenLd, p.e), 3, 32, 1, "ld of another column");
         s.tmem_read(s.op(AgentKind::kTcgenLd, p.e), 4, 31, 1, "ld of another lane");
       },
       {"tcgen05-commit: mma -> ld"}},
      {"st, wait::st, ld",
       "",
       [](Script& s) {
         AgentId w = s.warp(0);
         AgentId t = s.op(AgentKind::kTcgenSt, w);
         s.tmem_write(t, 3, 0, 32, "st");
         s.join(w, t);
         s.tmem_read(s.op(AgentKind::kTcgenLd, w), 3, 0, 32, "ld");
       },
       {}},
      {"st, ld without wait::st",
       "",
       [](Script& s) {
         AgentId w = s.warp(0);
         s.tmem_write(s.op(AgentKind::kTcgenSt, w), 3, 0, 32, "st");
         s.tmem_read(s.op(AgentKind::kTcgenLd, w), 3, 0, 32, "ld");
       },
       {"tcgen05-wait: st -> ld"}},
      {"ld, st of the same columns without wait::ld",
       "",
       [](Script& s) {
         AgentId w = s.warp(0);
         s.tmem_read(s.op(AgentKind::kTcgenLd, w), 3, 0, 32, "ld");
         s.tmem_write(s.op(AgentKind::kTcgenSt, w), 3, 0, 32, "st");
       },
       {"tcgen05-wait: ld -> st"}},
      {"st without wait::st, arrive, mma reads",
       "",
       [](Script& s) {
         Pair p(s);
         s.tmem_write(s.op(AgentKind::kTcgenSt, p.e), 3, 64, 32, "st");
         s.signal(p.e, 1024);
         s.wait(p.m, 1024);
         s.tmem_read(s.op(AgentKind::kTcgenMma, p.m), 3, 64, 32, "mma");
       },
       {"tcgen05-wait: st -> mma"}},
      {"relaxed hand-over with both fences",
       "",
       [](Script& s) {
         Pair p(s);
         AgentId l = s.op(AgentKind::kTcgenLd, p.e);
         s.tmem_read(l, 3, 0, 32, "ld");
         s.join(p.e, l);
         s.fence(p.e, Fence::kTcgenBeforeSync);
         s.signal(p.e, 1024, Order::kRelaxed);
         s.wait(p.m, 1024, Order::kRelaxed);
         s.fence(p.m, Fence::kTcgenAfterSync);
         mma(s, p.m, "mma");
       },
       {}},
      {"relaxed hand-over without ::before_thread_sync",
       "",
       [](Script& s) {
         Pair p(s);
         AgentId l = s.op(AgentKind::kTcgenLd, p.e);
         s.tmem_read(l, 3, 0, 32, "ld");
         s.join(p.e, l);
         s.signal(p.e, 1024, Order::kRelaxed);
         s.wait(p.m, 1024, Order::kRelaxed);
         s.fence(p.m, Fence::kTcgenAfterSync);
         mma(s, p.m, "mma");
       },
       {"barrier: ld -> mma"}},
      {"relaxed commit wait needs ::after_thread_sync",
       "",
       [](Script& s) {
         Pair p(s);
         mma(s, p.m, "mma");
         commit(s, p.m, 1024);
         s.wait(p.e, 1024, Order::kRelaxed);
         s.tmem_read(s.op(AgentKind::kTcgenLd, p.e), 3, 0, 32, "early");
         s.fence(p.e, Fence::kTcgenAfterSync);
         s.tmem_read(s.op(AgentKind::kTcgenLd, p.e), 3, 0, 32, "ld");
       },
       {"tcgen05-commit: mma -> early"}},
      {"strict: acquire wait without ::after_thread_sync",
       "strict-tcgen",
       [](Script& s) {
         Pair p(s);
         mma(s, p.m, "mma");
         commit(s, p.m, 1024);
         s.wait(p.e, 1024);
         s.tmem_read(s.op(AgentKind::kTcgenLd, p.e), 3, 0, 32, "ld");
       },
       {"tcgen05-fence: mma -> ld"}},
      {"strict: acquire wait with ::after_thread_sync",
       "strict-tcgen",
       [](Script& s) {
         Pair p(s);
         mma(s, p.m, "mma");
         commit(s, p.m, 1024);
         s.wait(p.e, 1024);
         s.fence(p.e, Fence::kTcgenAfterSync);
         s.tmem_read(s.op(AgentKind::kTcgenLd, p.e), 3, 0, 32, "ld");
       },
       {}},
      {"strict: fence before the wait is the wrong side",
       "strict-tcgen",
       [](Script& s) {
         Pair p(s);
         mma(s, p.m, "mma");
         commit(s, p.m, 1024);
         s.fence(p.e, Fence::kTcgenAfterSync);
         s.wait(p.e, 1024);
         s.tmem_read(s.op(AgentKind::kTcgenLd, p.e), 3, 0, 32, "ld");
       },
       {"tcgen05-fence: mma -> ld"}},
      {"strict: release without ::before_thread_sync",
       "strict-tcgen",
       [](Script& s) {
         Pair p(s);
         AgentId l = s.op(AgentKind::kTcgenLd, p.e);
         s.tmem_read(l, 3, 0, 32, "ld");
         s.join(p.e, l);
         s.signal(p.e, 1024);
         s.wait(p.m, 1024);
         s.fence(p.m, Fence::kTcgenAfterSync);
         mma(s, p.m, "mma");
       },
       {"tcgen05-fence: ld -> mma"}},
      {"strict: bar.sync hand-over with both fences",
       "strict-tcgen",
       [](Script& s) {
         Pair p(s);
         AgentId l = s.op(AgentKind::kTcgenLd, p.e);
         s.tmem_read(l, 3, 0, 32, "ld");
         s.join(p.e, l);
         s.fence(p.e, Fence::kTcgenBeforeSync);
         s.bar({p.e, p.m});
         s.fence(p.m, Fence::kTcgenAfterSync);
         mma(s, p.m, "mma");
       },
       {}},
      {"mma operand: written generically, fenced, arrived",
       "",
       [](Script& s) {
         Pair p(s);
         s.st(p.e, 0, 64, "st");
         s.fence(p.e, Fence::kProxyAsyncShared);
         s.signal(p.e, 1024);
         s.wait(p.m, 1024);
         s.async_read(s.op(AgentKind::kTcgenMma, p.m), 0, 64, "mma");
       },
       {}},
      {"mma operand: no proxy fence",
       "",
       [](Script& s) {
         Pair p(s);
         s.st(p.e, 0, 64, "st");
         s.signal(p.e, 1024);
         s.wait(p.m, 1024);
         s.async_read(s.op(AgentKind::kTcgenMma, p.m), 0, 64, "mma");
       },
       {"proxy-fence: st -> mma"}},
      {"mma operand: overwritten before the commit is seen",
       "",
       [](Script& s) {
         Pair p(s);
         AgentId m = s.op(AgentKind::kTcgenMma, p.m);
         s.async_read(m, 0, 64, "mma");
         commit(s, p.m, 1024);
         s.st(p.e, 0, 64, "early");
         s.wait(p.e, 1024);
         s.st(p.e, 0, 64, "st");
       },
       {"tcgen05-commit: mma -> early"}},
      {"tmem-at-issue: no tcgen05.wait, release and acquire",
       "tmem-at-issue",
       [](Script& s) {
         Pair p(s);
         AgentId l = s.op(AgentKind::kTcgenLd, p.e);
         s.tmem_read(l, 3, 0, 32, "ld");
         AgentId t = s.op(AgentKind::kTcgenSt, p.e);
         s.tmem_write(t, 3, 0, 32, "st");
         s.signal(p.e, 1024);
         s.wait(p.m, 1024);
         mma(s, p.m, "mma");
       },
       {}},
      {"tmem-at-issue: issued after the arrive",
       "tmem-at-issue",
       [](Script& s) {
         Pair p(s);
         s.signal(p.e, 1024);
         AgentId l = s.op(AgentKind::kTcgenLd, p.e);
         s.tmem_read(l, 3, 0, 32, "ld");
         s.wait(p.m, 1024);
         mma(s, p.m, "mma");
       },
       {"barrier: ld -> mma"}},
      {"rectangles: lanes and columns",
       "",
       [](Script& s) {
         AgentId v = s.warp(0), w = s.warp(1);
         s.tmem_write(s.op(AgentKind::kTcgenSt, v), 32, 24, 16, "st", 32);
         s.tmem_read(s.op(AgentKind::kTcgenLd, w), 0, 24, 16, "ld above", 32);
         s.tmem_read(s.op(AgentKind::kTcgenLd, w), 64, 24, 16, "ld below", 64);
         s.tmem_read(s.op(AgentKind::kTcgenLd, w), 0, 8, 16, "ld left", 128);
         s.tmem_read(s.op(AgentKind::kTcgenLd, w), 0, 40, 16, "ld right", 128);
         s.tmem_read(s.op(AgentKind::kTcgenLd, w), 63, 39, 1, "ld corner");
       },
       {"tcgen05-wait: st -> ld corner"}},
      {"dealloc while another warp reads",
       "",
       [](Script& s) {
         AgentId v = s.warp(0), w = s.warp(1);
         s.bar({v, w});
         AgentId l = s.op(AgentKind::kTcgenLd, w);
         s.tmem_read(l, 3, 32, 32, "ld");
         s.join(w, l);
         AgentId k = s.op(AgentKind::kTcgenLd, v);
         s.tmem_read(k, 3, 32, 32, "own ld");
         s.join(v, k);
         s.dealloc(v, 32, 32);
       },
       {"barrier: ld -> dealloc"}},
      {"dealloc behind a barrier",
       "",
       [](Script& s) {
         AgentId v = s.warp(0), w = s.warp(1);
         AgentId l = s.op(AgentKind::kTcgenLd, w);
         s.tmem_read(l, 3, 32, 32, "ld");
         s.join(w, l);
         AgentId k = s.op(AgentKind::kTcgenLd, v);
         s.tmem_read(k, 3, 32, 32, "own ld");
         s.join(v, k);
         s.bar({v, w});
         s.dealloc(v, 32, 32);
       },
       {}},
      {"dealloc by a warp that is not behind the last reader",
       "",
       [](Script& s) {
         // The reader itself knows its load: only who frees the columns matters.
         AgentId v = s.warp(0), w = s.warp(1);
         AgentId l = s.op(AgentKind::kTcgenLd, w);
         s.tmem_read(l, 3, 32, 32, "ld");
         s.join(w, l);
         s.dealloc(v, 32, 32);
       },
       {"barrier: ld -> dealloc"}},
      {"dealloc behind a load without wait::ld",
       "",
       [](Script& s) {
         AgentId w = s.warp(0);
         s.tmem_read(s.op(AgentKind::kTcgenLd, w), 3, 32, 32, "ld");
         s.dealloc(w, 32, 32);
       },
       {"note barrier: ld -> dealloc"}},
      {"dealloc behind a load without wait::ld, strict",
       "strict-tcgen",
       [](Script& s) {
         AgentId w = s.warp(0);
         s.tmem_read(s.op(AgentKind::kTcgenLd, w), 3, 32, 32, "ld");
         s.dealloc(w, 32, 32);
       },
       {"barrier: ld -> dealloc"}},
      {"dealloc before the mma is complete",
       "",
       [](Script& s) {
         AgentId w = s.warp(0);
         mma(s, w, "mma");
         s.dealloc(w, 0, 32);
       },
       {"barrier: mma -> dealloc"}},
      {"deallocated columns start afresh",
       "",
       [](Script& s) {
         AgentId v = s.warp(0), w = s.warp(1);
         AgentId t = s.op(AgentKind::kTcgenSt, v);
         s.tmem_write(t, 3, 32, 32, "st");
         s.join(v, t);
         s.dealloc(v, 32, 32);
         s.tmem_write(s.op(AgentKind::kTcgenSt, w), 3, 32, 32, "st of the next owner");
       },
       {}},
  };
}

}  // namespace race_test
