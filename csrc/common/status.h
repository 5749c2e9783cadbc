// The result of a launcher or of the encoder: success, or the error with its place and shapes.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <type_traits>
#include <utility>

namespace embert {

class [[nodiscard]] Status {
 public:
  Status() = default;  // success

  // Refused: the request cannot be run; the encoder stays usable. Out of memory is one such error. The message is these
  // texts and numbers, one after the other.
  template <typename... Parts>
  static Status refused(const Parts&... parts) {
    std::string message;
    (append(message, parts), ...);
    return Status(std::move(message), false);
  }
  // Lost: the device failed. After such an error the context is unusable.
  static Status lost(std::string message) { return Status(std::move(message), true); }

  // Success when `code` is cudaSuccess. Otherwise refused if the device did nothing, and lost if it failed, with CUDA's
  // own message. `where` names the kernel and its shapes.
  static Status cuda(cudaError_t code, const char* where) {
    if (code == cudaSuccess) return {};
    std::string message = std::string(where) + ": " + cudaGetErrorName(code) + ": " + cudaGetErrorString(code);
    return is_recoverable(code) ? refused(std::move(message)) : lost(std::move(message));
  }

  // Errors of a call that did not run. The context stays valid, and work that was queued before still runs.
  static bool is_recoverable(cudaError_t code) {
    switch (code) {
      case cudaErrorMemoryAllocation:
      case cudaErrorLaunchOutOfResources:
      case cudaErrorInvalidConfiguration:
      case cudaErrorNoKernelImageForDevice:
      case cudaErrorUnsupportedPtxVersion:
        return true;
      default:
        return false;
    }
  }

  bool ok() const { return ok_; }
  bool is_lost() const { return lost_; }
  const std::string& message() const { return message_; }

 private:
  template <typename Part>
  static void append(std::string& message, const Part& part) {
    if constexpr (std::is_arithmetic_v<Part>)
      message += std::to_string(part);
    else
      message += part;
  }

  Status(std::string message, bool lost) : ok_(false), lost_(lost), message_(std::move(message)) {}

  bool ok_ = true;
  bool lost_ = false;
  std::string message_;
};

}  // namespace embert

// Returns from the calling function when `expression`, a Status, is an error.
#define EMBERT_TRY(expression)                                                  \
  do {                                                                          \
    if (::embert::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

// The same for a call of the CUDA runtime, named in the message by its own text.
#define EMBERT_CUDA(call) EMBERT_TRY(::embert::Status::cuda((call), #call))
