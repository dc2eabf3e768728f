// Exceptions in the pool's threads; exits with 0 when all is as it should be.
#include "../../engine/kernels/cpu/thread_pool.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using slipstream::ThreadPool;

namespace {

constexpr int kTasks = 64;

int failures = 0;

void expect(bool ok, const std::string& what) {
  if (ok) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  ++failures;
}

void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }

// Every task that `thread` runs throws while the others are busy with theirs.
void throw_in(ThreadPool& pool, bool caller) {
  const ThreadPool::Region region(pool);
  int throws = 0;
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> running{0};
    std::atomic<bool> thrown{false};
    std::string caught;
    {
      // What the tasks refer to is gone once run() has ended: nothing may still be in them.
      std::vector<int> scratch(kTasks);
      try {
        pool.run(kTasks, 1, [&](int begin, int, int thread) {
          running.fetch_add(1);
          pause();
          scratch[static_cast<size_t>(begin)] = thread;
          running.fetch_sub(1);
          if ((thread == 0) == caller) {
            thrown = true;
            throw std::runtime_error("task failed");
          }
        });
      } catch (const std::runtime_error& error) {
        caught = error.what();
      }
    }
    expect(running.load() == 0, "a task runs on after run() has thrown");
    expect(caught == (thrown ? "task failed" : ""), "the exception is lost");
    throws += thrown;
    std::atomic<int> done{0};
    pool.run(kTasks, 1, [&](int begin, int end, int) { done.fetch_add(end - begin); });
    expect(done.load() == kTasks, "the pool does no more work after an exception");
  }
  expect(throws > 0, "no task has thrown");
}

}  // namespace

int main() {
  ThreadPool pool(4);
  throw_in(pool, true);
  throw_in(pool, false);
  return failures == 0 ? 0 : 1;
}
