// SPDX-License-Identifier: Apache-2.0
// Longest-processing-time-first scheduling: items in descending cost, each to the least loaded
// worker. Ties: items by creation order, workers by lowest number.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "mpfa/plan/tiles.h"

namespace mpfa {

struct Balance {
  int64_t min_load = 0;
  int64_t max_load = 0;
  int64_t total_load = 0;
  int64_t largest_item = 0;
};

// The runs in descending cost, stable: a counting sort where costs are dense, as they mostly are.
inline void sort_runs(const std::vector<Run>& runs, std::vector<int32_t>* counts,
                      std::vector<const Run*>* sorted) {
  sorted->resize(runs.size());
  if (runs.empty()) return;
  int64_t low = runs[0].cost, high = runs[0].cost;
  for (const Run& run : runs) {
    low = std::min(low, run.cost);
    high = std::max(high, run.cost);
  }
  const int64_t span = high - low + 1;
  if (span > static_cast<int64_t>(8 * runs.size() + 1024)) {
    std::transform(runs.begin(), runs.end(), sorted->begin(), [](const Run& run) { return &run; });
    std::stable_sort(sorted->begin(), sorted->end(),
                     [](const Run* a, const Run* b) { return a->cost > b->cost; });
    return;
  }
  counts->assign(span + 1, 0);
  for (const Run& run : runs) ++(*counts)[high - run.cost + 1];
  for (int64_t i = 0; i < span; ++i) (*counts)[i + 1] += (*counts)[i];
  for (const Run& run : runs) (*sorted)[(*counts)[high - run.cost]++] = &run;
}

// Loads share a 64-bit key with the worker number.
constexpr int kWorkerBits = 16;
constexpr int64_t kMaxTotalCost = int64_t{1} << (63 - kWorkerBits);

// Consecutive items, in scheduling order, that go to the same workers in turn: `rounds` times over
// the next `width` entries of Assignment::order.
struct Stretch {
  int32_t width;
  int32_t rounds;
};

struct Assignment {
  std::vector<Stretch> stretches;
  std::vector<uint16_t> order;
  std::vector<int32_t> items;  // per worker
};

// The least-loaded-worker queue, kept as a sorted array of (load, worker) keys.
//
// A heap pays log(workers) for every item. Here n items of equal cost c are served in rounds: the
// workers that stand below the first worker's load + c are exactly those that a heap would pop, in
// order, before it pops the first one again. They get one item each, move up by c together and are
// merged back. Once all workers stand that close, the order repeats and whole rounds are one step.
// The result is the heap's, item for item.
class WorkerQueue {
 public:
  void reset(int64_t num_workers) {
    keys_.resize(num_workers);
    for (int64_t w = 0; w < num_workers; ++w) keys_[w] = w;
  }

  // Gives out `count` items of cost `cost`.
  void assign(int64_t count, int64_t cost, Assignment* to) {
    const uint64_t step = static_cast<uint64_t>(cost) << kWorkerBits;
    const int64_t workers = static_cast<int64_t>(keys_.size());
    while (count > 0) {
      const uint64_t bound = keys_[0] + step;
      int64_t width = workers;
      if (keys_[workers - 1] >= bound) {
        width = std::lower_bound(keys_.begin(), keys_.end(), bound) - keys_.begin();
      }
      width = std::min(width, count);
      const int64_t rounds = width == workers ? count / workers : 1;
      to->stretches.push_back({static_cast<int32_t>(width), static_cast<int32_t>(rounds)});
      moved_.resize(width);
      for (int64_t i = 0; i < width; ++i) {
        const uint16_t worker = static_cast<uint16_t>(keys_[i]);
        to->order.push_back(worker);
        to->items[worker] += static_cast<int32_t>(rounds);
        moved_[i] = keys_[i] + step * static_cast<uint64_t>(rounds);
      }
      merge_back(width);
      count -= width * rounds;
    }
  }

  int64_t min_load() const { return static_cast<int64_t>(keys_.front() >> kWorkerBits); }
  int64_t max_load() const { return static_cast<int64_t>(keys_.back() >> kWorkerBits); }

