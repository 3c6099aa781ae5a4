// The low-rank part of an adapted linear as one node of an autograd graph. With few tokens a step is bound by
// the host, and libtorch would make twelve nodes of it.
#include "guarded.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <mutex>
#include <utility>

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

// The same values as a matrix: one row for each vector along the last dimension.
Tensor rows(const Tensor& tensor) {
  auto leading = tensor.sizes().slice(0, tensor.dim() - 1);
  return tensor.reshape({c10::multiply_integers(leading), tensor.size(-1)});
}

// factor * left right, rounded once.
Tensor scaled_product(double factor, const Tensor& left, const Tensor& right) {
  auto product = at::empty({left.size(0), right.size(1)}, left.options());
  return product.addmm_(left, right, /*beta=*/0, /*alpha=*/factor);
}

// left right in the dtype of the masters.
Tensor master_product(const Tensor& left, const Tensor& right) {
  // CUDA's products of 16 bits can be written in fp32 as they were summed; the CPU has no such kernels.
  bool is_summed_in_fp32 = left.scalar_type() == at::kBFloat16 || left.scalar_type() == at::kHalf;
  if (left.is_cuda() && is_summed_in_fp32) return at::mm(left, right, at::kFloat);
  return at::mm(left, right).to(at::kFloat);
}

struct LowRankNode final : public torch::autograd::Node {
  enum Input { X, OUTPUT, A, B, NUM_INPUTS };

  explicit LowRankNode(double scaling) : scaling(scaling) {}

  variable_list apply(variable_list&& grad_outputs) override {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list gradients(NUM_INPUTS);
    if (!grad_outputs[0].defined()) return gradients;
    TORCH_CHECK(!c10::GradMode::is_enabled(), "the gradient of an adapted linear cannot be differentiated again");
    // Every one is unpacked, so that a graph that was freed is an error whatever is asked for.
    Tensor saved_x = x.unpack(), saved_a = a.unpack(), saved_b = b.unpack(), saved_inner = inner.unpack();

    at::AutoDispatchBelowADInplaceOrView no_history;
    // The linear underneath takes its gradient as it is here: if a copy must be made, then one for both.
    Tensor grad = grad_outputs[0].contiguous();
    if (task_should_compute_output(OUTPUT)) gradients[OUTPUT] = grad;
    bool needs_x = task_should_compute_output(X), needs_a = task_should_compute_output(A);
    Tensor grad_rows = rows(grad);
    if (task_should_compute_output(B)) gradients[B] = master_product(grad_rows.t(), saved_inner);
    if (!needs_x && !needs_a) return gradients;
    Tensor grad_inner = scaled_product(scaling, grad_rows, saved_b);
    if (needs_a) gradients[A] = master_product(grad_inner.t(), rows(saved_x));
    if (needs_x) {
      auto sizes = grad.sizes().vec();
      sizes.back() = saved_a.size(1);
      gradients[X] = at::mm(grad_inner, saved_a).view(sizes);
    }
    return gradients;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    x.reset_data();
    a.reset_data();
    b.reset_data();
    inner.reset_data();
  }

  double scaling;
  // In the compute dtype, each only where a gradient needs it.
  SavedVariable x, a, b, inner;
};

void check(const Tensor& x, const Tensor& output, const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(0) == b.size(1), "A ", a.sizes(), " and B ", b.sizes(),
              " are not [rank, in_features] and [out_features, rank]");
  TORCH_CHECK(a.scalar_type() == at::kFloat && b.scalar_type() == at::kFloat, "A and B must be fp32, not ",
              a.scalar_type(), " and ", b.scalar_type());
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) == a.size(1), "an input ", x.sizes(), " does not fit A ", a.sizes());
  TORCH_CHECK(output.dim() == x.dim() && output.size(-1) == b.size(0) &&
                  output.sizes().slice(0, x.dim() - 1) == x.sizes().slice(0, x.dim() - 1),
              "an output ", output.sizes(), " does not fit an input ", x.sizes(), " and B ", b.sizes());
}

}  // namespace

extern "C" {

// output + scaling * (x A^T) B^T, with gradients for all four. `output` must not be used any more: its memory
// becomes the result's where nothing else refers to it.
int bs_add_low_rank(const Tensor* x, const Tensor* output, const Tensor* a, const Tensor* b, double scaling,
                    Tensor** result, const ErrorBuffer* error) {
  return guarded(error, [&] {
    check(*x, *output, *a, *b);
    std::shared_ptr<LowRankNode> node;
    if (torch::autograd::compute_requires_grad(*x, *output, *a, *b)) {
      node = std::shared_ptr<LowRankNode>(new LowRankNode(scaling), torch::autograd::deleteNode);
      node->set_next_edges(torch::autograd::collect_next_edges(*x, *output, *a, *b));
    }
    // A graph that kept the output for its own backward refers to its memory. What cannot be resized was not
    // taken from libtorch's allocator, and somebody may hold it whom libtorch does not know.
    bool may_be_changed = is_sole_owner(*output) && output->storage().unsafeGetStorageImpl()->resizable();
    Tensor cast_a, cast_b, inner, sum;
    {
      at::AutoDispatchBelowADInplaceOrView no_history;
      cast_a = a->to(output->scalar_type());
      cast_b = b->to(output->scalar_type());
      // The scaling goes where the tensor is smallest: on [.., rank].
      inner = scaled_product(scaling, rows(*x), cast_a.t());
      // Added in place in either case, so that a product with a graph runs the kernel of one without.
      sum = may_be_changed ? *output : output->clone(at::MemoryFormat::Contiguous);
      sum = rows(sum).addmm_(inner, cast_b.t()).view(output->sizes());
    }
    if (node) {
      bool needs_x = node->should_compute_output(LowRankNode::X);
      bool needs_a = node->should_compute_output(LowRankNode::A);
      if (needs_a) node->x = SavedVariable(*x, /*is_output=*/false);
      if (needs_x) node->a = SavedVariable(cast_a, /*is_output=*/false);
      if (needs_x || needs_a) node->b = SavedVariable(cast_b, /*is_output=*/false);
      if (node->should_compute_output(LowRankNode::B)) node->inner = SavedVariable(inner, /*is_output=*/false);
      torch::autograd::set_history(sum, node);
    }
    *result = new Tensor(std::move(sum));
  });
}
}
