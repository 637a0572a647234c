// SPDX-License-Identifier: Apache-2.0
// Happens-before race detector and proxy checks: a watcher (see watch.h). docs/simulator-races.md
// states the rules.
#ifndef PTXSIM_WATCH_RACE_H_
#define PTXSIM_WATCH_RACE_H_

#include <cstddef>
#include <memory>
#include <string>

#include "../watch.h"

namespace ptxsim {

struct RaceOptions {
  // TMEM handed from one thread to another needs tcgen05.fence::before/after_thread_sync even where
  // mbarrier release/acquire or bar order the two (PTX ISA 9.7.16.6.3 lets the standard model order
  // them; CUTLASS uses no tcgen05.fence at all).
  bool strict_tcgen = false;
  // An mbarrier that others use needs a fence behind its init: fence.mbarrier_init before a relaxed
  // barrier.cluster.arrive, fence.mbarrier_init or fence.proxy.async before bulk copies of other
  // warps signal it. Off: notes, since CUTLASS leaves the first out in one place, and the manual
  // says that copies access the barrier through the generic proxy.
  bool strict_init = false;
  // mbarrier.complete_tx executed by a thread releases nothing, as its .relaxed says. Off: it is a
  // release like the completion that it simulates.
  bool strict_complete_tx = false;
  // A weak read unordered with an atomic of the same bytes is an error, not a note.
  bool strict_atomics = false;
  // Generic read, then asynchronous write of the same bytes: needs fence.proxy.async as well. Off:
  // happens-before is enough.
  bool war_fence = false;
  // Accept fence.proxy.async anywhere on the path from the write to the asynchronous access. Off:
  // the writer must have executed it.
  bool path_fence = false;
  // tcgen05.ld and ::st count as complete when issued, as PTXSIM_TMEM_ST=issue executes them: for
  // kernels that leave tcgen05.wait out where the data depend on each other through registers
  // (9.7.16.6.4.5 says that this orders no memory access).
  bool tmem_at_issue = false;
  size_t shadow_limit = size_t{512} << 20;  // bytes for global memory
  int max_reports = 50;

  // Words separated by commas: strict (the first four), strict-tcgen, strict-init,
  // strict-complete-tx, strict-atomics, war-fence, path-fence, tmem-at-issue, shadow-mb=N. Throws
  // std::invalid_argument with the unknown word.
  static RaceOptions parse(const std::string& text);
};

std::unique_ptr<Observer> make_race_detector(const RaceOptions& options);

// The factory of the registry: options from the environment variable PTXSIM_RACE.
Observer* make_race_watcher();

}  // namespace ptxsim

#endif  // PTXSIM_WATCH_RACE_H_
