#!/usr/bin/env bash
# The GPU test suite and measurements, in one call on a machine with a CUDA device and Python with torch,
# transformers and peft.
#
#   benches/gpu.sh BINARIES OUT [phase...]      phases: doctor tiny engine repeat real train
#
# BINARIES holds the stripped `blockstreamer`, the plugins' *.so and the test binary `engine-tests`;
# OUT receives one log per phase. Exit code 1 when any phase failed.
set -u
binaries=$(realpath "$1"); out=$(realpath "$2"); shift 2
phases=${*:-doctor tiny engine repeat real train}
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
    "$@" > "$out/$name.log" 2>&1; local code=$?
    [ $code -eq 0 ] || failed=1
    echo "== $name: exit $code, $((SECONDS - start)) s"
    tail -n "${LINES_SHOWN:-6}" "$out/$name.log" | cut -c1-220
}

conformance() { # extra arguments: a summary of the checks that matter, and every failure
    "$bs" conformance qwen3-vl --device cuda "$@" > "$work/checks"; local code=$?
    grep -v '^ok .*\(grad\.\|changes no bit\)' "$work/checks" | cut -c1-200
    grep '^ok .*grad\.' "$work/checks" | sort -k3 -g -r | head -3 | cut -c1-200
    return $code
}

tiny() {
    local ok=0
    for dtype in fp32 bf16; do
        echo "-- goldens, $dtype"; conformance --golden tests/goldens/qwen3_vl_text --dtype $dtype || ok=1
        echo "-- contract, $dtype"; conformance --dtype $dtype || ok=1
    done
    return $ok
}

# Real block sizes: 368 MiB. transformers and peft make the goldens on this machine's GPU.
real() {
    local ok=0 model="$work/8b-4"
    "$bs" synth qwen3-vl:8b --layers 4 --out "$model" || return 1
    python3 tests/goldens/make_golden.py "$model" --device cuda --tokens 256 2>&1 | grep -E 'loss|Error|error' || return 1
    for dtype in fp32 bf16; do
        echo "-- 8b, 4 layers, $dtype"; conformance --golden "$model" --dtype $dtype || ok=1
    done
    rm -rf "$model"
    return $ok
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
    [ -e "$model/config.json" ] || { time "$bs" synth qwen3-vl:8b --out "$model" || return 1; }
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

engine() {
    BLOCKSTREAMER_TEST_DEVICE=cuda "$binaries/engine-tests" --test-threads=1
}

doctor() {
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    "$bs" doctor
}

for name in $phases; do phase "$name" "$name"; done
exit $failed
