"""Other programs on the checkpoint that `blockstreamer synth qwen3-vl:…` wrote (block-streamer-disk: or gpt-oss:…), one
JSON line per token count.

usage: peers.py PEER CHECKPOINT [--tokens 128,2048] [--steps 5] [--warmup 2] [--shards DIR] [--cold]

PEER  resident            transformers and peft with everything on the device
      block-streamer-ram  block-streamer, weights in pinned memory
      block-streamer-disk block-streamer, weights in the shard files of --shards, which it writes when they are not there
      trainstream         trainstream, frozen weights in host memory and paged in

LoRA of rank 8 and alpha 16 on q, k, v and o of the top half of the layers, AdamW, one row of random tokens, bf16: what
`blockstreamer bench step` does. The decoder is loaded as Qwen3ForCausalLM, which is what Qwen3-VL computes for text.
Adapters are bf16 where the peer has a choice, which is the faster one. Steps are timed from one to the next without
waiting for the device (`seconds`, `median_s`) and over all of them from an idle device to an idle device (`mean_s`).
"""

import argparse
import gc
import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

RANK, ALPHA, LEARNING_RATE = 8, 16, 2e-4
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
VLM_PREFIX = "model.language_model."


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def loss_of(logits, ids):
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def top_half(num_layers):
    return list(range(num_layers - max(1, round(num_layers * 0.5)), num_layers))


def text_model(checkpoint, device):
    """The text half as a causal language model, loaded tensor by tensor onto `device`."""
    from safetensors import safe_open
    from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

    text = AutoConfig.from_pretrained(checkpoint).text_config
    rope = dict(text.rope_parameters)
    rope = {key: rope[key] for key in ("rope_type", "rope_theta") if key in rope}
    config = Qwen3Config(
        **{key: getattr(text, key) for key in (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings", "hidden_act")},
        rope_parameters=rope,
        tie_word_embeddings=False,
        attention_bias=getattr(text, "attention_bias", False),
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    state = {}
    for path in sorted(Path(checkpoint).glob("*.safetensors")):
        with safe_open(path, framework="pt", device=str(device)) as file:
            for name in file.keys():
                if name.startswith(VLM_PREFIX):
                    state["model." + name.removeprefix(VLM_PREFIX)] = file.get_tensor(name)
                elif name == "lm_head.weight":
                    state[name] = file.get_tensor(name)
    # Small sizes have no head of their own.
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state, assign=True)
    # What no checkpoint holds, and the meta device left without values.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model.requires_grad_(False)


def peft_lora(model):
    from peft import LoraConfig, get_peft_model

    layers = top_half(model.config.num_hidden_layers)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, layers_to_transform=layers)
    return get_peft_model(model, config, autocast_adapter_dtype=False).train()


class Peer:
    """A step on a row of ids; `cold_files` are dropped from the page cache before each one."""

    cold_files = ()

    def __init__(self, parameters, forward):
        self.parameters, self.forward = list(parameters), forward
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE)

    def step(self, ids):
        self.optimizer.zero_grad()
        loss = loss_of(self.forward(ids), ids)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def resident(options, device):
    model = peft_lora(text_model(options.checkpoint, device))
    trained = (value for value in model.parameters() if value.requires_grad)
    return Peer(trained, lambda ids: model(input_ids=ids, use_cache=False).logits)


def block_streamer_ram(options, device):
    from block_streamer.lora import LoRAConfig, LoRALinear, apply_to_blocks, freeze_base
    from block_streamer.runners import materialize_adapters
    from streamer import StreamedModel

    whole = text_model(options.checkpoint, torch.device("cpu"))
    inner, head = whole.model, whole.lm_head
    blocks = inner.layers
    weights = {name: child.weight for name, child in blocks.named_modules() if isinstance(child, torch.nn.Linear)}
    apply_to_blocks(blocks, LoRAConfig(rank=RANK, alpha=ALPHA, targets=tuple(TARGETS), top_fraction=0.5))
    materialize_adapters(blocks)
    # This path of 0.2.0 leaves the weights under adapters without values.
    for name, child in blocks.named_modules():
        if isinstance(child, LoRALinear):
            child.weight.data = weights[name].data
    freeze_base(blocks)
    weights.clear()
    stream = StreamedModel(blocks, device=device, prefetch_ahead=2, dtype=torch.bfloat16).train()
    embed, norm, rotary = inner.embed_tokens.to(device), inner.norm.to(device), inner.rotary_emb.to(device)
    head = head.to(device)

    def forward(ids):
        hidden = embed(ids)
        positions = torch.arange(ids.shape[1], device=device).unsqueeze(0)
        hidden = stream(hidden, position_embeddings=rotary(hidden, positions), attention_mask=None, position_ids=positions)
        return head(norm(hidden))

    return Peer((value for value in stream.parameters() if value.requires_grad), forward)


