// Flash attention with what libtorch's scaled_dot_product_attention leaves out of it: a window, and sinks.
#include "guarded.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <optional>
#include <tuple>

using at::Tensor;

namespace {

// A sink is a key that every query sees and whose value is zero. Softmax over one key more is that over the
// others times the share of these in the new sum, and so is the output. The kernel's backward takes output and
// log of the sum from the caller: given those with the sink in them, it makes the gradients of the softmax over
// all keys, and of these the sink's alone are not there yet.
struct FlashAttention : torch::autograd::Function<FlashAttention> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& query, const Tensor& key,
                        const Tensor& value, const std::optional<Tensor>& sinks, bool causal, int64_t window,
                        double scale, bool is_recorded) {
    Tensor q = rows(query), k = rows(key), v = rows(value);
    auto [output, log_sum, random_state, unused, mask] =
        at::_flash_attention_forward(q, k, v, {}, {}, q.size(1), k.size(1), 0.0, causal, false, scale,
                                     before(window), std::nullopt);
    if (sinks) {
      Tensor sink = sinks->to(at::kFloat).view({1, -1, 1});
      Tensor share = at::sigmoid(log_sum - sink);
      output.mul_(share.transpose(1, 2).unsqueeze(-1));
      if (is_recorded) log_sum = at::logaddexp(log_sum, sink);
    }
    if (is_recorded) {
      context->save_for_backward({q, k, v, output, log_sum, random_state, unused, sinks.value_or(Tensor())});
      context->saved_data["causal"] = causal;
      context->saved_data["window"] = window;
      context->saved_data["scale"] = scale;
    }
    return output.transpose(1, 2);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grad_outputs) {
    auto saved = context->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2], &output = saved[3], &log_sum = saved[4];
    Tensor grad_output = grad_outputs[0].transpose(1, 2);
    auto [dq, dk, dv] = at::_flash_attention_backward(
        grad_output, q, k, v, output, log_sum, {}, {}, q.size(1), k.size(1), 0.0,
        context->saved_data["causal"].toBool(), saved[5], saved[6], context->saved_data["scale"].toDouble(),
        before(context->saved_data["window"].toInt()), std::nullopt);
    Tensor dsinks;
    if (saved[7].defined() && context->needs_input_grad(3)) {
      Tensor weight = at::exp(saved[7].to(at::kFloat).view({1, -1, 1}) - log_sum);
      Tensor along = at::mul(grad_output.to(at::kFloat), output).sum(-1).transpose(1, 2);
      dsinks = (weight * along).sum(at::IntArrayRef({0, 2})).neg().to(saved[7].scalar_type());
    }
    return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), dsinks, {}, {}, {}, {}};
  }

  // In the kernel's layout, [batch, sequence, heads, head_dim], whose last dimension must be dense.
  static Tensor rows(const Tensor& heads) {
    Tensor rows = heads.transpose(1, 2);
    return rows.stride(-1) == 1 ? rows : rows.contiguous();
  }

  // How many keys before its own a query sees; all without a window.
  static std::optional<int64_t> before(int64_t window) {
    return window > 0 ? std::make_optional(window - 1) : std::nullopt;
  }
};

}  // namespace

extern "C" {

// softmax(scale * query key^T) value for [batch, heads, sequence, head_dim], 16 bits, on CUDA. Key and value may
// have fewer heads. `sinks`, one per head, may be null. A query sees `window` keys up to its own; 0: all.
int bs_flash_attention(const Tensor* query, const Tensor* key, const Tensor* value, const Tensor* sinks, int causal,
                       int64_t window, double scale, Tensor** result, const ErrorBuffer* error) {
  return guarded(error, [&] {
    auto sink = sinks == nullptr ? std::nullopt : std::make_optional(*sinks);
    bool is_recorded = torch::autograd::compute_requires_grad(*query, *key, *value, sink);
    *result = new Tensor(
        FlashAttention::apply(*query, *key, *value, sink, causal != 0, window, scale, is_recorded));
  });
}
}
