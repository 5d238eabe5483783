"""The order of what to change: harm first."""

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from flexor.config.schema import TrainConfig
from flexor.core.typed import with_settings
from flexor.plan.advise import KINDS, Change, Effect, Impact, in_order, possible_changes, remedy
from flexor.plan.site.hardware import load_hardware

HARDWARE = load_hardware()


def change(name: str, memory: int = 0, time: float = 1.0, gpus: float = 1.0) -> Change:
    return Change(name, f"--{name}", "because", Effect(memory, time, gpus))


def test_what_computes_the_same_comes_first() -> None:
    changes = [
        change("batch"),
        change("lora"),
        change("precision"),
        change("sharding", gpus=2),
        change("checkpointing"),
    ]
    names = [c.name for c in in_order(changes)]
    assert names == ["checkpointing", "sharding", "precision", "lora", "batch"]


def test_among_equals_the_faster_one() -> None:
    slow, fast = change("accumulation", time=1.4), change("checkpointing", time=1.2)
    assert in_order([slow, fast]) == [fast, slow]
    alike = [change("checkpointing", time=1.2), change("accumulation", time=1.2)]
    assert [c.name for c in in_order(alike)] == ["accumulation", "checkpointing"]


CHANGES = st.builds(
    change,
    st.sampled_from(list(KINDS)),
    st.integers(-(10**9), 10**10),
    st.floats(0.5, 4, allow_nan=False),
    st.sampled_from([1.0, 2.0, 4.0]),
)


@given(st.lists(CHANGES, max_size=8))
def test_harm_never_falls(changes: list[Change]) -> None:
    ordered = in_order(changes)
    assert sorted(map(hash, ordered)) == sorted(map(hash, changes))
    assert [c.impact for c in ordered] == sorted(c.impact for c in changes)


@given(st.lists(CHANGES, max_size=8), st.integers(1, 10**10))
def test_a_remedy_is_enough_and_nothing_less_harmful_is(changes: list[Change], missing: int) -> None:
    def fits(some: list[Change]) -> bool:
        return sum(c.effect.memory for c in some if c.effect) >= missing

    tried = [replace(c, effect=replace(c.effect, fits=fits([c]))) for c in changes if c.effect]
    combined = remedy(tried, fits)
    if combined:
        assert fits(combined)
        less = [c for c in tried if c.impact < max(c.impact for c in combined)]
        assert not any(fits([c]) for c in less)
    else:
        assert not any(fits([c]) for c in tried)


def enough(missing: int) -> Callable[[list[Change]], bool]:
    return lambda some: sum(c.effect.memory for c in some if c.effect) >= missing


def test_one_change_is_better_than_two_as_harmful() -> None:
    small, large = change("accumulation", 3, time=1.1), change("checkpointing", 10, time=1.3)
    alone = replace(large, effect=replace(large.effect, fits=True))
    assert remedy([small, alone], enough(8)) == [alone]
    assert remedy([small, large], enough(12)) == [small, large]
    lora = change("lora", 10)
    lora = replace(lora, effect=replace(lora.effect, fits=True))
    assert remedy([small, lora], enough(8)) == [lora]  # it is needed anyway
    assert remedy([], enough(8)) == []


def test_changes_of_the_same_setting_do_not_go_together() -> None:
    fewer = Change("accumulation", "--batch_size=4", "because", Effect(5))
    smaller = Change("batch", "--batch_size=2", "because", Effect(5))
    assert remedy([fewer, smaller], enough(8)) == []


def test_changes_fit_the_run() -> None:
    gpu = HARDWARE.find("RTX 4090")
    config = TrainConfig(batch_size=8, precision="no")
    proposed = {c.name: c for c in possible_changes(config, gpu)}
    assert proposed["accumulation"].setting == "--batch_size=4 --gradient_accumulation_steps=2"
    assert proposed["precision"].setting == "--precision=bf16"
    assert proposed["sharding"].setting.startswith("--gpus=2")
    assert "average" not in proposed and "frames" not in proposed
    assert next(iter(proposed)) == "accumulation" and list(proposed)[-1] == "batch"

    changes = {"precision": "bf16", "activation_checkpointing": True, "ema.enable": True}
    config = with_settings(config, changes | {"parallel.strategy": "fsdp", "dataset.cache.tier": "gpu"})
    proposed = {c.name: c for c in possible_changes(config, gpu, gpus=4)}
    assert not {"precision", "checkpointing", "sharding"} & proposed.keys()
    assert {"average", "frames"} <= proposed.keys()


def test_accumulation_keeps_the_step() -> None:
    gpu = HARDWARE.find("T4")
    for batch, passes in [(2, 1), (6, 3), (7, 1), (8, 2)]:
        config = TrainConfig(batch_size=batch, gradient_accumulation_steps=passes)
        change = next(c for c in possible_changes(config, gpu) if c.name == "accumulation")
        flags = dict(word.removeprefix("--").split("=") for word in change.setting.split())
        assert int(flags["batch_size"]) * int(flags["gradient_accumulation_steps"]) == batch * passes
    with_global = next(
        c for c in possible_changes(TrainConfig(global_batch_size=64), gpu) if c.name == "accumulation"
    )
    assert with_global.setting == "--batch_size=4"
    assert not any(
        c.name in ("accumulation", "batch") for c in possible_changes(TrainConfig(batch_size=1), gpu)
    )


def test_a_gpu_without_bf16_is_offered_fp16() -> None:
    names = {c.setting for c in possible_changes(TrainConfig(precision="no"), HARDWARE.find("T4"))}
    assert "--precision=fp16" in names
    neither = replace(HARDWARE.find("T4"), tflops={"fp32": 8.1})
    assert not any(c.name == "precision" for c in possible_changes(TrainConfig(precision="no"), neither))


def test_every_kind_has_its_harm() -> None:
    assert set(KINDS.values()) == set(Impact)


def test_weights_in_bf16_bring_their_precision_along() -> None:
    def settings(**more: str) -> list[str]:
        config = TrainConfig(**more)
        changes = possible_changes(config, HARDWARE.find("H200"))
        return [c.setting for c in changes if c.name == "weights"]

    assert settings() == ["--precision=bf16 --weights_dtype=bf16"]
    assert settings(precision="bf16") == ["--weights_dtype=bf16"]
    assert not [
        c for c in possible_changes(TrainConfig(precision="no"), HARDWARE.find("T4")) if c.name == "weights"
    ]
