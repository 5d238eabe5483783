"""Shards of earlier runs: torch's distributed checkpoint is read, and no pickle in it runs code."""

import functools
import io
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from flexor.core.errors import CheckpointError
from flexor.core.torch_shards import METADATA, STORAGES, TORCH_INDEX, _read_tensor
from flexor.train.checkpoint.tensors import ShardedTensors
from support import ranks
from support.limits import LIMIT_S

TENSORS = {
    "model.a": torch.arange(10.0).reshape(5, 2),
    "model.b": torch.arange(3).bfloat16(),
    "optimizer.a.step": torch.tensor(4.0),
    "model.flag": torch.tensor([True, False]),
}


@pytest.fixture
def saved(tmp_path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(TENSORS), checkpoint_id=tmp_path / "sharded", no_dist=True)
    return tmp_path / "sharded"


def assert_read(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    filled = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    ShardedTensors(folder).fill(filled)
    assert all(torch.equal(filled[name], tensors[name]) for name in tensors)


def test_what_torch_wrote_is_read(saved):
    assert_read(saved, TENSORS)
    assert ShardedTensors(saved).read("model.").keys() == {"a", "b", "flag"}


def write_as_ranks(folder: Path) -> None:
    """A process of several: tensors as FSDP has them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    sharded = {n: distribute_tensor(t, mesh, [Shard(0)]) if t.ndim else t for n, t in TENSORS.items()}
    dcp.save(sharded, checkpoint_id=folder)
    dist.destroy_process_group()


@pytest.mark.ranks
def test_what_two_ranks_of_an_earlier_run_wrote_is_read(tmp_path):
    then = dict.fromkeys((0, 1), functools.partial(write_as_ranks, tmp_path / "sharded"))
    both = ranks.Ranks(tmp_path / "out", 2, ["--version"], then=then)
    assert both.end() == [0, 0], both.errors()
    assert len([*(tmp_path / "sharded").glob("*.distcp")]) == 2
    assert_read(tmp_path / "sharded", TENSORS)


# What a stranger could put there


class Marks:
    """A pickle of it leaves a mark when it is loaded."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def rewritten(saved: Path, change) -> None:
    metadata = pickle.loads((saved / TORCH_INDEX).read_bytes())
    (saved / TORCH_INDEX).write_bytes(pickle.dumps(change(metadata) or metadata))


def add_bytes(metadata) -> None:
    """torch's reader would unpickle such an entry without any limit."""
    metadata.state_dict_metadata["model.a"] = BytesStorageMetadata()


def lead_out(metadata) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = f"../../{info.relative_path}"


def claim_petabytes(metadata) -> None:
    entry = metadata.state_dict_metadata["model.a"]
    entry.size = torch.Size((5, 1 << 50))
    entry.chunks[0].sizes = entry.size


STRANGE = {
    "bytes": add_bytes,
    "a file elsewhere": lead_out,
    "petabytes": claim_petabytes,
    "no index": lambda metadata: {"a": 1},
    "empty": lambda metadata: setattr(metadata, "storage_data", {}),
    "nothing": lambda metadata: setattr(metadata, "storage_data", None),
}


@pytest.mark.parametrize("damage", STRANGE)
def test_a_strange_index_is_refused(damage, saved):
    rewritten(saved, STRANGE[damage])
    with pytest.raises((CheckpointError, OSError, ValueError)):
        ShardedTensors(saved).read("model.")


CLASS = b"c%s\nTensorStorageMetadata\n" % METADATA.encode()
TUPLES = b"K\x01" + 60 * b"q\x00h\x00\x86"  # ((((...), (...)), ...): 2**60 numbers
BOMBS = {
    "memory": b"\x80\x02Nr\xff\xff\xff\x07.",
    "a hash without end": b"\x80\x02}" + TUPLES + b"Ns.",
    "a text without end": b"\x80\x02" + TUPLES + b".",
    "a change of torch": b"\x80\x02" + CLASS + b"N}X\x07\x00\x00\x00changedNs\x86b.",
}


def test_bombs_take_no_memory_nor_time_and_change_nothing(saved):
    """In a process of its own, which could be killed: no unpickler in C can be interrupted."""
    damages = []
    for bomb in BOMBS.values():
        for path in sorted(saved.iterdir()):
            content = path.read_bytes()
            damaged = bomb if path.name == TORCH_INDEX else _as_shard(content, bomb)
            damages.append((str(path), damaged, content))
    code = f"""
import sys; sys.path[:0] = {sys.path!r}
import resource
from pathlib import Path
from flexor.train.checkpoint.tensors import ShardedTensors
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path, damaged, content in {damages!r}:
    Path(path).write_bytes(damaged)
    try:
        ShardedTensors(Path({str(saved)!r})).read("model.")
    except Exception as error:
        assert type(error).__name__ in ("CheckpointError", "OSError"), repr(error)
    else:
        raise AssertionError(f"{{path}} was read: {{damaged[:20]}}")
    Path(path).write_bytes(content)
    assert not hasattr(TensorStorageMetadata, "changed")
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert used * (1 if sys.platform == "darwin" else 1 << 10) < 256 << 20, (path, damaged[:20], used)
"""
    done = subprocess.run(
        [sys.executable, "-"], input=code, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def _as_shard(content: bytes, described: bytes) -> bytes:
    """The shard with tensors that are described by this pickle, each as long as it was."""
    saved = io.BytesIO()
    torch.save(torch.zeros(1), saved)
    changed = io.BytesIO()
    with zipfile.ZipFile(saved) as archive, zipfile.ZipFile(changed, "w") as copy:
        for name in archive.namelist():
            copy.writestr(name, described if name.endswith("data.pkl") else archive.read(name))
    return changed.getvalue().ljust(len(content), b"\0")


def test_a_compressed_tensor_is_refused():
    stream, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(1000), stream)
    with zipfile.ZipFile(stream) as archive, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as copy:
        for name in archive.namelist():
            copy.writestr(name, archive.read(name))
    assert torch.equal(_read_tensor(stream, torch.float32), torch.zeros(1000))
    with pytest.raises(ValueError, match="compressed"):
        _read_tensor(packed, torch.float32)
    with pytest.raises(ValueError, match="float32"):
        _read_tensor(stream, torch.float64)


@pytest.mark.parametrize("dtype", STORAGES.values(), ids=str)
def test_every_type_and_layout_is_read(dtype):
    tensor = torch.arange(24).to(dtype).reshape(2, 3, 4).transpose(0, 2)
    stream = io.BytesIO()
    torch.save(tensor, stream)
    assert torch.equal(_read_tensor(stream, dtype), tensor)


def test_no_pickle_leaves_a_mark(saved, tmp_path):
    mark = tmp_path / "mark"
    bomb = pickle.dumps(Marks(mark))
    pickle.loads(bomb)
    assert mark.exists()  # it would
    mark.unlink()
    inside_torch = io.BytesIO()
    torch.save({"x": Marks(mark)}, inside_torch)
    contents = {path: path.read_bytes() for path in saved.iterdir()}
    hidden = pickle.dumps({"a": [1, Marks(mark)]})
    for path, data in contents.items():
        for content in (bomb, hidden, inside_torch.getvalue(), data[:-1], b""):
            path.write_bytes(content)
            with pytest.raises((CheckpointError, OSError, ValueError)):
                ShardedTensors(saved).read("model.")
            assert not mark.exists()
        path.write_bytes(data)
    assert_read(saved, TENSORS)
