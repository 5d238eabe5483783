"""Time and peak memory of a training step on this GPU: LeRobot's, and Flexor's eager and as one CUDA graph.

    python benchmarks/step_speed.py [--policies act diffusion vqbet ...] [--batches 8 32 ...] [--variants full ...]
                                    [--fp8] [--compile] [--output FILE.json]

Batches are made up and lie on the GPU. All cases run one after the other in this process, so that they meet the same
machine. LeRobot 0.6.1 is measured if it is installed here, in float32 and in bf16; ratios are to the faster of the two.
LeRobot runs with the settings of torch that its own train command makes (`as_lerobot_trains`).
Cameras are 2 of 480x640 for ACT, Diffusion Policy, Multi-Task DiT, SmolVLA, EO-1, GR00T and WALL-X, 2 of 224x224 for
pi0, 1 of 96x96 for VQ-BeT (its second phase), 1 of 84x84 for TD-MPC, 2 of 256x256 for X-VLA. Multi-Task DiT has a CLIP
ViT-B/16 with random weights, SmolVLA a random SmolVLM2 of 500 M, pi0 a random PaliGemma, EO-1 a random Qwen2.5-VL of
3 B, whose own type is bfloat16, X-VLA a random Florence-2 large, GR00T a random base model of 3 B, WALL-X weights
of the published size: they need `transformers`, but no Hub. Images of EO-1 and GR00T are resized before the step in
LeRobot, and in the step here. LeRobot's WALL-X needs torchdiffeq and qwen-vl-utils, and resizes images and
writes tokens in the step, as it does when it trains. "images encoded once" begins with the features of a frozen image
encoder, as a run does by itself; LeRobot has nothing like it.
"""

import argparse
import gc
import importlib.util
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from flexor.bench.step import RepeatedStep
from flexor.config.parse import load_config
from flexor.config.schema import TrainConfig
from flexor.core.model_files import ModelFiles
from flexor.plan.data.imagined_robot import Robot
from flexor.policies.base import PolicyConfig
from flexor.policies.eo1.config import EO1Config
from flexor.policies.features import Kind
from flexor.policies.fit import deltas_of
from flexor.policies.groot.config import GrootConfig
from flexor.policies.processing.tokenize import TASK_MASK, TASK_TOKENS
from flexor.policies.vlm.florence_size import FLORENCE_2_LARGE
from flexor.policies.vlm.smolvlm_size import BUILTIN_SIZES
from flexor.policies.wall_x.config import WallXConfig
from flexor.policies.wall_x.size import WALL_OSS_FLOW, describe_wall_x

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from parity.eo1 import qwen
from parity.groot import lerobot as groot_files
from parity.smolvla import vlms
from parity.wall_x import models as walls

DEVICE = "cuda"
CLIP, VLM, WALL = (
    "clip-vit-base-patch16",
    "smolvlm2-500m",
    "wall-oss-flow",
)  # LeRobot looks for "clip" in the name
WARM_UP, STEPS, WINDOWS = 6, 10, 3  # fewer steps if a step takes longer than 0.1 s


class Case(NamedTuple):
    policy: str
    batch: int
    robot: Robot
    variant: str = ""
    settings: Mapping[str, Any] = MappingProxyType({})
    """Of the policy, in both programs."""
    flags: Sequence[str] = ()
    """Of Flexor's run."""

    @property
    def title(self) -> str:
        return f"{self.policy} {self.variant}".strip()


