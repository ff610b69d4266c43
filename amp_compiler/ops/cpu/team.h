// Threads that do one thing step by step, and meet between the steps.

#pragma once

#include <omp.h>

#include <atomic>
#include <optional>
#include <thread>

#include "blocks.h"

namespace amp {

// Threads that wait for each other for a microsecond or two should not be put to sleep; after that they may.
class Meeting {
 public:
  explicit Meeting(int threads) : threads_(threads) {}

  void wait() {
    const int round = round_.load(std::memory_order_acquire);
    if (here_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      here_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int turn = 0; round_.load(std::memory_order_acquire) == round; ++turn)
      if (turn > 4000) std::this_thread::yield();
  }

 private:
  const int threads_;
  std::atomic<int> here_{0}, round_{0};
};

// Calls `body(mine, count, meeting)` on up to `threads` threads that multiply: the thread's number, how many there are,
// and where all of them meet.
template <class Body>
void with_team(int threads, const Body& body) {
  std::optional<Meeting> meeting;  // there may be fewer threads than asked for, and only they know
#pragma omp parallel num_threads(threads)
  {
    const int mine = omp_get_thread_num(), count = omp_get_num_threads();
#pragma omp single
    meeting.emplace(count);
    const TileShape shape;
    body(mine, count, *meeting);
  }
}

}  // namespace amp
