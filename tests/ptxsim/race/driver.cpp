// SPDX-License-Identifier: Apache-2.0
// Usage: driver            runs every case, prints "ok NAME" or "FAIL NAME ..." and exits with 1 on
// any failure
//        driver --text NAME     prints the full reports of one case
//        driver --options TEXT  parses an option text; exit status 2 and the message on standard
//        error if it is wrong
#include "driver.h"

#include <cstdio>
#include <cstring>
#include <exception>

namespace race_test {

Script::Script(const std::string& options)
    : detector_(make_race_detector(RaceOptions::parse(options))) {
  begin();
  cta(0);
}

Script::~Script() = default;

void Script::begin() {
  LaunchInfo info;
  info.index = launches_++;
  detector_->on_launch_begin(info, this);
}

void Script::relaunch() {
  LaunchInfo info;
  for (auto& c : ctas_) detector_->on_cta_end(c.second.cluster, c.first);
  detector_->on_launch_end(info);
  ctas_.clear();
  agents_.clear();
  phase_.clear();
  named_phase_.clear();
  named_open_.clear();
  cluster_phase_ = 0;
  cluster_open_ = false;
  next_ = 1;
  begin();
  cta(0);
}

void Script::cta(uint32_t id, uint32_t cluster, uint32_t rank) {
  ctas_[id] = {cluster, rank};
  detector_->on_cta_begin(cluster, id, rank,
                          static_cast<uint64_t>(cluster) << 32 | rank << 24 | kBase, 0x10000);
}

AgentId Script::warp(uint32_t index, uint32_t cta) {
  AgentInfo i;
  i.id = i.parent = next_++;
  i.kind = AgentKind::kWarp;
  i.cta = cta;
  i.cluster = ctas_.at(cta).cluster;
  i.cta_rank = ctas_.at(cta).rank;
  i.warp = index;
  agents_[i.id] = i;
  detector_->on_agent_begin(i);
  return i.id;
}

AgentId Script::op(AgentKind kind, AgentId parent, Label at) {
  AgentInfo i = agents_.at(parent);
  i.id = next_++;
  i.kind = kind;
  i.parent = parent;
  i.site = site(at);
  agents_[i.id] = i;
  detector_->on_agent_begin(i);
  return i.id;
}

void Script::end(AgentId id) { detector_->on_agent_end(id); }

Site Script::site(Label at) {
  for (size_t k = 0; k < labels_.size(); ++k) {
    if (labels_[k] == at) return Site{nullptr, static_cast<uint32_t>(k)};
  }
  labels_.push_back(at);
  return Site{nullptr, static_cast<uint32_t>(labels_.size() - 1)};
}

Access Script::access(AgentId a, Space space, Rw rw, uint64_t addr, uint32_t n, Label at) {
  Access x;
  x.agent = a;
  x.space = space;
  x.rw = rw;
  x.addr = addr;
  x.size = n;
  x.site = site(at);
  return x;
}

uint64_t Script::shared(AgentId a, uint32_t off, int of) {
  const Cta& c = ctas_.at(of < 0 ? agents_.at(a).cta : static_cast<uint32_t>(of));
  return static_cast<uint64_t>(c.cluster) << 32 | c.rank << 24 | (kBase + off);
}

void Script::st(AgentId a, uint32_t off, uint32_t n, Label at, int of, uint32_t lane) {
  Access x = access(a, Space::kShared, Rw::kWrite, shared(a, off, of), n, at);
  x.lane = lane;
  detector_->on_access(x);
}
void Script::ld(AgentId a, uint32_t off, uint32_t n, Label at, int of) {
  detector_->on_access(access(a, Space::kShared, Rw::kRead, shared(a, off, of), n, at));
}
void Script::async_write(AgentId a, uint32_t off, uint32_t n, Label at, int of) {
  Access x = access(a, Space::kShared, Rw::kWrite, shared(a, off, of), n, at);
  x.proxy = Proxy::kAsync;
  detector_->on_access(x);
}
void Script::async_read(AgentId a, uint32_t off, uint32_t n, Label at, int of) {
  Access x = access(a, Space::kShared, Rw::kRead, shared(a, off, of), n, at);
  x.proxy = Proxy::kAsync;
  detector_->on_access(x);
}
void Script::shared_strong(AgentId a, Rw rw, uint32_t off, Order order, Scope scope, Label at) {
  Access x = access(a, Space::kShared, rw, shared(a, off, -1), 4, at);
  x.order = order;
  x.scope = scope;
  detector_->on_access(x);
}
void Script::tmem_write(AgentId a, uint32_t lane, uint32_t column, uint32_t n, Label at,
                        uint32_t lanes) {
  uint64_t addr = static_cast<uint64_t>(agents_.at(a).cta) << 32 | lane << 16 | column;
  Access x = access(a, Space::kTmem, Rw::kWrite, addr, n, at);
  x.rows = lanes;
  detector_->on_access(x);
}
void Script::tmem_read(AgentId a, uint32_t lane, uint32_t column, uint32_t n, Label at,
                       uint32_t lanes) {
  uint64_t addr = static_cast<uint64_t>(agents_.at(a).cta) << 32 | lane << 16 | column;
  Access x = access(a, Space::kTmem, Rw::kRead, addr, n, at);
  x.rows = lanes;
  detector_->on_access(x);
}
void Script::dealloc(AgentId w, uint32_t column, uint32_t n, Label at) {
  uint64_t addr = static_cast<uint64_t>(agents_.at(w).cta) << 32 | column;
  detector_->on_free(Space::kTmem, addr, n, "tcgen05.dealloc", w, site(at));
}
void Script::global(AgentId a, Rw rw, uint64_t addr, uint32_t n, Label at, Order order, Scope scope,
                    Proxy proxy) {
  Access x = access(a, Space::kGlobal, rw, addr, n, at);
  x.order = order;
  x.scope = scope;
  x.proxy = proxy;
  detector_->on_access(x);
}

void Script::bar_arrive(AgentId w, uint32_t index) {
  BarrierRef b;
  b.kind = BarrierKind::kNamed;
  b.owner = agents_.at(w).cta;
  b.index = index;
  named_open_[index] = true;
  detector_->on_arrive(w, b, named_phase_[index], 32, 0, Order::kAcqRel, site("bar"));
}

void Script::bar_wait(AgentId w, uint32_t index) {
  BarrierRef b;
  b.kind = BarrierKind::kNamed;
  b.owner = agents_.at(w).cta;
  b.index = index;
  if (named_open_[index]) {
    named_open_[index] = false;
    detector_->on_phase_complete(b, named_phase_[index]++);
  }
  detector_->on_wait(w, b, named_phase_[index] - 1, Order::kAcqRel, site("bar"));
}

void Script::bar(const std::vector<AgentId>& warps, uint32_t index) {
  for (AgentId w : warps) bar_arrive(w, index);
  for (AgentId w : warps) bar_wait(w, index);
}

void Script::cluster_arrive(AgentId w, Order order) {
  BarrierRef b;
  b.kind = BarrierKind::kCluster;
  b.owner = agents_.at(w).cluster;
  cluster_open_ = true;
  detector_->on_arrive(w, b, cluster_phase_, 32, 0, order, site("cluster arrive"));
}

void Script::cluster_wait(AgentId w) {
  BarrierRef b;
  b.kind = BarrierKind::kCluster;
  b.owner = agents_.at(w).cluster;
  if (cluster_open_) {
    cluster_open_ = false;
    detector_->on_phase_complete(b, cluster_phase_++);
  }
  detector_->on_wait(w, b, cluster_phase_ - 1, Order::kAcquire, site("cluster wait"));
}

BarrierRef Script::mbarrier(uint32_t off, uint32_t cta) {
  const Cta& c = ctas_.at(cta);
  BarrierRef b;
  b.kind = BarrierKind::kMbarrier;
  b.owner = cta;
  b.addr = static_cast<uint64_t>(c.cluster) << 32 | c.rank << 24 | (kBase + off);
  return b;
}

void Script::init(AgentId w, uint32_t off, Label at) {
  BarrierRef b = mbarrier(off, agents_.at(w).cta);
  phase_[b.addr] = 0;
  detector_->on_barrier_init(w, b, 1, site(at));
}

std::pair<AgentId, AgentId> Script::pair(uint32_t off, bool fenced) {
  AgentId first = warp(0), second = warp(1);
  init(first, off);
  if (fenced) fence(first, Fence::kMbarrierInit);
  bar({first, second});
  return {first, second};
}

void Script::inval(AgentId w, uint32_t off) {
  detector_->on_barrier_inval(w, mbarrier(off, agents_.at(w).cta), site("inval"));
}

void Script::arrive(AgentId a, uint32_t off, Order order, Label at, int of) {
  BarrierRef b = mbarrier(off, of < 0 ? agents_.at(a).cta : static_cast<uint32_t>(of));
  detector_->on_arrive(a, b, phase_[b.addr], 1, 0, order, site(at));
}

void Script::complete_tx(AgentId w, uint32_t off, int64_t bytes) {
  BarrierRef b = mbarrier(off, agents_.at(w).cta);
  detector_->on_arrive(w, b, phase_[b.addr], 0, -bytes, Order::kRelaxed, site("complete_tx"));
}

void Script::complete(uint32_t off, uint32_t of) {
  BarrierRef b = mbarrier(off, of);
  detector_->on_phase_complete(b, phase_[b.addr]++);
}

void Script::signal(AgentId a, uint32_t off, Order order, int of) {
  arrive(a, off, order, "arrive", of);
  complete(off, of < 0 ? agents_.at(a).cta : static_cast<uint32_t>(of));
}

void Script::wait(AgentId w, uint32_t off, Order order, Label at) {
  BarrierRef b = mbarrier(off, agents_.at(w).cta);
  detector_->on_wait(w, b, phase_[b.addr] - 1, order, site(at));
}

void Script::fence(AgentId w, Fence f, Order order, Scope scope, uint32_t lanes) {
  detector_->on_fence(w, f, order, scope, site("fence"), lanes);
}
void Script::join(AgentId w, AgentId op, Join what) { detector_->on_join(w, op, what); }

void Script::report(const char*, const std::string& text, bool fatal) {
  texts.push_back(text);
  std::string out = fatal ? "" : "note ";
  size_t a = text.find("[missing "), b = text.find(']');
  if (a == 0 && b != std::string::npos) out += text.substr(9, b - 9) + ":";
  const char* arrow = " ";
  for (size_t at = 0; (at = text.find('<', at)) != std::string::npos;) {
    size_t close = text.find('>', at);
    out += arrow + text.substr(at + 1, close - at - 1);
    arrow = " -> ";
    at = close;
  }
  reports.push_back(out);
}

std::string Script::describe(const Site& site) const { return "<" + labels_.at(site.pc) + ">"; }

const AgentInfo* Script::agent(AgentId id) const {
  auto it = agents_.find(id);
  return it == agents_.end() ? nullptr : &it->second;
}

}  // namespace race_test

int main(int argc, char** argv) {
  using namespace race_test;
  std::vector<Case> all;
  for (auto& list : {barrier_cases(), async_cases(), tmem_cases(), pattern_cases()})
    all.insert(all.end(), list.begin(), list.end());
  if (argc == 3 && !std::strcmp(argv[1], "--options")) {
    try {
      RaceOptions::parse(argv[2]);
      return 0;
    } catch (const std::exception& e) {
      std::fprintf(stderr, "%s\n", e.what());
      return 2;
    }
  }
  bool text = argc == 3 && !std::strcmp(argv[1], "--text");
  int failed = 0;
  for (const Case& c : all) {
    if (text && std::strcmp(c.name, argv[2])) continue;
    Script s(c.options);
    c.body(s);
    if (text) {
      for (auto& t : s.texts) std::printf("%s\n", t.c_str());
      continue;
    }
    if (s.reports == c.expected) {
      std::printf("ok %s\n", c.name);
      continue;
    }
    ++failed;
    std::printf("FAIL %s\n", c.name);
    for (auto& r : c.expected) std::printf("  expected %s\n", r.c_str());
    for (auto& r : s.reports) std::printf("  got      %s\n", r.c_str());
  }
  return failed != 0;
}