TWO, SMALL = Robot(cameras=2), Robot(cameras=2, height=224, width=224)
MEDIUM = Robot(cameras=2, height=256, width=256)
FULL_TUNING = {"train_expert_only": False, "freeze_vision_encoder": False}
LOWER = {"dtype": "bfloat16"}
OFF, ONCE = ("--dataset.cache.features=off",), ("--dataset.cache.features=ram",)
CASES = [
    Case("act", 8, TWO),
    Case("act", 32, TWO),
    Case("diffusion", 8, TWO),
    Case("diffusion", 32, TWO),
    Case("vqbet", 8, Robot(cameras=1, height=96, width=96)),
    Case("multi_task_dit", 8, TWO),
    Case("tdmpc", 256, Robot(cameras=1, height=84, width=84)),
    Case("smolvla", 8, TWO, "expert only"),
    Case("smolvla", 8, TWO, "full", FULL_TUNING),
    Case("smolvla", 32, TWO, "full", FULL_TUNING),
    Case("pi0", 8, SMALL, "full, checkpointing", LOWER | {"gradient_checkpointing": True}),
    Case("pi0", 32, SMALL, "full, checkpointing", LOWER | {"gradient_checkpointing": True}),
    Case("pi0", 32, SMALL, "full", LOWER),
    Case("eo1", 8, TWO, "full"),
    Case("eo1", 32, TWO, "full"),
    Case("xvla", 8, MEDIUM),
    Case("xvla", 32, MEDIUM),
    Case("groot", 8, TWO, flags=OFF),
    Case("groot", 32, TWO, flags=OFF),
    Case("groot", 8, TWO, "images encoded once", flags=ONCE),
    Case("groot", 32, TWO, "images encoded once", flags=ONCE),
    Case("groot", 8, TWO, "full", {"tune_llm": True, "tune_visual": True}),
    Case("wall_x", 8, TWO),
    Case("wall_x", 32, TWO),
]
LARGE = ("smolvla", "pi0", "eo1", "xvla", "groot", "wall_x")
POLICIES = list(dict.fromkeys(case.policy for case in CASES))
PLAIN = ["--step=eager", "--precision=no", "--channels_last=false"]
WAYS = {
    "eager, float32": PLAIN,
    "eager, bf16": [*PLAIN, "--precision=bf16"],
    "graph, float32": [*PLAIN, "--step=graph"],
    "graph, bf16": [*PLAIN, "--step=graph", "--precision=bf16"],
    "graph, bf16, channels last": ["--step=graph", "--precision=bf16", "--channels_last=true"],
}
OF_LARGE = ("eager, bf16", "graph, bf16")
IN_FP8 = {"graph, fp8": [*PLAIN, "--step=graph", "--precision=fp8"]}
COMPILED = "compiled graph, bf16, channels last"


