"""Plans for the application: at once where a step was traced before, and then what takes longer, part by part."""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from flexor.config.parse import code_in, config_from_flags, to_words
from flexor.config.schema import TrainConfig
from flexor.core.errors import ConfigError, FlexorError
from flexor.core.trust import require_trust
from flexor.core.typed import to_plain
from flexor.plan.advise import advise
from flexor.plan.compare import alone
from flexor.plan.data import FPS, FRAMES
from flexor.plan.data.host import Data
from flexor.plan.data.imagined_robot import Robot, imagined_data, parse_cameras, usual_robot
from flexor.plan.memory.memory import MemoryPlanner
from flexor.plan.plan import Plan, Site, make_plan, site_of
from flexor.plan.rank import COUNTS, Choice, Ranking
from flexor.plan.show.as_json import change_to_json, choice_to_json, plan_to_json
from flexor.plan.site.hardware import Hardware, load_hardware
from flexor.plan.speed.speeds import assumed
from flexor.plan.trace.traces import Traces
from flexor.policies import POLICIES, policy_class

T = TypeVar("T")

KEPT_TRACES = 12  # of different policies and settings
NEWS_S = 0.1  # between two messages about a trace
TOGETHER = 8  # GPUs in a message
DESCRIBING = ("gpu", "gpus", "cameras", "state", "action", "frames")  # what is no setting of a run
SAME_TRACE = {
    *(
        "batch_size",
        "gradient_accumulation_steps",
        "global_batch_size",
        "steps",
        "epochs",
        "parallel",
        "step",
    ),
    *("dataset", "checkpoint", "save_freq", "seed", "num_workers", "output_dir", "job_name", "eval", "env"),
}
"""Settings that do not change what one pass computes."""


@dataclass(frozen=True)
class PlanRequest:
    """What a person chose: settings of `flexor train`, and what they run on."""

    settings: Mapping[str, str]
    gpu: str
    gpus: int
    cameras: str
    state: int | None
    action: int | None
    frames: int

    @classmethod
    def read(cls, query: Mapping[str, str]) -> PlanRequest:
        settings = {name: value for name, value in query.items() if name not in DESCRIBING and value != ""}
        return cls(
            settings,
            query.get("gpu") or "RTX 4090",
            _count(query, "gpus", 1) or 1,
            query.get("cameras") or "",
            _count(query, "state", None),
            _count(query, "action", None),
            _count(query, "frames", FRAMES) or FRAMES,
        )


def _count(query: Mapping[str, str], name: str, otherwise: int | None) -> int | None:
    text = query.get(name, "")
    if not text:
        return otherwise
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 10**10:
        raise ConfigError(f"{name}={text} must be a whole number above 0.")
    return int(text)


