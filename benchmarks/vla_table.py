"""GPU memory and step time of large policies, planned and measured: the table of docs/vla.md.

    python benchmarks/vla_table.py [--output FILE.json]     on the GPU: measure and plan every row
    python benchmarks/vla_table.py --table FILE.json        the rows of a measurement, in Markdown

Each row is `flexor bench step` and `flexor plan` with the settings of the row, a batch of 8 and two cameras of 480x640.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

RANDOM_WEIGHTS = "--policy.load_vlm_weights=false"  # as fast and as large as published ones
WITH_IMAGES = "--dataset.cache.features=off"  # each step encodes its images, also where the encoder is frozen
COMMON = ["--batch_size=8", RANDOM_WEIGHTS, WITH_IMAGES, "--json"]


class Row(NamedTuple):
    policy: str
    trained: str
    settings: str
    """As the table shows them."""
    flags: list[str]


ROWS = [
    Row("smolvla", "the action expert", "the defaults", []),
    Row(
        "smolvla",
        "and the language model",
        "`--policy.train_expert_only=false`",
        ["--policy.train_expert_only=false"],
    ),
    Row(
        "smolvla",
        "everything",
        "and `--policy.freeze_vision_encoder=false`",
        ["--policy.train_expert_only=false", "--policy.freeze_vision_encoder=false"],
    ),
    Row("pi0", "adapters", "`--lora.r=16`", ["--lora.r=16"]),
    Row("pi05", "adapters", "`--lora.r=16`", ["--lora.r=16"]),
    Row("pi0", "the action expert", "`--policy.train_expert_only=true`", ["--policy.train_expert_only=true"]),
    Row(
        "pi0",
        "everything, bf16 weights",
        "`--policy.dtype=bfloat16 --activation_checkpointing=true`",
        ["--policy.dtype=bfloat16", "--activation_checkpointing=true"],
    ),
    Row("pi0", "everything", "the defaults", []),
]


def flexor(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "flexor", *arguments, *COMMON]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout)


def measure(row: Row, gpu: str) -> dict[str, Any]:
    flags = [f"--policy.type={row.policy}", *row.flags]
    bench = flexor("bench", "step", "--step=graph", *flags)
    (graph,) = bench["rows"]
    plan = flexor("plan", f"--gpu={gpu}", "--cameras=2x480x640", *flags)
    return {
        "policy": row.policy,
        "flags": row.flags,
        "way": graph["way"],
        "device": bench["device"],
        "torch": bench["torch"],
        "measured_allocated_bytes": graph["peak_memory_bytes"],
        "measured_ms": graph["step_ms"],
        "planned_allocated_bytes": plan["memory"]["allocated_bytes"],
        "planned_process_bytes": plan["memory"]["peak_bytes"],
        "planned_ms": 1000 * plan["time"]["step_s"],
    }


def table(results: dict[str, Any]) -> str:
    lines = [
        "| Policy | What is trained | Settings | GB of the process, planned | GB of tensors, planned / measured "
        "| ms per step, planned / measured |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row, case in zip(ROWS, results["rows"], strict=True):
        hows = ("planned", "measured") if case["measured_ms"] else ("planned",)
        tensors = [f"{case[f'{how}_allocated_bytes'] / 1e9:.2f}" for how in hows]
        times = [f"{case[f'{how}_ms']:.0f}" for how in hows]
        process = f"{case['planned_process_bytes'] / 1e9:.1f}"
        cells = (
            f"`{row.policy}`",
            row.trained,
            row.settings,
            process,
            " / ".join(tensors),
            " / ".join(times),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpu", default="H200", help="the GPU's name in plans")
    parser.add_argument("--output", type=Path, help="also write the results to this file, as JSON")
    parser.add_argument(
        "--table", type=Path, metavar="FILE.json", help="measure nothing; print the table of a file"
    )
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    results: dict[str, Any] = {"date": date.today().isoformat(), "rows": []}
    for row in ROWS:
        results["rows"].append(measure(row, args.gpu))
        print(json.dumps(results["rows"][-1]), file=sys.stderr, flush=True)
        if args.output:
            args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
