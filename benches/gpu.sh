#!/usr/bin/env bash
# The GPU test suite and measurements, in one call on a machine with a CUDA device and Python with torch,
# transformers and peft.
#
#   benches/gpu.sh BINARIES OUT [phase...]
#
#   doctor tiny contract engine peft repeat real real_moe real_pictures   does it run, and are the numbers right
#   stream step small train pictures  how fast is it, beside the bare link and drive; a run with pictures
#   gpt_oss gpt_oss_places            goldens and the layer's speed; the same adapter from wherever blocks are
#   gpt_oss_small                     20b and a 120B-shaped checkpoint of GPT_OSS_LAYERS layers on a small machine, and
#                                     block-streamer on it
#   peers                             how fast are other programs on the same checkpoint
#
# BINARIES holds the stripped `blockstreamer`, the plugins' *.so and the test binary `engine-tests`;
# OUT receives one log per phase and the measurements as JSON. Exit code 1 when any phase failed.
# WORK is the folder for checkpoints (50 GB), WHEELS one with the wheels of the peers that Python lacks here.
# Measurements share one checkpoint of the 8B shape, which the first phase that needs it writes.
set -u
binaries=$(realpath "$1"); out=$(realpath "$2"); shift 2
phases=${*:-doctor tiny contract engine peft repeat real real_moe real_pictures stream step small train pictures gpt_oss gpt_oss_places gpt_oss_small peers}
cd "$(dirname "$0")/.."
torch=$(python3 -c 'import torch, os; print(os.path.dirname(torch.__file__))')
export LD_LIBRARY_PATH="$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export PYTHONUNBUFFERED=1
chmod +x "$binaries"/* 2>/dev/null
work=${WORK:-/tmp/blockstreamer-gpu}; mkdir -p "$work"
bs="$binaries/blockstreamer"
failed=0

phase() { # name, command...
    local name=$1 start=$SECONDS; shift
    : > "$work/table"
    "$@" > "$out/$name.log" 2>&1; local code=$?
    cat "$work/table" >> "$out/$name.log"
    [ $code -eq 0 ] || failed=1
    echo "== $name: exit $code, $((SECONDS - start)) s"
    tail -n "${LINES_SHOWN:-14}" "$out/$name.log" | cut -c1-220
}

conformance() { # extra arguments: a summary of the checks that matter, and every failure
    "$bs" conformance "${FAMILY:-qwen3-vl}" --device cuda "$@" > "$work/checks"; local code=$?
    grep -v '^ok .*\(grad\.\|changes no bit\)' "$work/checks" | cut -c1-200
    grep '^ok .*grad\.' "$work/checks" | sort -k3 -g -r | head -3 | cut -c1-200
    return $code
}

tiny() {
    local ok=0
    for dtype in fp32 bf16; do
        for golden in tests/goldens/qwen3_vl*; do
            echo "-- $golden, $dtype"; conformance --golden "$golden" --dtype $dtype || ok=1
        done
    done
    return $ok
}

contract() {
    local ok=0 dtype
    for FAMILY in qwen3-vl gpt-oss; do
        for dtype in fp32 bf16; do echo "-- $FAMILY, $dtype"; conformance --dtype $dtype || ok=1; done
    done
    unset FAMILY
    return $ok
}

# Real block sizes: 368 MiB. transformers and peft make the goldens on this machine's GPU.
against_transformers() { # size, layers, arguments of make_golden.py...
    local ok=0 model="$work/real"
    "$bs" synth "qwen3-vl:$1" --layers "$2" --out "$model" || return 1
    python3 tests/goldens/make_golden.py "$model" --device cuda "${@:3}" 2>&1 | grep -E 'loss|Error|error' || return 1
    for dtype in fp32 bf16; do
        echo "-- $1, $2 layers, ${*:3}, $dtype"; conformance --golden "$model" --dtype $dtype || ok=1
    done
    rm -rf "$model"
    return $ok
}

real() { against_transformers 8b 4 --tokens 256; }
real_moe() { against_transformers 30b-a3b 1 --tokens 256 --layers-adapted 1; }
real_pictures() { against_transformers 8b 1 --tokens 256 --layers-adapted 1 --pictures; }

# Adapters and merged checkpoints of tiny models, attention, experts and router, in peft and transformers.
peft() {
    local ok=0 model="$work/tiny" size train merge
    for size in qwen3-vl:tiny qwen3-vl:tiny-moe gpt-oss:tiny; do
        train=() merge=()
        [ $size = qwen3-vl:tiny ] || train=(--set 'lora.target_parameters=["mlp.experts.gate_up_proj","mlp.experts.down_proj"]')
        [ $size = gpt-oss:tiny ] && merge=(--experts bf16)
        rm -rf "$model"*
        "$bs" synth $size --out "$model" || return 1
        "$bs" train --model "$model" --data host/assets/demo.jsonl --out "$model-run" --set steps=4 --set device=cuda \
            --set learning_rate=1e-3 --set data.overflow=truncate --set sequence_length=256 "${train[@]}" || return 1
        "$bs" merge "$model" --adapter "$model-run/adapter" --out "$model-merged" "${merge[@]}" || return 1
        CUDA_VISIBLE_DEVICES= python3 -W ignore tests/python/check_adapter.py "$model" "$model-run/adapter" || ok=1
        CUDA_VISIBLE_DEVICES= python3 -W ignore tests/python/check_merged.py "$model" "$model-run/adapter" "$model-merged" || ok=1
    done
    return $ok
}

# The whole 8B shape, trained on rows with pictures within 8 GiB of device memory.
pictures() {
    big || return 1
    python3 - "$work" <<'PY' || return 1
import json, os, struct, sys, zlib
folder = sys.argv[1] + "/pictures"
os.makedirs(folder, exist_ok=True)
def png(path, width, height, colour):
    row = lambda y: b"\0" + bytes((c + x * y // 97) % 256 for x in range(width) for c in colour)
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(row(y) for y in range(height)), 1)
    open(path, "wb").write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))
with open(f"{folder}/rows.jsonl", "w") as rows:
    for name, colour in {"red": (200, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 200)}.items():
        png(f"{folder}/{name}.png", 640, 480, colour)
        content = [{"type": "image", "image": f"{name}.png"}, {"type": "text", "text": "Which colour?"}]
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": f"It is {name}."}]
        rows.write(json.dumps({"messages": turns}) + "\n")
PY
    rm -rf "$work/run"
    watched "$bs" train --model "$work/8b" --data "$work/pictures/rows.jsonl" --out "$work/run" --vram 8GiB \
        --set steps=12 --set batch_size=1 --set device=cuda --set learning_rate=1e-3 \
        --set lora.rank=8 --set lora.alpha=16 --set lora.top_fraction=0.5 \
        --set 'lora.target_modules=["q_proj","k_proj","v_proj","o_proj"]' || return 1
    cut -c1-240 "$work/run/metrics.jsonl"
}

# Two equal runs, and one that is resumed half way, give the same adapter bit for bit, dropout included.
repeat() {
    local model="$work/8b-2" run
    "$bs" synth qwen3-vl:8b --layers 2 --out "$model" || return 1
    rows
    repeated() { # folder, steps, extra
        "$bs" train --model "$model" --data "$work/rows.jsonl" --out "$work/$1" --set steps=$2 \
            --set sequence_length=1024 --set data.overflow=truncate --set micro_batches=2 \
            --set lora.dropout=0.1 --set device=cuda --set learning_rate=1e-3 "${@:3}"
    }
    rm -rf "$work"/repeat-*
    repeated repeat-a 6 && repeated repeat-b 6 && repeated repeat-c 3 && repeated repeat-c 6 --resume || return 1
    for run in repeat-b repeat-c; do
        cmp "$work/repeat-a/adapter/adapter_model.safetensors" "$work/$run/adapter/adapter_model.safetensors" || return 1
    done
    echo "the adapters of two equal runs and of a resumed one are the same bytes"
    rm -rf "$model"
}

rows() { # one long row
    python3 - "$work" <<'PY'
import json, sys
text = open("host/assets/corpus.txt").read()
open(sys.argv[1] + "/rows.jsonl", "w").write(json.dumps({"text": text * 8}) + "\n")
PY
}

# Seconds per step of the 8B shape, LoRA r8 on q,k,v,o of the top half, one row of TOKENS tokens.
train() {
    local model="$work/8b" tokens tier
    big || return 1
    rows
    for tier in ram disk; do
        for tokens in 128 2048; do
            [ $tier = disk ] && { [ $tokens = 2048 ] && continue; sync; echo 3 > /proc/sys/vm/drop_caches; }
            rm -rf "$work/run"
            echo "-- tier $tier, $tokens tokens"
            "$bs" train --model "$model" --data "$work/rows.jsonl" --out "$work/run" \
                --set steps=$([ $tier = ram ] && echo 12 || echo 3) --set sequence_length=$tokens \
                --set data.overflow=truncate --set device=cuda --set stream.tier=$tier \
                --set lora.rank=8 --set lora.alpha=16 --set lora.top_fraction=0.5 \
                --set 'lora.target_modules=["q_proj","k_proj","v_proj","o_proj"]' || return 1
            cut -c1-240 "$work/run/metrics.jsonl" | tail -n 4
        done
    done
}

# The checkpoint that the measurements share.
big() {
    [ -e "$work/8b/config.json" ] || { bare_writes; time "$bs" synth qwen3-vl:8b --out "$work/8b"; }
}

# What the drive of WORK takes, past the page cache and through it.
bare_writes() {
    head -c 2G /dev/urandom > /dev/shm/blockstreamer-random
    for how in oflag=direct conv=fsync; do
        dd if=/dev/shm/blockstreamer-random of="$work/written" bs=16M $how 2>&1 | tail -n 1 | sed "s/^/bare writes, $how: /"
        rm "$work/written"
    done
    rm /dev/shm/blockstreamer-random
}

# Runs `blockstreamer bench …`, keeps its JSON as OUT/NAME.json and what matters of it for the phase's end.
bench() { # name, words...
    local name=$1; shift
    "$bs" bench "$@" --json > "$out/$name.json" || { echo "$name failed"; return 1; }
    python3 - "$name" "$out/$name.json" >> "$work/table" <<'PY'
import json, sys
name, report = sys.argv[1], json.load(open(sys.argv[2]))
gib = lambda size: "-" if size is None else f"{size / 2**30:.2f}"
if "passes" in report:
    images = report["num_images"] or report["read"]
    print(f"{name:16} ours {report['gb_per_s']:6.2f} GB/s  bare {report['bare']} {report['bare_gb_per_s']:6.2f} GB/s"
          f"  {100 * report['ratio']:5.1f} %  ({images})")
for count in report.get("counts", []):
    shares = "  ".join(f"{key} {100 * value:.0f}%" for key, value in count["shares"].items())
    print(f"{name:16} {count['tokens']:5} tokens  {count['median_s']:.4f} s (mean {count['mean_s']:.4f})"
          f"  floor {count['floor_s']:.4f} {count['floor']}  {count['ratio']:.2f}x"
          f"  copied {count['h2d_bytes'] / 1e9:.2f} GB  read {count['read_bytes'] / 1e9:.2f} GB"
          f"  device {gib(count['peak_device_bytes'])} GiB  host {gib(count['peak_host_bytes'])} GiB  {shares}")
PY
}

# The engine with nothing to compute.
stream() {
    local ok=0
    bench stream-ram stream --tier ram --blocks 36 --block-size 368MiB || ok=1
    bench stream-ram-large stream --tier ram --blocks 12 --block-size 1.63GiB --prefetch-ahead 2 || ok=1
    bench stream-disk stream --tier disk --blocks 36 --block-size 368MiB --passes 3 --dir "$work/blocks" || ok=1
    rm -rf "$work/blocks"
    bench stream-disk-large stream --tier disk --blocks 6 --block-size 1.63GiB --passes 2 --dir "$work/blocks" || ok=1
    rm -rf "$work/blocks"
    return $ok
}

# Full optimizer steps with ample memory.
step() {
    local ok=0
    big || return 1
    bench step-ram step "$work/8b" --tier ram --tokens 128,2048 --steps 8 --prefetch-ahead 2 || ok=1
    bench step-device step "$work/8b" --tier device --tokens 128,4096 --steps 12 || ok=1
    return $ok
}

# A control group with 16 GiB of host memory, page cache included; nothing where none can be made.
limit_bytes=$((16 << 30))
limit_group() {
    local group=/sys/fs/cgroup/blockstreamer-$$
    # Version 2 only: of version 1 the folder holds other things.
    grep -qw memory /sys/fs/cgroup/cgroup.controllers 2> /dev/null || return
    {
        echo +memory > /sys/fs/cgroup/cgroup.subtree_control
        mkdir -p $group
        echo 0 > $group/memory.swap.max
        echo $limit_bytes > $group/memory.max
    } 2> /dev/null
    if [ "$(cat $group/memory.max 2> /dev/null)" = $limit_bytes ]; then echo $group; else rmdir $group 2> /dev/null; fi
}

# Runs a command in a group, if there is one.
limited() { # group or nothing, command...
    local group=$1 code; shift
    if [ -z "$group" ]; then
        echo "no control group can be made here: host memory has no limit but the command's own"
        "$@"
        return
    fi
    (echo $BASHPID > "$group/cgroup.procs" && "$@"); code=$?
    echo "most host memory of the group: $(cat "$group/memory.peak" 2> /dev/null || echo not told) of $limit_bytes bytes"
    rmdir "$group"
    return $code
}

# Most memory in use on the device while a command runs, by the driver: other programs' included.
watched() {
    nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -lms 100 > "$work/used" 2> /dev/null &
    local watcher=$! code
    "$@"; code=$?
    kill $watcher; wait $watcher 2> /dev/null
    echo "most device memory in use: $(sort -n "$work/used" | tail -n 1) MiB"
    return $code
}

# A small machine: 8 GiB of device memory, 16 GiB of host memory, a drive with nothing cached. Both together hold
# the model; with 6 GiB of host memory the drive is read in every step.
small() {
    local ram ok=0
    big || return 1
    for ram in 16 6; do
        watched limited "$(limit_group)" bench small-$ram step "$work/8b" --tier auto --vram 8GiB --ram ${ram}GiB --cold \
            --tokens 128,2048 --steps 4 --warmup 2 || ok=1
    done
    return $ok
}

# gpt-oss: goldens.
gpt_oss() {
    local ok=0 dtype golden
    for dtype in fp32 bf16; do
        for golden in tests/goldens/gpt_oss*; do
            echo "-- $golden, $dtype"; FAMILY=gpt-oss conformance --golden "$golden" --dtype $dtype || ok=1
        done
    done
    BLOCKSTREAMER_TEST_DEVICE=cuda "$binaries/engine-tests" --test-threads=1 --ignored --nocapture mxfp4_layer_speed || ok=1
    python3 -W ignore benches/gpt_oss_layer.py || ok=1
    return $ok
}

# Four layers of 120b, in blocks of 1.63 GiB: the same adapter, byte for byte, wherever the blocks are.
gpt_oss_places() {
    local model="$work/120b-4" tier
    "$bs" synth gpt-oss:120b --layers 4 --out "$model" || return 1
    rows
    rm -rf "$work"/places-*
    for tier in device ram disk; do
        "$bs" train --model "$model" --data "$work/rows.jsonl" --out "$work/places-$tier" --expert-groups 1 \
            --set stream.tier=$tier --set steps=3 --set micro_batches=2 --set sequence_length=512 --set lora.rank=4 \
            --set data.overflow=truncate --set device=cuda --set learning_rate=1e-3 \
            --set 'lora.target_parameters=["mlp.experts.gate_up_proj","mlp.experts.down_proj"]' || return 1
        cmp "$work/places-device/adapter/adapter_model.safetensors" "$work/places-$tier/adapter/adapter_model.safetensors" || return 1
    done
    echo "the adapters of runs from the device, pinned RAM and the drive are the same bytes"
    rm -rf "$model"
}

# A small machine again: 20b whole, there and with all on the device, and 120b with as many layers as the drive holds.
gpt_oss_small() {
    local ok=0 model="$work/120b"
    watched limited "$(limit_group)" bench gpt-oss-20b step gpt-oss:20b --work-dir "$work/20b" --tier auto --vram 8GiB --cold \
        --tokens 128,2048 --steps 3 --warmup 2 || ok=1
    bench gpt-oss-20b-device step "$work"/20b/* --tier device --tokens 128,2048,4096 --steps 6 --warmup 2 || ok=1
    rm -rf "$work/20b" "$work/8b"
    time "$bs" synth gpt-oss:120b --layers "${GPT_OSS_LAYERS:-12}" --out "$model" || return 1
    watched limited "$(limit_group)" bench gpt-oss-small step "$model" --tier auto --vram 8GiB --cold \
        --tokens 128,2048 --steps 2 --warmup 1 || ok=1
    if wheels; then
        limited "$(limit_group)" timeout "${PEER_S:-200}" python3 -W ignore benches/peers.py block-streamer-disk "$model" \
            --shards "$work/120b-shards" --cold --tokens 128 --steps 1 --warmup 1 || { echo "block-streamer-disk failed"; ok=1; }
        rm -rf "$work/120b-shards"
    fi
    rm -rf "$model"
    return $ok
}

# Makes the peers' wheels importable, if there are any.
wheels() {
    [ -n "${WHEELS:-}" ] || return 1
    [ -e "$work/site" ] || python3 -m pip install -q --no-index --no-deps --no-compile --target "$work/site" "$WHEELS"/*.whl || return 1
    export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
}

# Other programs. Their wheels are in WHEELS; torch, transformers and peft are Python's own.
peers() {
    local ok=0
    big || return 1
    wheels
    export TRAINSTREAM_CACHE_DIR="$work/trainstream"
    # It compiles itself when it is first used, while a peer runs that only waits for the drive.
    python3 -c 'import trainstream' > "$work/trainstream.log" 2>&1 &
    local build=$!
    peer() { timeout 120 python3 -W ignore benches/peers.py "$1" "$work/8b" "${@:2}" >> "$out/peers.jsonl" || { echo "$1 failed"; ok=1; }; }
    : > "$out/peers.jsonl"
    limited "$(limit_group)" timeout 200 python3 -W ignore benches/peers.py block-streamer-disk "$work/8b" --shards "$work/8b-shards" \
        --cold --tokens 128,2048 --steps 2 --warmup 1 > "$work/peer" || { echo "block-streamer-disk failed"; ok=1; }
    grep '^{' "$work/peer" >> "$out/peers.jsonl"; grep -v '^{' "$work/peer"
    rm -rf "$work/8b-shards"
    wait $build || { tail -n 5 "$work/trainstream.log"; ok=1; }
    peer resident --tokens 128,2048,4096
    peer block-streamer-ram --tokens 128,2048,4096
    HOST_BYTES=$((128 << 30)) peer trainstream --tokens 128,2048
    python3 - "$out/peers.jsonl" >> "$work/table" <<'PY'
import json, sys
for line in open(sys.argv[1]):
    report = json.loads(line)
    print(f"{report['peer']:20} {report['tokens']:5} tokens  {report['median_s']:.4f} s (mean {report['mean_s']:.4f})"
          f"  device {(report['peak_device_bytes'] or 0) / 2**30:.2f} GiB  host {report['peak_host_bytes'] / 2**30:.2f} GiB"
          f"  cold {report['cold']}")
PY
    return $ok
}

engine() {
    BLOCKSTREAMER_TEST_DEVICE=cuda "$binaries/engine-tests" --test-threads=1
}

doctor() {
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    "$bs" doctor
}

for name in $phases; do phase "$name" "$name"; done
exit $failed