def timed(step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds per step (median of windows), and the peak memory from the first step on."""
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP):
        seconds = window(step, 1)
    steps = max(1, min(STEPS, int(1 / seconds)))
    return {
        "ms": round(1e3 * statistics.median(window(step, steps) for _ in range(WINDOWS)), 2),
        "peak_mb": round(torch.cuda.max_memory_allocated() / 1e6),
    }


def window(step: Callable[[], Any], steps: int) -> float:
    """Seconds per step."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps


def settings(case: Case, flags: list[str]) -> TrainConfig:
    """Flexor's settings of a case."""
    arguments = [f"--policy.type={case.policy}", f"--batch_size={case.batch}", "--dataset.repo_id=made/up"]
    arguments += [f"--policy.{name}={str(value).lower()}" for name, value in case.settings.items()]
    config = load_config([*arguments, *case.flags, *flags])
    return replace(config, policy=case.robot.fill_in(config.policy))


def flexor(case: Case, flags: list[str]) -> dict[str, float]:
    return timed(RepeatedStep(settings(case, flags), torch.device("cuda", 0)))


@contextmanager
def as_lerobot_trains() -> Iterator[None]:
    """The settings of torch of LeRobot's train command."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, matmul.allow_tf32
    cudnn.benchmark, matmul.allow_tf32 = True, True
    try:
        yield
    finally:
        cudnn.benchmark, matmul.allow_tf32 = before


def lerobot(case: Case, folder: Path, bf16: bool) -> dict[str, float]:
    with as_lerobot_trains():
        return timed(lerobot_step(case, folder, bf16))


def lerobot_step(case: Case, folder: Path, bf16: bool) -> Callable[[], None]:
    config, policy, optimizer = lerobot_policy(case, folder)
    policy.to(DEVICE).train()
    batch = lerobot_batch(config, case.batch)

    def step() -> None:
        with torch.autocast(DEVICE, torch.bfloat16) if bf16 else nullcontext():
            loss, _ = policy.forward(dict(batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(policy, "update"):
            policy.update()

    return step


def lerobot_policy(case: Case, folder: Path) -> tuple[PolicyConfig, Any, torch.optim.Optimizer]:
    """LeRobot's policy of the same settings and features, with the optimizer that it asks for."""
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.factory import get_policy_class, make_policy_config

    ours = settings(case, []).policy
    inputs, outputs = (
        {name: PolicyFeature(FeatureType(f.type.value), tuple(f.shape)) for name, f in features.items()}
        for features in (ours.input_features, ours.output_features)
    )
    theirs: dict[str, Any] = {"input_features": inputs, "output_features": outputs, "device": DEVICE}
    if case.policy == "multi_task_dit":
        write_clip(folder / CLIP)
        theirs |= {"vision_encoder_name": str(folder / CLIP), "text_encoder_name": str(folder / CLIP)}
    elif case.policy == "smolvla":
        write_vlm(folder / VLM)
        theirs |= {"vlm_model_name": str(folder / VLM)}
    elif case.policy == "eo1":  # with a path, LeRobot makes random weights
        theirs |= {"vlm_config": ours.described_vlm(), "pretrained_path": folder}
    elif case.policy == "xvla":
        theirs |= {"florence_config": dict(FLORENCE_2_LARGE)}
    elif case.policy == "wall_x":
        theirs |= {"pretrained_name_or_path": str(write_wall(folder / WALL))}
    elif case.policy in ("act", "diffusion", "vqbet"):
        theirs["pretrained_backbone_weights"] = None
    config = make_policy_config(case.policy, **theirs, **case.settings)
    place = (
        torch.device(DEVICE) if case.policy in LARGE else nullcontext()
    )  # random weights take long on a CPU
    with place, random_base_model() if case.policy == "groot" else nullcontext():
        policy = get_policy_class(case.policy)(config)
    if case.policy == "vqbet":  # the second phase
        policy.vqbet.action_head.vqvae_model.discretized = torch.tensor(True)
    return ours, policy, config.get_optimizer_preset().build(policy.get_optim_params())


@contextmanager
def random_base_model() -> Iterator[None]:
    """LeRobot's GR00T, which loads a base model, makes one with random weights; and it does not need dm-tree."""
    from lerobot.policies.groot.groot_n1_7 import GR00TN17, GR00TN17Config

    def make(pretrained_model_name_or_path: str, **settings: Any) -> Any:
        backbone = {name: settings[name] for name in ("tune_llm", "tune_visual")}
        head = {name: settings[name] for name in ("tune_projector", "tune_diffusion_model", "tune_vlln")}
        model = GR00TN17(GR00TN17Config(**backbone, **head), load_backbone_weights=False)
        model.backbone.set_trainable_parameters(**backbone)
        model.action_head.set_trainable_parameters(**head)
        return model

    GR00TN17.prepare_input = groot_files.prepare_input
    with patch.object(GR00TN17, "from_pretrained", make):
        yield


def write_clip(folder: Path) -> None:
    """A CLIP with random weights: LeRobot loads some when it builds the policy."""
    from transformers import CLIPConfig, CLIPModel

    if not (folder / "model.safetensors").is_file():
        CLIPModel(CLIPConfig(vision_config={"patch_size": 16})).save_pretrained(folder)


def write_vlm(folder: Path) -> None:
    """What LeRobot reads of a SmolVLM: the sizes of the real one, the tokenizer of a tiny one."""
    vlms.make_vlm(folder)
    sizes = {
        "model_type": "smolvlm",
        "image_token_id": 2,
        **BUILTIN_SIZES["HuggingFaceTB/SmolVLM2-500M-Video-Instruct"],
    }
    sizes["text_config"] = {"model_type": "llama", "pad_token_id": 0, **sizes["text_config"]}
    (folder / "config.json").write_text(json.dumps(sizes))


def write_wall(folder: Path) -> Path:
    """What LeRobot reads of a WALL-X: the published sizes, a tokenizer of as many words, no weights."""
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True)
        described = describe_wall_x(ModelFiles(WALL_OSS_FLOW, ""))
        rows = described["text_config"]["vocab_size"]
        added = walls.ADDED[:2]
        fill = [
            f"word{number}" for number in range(rows - len(walls.SPECIAL) - len(walls.WORDS) - len(added))
        ]
        words = [*walls.SPECIAL, *walls.WORDS, *fill, *added]
        special = ("image_pad", "video_pad", "vision_start", "vision_end")
        numbers = {name: words.index(f"<|{name}|>") for name in special}
        ids = {f"{name.removesuffix('_pad')}_token_id": number for name, number in numbers.items()}
        qwen.make_tokenizer(folder, walls.SPECIAL, [*walls.WORDS, *fill, *added])
        qwen.make_processor(folder)
        qwen.write(folder / "config.json", described | ids)
        save_file({}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def lerobot_batch(config: PolicyConfig, size: int) -> dict[str, Any]:
    """Normalised values on the GPU, as LeRobot's processing hands them on."""
    deltas = deltas_of(config)
    batch: dict[str, Any] = {"index": torch.arange(size, device=DEVICE)}
    for name, feature in {**config.input_features, **config.output_features}.items():
        steps = [len(deltas[name])] if name in deltas else []
        make = torch.rand if feature.type is Kind.VISUAL else torch.randn
        batch[name] = make(size, *steps, *feature.shape, device=DEVICE).clamp(-1, 1)
        if steps:
            batch[f"{name}_is_pad"] = torch.zeros(size, *steps, dtype=torch.bool, device=DEVICE)
    if config.reward_deltas is not None:
        shape = size, len(config.reward_deltas)
        batch |= {"next.reward": torch.rand(shape, device=DEVICE)}
        batch |= {"next.reward_is_pad": torch.zeros(shape, dtype=torch.bool, device=DEVICE)}
    if isinstance(config, EO1Config):
        batch |= eo1_conversation(config, size)
    if isinstance(config, GrootConfig):
        batch |= groot_inputs(config, size)
    if isinstance(config, WallXConfig):
        batch |= {"task": ["pick up the red cube and put it on the green block."] * size}
    if hasattr(config, "tokenizer_max_length"):
        shape = size, config.tokenizer_max_length
        batch |= {TASK_TOKENS: torch.randint(0, 1000, shape, device=DEVICE)}
        batch |= {TASK_MASK: torch.ones(shape, dtype=torch.bool, device=DEVICE)}
    return batch


def eo1_conversation(config: EO1Config, size: int) -> dict[str, Any]:
    """A task of ten words, the images of all cameras and a chunk, as tokens of Qwen2.5-VL."""
    image, start, end, state, action = 151_655, 151_652, 151_653, 151_669, 151_666
    images = [token for grid in config.grids for token in (start, *[image] * grid.tokens, end)]
    ids = [*range(15), *images, 151_668, state, 151_670, *range(16), 151_665]
    tokens = torch.tensor([*ids, *[action] * config.chunk_size, 151_667, 7, 8], device=DEVICE).expand(
        size, -1
    )
    patches = sum(grid.patches for grid in config.grids)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == image).int(),
        "pixel_values": torch.randn(size * patches, 1176, device=DEVICE),
        "image_grid_thw": torch.tensor([[1, *grid] for grid in config.grids] * size, device=DEVICE),
        "state_token_id": state,
        "action_token_id": action,
    }