 private:
  // Replaces the first `count` keys by moved_, keeping the array sorted. Stops early: keys above
  // the last moved one stay where they are.
  void merge_back(int64_t count) {
    const int64_t size = static_cast<int64_t>(keys_.size());
    int64_t to = 0, rest = count, next = 0;
    while (next < count) {
      keys_[to++] = rest < size && keys_[rest] < moved_[next] ? keys_[rest++] : moved_[next++];
    }
  }

  std::vector<uint64_t> keys_;   // load << 16 | worker
  std::vector<uint64_t> moved_;  // scratch of one step
};

struct Schedule {
  std::vector<const Run*> sorted;  // by falling cost
  std::vector<int32_t> counts;     // scratch of sort_runs
  std::vector<int32_t> cursor;     // per worker
  Assignment assignment;
  WorkerQueue queue;
};

inline Balance schedule(const TileList& list, int64_t num_workers, Schedule* s) {
  Balance balance;
  sort_runs(list.runs, &s->counts, &s->sorted);
  s->assignment.stretches.clear();
  s->assignment.order.clear();
  s->assignment.items.assign(num_workers, 0);
  s->queue.reset(num_workers);
  for (size_t i = 0; i < s->sorted.size();) {
    const int64_t cost = s->sorted[i]->cost;
    int64_t count = 0;
    for (; i < s->sorted.size() && s->sorted[i]->cost == cost; ++i) count += s->sorted[i]->count;
    s->queue.assign(count, cost, &s->assignment);
  }
  balance.total_load = list.total_cost;
  balance.largest_item = s->sorted.empty() ? 0 : s->sorted[0]->cost;
  balance.min_load = s->queue.min_load();
  balance.max_load = s->queue.max_load();
  return balance;
}

// A position in scheduling order: item `item` of run `**at`.
struct RunCursor {
  const Run* const* at;
  const Run* const* end;
  int64_t item;

  const Run& run() const { return **at; }
  void advance(int64_t count) {
    item += count;
    while (at != end && item >= (*at)->count) item -= (*at++)->count;
  }
};

// Writes the items in worker order: worker w owns items [worker_indptr[w], worker_indptr[w + 1]),
// in the order it was given them.
inline void write_items(int64_t num_workers, Schedule* s, WorkItem* items, int32_t* worker_indptr) {
  worker_indptr[0] = 0;
  const Assignment& assignment = s->assignment;
  std::partial_sum(assignment.items.begin(), assignment.items.end(), worker_indptr + 1);
  s->cursor.assign(worker_indptr, worker_indptr + num_workers);
  int32_t* const cursor = s->cursor.data();
  const uint16_t* order = assignment.order.data();
  RunCursor next = {s->sorted.data(), s->sorted.data() + s->sorted.size(), 0};
  for (const Stretch stretch : assignment.stretches) {
    const int64_t count = static_cast<int64_t>(stretch.width) * stretch.rounds;
    RunCursor after = next;
    after.advance(count);
    // Long runs are written one worker at a time. measured: sequential stores take 2/3 of the time
    // of stores to all workers in turn. With short runs, finding each worker's items would cost
    // more than that saves.
    if (stretch.rounds > 1 && (after.at - next.at + 1) * stretch.width <= count) {
      for (int32_t i = 0; i < stretch.width; ++i) {
        WorkItem* to = items + cursor[order[i]];
        cursor[order[i]] += stretch.rounds;
        RunCursor at = next;
        at.advance(i);
        for (int32_t left = stretch.rounds; left > 0; at.advance(0)) {
          const Run run = at.run();  // a copy: the stores cannot alias it
          int64_t k = at.item;
          for (; left > 0 && k < run.count; --left, k += stretch.width) {
            run.write_item(static_cast<int32_t>(k), to++);
          }
          at.item = k;
        }
      }
    } else {
      for (int32_t round = 0; round < stretch.rounds; ++round) {
        for (int32_t i = 0; i < stretch.width; ++i) {
          next.run().write_item(static_cast<int32_t>(next.item), &items[cursor[order[i]]++]);
          next.advance(1);
        }
      }
    }
    next = after;
    order += stretch.width;
  }
}

}  // namespace mpfa
