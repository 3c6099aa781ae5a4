"""The experts of one layer of gpt-oss-120b in transformers, as JSON lines, for the test `mxfp4_layer_speed`.

usage: gpt_oss_layer.py [--tokens 128,2048] [--steps 5] [--warmup 2] [--experts 128] [--width 2880] [--device cuda]

The codes stay packed; transformers' GptOssExperts asks for one expert at a time, which is dequantised with the
lookup table that transformers loads MXFP4 with, in every pass anew. A step is a forward without a graph, a forward
with one, and the gradient of the inputs: what recomputing a layer takes. There is no adapter, which favours this side.
"""

import argparse
import json
import statistics
import time

import torch
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

TOP_K = 4


class Packed:
    """One projection of every expert, in the place of a parameter [experts, in, out]."""

    def __init__(self, experts, rows, columns, device):
        size = (experts, rows, columns // 32)
        self.blocks = torch.randint(256, (*size, 16), dtype=torch.uint8, device=device)
        self.scales = torch.randint(117, 122, size, dtype=torch.uint8, device=device)

    def __getitem__(self, expert):
        expert = int(expert)
        part = slice(expert, expert + 1)
        return convert_moe_packed_tensors(self.blocks[part], self.scales[part], dtype=torch.bfloat16)[0]


def layer(experts, width, device):
    config = GptOssConfig(hidden_size=width, intermediate_size=width, num_local_experts=experts)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        module = GptOssExperts(config)
    for name, rows in (("gate_up_proj", 2 * width), ("down_proj", width)):
        delattr(module, name)
        setattr(module, name, Packed(experts, rows, width, device))
        bias = torch.randn(experts, rows, dtype=torch.bfloat16, device=device) * 0.02
        setattr(module, f"{name}_bias", torch.nn.Parameter(bias, requires_grad=False))
    return module


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="128,2048")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--width", type=int, default=2880)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    is_cuda = device.type == "cuda"
    synchronize = torch.cuda.synchronize if is_cuda else lambda: None
    torch.manual_seed(0)
    module = layer(options.experts, options.width, device)
    for tokens in map(int, options.tokens.split(",")):
        size = (tokens, options.width)
        x = torch.randn(size, dtype=torch.bfloat16, device=device, requires_grad=True)
        gradient = torch.randn(size, dtype=torch.bfloat16, device=device)
        scores, chosen = torch.randn(tokens, options.experts, device=device).topk(TOP_K)
        weights = scores.softmax(-1).to(torch.bfloat16)

        def step():
            with torch.no_grad():
                module(x, chosen, weights)
            output = module(x, chosen, weights)
            torch.autograd.grad(output, x, gradient)

        for _ in range(options.warmup):
            step()
        synchronize()
        before = torch.cuda.memory_allocated() if is_cuda else 0
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(options.steps):
            start = time.perf_counter()
            step()
            synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        extra = torch.cuda.max_memory_allocated() - before if is_cuda else 0
        print(json.dumps({
            "kernel": "transformers", "tokens": tokens, "step_ms": round(statistics.median(times), 3),
            "fastest_ms": round(min(times), 3), "extra_mib": round(extra / 2**20, 1),
        }), flush=True)


if __name__ == "__main__":
    main()
