// SPDX-License-Identifier: Apache-2.0
// Feeds the race detector hand-written event sequences, as the simulator's core would emit them.
#ifndef MPFA_TESTS_PTXSIM_RACE_DRIVER_H_
#define MPFA_TESTS_PTXSIM_RACE_DRIVER_H_

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../../../csrc/ptxsim/watch/race.h"

namespace race_test {

using namespace ptxsim;
using Label = const char*;

constexpr uint32_t kBase = 0x400;

class Script : public Reporter {
 public:
  explicit Script(const std::string& options = "");
  ~Script() override;
  // Reports so far, one per entry: "missing-edge: first access -> second access", prefixed by "note
  // " if not fatal.
  std::vector<std::string> reports;
  std::vector<std::string> texts;

  void relaunch();  // ends the launch and begins the next one
  void cta(uint32_t id, uint32_t cluster = 0, uint32_t rank = 0);
  AgentId warp(uint32_t index, uint32_t cta = 0);
  AgentId op(AgentKind kind, AgentId parent, Label at = "op");
  void end(AgentId id);

  // Shared memory of CTA `of` (-1: the agent's own).
  void st(AgentId a, uint32_t off, uint32_t n, Label at, int of = -1, uint32_t lane = ~0u);
  void ld(AgentId a, uint32_t off, uint32_t n, Label at, int of = -1);
  void async_write(AgentId a, uint32_t off, uint32_t n, Label at, int of = -1);
  void async_read(AgentId a, uint32_t off, uint32_t n, Label at, int of = -1);
  void shared_strong(AgentId a, Rw rw, uint32_t off, Order order, Scope scope, Label at);
  // Tensor memory of the agent's CTA.
  void tmem_write(AgentId a, uint32_t lane, uint32_t column, uint32_t n, Label at,
                  uint32_t lanes = 1);
  void tmem_read(AgentId a, uint32_t lane, uint32_t column, uint32_t n, Label at,
                 uint32_t lanes = 1);
  // tcgen05.dealloc of columns of the agent's CTA.
  void dealloc(AgentId w, uint32_t column, uint32_t n, Label at = "dealloc");
  // Global memory.
  void global(AgentId a, Rw rw, uint64_t addr, uint32_t n, Label at, Order order = Order::kWeak,
              Scope scope = Scope::kNone, Proxy proxy = Proxy::kGeneric);

  void bar(const std::vector<AgentId>& warps, uint32_t index = 0);
  void bar_arrive(AgentId w, uint32_t index);
  void bar_wait(AgentId w, uint32_t index);  // completes the phase at its first wait
  void cluster_arrive(AgentId w, Order order = Order::kRelease);
  void cluster_wait(AgentId w);

  void init(AgentId w, uint32_t off, Label at = "init");
  void inval(AgentId w, uint32_t off);
  void arrive(AgentId a, uint32_t off, Order order = Order::kRelease, Label at = "arrive",
              int of = -1);
  void complete_tx(AgentId w, uint32_t off, int64_t bytes);  // negative: expect_tx
  void complete(uint32_t off, uint32_t of = 0);              // the phase completes
  // Warps 0 and 1 behind a barrier; the first has initialised (and fenced) an mbarrier at `off`.
  std::pair<AgentId, AgentId> pair(uint32_t off, bool fenced = false);
  void wait(AgentId w, uint32_t off, Order order = Order::kAcquire, Label at = "wait");
  // Arrival that completes the phase.
  void signal(AgentId a, uint32_t off, Order order = Order::kRelease, int of = -1);

  void fence(AgentId w, Fence f, Order order = Order::kAcqRel, Scope scope = Scope::kGpu,
             uint32_t lanes = ~0u);
  void join(AgentId w, AgentId op, Join what = Join::kFull);

  Observer& observer() { return *detector_; }

  void report(const char* watcher, const std::string& text, bool fatal) override;
  std::string describe(const Site& site) const override;
  const AgentInfo* agent(AgentId id) const override;

 private:
  Site site(Label at);
  Access access(AgentId a, Space space, Rw rw, uint64_t addr, uint32_t n, Label at);
  uint64_t shared(AgentId a, uint32_t off, int of);
  BarrierRef mbarrier(uint32_t off, uint32_t cta);
  void begin();

  std::unique_ptr<Observer> detector_;
  std::vector<std::string> labels_;
  std::map<AgentId, AgentInfo> agents_;
  struct Cta {
    uint32_t cluster, rank;
  };
  std::map<uint32_t, Cta> ctas_;
  std::map<uint64_t, uint64_t> phase_;        // mbarriers by address
  std::map<uint32_t, uint64_t> named_phase_;  // of CTA 0
  std::map<uint32_t, bool> named_open_;
  uint64_t cluster_phase_ = 0;
  bool cluster_open_ = false;
  AgentId next_ = 1;
  uint64_t launches_ = 0;
};

struct Case {
  const char* name;
  const char* options;
  std::function<void(Script&)> body;
  std::vector<std::string> expected;
};

std::vector<Case> barrier_cases();
std::vector<Case> async_cases();
std::vector<Case> tmem_cases();
std::vector<Case> pattern_cases();

}  // namespace race_test

#endif  // MPFA_TESTS_PTXSIM_RACE_DRIVER_H_
