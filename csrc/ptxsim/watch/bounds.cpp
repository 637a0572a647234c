// SPDX-License-Identifier: Apache-2.0
// Global accesses outside the allocations that the simulator knows: cudaMalloc and relatives,
// module variables, ranges that the host registered (tensors). While no host range is registered,
// addresses outside every allocation are not judged, because ordinary host memory may be passed to
// a kernel.
#include <map>

#include "../base.h"
#include "../ranges.h"
#include "watchers.h"

namespace ptxsim {
namespace {

class BoundsWatcher : public Observer {
 public:
  void on_launch_begin(const LaunchInfo&, Reporter* r) override { reporter_ = r; }
  void on_access(const Access& a) override {
    if (a.space != Space::kGlobal || a.proxy == Proxy::kTensormap || a.size == 0) return;
    if (a.addr >= last_begin_ && a.addr + a.size <= last_end_) return;
    MemoryRange range;
    if (find_range(a.addr, &range)) {
      if (a.addr + a.size <= range.begin + range.size) {
        last_begin_ = range.begin;
        last_end_ = range.begin + range.size;
        return;
      }
    } else if (!host_ranges_registered() && !nearest_allocation(a.addr, 4096, &range)) {
      return;
    }
    std::string where = find_range(a.addr, &range) || nearest_allocation(a.addr, 1 << 20, &range)
                            ? format(", %lld bytes from the start of a %s of %llu bytes",
                                     (long long)(a.addr - range.begin), range.what.c_str(),
                                     (unsigned long long)range.size)
                            : std::string();
    reporter_->report(
        "bounds",
        format("%s of %u bytes at 0x%llx outside every allocation%s, lane %d, %s",
               a.rw == Rw::kRead ? "read" : "write", a.size, (unsigned long long)a.addr,
               where.c_str(), static_cast<int>(a.lane), reporter_->describe(a.site).c_str()));
  }

 private:
  Reporter* reporter_ = nullptr;
  uint64_t last_begin_ = 0, last_end_ = 0;
};

}  // namespace

Observer* make_bounds_watcher() { return new BoundsWatcher; }

}  // namespace ptxsim
