"""One tiny mixture-of-experts block of transformers under peft's target_parameters: what peft writes for each
choice of parameters, and what the adapted block computes.
usage: python make_peft_experts.py OUT      needs torch>=2.6, transformers>=5.20, peft>=0.19, safetensors

OUT/block.safetensors holds the weights (experts as [E, out, in]), `x`, and per case `CASE.output`, `CASE.grad_x`
and the gradient of every adapter tensor under `CASE.grad.KEY` for the gradient `grad_output`, all fp32.
OUT/CASE is the adapter's folder."""
import os, sys

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextSparseMoeBlock

EXPERTS, GATE = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "mlp.gate.weight"
CASES = {
    "all": dict(r=3, lora_alpha=5, target_parameters=EXPERTS + [GATE], use_rslora=True,
                rank_pattern={"gate_up_proj": 2, r"mlp\.gate\.weight": 1}, alpha_pattern={"experts.down_proj": 7}),
    "down": dict(r=2, lora_alpha=4, target_parameters=["down_proj"]),
    "gate_up": dict(r=2, lora_alpha=4, target_parameters=["experts.gate_up_proj"]),
}


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        config = Qwen3VLMoeTextConfig(hidden_size=16, moe_intermediate_size=12, num_experts=4, num_experts_per_tok=2,
                                      experts_implementation="eager")
        config._experts_implementation = "eager"
        self.mlp = Qwen3VLMoeTextSparseMoeBlock(config)

    def forward(self, x):
        return self.mlp(x)


def main(out):
    generator = torch.Generator().manual_seed(5)
    draw = lambda *size: torch.randn(*size, generator=generator)
    layer = Layer()
    weights = {name: draw(*tensor.shape) * 0.3 for name, tensor in layer.state_dict().items()}
    x, grad_output = draw(1, 7, 16), draw(1, 7, 16)
    gold = {**weights, "x": x, "grad_output": grad_output}
    for case, options in CASES.items():
        layer = Layer()
        layer.load_state_dict(weights)
        model = get_peft_model(layer, LoraConfig(target_modules=[], **options))
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if "lora_" in name:
                    tensor.copy_(draw(*tensor.shape) * 0.2)
        model.save_pretrained(f"{out}/{case}")
        os.remove(f"{out}/{case}/README.md")
        leaf = x.clone().requires_grad_()
        output = model(leaf)
        output = output[0] if isinstance(output, tuple) else output
        output.backward(grad_output)
        gold |= {f"{case}.output": output.detach(), f"{case}.grad_x": leaf.grad}
        gold |= {f"{case}.grad.{name.replace('.default.', '.')}": tensor.grad
                 for name, tensor in model.named_parameters() if "lora_" in name}
    save_file({name: tensor.contiguous() for name, tensor in gold.items()}, f"{out}/block.safetensors")


if __name__ == "__main__":
    main(sys.argv[1])
