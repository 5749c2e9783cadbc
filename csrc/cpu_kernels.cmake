# Sets `reason`: why embert's own CPU kernels cannot be built here. It is empty if they can, and then C++ is enabled.
#
# A script instead of a function: enabling a language sets variables of the scope that does so.
set(reason "")
if(EMBERT_CPU STREQUAL "OFF")
  set(reason "EMBERT_CPU=OFF")
  return()
endif()
cmake_host_system_information(RESULT machine QUERY OS_PLATFORM)
if(NOT machine MATCHES "^(x86_64|amd64)$")
  set(reason "they are for x86-64, and this is ${machine}")
  return()
endif()
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  set(reason "no working C++ compiler was found")
  return()
endif()
enable_language(CXX)

include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_FLAGS "-std=c++20 -march=x86-64-v4 -mavx512vnni")
check_cxx_source_compiles("#include <atomic>\n#include <immintrin.h>
  int main() { std::atomic<int> x{0}; x.notify_all(); return _mm512_cvtsi512_si32(_mm512_setzero_si512()); }"
  EMBERT_KNOWS_AVX512)
unset(CMAKE_REQUIRED_FLAGS)
if(NOT EMBERT_KNOWS_AVX512)
  set(reason "${CMAKE_CXX_COMPILER} does not know C++20, AVX2 and AVX-512")
  return()
endif()

# From Python 3.12 on, one extension for that Python and every newer one: scikit-build-core then names the component.
find_package(Python 3.11 QUIET COMPONENTS Interpreter Development.Module ${SKBUILD_SABI_COMPONENT})
if(NOT Python_FOUND)
  set(reason "Python's headers were not found")
  return()
endif()
execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
if(status)
  set(reason "nanobind was not found")
endif()
