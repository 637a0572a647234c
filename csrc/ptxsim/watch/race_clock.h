// SPDX-License-Identifier: Apache-2.0
// Vector clocks of the race detector.
//
// A component ("slot") belongs to a warp, to the in-order tcgen05 pipe of a warp, or to an
// mbarrier. Asynchronous operations have no component of their own: an operation is known to
// whoever knows the point at which it was first observed complete, which is a tick of one of those
// components (see Alt in race.h). So clocks stay as short as warps + mbarriers of a cluster,
// however many copies are issued, and nothing is lost by it.
#ifndef PTXSIM_WATCH_RACE_CLOCK_H_
#define PTXSIM_WATCH_RACE_CLOCK_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace ptxsim {
namespace race {

using Tick = uint32_t;

struct Slot {
  uint32_t cluster = ~0u;
  uint32_t index = 0;
  bool valid() const { return cluster != ~0u; }
  bool operator==(const Slot& o) const { return cluster == o.cluster && index == o.index; }
};

class Clock {
 public:
  Tick get(Slot s) const {
    for (const Part& p : parts_) {
      if (p.cluster == s.cluster) return s.index < p.ticks.size() ? p.ticks[s.index] : 0;
    }
    return 0;
  }

  void raise(Slot s, Tick t) {
    std::vector<Tick>& v = part(s.cluster);
    if (v.size() <= s.index) v.resize(s.index + 1, 0);
    v[s.index] = std::max(v[s.index], t);
  }

  void join(const Clock& o) {
    for (const Part& p : o.parts_) {
      std::vector<Tick>& v = part(p.cluster);
      if (v.size() < p.ticks.size()) v.resize(p.ticks.size(), 0);
      for (size_t k = 0; k < p.ticks.size(); ++k) v[k] = std::max(v[k], p.ticks[k]);
    }
  }

  bool empty() const { return parts_.empty(); }
  void clear() { parts_.clear(); }

 private:
  struct Part {
    uint32_t cluster;
    std::vector<Tick> ticks;
  };
  std::vector<Tick>& part(uint32_t cluster) {
    for (Part& p : parts_) {
      if (p.cluster == cluster) return p.ticks;
    }
    parts_.push_back({cluster, {}});
    return parts_.back().ticks;
  }
  std::vector<Part> parts_;  // one entry unless clusters synchronise through global memory
};

enum FenceSpace : int { kSharedSpace, kGlobalSpace, kTensormapSpace, kFenceSpaces };

// What an agent knows to have happened before its next operation.
struct Knowledge {
  Clock hb;                    // base causality order (PTX ISA 8.9.5)
  Clock fenced[kFenceSpaces];  // the part of hb with a proxy fence behind it
  Clock init;       // mbarrier.init operations made visible by fence.mbarrier_init or a proxy fence
  Clock init_seen;  // the same without fence: execution is ordered, visibility is not guaranteed
  Clock tmem;       // tcgen05 operations complete before the next one, through tcgen05.fence
  Clock piped;      // tcgen05.mma/cp/shift that run before the next of these, complete or not
};

using Shared = std::shared_ptr<Knowledge>;

// The part that a release hands to an acquire.
struct Released {
  Clock hb;
  Clock fenced[kFenceSpaces];
  void join(const Knowledge& k) {
    hb.join(k.hb);
    for (int s = 0; s < kFenceSpaces; ++s) fenced[s].join(k.fenced[s]);
  }
  void join(const Released& o) {
    hb.join(o.hb);
    for (int s = 0; s < kFenceSpaces; ++s) fenced[s].join(o.fenced[s]);
  }
  void into(Knowledge* k) const {
    k->hb.join(hb);
    for (int s = 0; s < kFenceSpaces; ++s) k->fenced[s].join(fenced[s]);
  }
  bool empty() const { return hb.empty(); }
  void clear() {
    hb.clear();
    for (auto& f : fenced) f.clear();
  }
};

// What one phase of a barrier carries from those who arrived to those who wait.
struct Payload {
  Released released;      // needs release and acquire
  Clock init, init_seen;  // carried by relaxed operations as well
  Clock tmem, piped;      // needs tcgen05.fence on both sides, memory order does not matter
  uint64_t version = 0;   // never the same for two different contents, of whatever payload
  void touch() {
    static uint64_t stamp = 0;
    version = ++stamp;
  }
  void join(const Payload& o) {
    released.join(o.released);
    init.join(o.init);
    init_seen.join(o.init_seen);
    tmem.join(o.tmem);
    piped.join(o.piped);
    touch();
  }
};

}  // namespace race
}  // namespace ptxsim

#endif  // PTXSIM_WATCH_RACE_CLOCK_H_
