// SPDX-License-Identifier: Apache-2.0
// Asynchronous operations: agents, the pool of copies that may land at any time, the in-order
// tcgen05 pipe, and when they land.
//
// Eager: at issue. Random: anywhere between issue and the point where the program has waited for
// it. Lazy: only when no warp can go on, or when a wait forces it.
#include <algorithm>

#include "machine.h"

namespace ptxsim {

std::atomic<AgentId>& next_agent_id() {
  static std::atomic<AgentId> id{1};
  return id;
}

AgentId new_agent(Warp& w, AgentKind kind) {
  if (!watched(w)) return 0;  // only watchers ask for it
  Grid& g = *w.cl->grid;
  AgentId id = next_agent_id()++;
  {
    AgentInfo info;
    info.id = id;
    info.kind = kind;
    info.parent = kind == AgentKind::kWarp ? id : w.agent;
    info.cluster = w.cl->key;
    info.cta = w.cta->key;
    info.launch = g.number;
    info.cta_rank = w.cta->rank;
    info.warp = w.id;
    info.site.kernel = w.kernel;
    if (w.at) info.site = w.site();
    g.agents[id] = info;
    for (Observer* o : *w.cl->observers) o->on_agent_begin(info);
  }
  return id;
}

AsyncPtr new_async(Warp& w, AgentKind kind) {
  auto op = std::make_shared<AsyncOp>();
  op->kind = kind;
  op->agent = new_agent(w, kind);
  op->warp = &w;
  op->cta = w.cta;
  op->site = w.site();
  return op;
}

void force_read(AsyncOp& op) {
  if (op.did_read || op.done) return;
  op.did_read = true;
  if (!op.read) return;
  const AsyncOp* before = set_current_op(&op);
  op.read();
  set_current_op(before);
}

void force(AsyncOp& op) {
  if (op.done) return;
  force_read(op);
  op.done = true;
  const AsyncOp* before = set_current_op(&op);
  if (op.run) op.run();
  set_current_op(before);
  op.run = nullptr;
  op.read = nullptr;
  Cluster& cl = *op.warp->cl;
  cl.progress = true;
  if (cl.observers) {
    for (Observer* o : *cl.observers) o->on_agent_end(op.agent);
  }
}

void pool_add(Warp& w, const AsyncPtr& op) {
  if (config().mode == Mode::kEager) {
    force(*op);
    return;
  }
  op->in_pool = true;
  w.cl->pool.push_back(op);
}

namespace {

void run_head(Cluster& cl, size_t k) {
  Warp* w = cl.pipes[k];
  AsyncPtr op = w->tcgen.front();
  w->tcgen.pop_front();
  if (w->tcgen.empty()) cl.pipes.erase(cl.pipes.begin() + static_cast<long>(k));
  force(*op);
}

void sweep(Cluster& cl) {
  auto& p = cl.pool;
  p.erase(std::remove_if(p.begin(), p.end(), [](const AsyncPtr& o) { return o->done; }), p.end());
}

}  // namespace

void pipe_add(Warp& w, const AsyncPtr& op) {
  if (watched(w) && w.last_pipe_agent) {
    for (Observer* o : *w.cl->observers) o->on_order(w.last_pipe_agent, op->agent);
  }
  w.last_pipe_agent = op->agent;
  if (config().mode == Mode::kEager) {
    force(*op);
    return;
  }
  if (w.tcgen.empty()) w.cl->pipes.push_back(&w);
  w.tcgen.push_back(op);
}

bool pump_one(Cluster& cl) {
  sweep(cl);
  size_t n = cl.pool.size() + cl.pipes.size();
  if (n == 0) return false;
  size_t k = cl.rng.below(static_cast<uint32_t>(n));
  if (k >= cl.pool.size()) {
    run_head(cl, k - cl.pool.size());
    return true;
  }
  AsyncPtr op = cl.pool[k];
  if (op->read && !op->did_read && cl.rng.below(2)) {
    force_read(*op);  // a store may have read its source long before its result is visible
    cl.progress = true;
    return true;
  }
  cl.pool.erase(cl.pool.begin() + static_cast<long>(k));
  force(*op);
  return true;
}

void pump_some(Cluster& cl) {
  if (config().mode != Mode::kRandom || (cl.pool.empty() && cl.pipes.empty())) return;
  // On average one operation per few warp turns, in bursts.
  uint32_t r = cl.rng.below(8);
  if (r < 3) {
    for (uint32_t k = 0; k <= r; ++k) pump_one(cl);
  }
}

void WatchSink::report(const char* watcher, const std::string& text, bool fatal) {
  if (printed_++ < 20) fprintf(stderr, "ptxsim %s: %s\n", watcher, text.c_str());
  if (fatal) {
    std::lock_guard<std::mutex> lock(grid_.error_mutex);
    if (!grid_.failed) {
      grid_.failed = true;
      grid_.code = Err::kLaunchFailure;
      grid_.error = std::string(watcher) + ": " + text;
    }
  }
}

std::string WatchSink::describe(const Site& site) const {
  return site.kernel ? site.kernel->describe(site.pc) : "?";
}

const AgentInfo* WatchSink::agent(AgentId id) const {
  auto it = grid_.agents.find(id);
  return it == grid_.agents.end() ? nullptr : &it->second;
}

}  // namespace ptxsim
