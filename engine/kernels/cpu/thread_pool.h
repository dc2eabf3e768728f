// A persistent pool that runs one parallel loop at a time; the caller is one of its threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace slipstream {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls fn(begin, end, thread) on ranges of at most `grain` tasks until [0, tasks) is done, or
  // until a call throws: then the first exception comes out once no thread is in `fn` any more.
  // Not re-entrant; one caller at a time (see `Region`).
  template <class Fn>
  void run(int tasks, int grain, Fn&& fn) {
    run_job(tasks, grain, tasks, fn);
  }

  // The same in ranges that shrink with what is left, down to `least` tasks: for tasks that read
  // memory in order, which long ranges do fastest, and short last ones end together.
  template <class Fn>
  void run_in_order(int tasks, int least, Fn&& fn) {
    run_job(tasks, least, 2 * threads(), fn);
  }

  // A region of consecutive run() calls. Workers spin between them, and sleep once it ends.
  class Region {
   public:
    explicit Region(ThreadPool& pool) : pool_(pool), lock_(pool.callers_) {
      pool_.spinning_.store(true, std::memory_order_relaxed);
    }
    ~Region() { pool_.spinning_.store(false, std::memory_order_relaxed); }

   private:
    ThreadPool& pool_;
    std::lock_guard<std::mutex> lock_;
  };

 private:
  struct Job {
    void (*call)(void*, int, int, int) = nullptr;
    void* fn = nullptr;
    int tasks = 0;
    int grain = 1;
    int divisor = 1;  // of what is left, for a range

    int range(int begin) const {
      const int left = tasks - begin, part = left / divisor;
      return part > grain ? part : grain < left ? grain : left;
    }
  };

  template <class Fn>
  void run_job(int tasks, int grain, int divisor, Fn& fn) {
    if (tasks <= grain || workers_.empty()) {
      if (tasks > 0) fn(0, tasks, 0);
      return;
    }
    start({[](void* f, int begin, int end, int thread) {
             (*static_cast<std::remove_reference_t<Fn>*>(f))(begin, end, thread);
           },
           &fn, tasks, grain, divisor});
  }

  void start(const Job& job);
  void work(int thread) noexcept;
  void join();
  void worker_loop(int thread);
  uint64_t next_generation(uint64_t seen);

  std::vector<std::thread> workers_;
  std::mutex callers_;
  Job job_;
  std::exception_ptr error_;  // of the job; who sets failed_ first writes it
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> active_{0};
  alignas(64) std::atomic<uint64_t> generation_{0};
  std::atomic<bool> open_{false};
  std::atomic<bool> failed_{false};
  std::atomic<bool> spinning_{false};
  std::atomic<bool> stop_{false};
  std::atomic<int> sleepers_{0};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
};

}  // namespace slipstream
