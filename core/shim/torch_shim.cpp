// The few libtorch calls that tch lacks. No CUDA headers: device work goes through libtorch's own dispatch.
// Every function returns 0, or 1 with a message in `error`; no exception leaves this file.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdlib>
#include <cstring>
#include <string>

using at::Tensor;

namespace {

struct ErrorBuffer {
  char* text;
  size_t num_bytes;
};

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

at::Generator seeded_generator(const at::Device& device, uint64_t seed) {
  if (device.is_cpu()) return at::detail::createCPUGenerator(seed);
  auto& hooks = at::globalContext().getAcceleratorHooksInterface(device.type());
  at::Generator generator = hooks.getNewGenerator(device.index());
  generator.set_current_seed(seed);
  return generator;
}

c10::DeviceAllocator* device_allocator(int device_type) {
  at::globalContext().lazyInitDevice(static_cast<c10::DeviceType>(device_type));
  return dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(static_cast<c10::DeviceType>(device_type)));
}

}  // namespace

extern "C" {

// Vector-Jacobian product. results[i] is null where input i does not take part.
int bs_grad(Tensor* const* outputs, Tensor* const* grad_outputs, size_t num_outputs, Tensor* const* inputs,
            size_t num_inputs, Tensor** results, const ErrorBuffer* error) {
  return guarded(error, [&] {
    torch::autograd::variable_list outs, grads, ins;
    for (size_t i = 0; i < num_outputs; i++) {
      outs.push_back(*outputs[i]);
      grads.push_back(*grad_outputs[i]);
    }
    for (size_t i = 0; i < num_inputs; i++) ins.push_back(*inputs[i]);
    auto gradients = torch::autograd::grad(outs, ins, grads, /*retain_graph=*/false, /*create_graph=*/false,
                                           /*allow_unused=*/true);
    for (size_t i = 0; i < num_inputs; i++)
      results[i] = gradients[i].defined() ? new Tensor(gradients[i]) : nullptr;
  });
}

// 1/keep where a fresh generator with this seed keeps an element of `like`, 0 elsewhere.
int bs_dropout_mask(const Tensor* like, double keep, uint64_t seed, Tensor** result, const ErrorBuffer* error) {
  return guarded(error, [&] {
    c10::AutoGradMode no_grad(false);
    auto mask = at::empty_like(*like, like->options(), at::MemoryFormat::Contiguous);
    mask.bernoulli_(keep, seeded_generator(like->device(), seed)).div_(keep);
    *result = new Tensor(std::move(mask));
  });
}

// A copy of a host tensor on an accelerator, through pinned memory, so that the host does not wait.
int bs_upload(const Tensor* host, int device_type, int index, Tensor** result, const ErrorBuffer* error) {
  return guarded(error, [&] {
    at::Device device(static_cast<c10::DeviceType>(device_type), static_cast<c10::DeviceIndex>(index));
    *result = new Tensor(host->pin_memory().to(device, /*non_blocking=*/true));
  });
}

// Bytes that libtorch's caching allocator has handed out on a device: now, and at most since the last reset.
int bs_memory_stats(int device_type, int index, int64_t* current_bytes, int64_t* peak_bytes,
                    const ErrorBuffer* error) {
  return guarded(error, [&] {
    auto* allocator = device_allocator(device_type);
    TORCH_CHECK(allocator != nullptr, "this device keeps no memory statistics");
    auto stats = allocator->getDeviceStats(static_cast<c10::DeviceIndex>(index));
    *current_bytes = stats.allocated_bytes[0].current;
    *peak_bytes = stats.allocated_bytes[0].peak;
  });
}

int bs_reset_peak_memory(int device_type, int index, const ErrorBuffer* error) {
  return guarded(error, [&] {
    auto* allocator = device_allocator(device_type);
    TORCH_CHECK(allocator != nullptr, "this device keeps no memory statistics");
    allocator->resetPeakStats(static_cast<c10::DeviceIndex>(index));
  });
}

// Kernels with one fixed order of additions, where libtorch has them.
int bs_set_deterministic(int on, const ErrorBuffer* error) {
  return guarded(error, [&] {
    // cuBLAS reads it when its first handle is made. What the user has set stays.
    if (on != 0) setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
    at::globalContext().setDeterministicAlgorithms(on != 0, /*warn_only=*/false);
    // cuDNN's attention has no fixed order; libtorch's own kernels have one.
    at::globalContext().setSDPUseCuDNN(on == 0);
    // Filling every new tensor would cost a pass over memory and changes nothing that is used.
    at::globalContext().setDeterministicFillUninitializedMemory(false);
  });
}
}
