// What every function of the shim does: it returns 0, or 1 with a message in `error`; no exception leaves it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstring>

struct ErrorBuffer {
  char* text;
  size_t num_bytes;
};

namespace {

void report(const ErrorBuffer* error, const char* message) {
  if (error->num_bytes == 0) return;
  std::strncpy(error->text, message, error->num_bytes - 1);
  error->text[error->num_bytes - 1] = '\0';
}

template <typename F>
int guarded(const ErrorBuffer* error, F&& work) {
  try {
    work();
    return 0;
  } catch (const c10::Error& e) {
    report(error, e.what_without_backtrace());
  } catch (const std::exception& e) {
    report(error, e.what());
  } catch (...) {
    report(error, "unknown C++ exception");
  }
  return 1;
}

// Whether nothing else refers to a tensor or its memory, and it is laid out without gaps: it may then be
// changed in place.
bool is_sole_owner(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1 && tensor.is_contiguous();
}

}  // namespace
