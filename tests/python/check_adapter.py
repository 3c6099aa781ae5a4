"""Loads an adapter that BlockStreamer exported with peft, over the transformers model.
usage: python check_adapter.py MODEL_DIR ADAPTER_DIR [--logits FILE] [--tolerance 1e-4]

Checks that peft builds exactly the modules that the file has tensors for, with the scaling that the configuration
says and the values of the file. FILE is a safetensors file with
`input_ids` [batch, sequence] (Int64), optionally `attention_mask`, and `logits` [batch, sequence, vocab] as
BlockStreamer computed them in fp32; masked positions are not compared. Exit 1 on any difference.
needs torch>=2.6, transformers>=5.20, peft>=0.19, safetensors"""
import argparse, json, math, re, sys, warnings

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from transformers import AutoConfig
import transformers


def load_model(directory):
    config = AutoConfig.from_pretrained(directory)
    kind = getattr(transformers, config.architectures[0])
    # Fused experts have a module whose kernel can be chosen; dense models ignore the choice.
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager",
                                 experts_implementation="eager").eval()
    # Of packed experts some versions make bf16, which holds their values exactly.
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


def pattern_value(patterns, module, default):
    return next((value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module)), default)


def path_of(name, module):
    """The path by which peft looks for the rank: of the module, or of the parameter that it wraps."""
    if not isinstance(module, ParamWrapper):
        return name
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
    return f"{name}.{module.parameter_name}"


def check_modules(peft_model, adapter_dir):
    """Differences between the adapter's files and what peft made of them."""
    config = json.load(open(f"{adapter_dir}/adapter_config.json"))
    tensors = load_file(f"{adapter_dir}/adapter_model.safetensors")
    expected = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}
    found = {name: tensor for name, tensor in peft_model.named_parameters() if "lora_" in name}
    problems = [f"missing in peft: {name}" for name in expected.keys() - found.keys()]
    problems += [f"only in peft: {name}" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        if not torch.equal(found[name].detach(), expected[name].float()):
            problems.append(f"other values in peft: {name}")
    for name, module in peft_model.base_model.model.named_modules():
        if isinstance(module, LoraLayer):
            path = path_of(name, module)
            rank = pattern_value(config["rank_pattern"], path, config["r"])
            alpha = pattern_value(config["alpha_pattern"], path, config["lora_alpha"])
            scaling = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
            if not math.isclose(module.scaling["default"], scaling):
                problems.append(f"{path}: peft scales by {module.scaling['default']}, the configuration says {scaling}")
    print(f"modules: {len(expected) // 2} in the file, {len(found) // 2} in peft")
    return problems


def check_logits(peft_model, path, tolerance):
    given = load_file(path)
    mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
    with torch.no_grad():
        run = lambda: peft_model(input_ids=given["input_ids"], attention_mask=mask, use_cache=False).logits
        logits = run()
        with peft_model.disable_adapter():
            effect = (run() - logits).abs().max().item()
    difference = (logits - given["logits"].float())[mask.bool()].abs().max().item()
    print(f"logits: largest difference {difference:.3g}, largest value {logits.abs().max():.3g}, effect of the adapter {effect:.3g}")
    return [] if difference <= tolerance else [f"logits differ by {difference}, more than {tolerance}"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir")
    parser.add_argument("adapter_dir")
    parser.add_argument("--logits")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    arguments = parser.parse_args()
    model = load_model(arguments.model_dir)
    with warnings.catch_warnings(record=True) as caught:      # peft only warns of missing keys
        warnings.simplefilter("always")
        peft_model = PeftModel.from_pretrained(model, arguments.adapter_dir).eval()
    problems = [f"peft warns: {w.message}" for w in caught if "adapter" in str(w.message).lower() or "missing" in str(w.message)]
    problems += check_modules(peft_model, arguments.adapter_dir)
    if arguments.logits:
        problems += check_logits(peft_model, arguments.logits, arguments.tolerance)
    for problem in problems:
        print(problem)
    print("FAILED" if problems else "ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
