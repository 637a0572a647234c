// SPDX-License-Identifier: Apache-2.0
// Reads of shared memory bytes and Tensor Memory cells that nothing has written since the CTA
// started (or the columns were allocated).
#include <bitset>
#include <memory>
#include <unordered_map>

#include "../base.h"
#include "watchers.h"

namespace ptxsim {
namespace {

class InitWatcher : public Observer {
 public:
  void on_launch_begin(const LaunchInfo&, Reporter* r) override {
    reporter_ = r;
    smem_.clear();
    tmem_.clear();
  }
  void on_cta_begin(uint32_t cluster, uint32_t, uint32_t rank, uint64_t, uint32_t size) override {
    smem_[key(cluster, rank)].assign(size + 0x400, false);
  }
  void on_cta_end(uint32_t, uint32_t cta) override { tmem_.erase(cta); }
  void on_alloc(Space space, uint64_t addr, uint64_t size, const char*) override {
    if (space != Space::kTmem) return;
    auto& t = tmem_[static_cast<uint32_t>(addr >> 32)];
    if (!t) t = std::make_unique<Cells>();
    for (uint32_t lane = 0; lane < 128; ++lane) {
      for (uint64_t c = 0; c < size; ++c) t->reset(lane * 512 + (addr & 0xffff) + c);
    }
  }
  void on_access(const Access& a) override {
    if (a.space == Space::kShared) {
      shared(a);
    } else if (a.space == Space::kTmem) {
      tmem(a);
    }
  }
  void on_barrier_init(AgentId, const BarrierRef& b, uint32_t, const Site&) override {
    mark(b.addr, 8);
  }

 private:
  using Cells = std::bitset<128 * 512>;
  static uint64_t key(uint32_t cluster, uint32_t rank) {
    return static_cast<uint64_t>(cluster) << 8 | rank;
  }
  std::vector<bool>* bytes(uint64_t addr) {
    auto it = smem_.find(
        key(static_cast<uint32_t>(addr >> 32), static_cast<uint32_t>(addr >> 24) & 0xff));
    return it == smem_.end() ? nullptr : &it->second;
  }
  void mark(uint64_t addr, uint32_t size) {
    auto* b = bytes(addr);
    uint32_t off = addr & 0xffffff;
    for (uint32_t k = 0; b && k < size && off + k < b->size(); ++k) (*b)[off + k] = true;
  }
  void shared(const Access& a) {
    auto* b = bytes(a.addr);
    if (!b) return;
    uint32_t off = a.addr & 0xffffff;
    if (a.rw != Rw::kWrite) {
      for (uint32_t k = 0; k < a.size && off + k < b->size(); ++k) {
        if (!(*b)[off + k]) {
          reporter_->report("init",
                            format("read of shared memory that nothing wrote: offset 0x%x (%u "
                                   "bytes at 0x%x), lane %d, %s",
                                   off + k - 0x400, a.size, off - 0x400, static_cast<int>(a.lane),
                                   reporter_->describe(a.site).c_str()));
          for (uint32_t n = 0; n < a.size && off + n < b->size(); ++n)
            (*b)[off + n] = true;  // once per place
          return;
        }
      }
    }
    if (a.rw != Rw::kRead) mark(a.addr, a.size);
  }
  void tmem(const Access& a) {
    auto it = tmem_.find(static_cast<uint32_t>(a.addr >> 32));
    if (it == tmem_.end()) return;
    uint32_t lane = a.addr >> 16 & 0xffff, column = a.addr & 0xffff;
    for (uint32_t r = lane; r < lane + a.rows && r < 128; ++r) {
      for (uint32_t c = column; c < column + a.size && c < 512; ++c) {
        size_t at = r * 512 + c;
        if (a.rw == Rw::kRead && !it->second->test(at)) {
          reporter_->report(
              "init", format("read of Tensor Memory that nothing wrote: lane %u column %u, %s", r,
                             c, reporter_->describe(a.site).c_str()));
          for (uint32_t n = lane; n < lane + a.rows && n < 128; ++n) {
            for (uint32_t k = column; k < column + a.size && k < 512; ++k)
              it->second->set(n * 512 + k);
          }
          return;
        }
        if (a.rw != Rw::kRead) it->second->set(at);
      }
    }
  }
  Reporter* reporter_ = nullptr;
  std::unordered_map<uint64_t, std::vector<bool>> smem_;
  std::unordered_map<uint32_t, std::unique_ptr<Cells>> tmem_;
};

}  // namespace

Observer* make_init_watcher() { return new InitWatcher; }

}  // namespace ptxsim
