"""What peft's merge_and_unload makes of the adapter of a golden checkpoint, in some of its layers.
usage: python make_peft_merged.py CHECKPOINT OUT LAYER...     needs torch>=2.6, transformers>=5.20, peft>=0.19, safetensors

CHECKPOINT is a folder as make_tiny.py writes it. OUT, a safetensors file, gets every tensor of these layers that the
adapter changes, named and laid out as in the checkpoint: merged in fp32, and rounded to the dtype of the files."""
import glob, json, sys

import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

checkpoint, out, *layers = sys.argv[1:]
stored = {}
for path in glob.glob(f"{checkpoint}/model*.safetensors"):
    stored |= load_file(path)
kind = getattr(transformers, json.load(open(f"{checkpoint}/config.json"))["architectures"][0])
model = kind.from_pretrained(checkpoint, dtype=torch.float32)
before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
after = PeftModel.from_pretrained(model, f"{checkpoint}/adapter").merge_and_unload().state_dict()
golden = {}
for name, tensor in after.items():
    if any(f".layers.{layer}." in name for layer in layers) and not torch.equal(tensor, before[name]):
        file = stored.get(name)                 # experts that are packed become BF16, as transformers unpacks them
        if file is not None and not torch.equal(before[name], file.float()):    # they lie the other way round in files
            tensor = tensor.transpose(1, 2)
            assert torch.equal(before[name].transpose(1, 2), file.float()), name
        golden[name] = tensor.to(torch.bfloat16 if file is None else file.dtype).contiguous()
save_file(golden, out)
print(f"{out}: {len(golden)} tensors")