def groot_inputs(config: GrootConfig, size: int) -> dict[str, Any]:
    """A task of ten words after the images of all cameras, as tokens of Qwen3-VL; a state and a chunk."""
    image, start, end = 151_655, 151_652, 151_653
    images = [token for grid in config.grids for token in (start, *[image] * grid.tokens, end)]
    tokens = torch.tensor([*range(3), *images, *range(12)], device=DEVICE).expand(size, -1)
    patches = sum(grid.patches for grid in config.grids)
    chunk = size, config.training_horizon, config.max_action_dim
    mask = torch.zeros(chunk, device=DEVICE)
    mask[..., : config.action.shape[0]] = 1
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.randn(size * patches, 1536, device=DEVICE),
        "image_grid_thw": torch.tensor([[1, *grid] for grid in config.grids] * size, device=DEVICE),
        "state": torch.randn(size, 1, config.max_state_dim, device=DEVICE),
        "action": torch.randn(chunk, device=DEVICE) * mask,
        "action_mask": mask,
        "embodiment_id": torch.full((size,), config.tag_number, device=DEVICE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="*", default=POLICIES, choices=POLICIES)
    parser.add_argument("--batches", type=int, nargs="*", help="only these batch sizes")
    parser.add_argument("--variants", nargs="*", help="only these, such as full")
    parser.add_argument("--fp8", action="store_true", help="large policies also in fp8")
    parser.add_argument("--compile", action="store_true", help="also with compiled blocks: minutes more")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure_all(args, Path(folder))


