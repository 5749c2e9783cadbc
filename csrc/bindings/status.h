// Converts a Status to a Python exception: `Refused` leaves the encoder usable, `Lost` does not.
#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>

#include "common/status.h"

namespace embert {

struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Lost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void raise(const Status& status) {
  if (status.ok()) return;
  if (status.is_lost()) throw Lost(status.message());
  throw Refused(status.message());
}

inline void bind_exceptions(nanobind::module_& m) {
  nanobind::exception<Refused>(m, "Refused", PyExc_RuntimeError);
  nanobind::exception<Lost>(m, "Lost", PyExc_RuntimeError);
}

}  // namespace embert
