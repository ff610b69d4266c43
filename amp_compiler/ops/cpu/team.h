// Threads that do one thing step by step, and meet between the steps.

#pragma once

#include <omp.h>

#include "blocks.h"

namespace amp {

// Calls `body(mine, count)` on up to `threads` threads that multiply: the thread's number, and how many there are. They
// meet at `#pragma omp barrier`.
template <class Body>
void with_team(int threads, const Body& body) {
#pragma omp parallel num_threads(threads)
  {
    const TileShape shape;
    body(omp_get_thread_num(), omp_get_num_threads());
  }
}

}  // namespace amp
