// SPDX-License-Identifier: Apache-2.0
// Shadow memory of the race detector: who touched which bytes last.
//
// A cell covers 16 bytes of shared or global memory, or 16 consecutive 32-bit columns of one TMEM
// lane; bit b of a record's mask is byte (column) b. A cell keeps the last writer of each byte and
// the readers since, as FastTrack does, with the difference that records are per byte mask:
// neighbours inside a cell do not disturb each other.
#ifndef PTXSIM_WATCH_RACE_SHADOW_H_
#define PTXSIM_WATCH_RACE_SHADOW_H_

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

#include "../watch.h"
#include "race_clock.h"

namespace ptxsim {
namespace race {

constexpr uint32_t kCellUnits = 16;

struct Record {
  AgentId agent = 0;
  Tick tick = 0;  // of the agent's warp; unused for asynchronous operations
  uint32_t pc = 0;
  uint32_t lanes = 0;  // of the warp that made it; 0 when unknown or asynchronous
  uint16_t mask = 0;
  uint8_t write : 1;
  uint8_t strong : 1;
  uint8_t atomic : 1;
  uint8_t proxy : 2;  // Proxy
  uint8_t scope : 3;  // Scope
  uint8_t pad = 0;
  Record() : write(0), strong(0), atomic(0), proxy(0), scope(0) {}
};
static_assert(sizeof(Record) == 20, "records are the bulk of the shadow memory");

class Cell {
 public:
  Cell() = default;
  Cell(const Cell&) = delete;
  Cell& operator=(const Cell&) = delete;
  ~Cell() { std::free(r_); }
  uint32_t size() const { return n_; }
  Record& operator[](uint32_t k) { return r_[k]; }
  void erase(uint32_t k) { r_[k] = r_[--n_]; }
  // Returns the bytes by which the shadow grew.
  size_t push(const Record& r) {
    size_t grown = 0;
    if (n_ == cap_) {
      uint32_t cap = cap_ ? cap_ * 2u : 1u;
      auto* p = static_cast<Record*>(std::realloc(static_cast<void*>(r_), cap * sizeof(Record)));
      if (!p) std::abort();
      grown = (cap - cap_) * sizeof(Record);
      r_ = p;
      cap_ = static_cast<uint16_t>(cap);
    }
    r_[n_++] = r;
    return grown;
  }
  void clear() { n_ = 0; }

 private:
  Record* r_ = nullptr;
  uint16_t n_ = 0, cap_ = 0;
};

// A contiguous range that lives as long as its CTA (shared memory, TMEM).
class Region {
 public:
  explicit Region(uint32_t cells) : cells_(new Cell[cells]), n_(cells) {}
  Cell* at(uint32_t k) { return k < n_ ? &cells_[k] : nullptr; }

 private:
  std::unique_ptr<Cell[]> cells_;
  uint32_t n_;
};

// Global memory: pages of 256 cells in a hash table, until `limit` bytes of shadow are in use. All
// of it goes when the launch ends, since the kernel boundary orders everything; nothing is evicted
// before.
class Paged {
 public:
  static constexpr uint32_t kPageCells = 256;
  explicit Paged(size_t limit) : limit_(limit) {}
  // Null when the limit is reached.
  Cell* at(uint64_t cell) {
    uint64_t page = cell / kPageCells;
    Recent& hit = recent_[page % kRecent];
    if (hit.page != page || !hit.cells) {
      auto it = pages_.find(page);
      if (it == pages_.end()) {
        if (bytes_ >= limit_) {
          full_ = true;
          return nullptr;
        }
        it = pages_.emplace(page, std::unique_ptr<Cell[]>(new Cell[kPageCells])).first;
        bytes_ += kPageCells * sizeof(Cell);
      }
      hit = {page, it->second.get()};
    }
    return &hit.cells[cell % kPageCells];
  }
  template <class F>
  void each(F f) {
    for (auto& page : pages_) {
      for (uint32_t k = 0; k < kPageCells; ++k) f(page.second[k]);
    }
  }
  void grew(size_t bytes) { bytes_ += bytes; }
  void clear() {
    pages_.clear();
    for (Recent& r : recent_) r = Recent();
    bytes_ = 0;
    full_ = false;
  }
  bool full() const { return full_; }
  size_t bytes() const { return bytes_; }

 private:
  std::unordered_map<uint64_t, std::unique_ptr<Cell[]>> pages_;
  struct Recent {
    uint64_t page = 0;
    Cell* cells = nullptr;
  };
  static constexpr uint32_t kRecent = 256;
  Recent recent_[kRecent];
  size_t bytes_ = 0, limit_;
  bool full_ = false;
};

}  // namespace race
}  // namespace ptxsim

#endif  // PTXSIM_WATCH_RACE_SHADOW_H_
