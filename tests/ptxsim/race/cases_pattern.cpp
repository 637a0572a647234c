// SPDX-License-Identifier: Apache-2.0
// Whole pipelines as CUTLASS and this repository write them, and the same with one edge left out.
#include "driver.h"

namespace race_test {
namespace {

constexpr uint32_t kFull = 0x8000, kEmpty = 0x8100, kAcc = 0x8200, kAccEmpty = 0x8208;

// TMA ring feeding tcgen05.mma, accumulator to an epilogue warp, staging buffer and TMA store.
// `skip` names one edge to leave out.
void gemm(Script& s, const std::string& skip) {
  auto on = [&](const char* edge) { return skip != edge; };
  AgentId load = s.warp(0), issue = s.warp(1), epi[2] = {s.warp(4), s.warp(5)};
  const uint32_t stages = 3;
  for (uint32_t k = 0; k < stages; ++k) {
    s.init(load, kFull + 8 * k);
    s.init(load, kEmpty + 8 * k);
  }
  s.init(load, kAcc);
  s.init(load, kAccEmpty);
  s.fence(load, Fence::kMbarrierInit);
  s.bar({load, issue, epi[0], epi[1]});
  for (uint32_t tile = 0, k = 0; tile < 3; ++tile) {
    if (tile && on("accumulator empty wait"))
      s.wait(issue, kAccEmpty, Order::kAcquire, "wait accumulator empty");
    for (uint32_t i = 0; i < 4; ++i, ++k) {
      uint32_t stage = k % stages, at = stage * 0x400;
      if (k >= stages && on("empty wait"))
        s.wait(load, kEmpty + 8 * stage, Order::kAcquire, "wait empty");
      AgentId t = s.op(AgentKind::kBulkLoad, load, "tma");
      s.arrive(load, kFull + 8 * stage);
      s.async_write(t, at, 0x400, "tma");
      s.signal(t, kFull + 8 * stage);
      s.end(t);
      if (on("full wait")) s.wait(issue, kFull + 8 * stage, Order::kAcquire, "wait full");
      AgentId c = s.op(AgentKind::kTcgenCp, issue);
      s.async_read(c, at + 0x300, 0x100, "cp");
      s.tmem_write(c, 0, 64, 4, "cp");
      AgentId m = s.op(AgentKind::kTcgenMma, issue);
      s.async_read(m, at, 0x300, "mma");
      s.tmem_read(m, 0, 64, 4, "mma");
      s.tmem_write(m, 0, 0, 32, "mma");
      AgentId e = s.op(AgentKind::kTcgenCommit, issue);
      if (on("stage commit")) {
        s.signal(e, kEmpty + 8 * stage);
      } else {
        s.signal(issue, kEmpty + 8 * stage);
      }
      for (AgentId o : {c, m, e}) s.end(o);
    }
    AgentId e = s.op(AgentKind::kTcgenCommit, issue);
    s.signal(e, kAcc);
    AgentId lds[2];
    for (int w = 0; w < 2; ++w) {
      if (on("accumulator wait")) s.wait(epi[w], kAcc, Order::kAcquire, "wait accumulator");
      lds[w] = s.op(AgentKind::kTcgenLd, epi[w]);
      s.tmem_read(lds[w], 0, 16u * static_cast<uint32_t>(w), 16, "ld");
      if (on("wait::ld")) s.join(epi[w], lds[w]);
      s.arrive(epi[w], kAccEmpty);
      if (w == 1) s.complete(kAccEmpty);
    }
    // Staging: two warps write, the first stores.
    for (int w = 0; w < 2; ++w) {
      s.st(epi[w], 0x4000 + 64u * static_cast<uint32_t>(w), 64, "st");
      if (on("proxy fence")) s.fence(epi[w], Fence::kProxyAsyncShared);
    }
    if (on("store barrier")) s.bar({epi[0], epi[1]}, 1);
    AgentId out = s.op(AgentKind::kBulkStore, epi[0]);
    s.async_read(out, 0x4000, 128, "tma store");
    s.global(out, Rw::kWrite, 0x100000 + 128 * tile, 128, "tma store", Order::kWeak, Scope::kNone,
             Proxy::kAsync);
    if (on("wait_group.read")) s.join(epi[0], out, Join::kRead);
    if (on("reuse barrier")) s.bar({epi[0], epi[1]}, 1);
  }
}

// TMA ring whose consumers read shared memory with ld, release with arrive; two consumers.
void ring(Script& s, const std::string& skip) {
  auto on = [&](const char* edge) { return skip != edge; };
  AgentId p = s.warp(0), c[2] = {s.warp(1), s.warp(2)};
  for (uint32_t k = 0; k < 2; ++k) {
    s.init(p, kFull + 8 * k);
    s.init(p, kEmpty + 8 * k);
  }
  s.fence(p, Fence::kProxyAsyncShared);
  if (on("init barrier")) s.bar({p, c[0], c[1]});
  for (uint32_t k = 0; k < 8; ++k) {
    uint32_t stage = k % 2;
    if (k >= 2 && on("empty wait")) s.wait(p, kEmpty + 8 * stage, Order::kAcquire, "wait empty");
    AgentId t = s.op(AgentKind::kBulkLoad, p, "tma");
    s.arrive(p, kFull + 8 * stage, Order::kRelease, "expect");
    s.async_write(t, stage * 0x400, 0x400, "tma");
    s.signal(t, kFull + 8 * stage);
    for (AgentId w : c) {
      if (on("full wait") || w != c[1]) s.wait(w, kFull + 8 * stage, Order::kAcquire, "wait full");
      s.ld(w, stage * 0x400, 0x400, "ld");
      if (on("release") || w != c[1]) s.arrive(w, kEmpty + 8 * stage, Order::kRelease, "release");
    }
    s.complete(kEmpty + 8 * stage);
  }
}

// Softmax hand-over: scores from tcgen05.mma, probabilities back through tcgen05.st, read by the
// next mma.
void scores(Script& s, const std::string& skip) {
  auto on = [&](const char* edge) { return skip != edge; };
  AgentId m = s.warp(12), w = s.warp(0);
  for (uint32_t b : {kFull, kEmpty}) s.init(m, b);
  s.fence(m, Fence::kMbarrierInit);
  s.bar({m, w});
  for (int k = 0; k < 4; ++k) {
    AgentId qk = s.op(AgentKind::kTcgenMma, m);
    s.tmem_write(qk, 0, 0, 64, "qk");
    AgentId c = s.op(AgentKind::kTcgenCommit, m);
    s.signal(c, kFull);
    if (on("score wait")) s.wait(w, kFull);
    AgentId l = s.op(AgentKind::kTcgenLd, w);
    s.tmem_read(l, 0, 0, 64, "ld");
    if (on("wait::ld")) s.join(w, l);
    AgentId t = s.op(AgentKind::kTcgenSt, w);
    s.tmem_write(t, 0, 32, 16, "st");
    if (on("wait::st")) s.join(w, t);
    s.signal(w, kEmpty);
    if (on("probability wait")) s.wait(m, kEmpty);
    AgentId pv = s.op(AgentKind::kTcgenMma, m);
    s.tmem_read(pv, 0, 32, 16, "pv");
    s.tmem_write(pv, 0, 128, 64, "pv");
  }
}

}  // namespace

std::vector<Case> pattern_cases() {
  return {
      {"gemm", "strict-init", [](Script& s) { gemm(s, ""); }, {}},
      {"gemm without full wait",
       "",
       [](Script& s) { gemm(s, "full wait"); },
       {"mbarrier-wait: tma -> cp", "mbarrier-wait: tma -> mma", "mbarrier-wait: tma -> tma"}},
      {"gemm without empty wait",
       "",
       [](Script& s) { gemm(s, "empty wait"); },
       {"mbarrier-wait: tma -> tma", "tcgen05-commit: mma -> tma", "tcgen05-commit: cp -> tma"}},
      {"gemm with arrive instead of commit",
       "",
       [](Script& s) { gemm(s, "stage commit"); },
       {"tcgen05-commit: mma -> tma", "tcgen05-commit: cp -> tma"}},
      {"gemm without accumulator wait",
       "",
       [](Script& s) { gemm(s, "accumulator wait"); },
       {"tcgen05-commit: mma -> ld"}},
      {"gemm without accumulator empty wait",
       "",
       [](Script& s) { gemm(s, "accumulator empty wait"); },
       {"barrier: ld -> mma"}},
      {"gemm without wait::ld",
       "",
       [](Script& s) { gemm(s, "wait::ld"); },
       {"tcgen05-wait: ld -> mma"}},
      {"gemm without proxy fence",
       "",
       [](Script& s) { gemm(s, "proxy fence"); },
       {"proxy-fence: st -> tma store"}},
      {"gemm without store barrier",
       "",
       [](Script& s) { gemm(s, "store barrier"); },
       {"barrier: st -> tma store"}},
      {"gemm without wait_group.read",
       "",
       [](Script& s) { gemm(s, "wait_group.read"); },
       {"bulk-wait: tma store -> st"}},
      {"gemm without reuse barrier",
       "",
       [](Script& s) { gemm(s, "reuse barrier"); },
       {"barrier: tma store -> st"}},
      {"ring", "strict-init", [](Script& s) { ring(s, ""); }, {}},
      {"ring without init barrier",
       "",
       [](Script& s) { ring(s, "init barrier"); },
       {"mbarrier-init: init -> wait full"}},
      {"ring without empty wait",
       "",
       [](Script& s) { ring(s, "empty wait"); },
       {"mbarrier-wait: tma -> tma", "barrier: ld -> tma"}},
      {"ring, one consumer without full wait",
       "",
       [](Script& s) { ring(s, "full wait"); },
       {"mbarrier-wait: tma -> ld"}},
      {"ring, one consumer does not release",
       "",
       [](Script& s) { ring(s, "release"); },
       {"barrier: ld -> tma"}},
      {"softmax hand-over", "", [](Script& s) { scores(s, ""); }, {}},
      {"softmax without score wait",
       "",
       [](Script& s) { scores(s, "score wait"); },
       {"tcgen05-commit: qk -> ld", "tcgen05-commit: qk -> st"}},
      {"softmax without wait::ld",
       "",
       [](Script& s) { scores(s, "wait::ld"); },
       {"tcgen05-wait: ld -> st", "tcgen05-wait: ld -> qk"}},
      {"softmax without wait::st",
       "",
       [](Script& s) { scores(s, "wait::st"); },
       {"tcgen05-wait: st -> pv", "tcgen05-wait: st -> qk"}},
      {"softmax without probability wait",
       "",
       [](Script& s) { scores(s, "probability wait"); },
       {"barrier: st -> pv", "barrier: ld -> qk", "barrier: st -> qk"}},
  };
}

}  // namespace race_test
