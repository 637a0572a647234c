// SPDX-License-Identifier: Apache-2.0
// The list of watchers and their selection by PTXSIM_WATCH.
#include "watch/watchers.h"

#include "machine.h"

namespace ptxsim {

void select_watchers(const std::string& names) {
  Observers& list = observers();
  for (Observer* o : list) delete o;
  list.clear();
  if (names == "none" || names.empty()) return;
  size_t pos = 0;
  while (pos <= names.size()) {
    size_t comma = names.find(',', pos);
    std::string n = names.substr(pos, comma == std::string::npos ? comma : comma - pos);
    pos = comma == std::string::npos ? names.size() + 1 : comma + 1;
    bool found = false;
    for (const WatcherEntry& e : watcher_table()) {
      if (n == e.name || n == "all") {
        list.push_back(e.make());
        found = true;
      }
    }
    if (!found) {
      std::string known = "none, all";
      for (const WatcherEntry& e : watcher_table()) known += std::string(", ") + e.name;
      throw SimError(Err::kInvalidValue,
                     "PTXSIM_WATCH: unknown watcher '" + n + "'; known: " + known);
    }
  }
}

}  // namespace ptxsim