def block_streamer_disk(options, device):
    from block_streamer.lora import LoRAConfig
    from block_streamer.runners import GptOssRunner, Qwen3VLRunner

    if options.shards is None:
        sys.exit("block-streamer-disk keeps a copy of the decoder in shard files: name their folder with --shards")
    lora = LoRAConfig(rank=RANK, alpha=ALPHA, targets=tuple(TARGETS), top_fraction=0.5)
    family = json.loads((Path(options.checkpoint) / "config.json").read_text())["model_type"]
    runner = (GptOssRunner if family == "gpt_oss" else Qwen3VLRunner)(options.checkpoint, options.shards, lora, device=str(device), prefetch_ahead=2,
                           dtype=torch.bfloat16).train()
    peer = Peer(runner.trainable_parameters(), runner)
    peer.cold_files = sorted(Path(options.shards).glob("*.bin"))
    return peer


def trainstream(options, device):
    import trainstream
    import trainstream.optimizer
    import trainstream.paging
    from trainstream.integrations.huggingface import _CaptureHidden, decoder_layers, lm_head_of

    if "HOST_BYTES" in os.environ:
        # It sizes itself by MemTotal, which grows with use on some virtual machines.
        trainstream.optimizer.physical_ram_bytes = lambda: int(os.environ["HOST_BYTES"])
        trainstream.paging.physical_ram_bytes = trainstream.optimizer.physical_ram_bytes
    model = peft_lora(text_model(options.checkpoint, torch.device("cpu")))
    trained = [value for value in model.parameters() if value.requires_grad]
    model, optimizer = trainstream.wrap(
        model, torch.optim.AdamW(trained, lr=LEARNING_RATE), device=str(device), param_offload=True, offload=True,
        quantize="none", blocks=decoder_layers(model), check_memory=False)
    head = lm_head_of(model)
    peer = Peer(trained, None)

    def step(ids):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with _CaptureHidden(head) as captured:
                model(input_ids=ids, use_cache=False)
            loss = trainstream.causal_lm_loss(captured.hidden, head.weight, ids, head.bias)
        loss.backward()
        optimizer.step()
        optimizer.synchronize()
        return loss.detach()

    peer.step = step
    return peer


PEERS = {
    "resident": resident,
    "block-streamer-ram": block_streamer_ram,
    "block-streamer-disk": block_streamer_disk,
    "trainstream": trainstream,
}


def drop_cached(paths):
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def measure(peer, tokens, options, device, vocab_size):
    def row(step):
        generator = torch.Generator().manual_seed(1000 * tokens + step)
        return torch.randint(0, vocab_size, (1, tokens), generator=generator).to(device)

    def run(step):
        if options.cold:
            drop_cached(peer.cold_files)
        return peer.step(row(step))

    for step in range(options.warmup):
        run(step)
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, start = [], time.perf_counter()
    launched = start
    for step in range(options.steps):
        loss = run(options.warmup + step)
        now = time.perf_counter()
        seconds.append(now - launched)
        launched = now
    synchronize(device)
    mean_s = (time.perf_counter() - start) / options.steps
    return {
        "tokens": tokens,
        "median_s": round(statistics.median(seconds), 4),
        "mean_s": round(mean_s, 4),
        "seconds": [round(value, 4) for value in seconds],
        "loss": round(float(loss), 4),
        "peak_device_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "cold": bool(options.cold and peer.cold_files),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("checkpoint")
    parser.add_argument("--tokens", default="128,2048")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--shards", help="folder for the files of block-streamer-disk")
    parser.add_argument("--cold", action="store_true", help="drop the peer's files from the page cache before every step")
    options = parser.parse_args()
    config = json.loads((Path(options.checkpoint) / "config.json").read_text())
    vocab_size = config.get("text_config", config)["vocab_size"]
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    start = time.perf_counter()
    peer = PEERS[options.peer](options, device)
    gc.collect()
    loaded_s = round(time.perf_counter() - start, 1)
    for tokens in map(int, options.tokens.split(",")):
        report = {"peer": options.peer, "loaded_s": loaded_s, **measure(peer, tokens, options, device, vocab_size)}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
