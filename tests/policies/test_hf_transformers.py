"""Models and tokenizers from anywhere: no code in their folders is run."""

import contextlib
import json

import pytest

from flexor.core.errors import ConfigError
from flexor.core.paths import UnsafePath
from flexor.policies.hf_transformers import fetch, resolve_builtin
from support.tokenizers import make_tokenizer


@pytest.mark.parametrize("kind", ["SomeTokenizer", None])
def test_code_beside_a_tokenizer_is_not_run(kind, tmp_path):
    pytest.importorskip("transformers")
    folder, mark = make_tokenizer(tmp_path / "theirs"), tmp_path / "mark"
    (folder / "theirs.py").write_text(f"open({str(mark)!r}, 'w')\nclass SomeTokenizer:\n    pass\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": [None, "theirs.SomeTokenizer"]}}
    settings |= {"tokenizer_class": kind} if kind else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with contextlib.suppress(ConfigError):  # or it is loaded as far as it is known without its code
        fetch("AutoTokenizer", str(folder))
    assert not mark.exists()


@pytest.mark.parametrize("name", ["builtin/../../../etc", "builtin//etc", "builtin/.."])
def test_names_of_built_in_models_stay_there(name):
    with pytest.raises(UnsafePath):
        resolve_builtin(name)
