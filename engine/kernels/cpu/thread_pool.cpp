#include "thread_pool.h"

#include <stdexcept>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace slipstream {
namespace {

constexpr int kSpins = 20000;       // about a millisecond of pauses, should a caller be held up
constexpr int kSpinsToYield = 4000;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  if (threads < 1) throw std::invalid_argument("threads must be at least 1");
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { worker_loop(i); });
  } catch (...) {
    join();
    throw;
  }
}

ThreadPool::~ThreadPool() { join(); }

void ThreadPool::join() {
  stop_.store(true);
  generation_.fetch_add(1);
  {
    const std::lock_guard<std::mutex> lock(sleep_mutex_);
    wake_.notify_all();
  }
  for (std::thread& worker : workers_) worker.join();
}

// A worker that comes late finds the job closed and is not waited for: on a busy machine a loop
// must not cost a scheduler's time slice.
void ThreadPool::start(const Job& job) {
  job_ = job;
  next_.store(0, std::memory_order_relaxed);
  open_.store(true);
  generation_.fetch_add(1);  // sequentially consistent against sleepers_ in next_generation
  if (sleepers_.load() > 0) {
    const std::lock_guard<std::mutex> lock(sleep_mutex_);
    wake_.notify_all();
  }
  work(0);
  open_.store(false);  // sequentially consistent against active_ in worker_loop
  for (int spins = 0; active_.load() > 0; ++spins) {
    if (spins < kSpinsToYield) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
  if (failed_.load(std::memory_order_relaxed)) {
    failed_.store(false, std::memory_order_relaxed);
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
}

void ThreadPool::work(int thread) noexcept {
  const Job job = job_;
  try {
    int begin = next_.load(std::memory_order_relaxed);
    while (begin < job.tasks) {
      const int end = begin + job.range(begin);
      if (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      job.call(job.fn, begin, end, thread);
      begin = next_.load(std::memory_order_relaxed);
    }
  } catch (...) {
    next_.store(job.tasks, std::memory_order_relaxed);  // the others begin nothing more
    if (!failed_.exchange(true)) error_ = std::current_exception();
  }
}

uint64_t ThreadPool::next_generation(uint64_t seen) {
  for (int spins = 0; spins < kSpins && spinning_.load(std::memory_order_relaxed); ++spins) {
    const uint64_t now = generation_.load(std::memory_order_acquire);
    if (now != seen) return now;
    relax();
  }
  std::unique_lock<std::mutex> lock(sleep_mutex_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, [&] { return generation_.load() != seen; });
  sleepers_.fetch_sub(1);
  return generation_.load();
}

void ThreadPool::worker_loop(int thread) {
  uint64_t seen = 0;
  for (;;) {
    seen = next_generation(seen);
    if (stop_.load()) return;
    active_.fetch_add(1);
    if (open_.load()) work(thread);
    active_.fetch_sub(1);
  }
}

}  // namespace slipstream
