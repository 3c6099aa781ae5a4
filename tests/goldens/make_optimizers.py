"""Golden curves of torch.optim, gradient clipping and transformers' schedules.
usage: python make_optimizers.py OUT      needs torch>=2.6, transformers>=5.20, safetensors

OUT/optimizers.safetensors holds for each case `{case}.{step}` (the parameter after that step, [7, 5] fp32) and the
inputs `start` and `gradient.{step}`; its metadata names the settings. OUT/schedules.json holds the factors."""
import json, os, sys

import torch
from safetensors.torch import save_file
from transformers import get_scheduler

STEPS, RATE = 20, 3e-3
CASES = {
    "adamw": (torch.optim.AdamW, dict(weight_decay=0.01)),
    "adamw_heavy": (torch.optim.AdamW, dict(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)),
    "adam": (torch.optim.Adam, dict()),
    "adam_decay": (torch.optim.Adam, dict(weight_decay=0.1)),
    "sgd": (torch.optim.SGD, dict()),
    "sgd_decay": (torch.optim.SGD, dict(weight_decay=0.1)),
    "sgd_momentum": (torch.optim.SGD, dict(momentum=0.9, weight_decay=0.1)),
    "sgd_nesterov": (torch.optim.SGD, dict(momentum=0.9, nesterov=True, weight_decay=0.1)),
}


def optimizers(out):
    generator = torch.Generator().manual_seed(5)
    draw = lambda: torch.randn(7, 5, generator=generator)
    start = draw()
    # Magnitudes from 1e-6 to 1e2 and exact zeros, so that eps and the corrections matter.
    scale = 10.0 ** torch.linspace(-6, 2, 35).reshape(7, 5)
    scale[0, 1] = 0
    gradients = [draw() * scale for _ in range(STEPS)]
    tensors = {"start": start, **{f"gradient.{i}": g for i, g in enumerate(gradients)}}
    for name, (kind, options) in CASES.items():
        value = start.clone().requires_grad_(True)
        optimizer = kind([value], lr=RATE, foreach=False, fused=False, **options)
        for step, gradient in enumerate(gradients):
            # The rate changes from step to step, as under a schedule.
            optimizer.param_groups[0]["lr"] = RATE * (1 + step % 3)
            value.grad = gradient.clone()
            optimizer.step()
            tensors[f"{name}.{step}"] = value.detach().clone()
    for max_norm in (0.5, 1e6):
        some = [g.clone() for g in gradients[:3]]
        for g in some:
            g.grad = g.clone()
        norm = torch.nn.utils.clip_grad_norm_(some, max_norm)
        tensors[f"clip.{max_norm:g}.norm"] = norm.reshape(1)
        tensors.update({f"clip.{max_norm:g}.{i}": g.grad for i, g in enumerate(some)})
    save_file(tensors, f"{out}/optimizers.safetensors")


def schedules(out):
    cases = []
    for name in ("constant", "linear", "cosine"):
        for warmup, total in ((0, 10), (4, 10), (10, 10), (1, 1), (6, 3)):
            kind = "constant_with_warmup" if name == "constant" else name
            optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
            factor = get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=total).lr_lambdas[0]
            steps = total if name == "cosine" else total + 3      # past its end transformers' cosine rises again
            cases.append(dict(decay=name, warmup_steps=warmup, total_steps=total,
                              factors=[float(factor(step)) for step in range(steps + 1)]))
    with open(f"{out}/schedules.json", "w") as file:
        json.dump(cases, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    os.makedirs(sys.argv[1], exist_ok=True)
    optimizers(sys.argv[1])
    schedules(sys.argv[1])
