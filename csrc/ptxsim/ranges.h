// SPDX-License-Identifier: Apache-2.0
// Known pieces of global memory: device allocations, module variables and host ranges that the
// caller registered.
#ifndef PTXSIM_RANGES_H_
#define PTXSIM_RANGES_H_

#include <atomic>
#include <cstdint>
#include <string>

namespace ptxsim {

struct MemoryRange {
  uint64_t begin = 0, size = 0;
  std::string what;
};

void add_range(uint64_t begin, uint64_t size, const std::string& what, bool host = false);
bool remove_range(uint64_t begin, MemoryRange* removed = nullptr);
bool find_range(uint64_t addr, MemoryRange* range);
// A range that begins or ends within `distance` bytes of addr.
bool nearest_allocation(uint64_t addr, uint64_t distance, MemoryRange* range);
// Number of registered host ranges. While it is not zero, global accesses outside every range are
// refused before they happen.
extern std::atomic<int> host_range_count;
extern std::atomic<uint64_t> range_generation;  // changes with every add and remove
inline bool host_ranges_registered() {
  return host_range_count.load(std::memory_order_relaxed) != 0;
}

}  // namespace ptxsim

#endif  // PTXSIM_RANGES_H_
