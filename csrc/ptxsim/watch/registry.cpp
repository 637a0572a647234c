// SPDX-License-Identifier: Apache-2.0
#include "race.h"
#include "watchers.h"

namespace ptxsim {

const std::vector<WatcherEntry>& watcher_table() {
  static const std::vector<WatcherEntry> table = {
      {"init", make_init_watcher},
      {"bounds", make_bounds_watcher},
      {"phase", make_phase_watcher},
      {"race", make_race_watcher},
  };
  return table;
}

}  // namespace ptxsim
