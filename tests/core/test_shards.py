"""Shards of a run's tensors: written by any number of ranks, read by any other number; damaged ones are refused."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from flexor.core import shards
from flexor.core.errors import CheckpointError
from flexor.core.shards import INDEX, write_index, write_shard
from flexor.train.checkpoint.tensors import ShardedTensors

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def write(folder: Path, tensors: dict[str, torch.Tensor], ranks: int) -> None:
    """As `ranks` processes would, each with the rows that torch.chunk gives it."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for rank in range(ranks):
        index, expected = {}, {}
        for name, tensor in tensors.items():
            size = -(-len(tensor) // ranks) if tensor.ndim else 0
            rows = (
                slice(min(rank * size, len(tensor)), min((rank + 1) * size, len(tensor)))
                if tensor.ndim
                else None
            )
            if rows is None or rows.stop > rows.start or (len(tensor) == 0 and rank == 0):
                if rows is None and rank:
                    continue
                expected[name] = tensor if rows is None else tensor[rows].clone()
                described = shards._index_entry(tensor, shards.shard_file(rank))
                if rows is not None:
                    described["pieces"][0] |= {"start": rows.start, "stop": rows.stop}
                index[name] = described
        shards._write_safetensors(folder / shards.shard_file(rank), expected)
        parts.append(index)
    write_index(folder, parts)


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcdefg"), st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1),
    st.integers(1, 5),
)
def test_what_ranks_wrote_is_read_whole_and_by_rows(tmp_path_factory, described, ranks):
    folder = tmp_path_factory.mktemp("shards")
    tensors = {f"model.{name}": values(*each, seed=ord(name)) for name, each in described.items()}
    write(folder, tensors, ranks)
    opened = ShardedTensors(folder)
    assert {n: (t.shape, t.dtype) for n, t in opened.described().items()} == {
        n: (t.shape, t.dtype) for n, t in tensors.items()
    }
    weights = opened.read("model.")
    assert all(torch.equal(weights[n.removeprefix("model.")], t) for n, t in tensors.items())
    for rank in range(ranks):  # each file is one that anybody's safetensors can read
        load_file(folder / shards.shard_file(rank))


def test_one_rank_writes_everything_and_the_hash_is_that_of_the_file(tmp_path):
    from flexor.core.manifest import hash_file

    tensors = {"model.a": values((4, 3), torch.float32), "optimizer.a.step": torch.tensor(7.0)}
    index, digest = write_shard(tensors, tmp_path, 0)
    assert digest == hash_file(tmp_path / "rank-00000.safetensors") and index.keys() == tensors.keys()
    assert write_shard(tensors, tmp_path, 1)[0] == {}  # what is not sharded is written once
    write_index(tmp_path, [index, {}])
    filled = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    ShardedTensors(tmp_path).fill(filled)
    assert all(torch.equal(filled[name], tensors[name]) for name in tensors)
    with pytest.raises(ValueError, match=r"model.a is \[2, 3\], but \[4, 3\] in the checkpoint"):
        ShardedTensors(tmp_path).fill({"model.a": torch.zeros(2, 3)})


@pytest.fixture
def written(tmp_path) -> Path:
    write(tmp_path / "sharded", {"model.a": values((5, 2), torch.float32), "model.b": torch.tensor(3)}, 2)
    return tmp_path / "sharded"


def damaged(change) -> object:
    def apply(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["tensors"])
        (folder / INDEX).write_text(json.dumps(index))

    return apply


DAMAGE = {
    "a gap": damaged(lambda t: t["model.a"]["pieces"].pop()),
    "rows twice": damaged(lambda t: t["model.a"]["pieces"].append(t["model.a"]["pieces"][0])),
    "invented rows": damaged(lambda t: t["model.a"].update(shape=[1 << 50, 2])),
    "an invented size": damaged(
        lambda t: (t["model.a"].update(shape=[5, 1 << 40]), None)  # would take petabytes
    ),
    "negative": damaged(lambda t: t["model.a"].update(shape=[5, -2])),
    "another type": damaged(lambda t: t["model.a"].update(dtype="F128")),
    "no list": damaged(lambda t: t["model.a"].update(pieces=3)),
    "a file elsewhere": damaged(lambda t: t["model.a"]["pieces"][0].update(file="../../x.safetensors")),
    "an absolute file": damaged(lambda t: t["model.a"]["pieces"][0].update(file="/etc/passwd")),
    "no index": lambda folder: (folder / INDEX).write_text("[1]"),
    "half an index": lambda folder: (folder / INDEX).write_bytes((folder / INDEX).read_bytes()[:50]),
    "a shard is gone": lambda folder: (folder / "rank-00001.safetensors").unlink(),
    "a shard is cut": lambda folder: (folder / "rank-00001.safetensors").write_bytes(b"x" * 30),
    "a shard without it": lambda folder: save_file({"x": torch.zeros(99)}, folder / "rank-00001.safetensors"),
    "a shard of another shape": lambda folder: save_file(
        {"model.a": torch.zeros(1, 99)}, folder / "rank-00001.safetensors"
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_shards_are_refused(damage, written):
    DAMAGE[damage](written)
    with pytest.raises((CheckpointError, OSError, ValueError)):
        ShardedTensors(written).read("model.")
