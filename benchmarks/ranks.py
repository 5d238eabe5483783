"""What each process of a run takes: its step, its memory, and how long a checkpoint holds it up.

    python benchmarks/ranks.py --steps act diffusion smolvla                                         # on one GPU
    python benchmarks/ranks.py --steps pi0 --flags="--batch_size=32" --ways "one process" "1 with FSDP"
    python benchmarks/ranks.py --processes 4 --layers 12 --strategies ddp fsdp hsdp
    python benchmarks/ranks.py --processes 1 --layers 60 --strategies ddp fsdp --precision bf16      # on a GPU
    python benchmarks/ranks.py --pretend 8 --layers 240 --strategies fsdp --precision bf16           # on one GPU

With --steps: the step of one process, of one rank that exchanges gradients with itself over NCCL, of two ranks that
share the GPU and exchange them over gloo, of one rank with FSDP, and of one rank of eight with FSDP whose collectives
do nothing: each eager and as CUDA graphs, at batch 8, and how long the host needs for it. NCCL captures the exchange of
one rank, but moves nothing. Two ranks on one GPU share its time: a step takes twice as long, plus the exchange.

For each way to share a model: trains an ACT without cameras, `--layers` blocks of 12.6 million parameters, on a small
dataset made on the spot: real runs by `flexor train` with real checkpoints. Prints a table, and one JSON object per
strategy with --json.

- state: weights, gradients and Adam's moments of one rank, counted (16 bytes per parameter, whole or a part).
- peak: on a GPU what the allocator held at most; on a CPU resident memory above what imports take.
- build: the peak before the first step.
- --pretend N: rank 0 of N alone, with collectives that do nothing: what it computes is nonsense, but the memory it
  takes is that of a rank among N. For fsdp and hsdp, without checkpoints.
- held up: how long the loop stood still for a checkpoint; `step` is the median time of a step beside it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from flexor.core.console import table
from flexor.launch.local import free_port, rank_environment

STEPS = 9
WAYS = {  # processes that are started, and those that they take part with
    "one process": (1, 1, "none"),
    "1 over NCCL": (1, 1, "nccl"),
    "2 over gloo": (2, 2, "gloo"),
    "1 with FSDP": (1, 1, "fsdp"),
    "1 of 8 with FSDP": (1, 8, "fsdp"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--precision", default="no")
    parser.add_argument("--backend", default="auto", help="gloo lets processes share a GPU")
    parser.add_argument("--device", default=None)
    parser.add_argument("--pretend", type=int, default=0)
    parser.add_argument("--modes", nargs="+", choices=("sync", "async"), default=["sync", "async"])
    parser.add_argument(
        "--steps", nargs="+", metavar="POLICY", help="measure the step of these policies instead"
    )
    parser.add_argument("--flags", type=shlex.split, default=[], help="with --steps: settings of all of them")
    parser.add_argument("--step", nargs="+", choices=("eager", "graph"), default=["eager", "graph"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.steps:
        measure_steps(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder) / "data")
        results = [
            measure(Path(folder), dataset, strategy, mode == "async", options)
            for strategy in options.strategies
            for mode in (["sync"] if options.pretend else options.modes)
        ]
    for result in results if options.json else []:
        print(json.dumps(result))
    if not options.json:
        print(
            table(
                [
                    [
                        "strategy",
                        "async",
                        "parameters",
                        "state",
                        "build",
                        "peak",
                        "step",
                        "held up",
                        "on disk",
                    ],
                    *map(row, results),
                ]
            )
        )


def measure_steps(options: Any) -> None:
    rows = []
    for policy in options.steps:
        flags = [f"--policy.type={policy}", "--batch_size=8", *options.flags]
        for way in options.ways:
            count, world_size, backend = WAYS[way]
            for step in options.step:
                ranks = start(count, world_size, [backend, f"--step={step}", *flags])
                result = max(ranks, key=lambda rank: rank["step_ms"])
                settings = shlex.join(options.flags)
                rows.append({"policy": policy, "flags": settings, "way": way, "step": step, **result})
                if options.json:
                    print(json.dumps(rows[-1]), flush=True)
    if not options.json:
        head = ["policy", "ranks", "step", "time", "host", "peak memory", "planned", "exchanged"]
        print(table([head, *map(step_row, rows)]))


def step_row(result: dict[str, Any]) -> list[str]:
    times = [f"{result[name]:.2f} ms" for name in ("step_ms", "host_ms")]
    sizes = [f"{result[name] / 1e9:.3f} GB" for name in ("peak", "planned", "exchanged")]
    return [result["policy"], result["way"], result["step"], *times, *sizes]


def start(count: int, world_size: int, arguments: list[str]) -> list[dict[str, Any]]:
    """The figures that `step_main` prints in each of these processes; if they are not all, they pretend."""
    port, processes = free_port(), []
    for rank in range(count):
        env = {**os.environ, **(rank_environment(rank, world_size, port, "step", 0))}
        env["RANKS_PRETEND"] = str(world_size if world_size > count else 0)
        command = [sys.executable, __file__, "step", *arguments]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{arguments} failed")
    return [json.loads(text.splitlines()[-1]) for text in printed]


def row(result: dict[str, Any]) -> list[str]:
    worst = {key: max(rank[key] for rank in result["ranks"]) for key in result["ranks"][0]}
    gb = {key: f"{worst[key] / 1e9:.2f} GB" for key in ("state", "build", "peak")}
    return [
        result["strategy"],
        "yes" if result["async"] else "no",
        f"{worst['parameters'] / 1e6:.0f} M",
        gb["state"],
        gb["build"],
        gb["peak"],
        f"{worst['step'] * 1e3:.0f} ms",
        f"{worst['held_up'] * 1e3:.0f} ms",
        f"{result['checkpoint'] / 1e9:.2f} GB",
    ]


def write_dataset(root: Path) -> Path:
    from flexor.data.format.writer import DatasetWriter

    vector = {"dtype": "float32", "names": None, "shape": (8,)}
    names = ("observation.environment_state", "observation.state", "action")
    with DatasetWriter(root, 10, dict.fromkeys(names, vector)) as writer:
        for _ in range(4):
            for _ in range(32):
                writer.add_frame(
                    {name: np.random.default_rng(0).normal(size=8).astype(np.float32) for name in names}
                )
            writer.save_episode("move")
    return root


def measure(folder: Path, dataset: Path, strategy: str, asynchronous: bool, options: Any) -> dict[str, Any]:
    """One run by as many processes as asked for."""
    name = f"{strategy}_{asynchronous}"
    flags = [
        f"--dataset.root={dataset}",
        f"--output_dir={folder / name}",
        f"--parallel.strategy={strategy}",
        f"--parallel.backend={options.backend}",
        f"--checkpoint.async={str(asynchronous).lower()}",
        "--checkpoint.export=false",
        f"--precision={options.precision}",
        f"--steps={STEPS}",
        f"--save_freq={STEPS // 3}",
        f"--log_freq={STEPS}",
        "--batch_size=4",
        "--num_workers=0",
        "--policy.chunk_size=8",
        "--policy.n_action_steps=8",
        "--policy.dim_model=1024",
        "--policy.dim_feedforward=4096",
        f"--policy.n_encoder_layers={options.layers}",
        "--policy.use_vae=false",
        *([f"--policy.device={options.device}"] if options.device else []),
        *(["--save_checkpoint=false"] if options.pretend else []),
    ]
    port, processes = free_port(), []
    count = 1 if options.pretend else options.processes
    for rank in range(count):
        env = {**os.environ, **rank_environment(rank, options.pretend or count, port, name, 0)}
        env["RANKS_PRETEND"] = str(options.pretend)
        command = [sys.executable, __file__, "rank", str(folder / f"{name}.{rank}.json"), *flags]
        processes.append(subprocess.Popen(command, env=env))
    if sum(process.wait() != 0 for process in processes):
        raise SystemExit(f"{name} failed")
    ranks = [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(count)]
    last = (folder / name / "checkpoints" / "last").resolve()
    size = sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
    return {"strategy": strategy, "async": asynchronous, "ranks": ranks, "checkpoint": size}


# One rank


def rank_main(output: Path, flags: list[str]) -> int:
    import torch

    from flexor.cli.main import main as flexor
    from flexor.core.tensors import local
    from flexor.train import graph, loop

    if os.environ["RANKS_PRETEND"] != "0":
        pretend()
    figures: dict[str, Any] = {}
    times: list[float] = []
    imports = resident()

    def peak() -> int:
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - imports

    fit, step, save = loop.fit, graph.optimizer_step, loop.Saver.save

    def watched_fit(state: Any, *rest: Any) -> Any:
        parameters = list(state.policy.parameters())
        figures["build"] = peak()
        figures["parameters"] = sum(p.numel() for p in parameters)
        figures["state"] = 16 * sum(local(p).numel() for p in parameters)
        return fit(state, *rest)

    def watched_step(*arguments: Any) -> Any:
        started = time.perf_counter()
        result = step(*arguments)
        synchronize()
        times.append(time.perf_counter() - started)
        return result

    def watched_save(saver: Any) -> None:
        saver.wait()  # as if steps were so many that the last checkpoint is long written
        synchronize()
        started = time.perf_counter()
        save(saver)
        synchronize()
        figures[f"held_up_{saver.state.step}"] = time.perf_counter() - started

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    loop.fit, graph.optimizer_step, loop.Saver.save = watched_fit, watched_step, watched_save  # type: ignore[method-assign]
    code = flexor(["train", *flags])
    held_up = [value for key, value in figures.items() if key.startswith("held_up")]
    figures |= {"peak": peak(), "step": statistics.median(times[1:]), "held_up": max(held_up, default=0)}
    output.write_text(json.dumps(figures))
    return code


def step_main(backend: str, flags: list[str]) -> None:
    """Measure the step of this rank, and print its figures."""
    import torch

    from flexor.bench.step import GPU_STEPS, WINDOWS, RepeatedStep, ThisDevice
    from flexor.cli.flags import described_run, robot_flags
    from flexor.config.for_gpu import settle_for_gpu
    from flexor.config.parse import parse_flags
    from flexor.core.machine import let_gpu_memory_grow
    from flexor.core.tensors import local
    from flexor.core.typed import with_settings
    from flexor.plan.memory.memory import MemoryPlanner
    from flexor.plan.speed.ceilings import seconds_each
    from flexor.train.engine.base import Engine
    from flexor.train.engine.fsdp import ShardedEngine
    from flexor.train.ranks.processes import find_processes

    if os.environ["RANKS_PRETEND"] != "0":
        pretend()
    let_gpu_memory_grow()
    device, processes = torch.device("cuda", 0), find_processes()
    parser = argparse.ArgumentParser()
    robot_flags(parser)
    robot, settings = parser.parse_known_args(flags)
    config = described_run(robot, parse_flags(settings))[0]
    config = settle_for_gpu(config, torch.cuda.get_device_capability(device))
    engine = None
    if backend != "none":
        sharded = backend == "fsdp"
        backend = "nccl" if sharded else backend
        config = with_settings(
            config, {"parallel.backend": backend, "parallel.strategy": "fsdp" if sharded else "ddp"}
        )
        processes.join(device, 600, backend)
        make = functools.partial(ShardedEngine, strategy="fsdp") if sharded else Engine
        engine = make(device, config.precision, False, processes, config.parallel)
    step = RepeatedStep(config, device, engine)
    if engine is not None and engine.sharded:
        with torch.no_grad():
            for parameter in step.run.policy.parameters():
                local(parameter).normal_(0, 0.02)
    for _ in range(8):
        step()
    processes.barrier()
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    step()
    host = time.perf_counter() - started
    seconds = statistics.median(seconds_each(step, GPU_STEPS, device) for _ in range(WINDOWS))
    exchange = step.run.state.engine.exchange
    trained = [p for p in step.run.policy.parameters() if p.requires_grad]
    card = ThisDevice(torch.cuda.mem_get_info(device)[1], torch.cuda.get_device_capability(device))
    planner = MemoryPlanner(config, card, world_size=processes.world_size if exchange is None else 2)
    figures = {
        "step_ms": 1e3 * seconds,
        "peak": torch.cuda.max_memory_allocated(device),
        "host_ms": 1e3 * host,
        "planned": planner.at(step.run.split.batch_size).allocated,
        "exchanged": sum(p.nbytes for p in trained) if exchange else 0,
        "captured": bool(getattr(step.run.run_step, "captured", None)),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
    }
    print(json.dumps(figures))
    step.run.run_step.close()  # type: ignore[attr-defined]
    processes.leave()


def pretend() -> None:
    """Be alone among many: torch's group that only pretends to communicate, and messages that nobody answers."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from flexor.train.ranks.processes import Processes

    def join(self: Any, *_: Any) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.world_size)
        self.control = dist.group.WORLD

    Processes.join = join  # type: ignore[method-assign]
    Processes.gather = lambda self, value: [value] * self.world_size  # type: ignore[method-assign]
    Processes.share = lambda self, make: make()  # type: ignore[method-assign]
    Processes.barrier = Processes.leave = lambda self: None  # type: ignore[method-assign]
    Processes.store = property(lambda self: None)  # type: ignore[assignment]
    import flexor.train.loop as loop

    loop.check_devices = lambda *_: None
    loop.StopConditions.check = lambda self: None  # type: ignore[method-assign]
    watchdog = loop.Watchdog
    loop.Watchdog = lambda *_: watchdog(0, 1, "here", None, 600)  # type: ignore[misc, assignment]


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    if sys.argv[1:2] == ["step"]:
        step_main(sys.argv[2], sys.argv[3:])
        sys.exit()
    if sys.argv[1:2] == ["rank"]:
        sys.exit(rank_main(Path(sys.argv[2]), sys.argv[3:]))
    main()