class Planning:
    """A newer request ends what is left of the one before, and does not wait for it."""

    def __init__(self) -> None:
        self._traces: OrderedDict[str, Traces] = OrderedDict()
        self._newest = 0
        self._first, self._later = (ThreadPoolExecutor(1, thread_name_prefix="plan") for _ in range(2))

    @cached_property
    def hardware(self) -> Hardware:
        return load_hardware()

    def options(self) -> dict[str, Any]:
        """What can be chosen."""
        offers = {gpu.name: self.hardware.offers(gpu, 1) for gpu in self.hardware.gpus.values()}
        return {
            "policies": [_policy_options(kind) for kind in POLICIES],
            "gpus": [
                {
                    "name": name,
                    "memory_bytes": gpu.memory,
                    "usd_per_hour": offers[name][0].usd_per_hour if offers[name] else None,
                }
                for name, gpu in sorted(self.hardware.gpus.items(), key=lambda item: -item[1].memory)
            ],
            "counts": list(COUNTS),
            "frames": FRAMES,
            "fps": FPS,
        }

    def answers(self, request: PlanRequest) -> Iterator[dict[str, Any]]:
        """Messages: `tracing` while a step is traced, `plan`, `largest`, `choices` part by part, `changes`, `done`."""
        self._newest += 1
        number = self._newest
        try:
            yield from self._answers(request, lambda: number == self._newest)
        except FlexorError as error:
            yield {"error": str(error)}

    def _answers(self, request: PlanRequest, is_newest: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        config, robot = _described(request)
        data = imagined_data(config.policy, request.frames)
        traces = self._traces_of(config)
        site = site_of(self.hardware, self.hardware.find(request.gpu), request.gpus)
        job = _Job(config, data, site, traces, self.hardware)
        plan = yield from self._watched(self._first.submit(job.plan), traces)
        about = {"command": _command(request), "robot": robot.describe()}
        yield {"plan": plan_to_json(plan, alone(plan, traces)), **about}
        if not is_newest():
            return
        yield {"largest": (yield from self._watched(self._later.submit(job.largest, plan), traces))}
        if not plan.fits:
            yield from self._changes(job, plan)
        if is_newest():
            yield from self._choices(job, plan, is_newest)
        yield {"done": True}

    def _changes(self, job: _Job, plan: Plan) -> Iterator[dict[str, Any]]:
        yield {"looking": "what makes it fit"}
        advice = self._later.submit(advise, plan, self.hardware, job.config, job.traces)
        changes, remedy = yield from self._watched(advice, job.traces)
        yield {
            "changes": [change_to_json(change) for change in changes],
            "remedy": [change.setting for change in remedy],
        }

    def _choices(self, job: _Job, plan: Plan, is_newest: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """The same training on every GPU."""
        config = replace(job.config, global_batch_size=plan.split.global_batch)
        ranking = Ranking(config, job.data, self.hardware, assumed(), traces=job.traces)
        choices: list[Choice] = []
        for choice in ranking.each(self.hardware.gpus.values(), COUNTS):
            choices.append(choice)
            if len(choices) % TOGETHER == 0:
                yield {"choices": [_listed(each) for each in choices[-TOGETHER:]]}
                if not is_newest():
                    return
        rest = len(choices) % TOGETHER
        yield {"choices": [_listed(each) for each in choices[len(choices) - rest :]]}

    def _watched(self, future: Future[T], traces: Traces) -> Generator[dict[str, Any], None, T]:
        """What is computed in a thread; messages about new traces meanwhile."""
        before = len(traces.made)
        while True:
            try:
                return future.result(NEWS_S)
            except NotYet:
                if future.done():
                    raise
                yield {"tracing": len(traces.made) - before}

    def _traces_of(self, config: TrainConfig) -> Traces:
        plain = {name: value for name, value in to_plain(config).items() if name not in SAME_TRACE}
        key = json.dumps(plain, sort_keys=True, default=str)
        traces = self._traces.pop(key, None) or Traces(config)
        self._traces[key] = traces
        while len(self._traces) > KEPT_TRACES:
            self._traces.popitem(last=False)
        return traces


@dataclass(frozen=True)
class _Job:
    config: TrainConfig
    data: Data
    site: Site
    traces: Traces
    hardware: Hardware

    def plan(self) -> Plan:
        return make_plan(self.config, self.data, self.site, self.hardware, traces=self.traces, search=False)

    def largest(self, plan: Plan) -> int:
        planner = MemoryPlanner(
            plan.config,
            self.site.gpu,
            world_size=self.site.world_size,
            local_world_size=self.site.gpus,
            traces=self.traces,
        )
        trace = planner.trace(plan.split.batch_size, plan.split.accumulation)
        return planner.largest_batch(plan.split.accumulation, like=trace)


def _described(request: PlanRequest) -> tuple[TrainConfig, Robot]:
    """The settings with the features of a robot that is described, or of a usual one."""
    require_trust(code_in(request.settings), "This page")  # who opens the link runs nothing new with it
    config = config_from_flags({**request.settings, "dataset.repo_id": "planned/dataset"})
    sizes = {
        name: value
        for name, value in (("state", request.state), ("action", request.action))
        if value is not None
    }
    if not request.cameras:
        with contextlib.suppress(ConfigError):  # below is the error of the default robot
            robot, policy = usual_robot(config.policy, **sizes)
            return replace(config, policy=policy), robot
    robot = Robot(*parse_cameras(request.cameras or "2x480x640"), **sizes)
    return replace(config, policy=robot.fill_in(config.policy)), robot


def _command(request: PlanRequest) -> str:
    gpus = [f"--gpus={request.gpus}"] if request.gpus > 1 else []
    return " ".join(["flexor train", *to_words(request.settings), "--dataset.repo_id=USER/NAME", *gpus])


def _listed(choice: Choice) -> dict[str, Any]:
    """As in the JSON of a plan; the memory of what does not fit is not worth its time here."""
    if choice.fits:
        return choice_to_json(choice)
    return {"gpu": choice.gpu.name, "gpus": choice.gpus, "fits": False}


def _policy_options(kind: str) -> dict[str, Any]:
    config = policy_class(kind).Config()
    if hasattr(config, "train_expert_only"):
        trained = [
            ("--policy.train_expert_only=false --policy.freeze_vision_encoder=false", "everything"),
            ("--policy.train_expert_only=true --policy.freeze_vision_encoder=true", "the action expert"),
        ]
    else:
        trained = [("", "everything")]
    default = trained[-1 if getattr(config, "train_expert_only", False) else 0]
    return {
        "type": kind,
        "trained": [
            *trained,
            ("--lora.r=16", "LoRA adapters, rank 16"),
            ("--lora.r=16 --lora.base=8bit", "LoRA adapters on 8-bit weights"),
            ("--lora.r=16 --lora.base=4bit", "LoRA adapters on 4-bit weights"),
        ],
        "default": default[0],
    }
