// SPDX-License-Identifier: Apache-2.0
#include "ranges.h"

#include <map>
#include <mutex>

namespace ptxsim {

std::atomic<int> host_range_count{0};
std::atomic<uint64_t> range_generation{1};

namespace {

std::mutex mutex;
struct Entry {
  uint64_t size;
  std::string what;
  bool host;
};
std::map<uint64_t, Entry>& table() {
  static auto* t = new std::map<uint64_t, Entry>;  // programs unregister after static destructors
  return *t;
}

}  // namespace

void add_range(uint64_t begin, uint64_t size, const std::string& what, bool host) {
  std::lock_guard<std::mutex> lock(mutex);
  auto it = table().find(begin);
  if (it != table().end()) {
    if (it->second.host) --host_range_count;
    if (it->second.size > size) size = it->second.size;
  }
  table()[begin] = {size, what, host};
  ++range_generation;
  host_range_count += host;
}

bool remove_range(uint64_t begin, MemoryRange* removed) {
  std::lock_guard<std::mutex> lock(mutex);
  auto it = table().find(begin);
  if (it == table().end()) return false;
  if (removed) *removed = {begin, it->second.size, it->second.what};
  if (it->second.host) --host_range_count;
  table().erase(it);
  ++range_generation;
  return true;
}

bool find_range(uint64_t addr, MemoryRange* range) {
  std::lock_guard<std::mutex> lock(mutex);
  auto it = table().upper_bound(addr);
  if (it == table().begin()) return false;
  --it;
  if (addr >= it->first + it->second.size) return false;
  *range = {it->first, it->second.size, it->second.what};
  return true;
}

bool nearest_allocation(uint64_t addr, uint64_t distance, MemoryRange* range) {
  std::lock_guard<std::mutex> lock(mutex);
  auto it = table().upper_bound(addr);
  if (it != table().begin()) {
    auto before = std::prev(it);
    if (addr - (before->first + before->second.size) <= distance) {
      *range = {before->first, before->second.size, before->second.what};
      return true;
    }
  }
  if (it != table().end() && it->first - addr <= distance) {
    *range = {it->first, it->second.size, it->second.what};
    return true;
  }
  return false;
}

}  // namespace ptxsim
