#!/usr/bin/env bash
# Train on all GPUs of this machine, or on those in CUDA_VISIBLE_DEVICES: `flexor train ... --gpus=all`.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/train_multi_gpu.sh --config FILE [settings of flexor train ...]

Train with one process per GPU, on every GPU that is visible.

  scripts/train_multi_gpu.sh --config run.yaml --steps=20000
  CUDA_VISIBLE_DEVICES=0,2 scripts/train_multi_gpu.sh --config run.yaml

Uses the flexor on the path, else the one that `make setup` installs. `flexor train --help` lists the
settings. Ctrl-C saves and stops.
TEXT
}

for word in "$@"; do
  case "$word" in -h | --help) usage; exit 0 ;; esac
done
if [ $# -eq 0 ]; then
  usage >&2
  exit 2
fi

flexor=$(command -v flexor || true)
if [ -z "$flexor" ]; then
  flexor=$(dirname "$0")/../.venv/bin/flexor
  if [ ! -x "$flexor" ]; then
    echo "train_multi_gpu.sh: there is no flexor on the path and no .venv: run \`make setup\` first." >&2
    exit 2
  fi
fi
exec "$flexor" train "$@" --gpus=all
