// SPDX-License-Identifier: Apache-2.0
// Registry of the watchers. A new watcher adds its factory here and one row in registry.cpp.
#ifndef PTXSIM_WATCH_WATCHERS_H_
#define PTXSIM_WATCH_WATCHERS_H_

#include <vector>

#include "../watch.h"

namespace ptxsim {

struct WatcherEntry {
  const char* name;
  Observer* (*make)();
};
const std::vector<WatcherEntry>& watcher_table();

Observer* make_init_watcher();    // reads of shared memory and Tensor Memory that nothing wrote
Observer* make_bounds_watcher();  // global accesses outside known allocations
Observer* make_phase_watcher();   // mbarrier phases, expect_tx and barrier lifetime

}  // namespace ptxsim

#endif  // PTXSIM_WATCH_WATCHERS_H_
