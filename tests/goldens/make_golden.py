"""Golden tensors for a text checkpoint of any size that is already on disk, as make_tiny.py writes them.
usage: python make_golden.py CHECKPOINT [--device cuda] [--tokens 128] [--layers-adapted 2]
Adds golden_fp32.safetensors, golden_bf16.safetensors and adapter/ to the folder CHECKPOINT.
needs torch, transformers >= 5, peft >= 0.19, safetensors"""
import argparse
import json

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint")
parser.add_argument("--device", default="cpu")
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--layers-adapted", type=int, default=2, help="adapters sit on the top layers, this many")
args = parser.parse_args()

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
config = json.load(open(f"{args.checkpoint}/config.json"))["text_config"]
generator = torch.Generator().manual_seed(7)
ids = torch.randint(3, min(1000, config["vocab_size"]), (2, args.tokens), generator=generator)
mask = torch.ones_like(ids)
mask[1, args.tokens * 3 // 4:] = 0
labels = ids.masked_fill(mask == 0, -100)
labels[:, :5] = -100
inputs = {k: v.to(args.device) for k, v in dict(input_ids=ids, attention_mask=mask, labels=labels).items()}
layers = config["num_hidden_layers"]
top = "|".join(str(i) for i in range(layers - args.layers_adapted, layers))

for tag, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
    model = AutoModelForImageTextToText.from_pretrained(
        args.checkpoint, dtype=dtype, attn_implementation="eager", device_map={"": args.device}).eval()
    golden = {f"in.{k}": v for k, v in inputs.items()}
    hooks = [layer.register_forward_hook(
        lambda module, _, out, i=i: golden.__setitem__(f"layer_out.{i}", out[0] if isinstance(out, tuple) else out))
        for i, layer in enumerate(model.model.language_model.layers)]
    with torch.no_grad():
        out = model(**inputs, use_cache=False)
    golden["logits"], golden["loss"] = out.logits, out.loss.reshape(1)
    for hook in hooks:
        hook.remove()
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, task_type="CAUSAL_LM",
                      target_modules=rf"model\.language_model\.layers\.({top})\.self_attn\.(q|k|v|o)_proj")
    adapted = get_peft_model(model, lora, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(adapted.named_parameters()):
            if "lora_" in name:
                parameter.copy_((torch.randn(parameter.shape, generator=generator) * 0.02).bfloat16())
    if tag == "fp32":
        adapted.save_pretrained(f"{args.checkpoint}/adapter")
    out = adapted(**inputs, use_cache=False)
    golden["lora.logits"], golden["lora.loss"] = out.logits, out.loss.reshape(1)
    out.loss.backward()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            golden["grad." + name.replace(".default.", ".")] = parameter.grad
    save_file({k: t.detach().contiguous().cpu() for k, t in golden.items()}, f"{args.checkpoint}/golden_{tag}.safetensors")
    print(tag, "loss", float(golden["loss"]), "with the adapter", float(golden["lora.loss"]), flush=True)
    del model, adapted, out, golden
    torch.cuda.empty_cache()
