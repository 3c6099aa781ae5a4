"""Golden tensors for a checkpoint of any size that is already on disk, as make_tiny.py writes them.
usage: python make_golden.py CHECKPOINT [--device cuda] [--tokens 128] [--layers-adapted 2] [--pictures]
Adds golden_fp32.safetensors, golden_bf16.safetensors and adapter/ to the folder CHECKPOINT. Adapters sit on
the attention of the top layers, and on their experts where the model has any. --pictures puts a picture into
each of the two rows (at least 96 tokens).
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
parser.add_argument("--pictures", action="store_true", help="one picture per row, of random pixels")
args = parser.parse_args()

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
root = json.load(open(f"{args.checkpoint}/config.json"))
config, vision = root["text_config"], root["vision_config"]
generator = torch.Generator().manual_seed(7)
ids = torch.randint(3, min(1000, config["vocab_size"]), (2, args.tokens), generator=generator)
mask = torch.ones_like(ids)
mask[1, args.tokens * 3 // 4:] = 0
inputs = dict(input_ids=ids, attention_mask=mask)
if args.pictures:
    merge = vision["spatial_merge_size"]
    grids = [[1, 8 * merge, 7 * merge], [1, 4 * merge, 12 * merge]]
    for row, (_, height, width) in enumerate(grids):
        cells = height * width // merge**2
        start, end = root["vision_start_token_id"], root["vision_end_token_id"]
        ids[row, 9:9 + cells + 2] = torch.tensor([start] + [root["image_token_id"]] * cells + [end])
    values = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"]**2
    inputs |= dict(pixel_values=torch.randn(sum(h * w for _, h, w in grids), values, generator=generator),
                   image_grid_thw=torch.tensor(grids), mm_token_type_ids=(ids == root["image_token_id"]).int())
labels = ids.masked_fill(mask == 0, -100)
labels[:, :5] = -100
for name in ("image_token_id", "vision_start_token_id", "vision_end_token_id"):
    labels[ids == root[name]] = -100
inputs = {k: v.to(args.device) for k, v in (inputs | dict(labels=labels)).items()}
layers = config["num_hidden_layers"]
adapted_layers = range(max(layers - args.layers_adapted, 0), layers)
top = "|".join(str(i) for i in adapted_layers)

for tag, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
    model = AutoModelForImageTextToText.from_pretrained(
        args.checkpoint, dtype=dtype, attn_implementation="eager", experts_implementation="eager",
        device_map={"": args.device}).eval()
    golden = {f"in.{k}": v for k, v in inputs.items()}
    typed = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    if args.pictures:
        with torch.no_grad():
            seen = model.model.get_image_features(typed["pixel_values"], typed["image_grid_thw"], return_dict=True)
        # Some releases give a list with one tensor per picture, some a single one.
        whole = lambda features: features if torch.is_tensor(features) else torch.cat(features)
        golden["vis.embeds"] = whole(seen.pooler_output)
        for number, features in enumerate(seen.deepstack_features):
            golden[f"vis.deepstack.{number}"] = whole(features)
        golden["pos3"], _ = model.model.get_rope_index(
            **{k: v for k, v in inputs.items() if k not in ("labels", "pixel_values")})
    hooks = [layer.register_forward_hook(
        lambda module, _, out, i=i: golden.__setitem__(f"layer_out.{i}", out[0] if isinstance(out, tuple) else out))
        for i, layer in enumerate(model.model.language_model.layers)]
    with torch.no_grad():
        out = model(**typed, use_cache=False)
    golden["logits"], golden["loss"] = out.logits, out.loss.reshape(1)
    for hook in hooks:
        hook.remove()
    experts = [f"model.language_model.layers.{i}.mlp.experts.{name}_proj" for i in adapted_layers for name in ("gate_up", "down")]
    parameters = {name for name, _ in model.named_parameters()}
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, task_type="CAUSAL_LM",
                      target_parameters=[name for name in experts if name in parameters] or None,
                      target_modules=rf"model\.language_model\.layers\.({top})\.self_attn\.(q|k|v|o)_proj")
    adapted = get_peft_model(model, lora, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(adapted.named_parameters()):
            if "lora_" in name:
                parameter.copy_((torch.randn(parameter.shape, generator=generator) * 0.02).bfloat16())
    if tag == "fp32":
        adapted.save_pretrained(f"{args.checkpoint}/adapter")
    out = adapted(**typed, use_cache=False)
    golden["lora.logits"], golden["lora.loss"] = out.logits, out.loss.reshape(1)
    out.loss.backward()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            golden["grad." + name.replace(".default.", ".")] = parameter.grad
    save_file({k: t.detach().contiguous().cpu() for k, t in golden.items()}, f"{args.checkpoint}/golden_{tag}.safetensors")
    print(tag, "loss", float(golden["loss"]), "with the adapter", float(golden["lora.loss"]), flush=True)
    del model, adapted, out, golden
    torch.cuda.empty_cache()
