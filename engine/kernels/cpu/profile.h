// Where the time of forward passes goes, by part, as the calling thread sees it.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace slipstream {

enum class Part : uint8_t {
  Prepare,
  Norm,
  QueryKeyValue,
  Rotate,
  Attention,
  AttentionOutput,
  GateUp,  // and the activation
  Down,
  Head,
  Refine,
};
constexpr size_t kParts = 10;
constexpr const char* kPartNames[kParts] = {"prepare",   "norm", "qkv",        "rotate",
                                            "attention", "o",    "gate_up",
                                            "down",      "head", "refine"};

class Profile {
 public:
  using Seconds = std::array<double, kParts>;

  // From here on time belongs to `part`.
  void enter(Part part) {
    if (!enabled_) return;
    const Clock::time_point now = Clock::now();
    seconds_[static_cast<size_t>(part_)] += std::chrono::duration<double>(now - since_).count();
    part_ = part;
    since_ = now;
  }
  void begin() { since_ = enabled_ ? Clock::now() : Clock::time_point(); }

  // The seconds of each part since the last call; measures on if `enabled`.
  Seconds take(bool enabled) {
    const Seconds seconds = seconds_;
    seconds_ = {};
    enabled_ = enabled;
    return seconds;
  }

 private:
  using Clock = std::chrono::steady_clock;
  bool enabled_ = false;
  Part part_ = Part::Prepare;
  Clock::time_point since_;
  Seconds seconds_ = {};
};

}  // namespace slipstream
