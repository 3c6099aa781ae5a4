"""Compares a checkpoint that BlockStreamer merged with what peft's merge_and_unload makes of model and adapter.
usage: python check_merged.py MODEL_DIR ADAPTER_DIR MERGED_DIR [--dtype bfloat16]

peft merges in fp32, and its result is rounded to --dtype, that of the files: every weight must be the same, but for
sums that two ways of adding put on either side of a rounding; those may differ by one step and are counted. Where
weight and change nearly cancel, as much as the two sums may differ is many steps of what is left: that counts too. Also
loads the merged folder in transformers and compares its logits with those of peft's rounded weights; how far the
rounding moves them from the adapted model's is printed (much where a token chooses another expert). Exit 1 on a
difference.
needs torch>=2.6, transformers>=5.20, peft>=0.19, safetensors"""
import argparse, sys

import torch
from peft import PeftModel

from check_adapter import load_model


def steps(one, two):
    """How many representable numbers lie between two tensors of one dtype, element by element."""
    kind = torch.int32 if one.dtype == torch.float32 else torch.int16
    order = lambda t: torch.where(t.view(kind) < 0, torch.iinfo(kind).min - t.view(kind).long(), t.view(kind).long())
    return (order(one.contiguous()) - order(two.contiguous())).abs()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir")
    parser.add_argument("adapter_dir")
    parser.add_argument("merged_dir")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    problems, changed, apart, largest = [], 0, 0, 0

    base = {name: tensor.clone() for name, tensor in load_model(arguments.model_dir).state_dict().items()}
    adapted = PeftModel.from_pretrained(load_model(arguments.model_dir), arguments.adapter_dir).eval()
    ids = torch.randint(3, 100, (2, 24), generator=torch.Generator().manual_seed(1))
    logits = lambda model: model(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        adapted_logits = logits(adapted)
        peft_merged = adapted.merge_and_unload()
        wanted = {name: tensor.clone() for name, tensor in peft_merged.state_dict().items()}
        for tensor in peft_merged.state_dict().values():
            tensor.copy_(tensor.to(dtype))
        wanted_logits = logits(peft_merged)
        merged = load_model(arguments.merged_dir)
        found_logits = logits(merged)
    found = merged.state_dict()
    if found.keys() != wanted.keys():
        problems.append(f"names differ: {sorted(found.keys() ^ wanted.keys())[:4]}")
    for name in found.keys() & wanted.keys():
        one, two = found[name].to(dtype), wanted[name].to(dtype)
        if one.shape != two.shape:
            problems.append(f"{name}: shape {tuple(one.shape)}, peft has {tuple(two.shape)}")
            continue
        if not torch.equal(wanted[name], base[name]):
            changed += 1
        distance = steps(one, two)
        apart, largest = apart + int((distance > 0).sum()), max(largest, int(distance.max()))
        # fp32 sums of a few products are off by some 1e-7 of the largest of them.
        terms = base[name].abs().float() + (wanted[name] - base[name]).abs().max().float()
        wrong = (distance > 1) & ((one.float() - two.float()).abs() > 1e-6 * terms)
        if wrong.any():
            problems.append(f"{name}: up to {int(distance[wrong].max())} steps from peft's")
    distance = lambda one, two: (one - two).abs().max().item()
    error = distance(found_logits, wanted_logits)
    print(f"{changed} of {len(found)} tensors changed; {apart} values {largest} step from peft's; logits differ from "
          f"peft's by {error:.3g}, from the adapted model's by {distance(found_logits, adapted_logits):.3g}")
    if changed == 0:
        problems.append("the adapter changes nothing")
    if error > 1e-4 and apart == 0:
        problems.append("the merged model does not compute what peft's does")
    for problem in problems:
        print(problem)
    print("FAILED" if problems else "ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
