// The few libtorch calls that tch lacks. No CUDA headers: device work goes through libtorch's own dispatch.
#include "guarded.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

using at::Tensor;

namespace {

at::Generator seeded_generator(const at::Device& device, uint64_t seed) {
  if (device.is_cpu()) return at::detail::createCPUGenerator(seed);
  auto& hooks = at::globalContext().getAcceleratorHooksInterface(device.type());
  at::Generator generator = hooks.getNewGenerator(device.index());
  generator.set_current_seed(seed);
  return generator;
}

std::vector<Tensor> list(Tensor* const* tensors, size_t count) {
  std::vector<Tensor> result;
  result.reserve(count);
  for (size_t i = 0; i < count; i++) result.push_back(*tensors[i]);
  return result;
}

// Makes the gradient of an input from the gradient of the output; returns 0, or 1 with a message. It neither
// throws nor panics. `result` receives a tensor that is given away.
using Backward = int (*)(void* closure, const Tensor* grad_output, Tensor** result, char* message,
                         size_t num_message_bytes);
using Release = void (*)(void*);

// A node of an autograd graph whose backward is a closure of somebody else.
struct ForeignNode final : public torch::autograd::Node {
  ForeignNode(void* closure, Backward backward, Release release) : closure(closure, release), backward(backward) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grad_outputs) override {
    std::lock_guard<std::mutex> lock(mutex_);
    torch::autograd::variable_list gradients(1);
    if (!grad_outputs[0].defined()) return gradients;
    TORCH_CHECK(closure != nullptr, "a graph that was freed cannot be gone through again");
    char message[1024] = {};
    Tensor* gradient = nullptr;
    if (backward(closure.get(), &grad_outputs[0], &gradient, message, sizeof(message)) != 0)
      throw std::runtime_error(message);
    gradients[0] = *gradient;
    delete gradient;
    return gradients;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    closure.reset();
  }

  std::unique_ptr<void, Release> closure;
  Backward backward;
};

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
    auto gradients = torch::autograd::grad(list(outputs, num_outputs), list(inputs, num_inputs),
                                           list(grad_outputs, num_outputs), /*retain_graph=*/false,
                                           /*create_graph=*/false, /*allow_unused=*/true);
    for (size_t i = 0; i < num_inputs; i++)
      results[i] = gradients[i].defined() ? new Tensor(gradients[i]) : nullptr;
  });
}

// The values of `output` as a function of `input` whose gradient `backward` makes. `closure` is handed to
// `release` when the graph goes, or at once when there is none to be or the call fails.
int bs_with_gradient(const Tensor* input, const Tensor* output, void* closure, Backward backward, Release release,
                     Tensor** result, const ErrorBuffer* error) {
  std::unique_ptr<void, Release> held(closure, release);
  return guarded(error, [&] {
    Tensor value = output->detach();
    if (c10::GradMode::is_enabled() && input->requires_grad()) {
      std::shared_ptr<ForeignNode> node(new ForeignNode(held.release(), backward, release),
                                        torch::autograd::deleteNode);
      node->set_next_edges(torch::autograd::collect_next_edges(*input));
      torch::autograd::set_history(value, node);
    }
    *result = new Tensor(std::move(value));
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

// Host memory as a tensor of bytes that a device reads over the link: `data` is its address there. `owner` is
// handed to `release` when the last tensor over it goes, or at once when the call fails.
int bs_tensor_over(void* data, int64_t num_bytes, int device_type, int index, void* owner, void (*release)(void*),
                   Tensor** result, const ErrorBuffer* error) {
  std::unique_ptr<void, void (*)(void*)> held(owner, release);
  return guarded(error, [&] {
    at::Device device(static_cast<c10::DeviceType>(device_type), static_cast<c10::DeviceIndex>(index));
    at::globalContext().lazyInitDevice(device.type());
    // libtorch would ask the driver where the pointer belongs, and take it for the host's.
    auto bytes = at::for_blob(data, num_bytes)
                     .context(held.release(), release)
                     .options(at::TensorOptions().dtype(at::kByte).device(device))
                     .target_device(device)
                     .make_tensor();
    *result = new Tensor(std::move(bytes));
  });
}

int bs_is_sole_owner(const Tensor* tensor, int* result, const ErrorBuffer* error) {
  return guarded(error, [&] { *result = is_sole_owner(*tensor); });
}

// Euclidean norms, one scalar per tensor.
int bs_foreach_norm(Tensor* const* tensors, size_t count, Tensor** results, const ErrorBuffer* error) {
  return guarded(error, [&] {
    auto norms = at::_foreach_norm(list(tensors, count), 2);
    for (size_t i = 0; i < count; i++) results[i] = new Tensor(norms[i]);
  });
}

// Multiplies every tensor in place by a scalar on the same device.
int bs_foreach_mul(Tensor* const* tensors, size_t count, const Tensor* factor, const ErrorBuffer* error) {
  return guarded(error, [&] { at::_foreach_mul_(list(tensors, count), *factor); });
}

struct AdamStep {
  double learning_rate;
  double beta1;
  double beta2;
  double weight_decay;
  double eps;
  int decoupled;
};

// One step of Adam, or AdamW when decoupled, over tensors that have all taken as many steps as `num_steps` says.
int bs_fused_adam(Tensor* const* values, Tensor* const* gradients, Tensor* const* means, Tensor* const* squares,
                  size_t count, const Tensor* num_steps, const AdamStep* step, const ErrorBuffer* error) {
  return guarded(error, [&] {
    std::vector<Tensor> steps(count, *num_steps);
    auto fused = [&](auto&& run) {
      run(list(values, count), list(gradients, count), list(means, count), list(squares, count),
          std::vector<Tensor>{}, steps, step->learning_rate, step->beta1, step->beta2, step->weight_decay,
          step->eps, /*amsgrad=*/false, /*maximize=*/false, std::nullopt, std::nullopt);
    };
    if (step->decoupled != 0) {
      fused([](auto&&... arguments) { at::_fused_adamw_(arguments...); });
    } else {
      fused([](auto&&... arguments) { at::_fused_adam_(arguments...); });
    }
  });
}

// Bytes that libtorch's caching allocator has handed out on a device: now, and at most so far.
int bs_memory_stats(int device_type, int index, int64_t* current_bytes, int64_t* peak_bytes,
                    int64_t* reserved_bytes, const ErrorBuffer* error) {
  return guarded(error, [&] {
    auto* allocator = device_allocator(device_type);
    TORCH_CHECK(allocator != nullptr, "this device keeps no memory statistics");
    auto stats = allocator->getDeviceStats(static_cast<c10::DeviceIndex>(index));
    *current_bytes = stats.allocated_bytes[0].current;
    *peak_bytes = stats.allocated_bytes[0].peak;
    *reserved_bytes = stats.reserved_bytes[0].current;
  });
}

// The peak of bs_memory_stats starts anew.
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
    // CUBLAS_WORKSPACE_CONFIG stays unset: libtorch gives cuBLAS a workspace of its own, which fixes the
    // order on one stream, and parses the variable anew, with a regular expression, at every product.
    at::globalContext().setDeterministicAlgorithms(on != 0, /*warn_only=*/false);
    // cuDNN's attention has no fixed order; libtorch's own kernels have one.
    at::globalContext().setSDPUseCuDNN(on == 0);
    // Filling every new tensor would cost a pass over memory and changes nothing that is used.
    at::globalContext().setDeterministicFillUninitializedMemory(false);
  });
}
}
