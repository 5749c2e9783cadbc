// Addresses that Python passes as ints.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

namespace embert {

// A pointer of any type.
struct Address {
  std::uintptr_t value = 0;

  template <typename T>
  operator T*() const {
    return reinterpret_cast<T*>(value);  // NOLINT(performance-no-int-to-ptr): Python passes addresses
  }
  explicit operator bool() const { return value != 0; }
  Address operator+(std::size_t bytes) const { return {value + bytes}; }
};

}  // namespace embert

template <>
struct nanobind::detail::type_caster<embert::Address> {
  NB_TYPE_CASTER(embert::Address, const_name("int"))
  bool from_python(handle source, std::uint8_t flags, cleanup_list* cleanup) noexcept {
    make_caster<std::uintptr_t> number;
    if (!number.from_python(source, flags, cleanup)) return false;
    value.value = number.value;
    return true;
  }
  static handle from_cpp(embert::Address address, rv_policy policy, cleanup_list* cleanup) noexcept {
    return make_caster<std::uintptr_t>::from_cpp(address.value, policy, cleanup);
  }
};
