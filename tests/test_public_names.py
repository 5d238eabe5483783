"""What `flexor` itself exports: a list that only grows."""

import re
from pathlib import Path

import flexor
from flexor.train import loop
from support import runs

PAGE = Path(__file__).parents[1] / "docs/python.md"
NAMES = {
    *("ACTION", "STATE", "Batch", "ConfigError", "Dataset", "DatasetWriter", "FlexorError", "Kind", "Loss"),
    *("ImageEncoder", "Noise", "NoiseSource", "Normalization", "ParamGroup", "Policy", "PolicyConfig"),
    *("PolicyFeature", "Pretrained", "TrainConfig", "load_config", "load_pretrained", "mean_over_valid"),
    *("ProcessingStep", "Session", "StepContext", "act_together", "open_dataset", "processing_step", "train"),
}


def test_every_name_is_there_and_on_its_page():
    page = PAGE.read_text()
    assert {*flexor._WHERE} == NAMES and {*dir(flexor)} >= NAMES
    for name in NAMES:
        assert getattr(flexor, name) is not None
        assert re.search(rf"`{name}\b", page), name


def test_the_example_runs(lowdim, tiny_act, tmp_path, monkeypatch, capsys):
    """On other data and with a smaller policy than the demo's, which take minutes."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    flags = [*runs.flags(lowdim, Path("runs/from_python"), tiny_act), "--steps=2"]
    quick = code.replace('"--config=demo"', ", ".join(map(repr, flags))).replace('"--steps=10", ', "")
    monkeypatch.chdir(tmp_path)
    exec(quick, {})
    assert capsys.readouterr().out.startswith("runs/from_python ")


def test_train_can_be_called_also_after_its_folder_was_imported(monkeypatch):
    monkeypatch.setattr(loop, "train", lambda *arguments: arguments)
    assert flexor.train(1, "no") == (1, "no")
