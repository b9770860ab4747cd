// Work sharing on the threads of the framework that runs the kernel.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>

#include "kernel_host.h"

namespace octavo {

// An upper bound of the pool's size, which not every framework tells. Results never depend on it.
inline size_t hardware_threads() {
  static const size_t threads = std::max(1u, std::thread::hardware_concurrency());
  return threads;
}

// Calls task(0..count-1) and waits. Threads claim tasks in order, so put the longest first.
template <class Task>
void parallel_for(const Context& context, size_t count, const Task& task) {
  struct Shared {
    const Task& task;
    size_t count;
    std::atomic<size_t> next{0};
    std::atomic<bool> out_of_memory{false};
  } shared{task, count};
  const auto work = [](void* user, size_t) {
    auto& s = *static_cast<Shared*>(user);
    try {
      for (size_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.count;) s.task(i);
    } catch (const std::bad_alloc&) {  // the only exception that tasks throw
      s.out_of_memory = true;
    }
  };
  const size_t workers = std::min(count, hardware_threads());
  if (workers <= 1)
    work(&shared, 0);
  else
    context.share(work, workers, &shared);
  if (shared.out_of_memory) throw std::bad_alloc();
}

// A buffer that grows and is kept, for use as a thread_local: no allocation in the steady state.
class Scratch {
 public:
  // At least `count` floats on a cache line's boundary, their values unspecified.
  float* floats(size_t count) {
    if (count > count_) {
      buffer_.reset();
      count_ = 0;
      buffer_.reset(static_cast<float*>(::operator new(count * sizeof(float), kAlignment)));
      count_ = count;
    }
    return buffer_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<float, Free> buffer_;
  size_t count_ = 0;
};

}  // namespace octavo
