#pragma once

#include <stdexcept>

namespace slipstream {

inline void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

}  // namespace slipstream