def ways_of(
    case: Case, folder: Path, compiled: bool, in_fp8: bool
) -> dict[str, Callable[[], dict[str, float]]]:
    ways: dict[str, Callable[[], dict[str, float]]] = {}
    if importlib.util.find_spec("lerobot"):
        ways["LeRobot, float32"] = lambda: lerobot(case, folder, False)
        ways["LeRobot, bf16"] = lambda: lerobot(case, folder, True)
    mine = {name: flags for name, flags in WAYS.items() if name in OF_LARGE or case.policy not in LARGE}
    if in_fp8 and case.policy in LARGE:
        mine |= IN_FP8
    if compiled:
        mine[COMPILED] = [*WAYS["graph, bf16, channels last"], "--compile=true"]
    return ways | {name: lambda flags=flags: flexor(case, flags) for name, flags in mine.items()}


def is_asked_for(case: Case, args: argparse.Namespace) -> bool:
    batches, variants = args.batches or [case.batch], args.variants or [case.variant]
    return case.policy in args.policies and case.batch in batches and case.variant in variants


def measure_all(args: argparse.Namespace, folder: Path) -> None:
    report: dict[str, Any] = {
        "date": str(date.today()),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cases": [],
    }
    for case in filter(lambda case: is_asked_for(case, args), CASES):
        measured: dict[str, Any] = {}
        for name, measure in ways_of(case, folder, args.compile, args.fp8).items():
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()  # of the streams of the previous way
            torch.cuda.empty_cache()
            try:
                measured[name] = measure()
            except Exception as error:
                measured[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
                traceback.print_exc(limit=5)
            print(f"{case.title} {case.batch}: {name}: {measured[name]}", flush=True)
        report["cases"].append({"policy": case.title, "batch": case.batch, "ways": measured})
        if args.output:
            args.output.write_text(json.dumps(report, indent=1))
    print(table(report))


def table(report: dict[str, Any]) -> str:
    lines = [
        "| policy | batch | way | ms | times LeRobot's speed | peak, MB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case in report["cases"]:
        theirs = [way["ms"] for name, way in case["ways"].items() if "LeRobot" in name and "ms" in way]
        for name, way in case["ways"].items():
            ratio = f"{min(theirs) / way['ms']:.1f}" if theirs and "ms" in way else "-"
            lines.append(
                f"| {case['policy']} | {case['batch']} | {name} | {way.get('ms', way.get('error'))} | {ratio} "
                f"| {way.get('peak_mb', '-')} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
