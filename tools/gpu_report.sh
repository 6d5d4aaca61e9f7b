#!/usr/bin/env bash
# Runs everything that needs an NVIDIA GPU, and prints one table to paste into an issue: the card, every kernel beside the processor's,
# GPT-2 124M in bf16 with its memory beside the plan, and PyTorch with torch.compile where python3 has torch.
#
#   tools/gpu_report.sh [FOLDER]      FOLDER: where the full outputs go; a new temporary folder when left out
#
# Builds the release binary first (not counted), unless PHALANX names a binary; then it takes at most eight minutes (with several cards nine and a half). Needs what `phalanx doctor` says.
set -euo pipefail
out=$(realpath -m "${1:-$(mktemp -d)}")
cd "$(dirname "$0")/.."

phalanx=${PHALANX:-}
if [ -z "$phalanx" ]; then
  cargo build --release --package phalanx-program
  phalanx=${CARGO_TARGET_DIR:-target}/release/phalanx
fi
mkdir -p "$out"
gpt2=(examples/gpt2_124m.toml --nproc 1 --set device.kind=cuda --set precision.compute=bf16
  --set model.seq=1024 --set batch.global=4)
quickstart=(examples/quickstart.toml --data README.md --run "$out/run" --nproc 1 --set device.kind=cuda
  --set precision.compute=bf16 --set train.steps=50)

# Runs a command for at most so many seconds, with its output in a file; says whether it succeeded.
step() {
  local name=$1 seconds=$2
  shift 2
  echo "running: $name (at most $seconds s)" >&2
  if timeout "$seconds" "$@" >"$out/$name.txt" 2>"$out/$name.err"; then
    echo ok
  else
    echo "FAILED (exit $?): $(tail -n 1 "$out/$name.err")"
  fi
}

# A number of a JSON file, by a python expression over `data`; without python3 the line of the file is left to the reader.
number() {
  python3 -c 'import json,sys; data=json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2" 2>/dev/null || echo "see $1"
}

kernels=$(step kernels 180 "$phalanx" doctor --kernels)
bench=$(step step 120 "$phalanx" bench step "${gpt2[@]}" --steps 10 --warmup 3 --json)
train=$(step train 60 "$phalanx" train "${quickstart[@]}")
# With two cards: ranks that exchange data from card to card, and through host memory, to the bit.
cards=$(grep -cE '^GPU [0-9]' "$out/kernels.txt" || true)
between="not run: fewer than two cards"
if [ "$cards" -ge 2 ]; then
  two=(examples/quickstart.toml --data README.md --nproc 2 --set device.kind=cuda --set parallel.zero=2
    --set precision.compute=bf16 --set train.steps=20)
  between=$(step nccl 45 "$phalanx" train "${two[@]}" --run "$out/nccl" --set device.communication=nccl)
  through=$(step host 45 "$phalanx" train "${two[@]}" --run "$out/host" --set device.communication=host)
  if [ "$between$through" = okok ]; then
    losses() { grep -o '"loss":[^,}]*' "$out/$1/metrics.jsonl"; }
    if [ "$(losses nccl)" = "$(losses host)" ]; then between="ok, the same losses"; else between="DIFFERENT LOSSES"; fi
  fi
fi
if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
  torch=$(step torch 110 python3 tools/gpu_report_torch.py)
else
  torch="not run: python3 has no torch with CUDA"
fi

echo
echo "| what | result |"
echo "|---|---|"
echo "| commit | $(git rev-parse --short HEAD 2>/dev/null || echo unknown) |"
{ grep -E '^(CUDA driver|GPU|NVRTC|cuBLASLt|NCCL|device.kind)' "$out/kernels.txt" || true; } | sed -E 's/^(CUDA driver|[^ ]+( [0-9]+)?) +(.*)$/| \1 | \3 |/'
echo "| every kernel beside the processor's | $kernels |"
echo "| two cards, by NCCL and through host memory | $between |"
echo "| GPT-2 124M, bf16, 4 x 1024 tokens | $bench |"
if [ "$bench" = ok ]; then
  echo "| tokens/s | $(number "$out/step.txt" 'round(data["tokens_per_s"])') |"
  echo "| step, median | $(number "$out/step.txt" '"%.1f ms" % (1e3 * data["step_s_median"])') |"
  echo "| share of the published bf16 limit (mfu) | $(number "$out/step.txt" '"%.1f %%" % (100 * data["mfu"])') |"
  echo "| planned bytes of the arena, all used | $(number "$out/step.txt" 'data["arena_bytes"]') |"
fi
echo "| training the quick start | $train |"
echo "| memory | $(grep -h 'peak == plan' "$out/train.txt" "$out/train.err" | head -n 1 | sed 's/^memory *//') |"
echo "| PyTorch with torch.compile, the same model and batch | $torch $( [ "$torch" = ok ] && cat "$out/torch.txt") |"
echo
echo "Rates of kernels:"
sed -n '/^  rate /,$p' "$out/kernels.txt"
echo "Full outputs: $out"
