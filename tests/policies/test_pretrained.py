"""Reading the folders of other programs' policies."""

import json

from flexor.policies.pretrained import read_config


def test_reads_a_switch_that_lerobot_wrote_as_a_number(tmp_path):
    """It declares this one an int, and so writes 0 once a checkpoint has been loaded and saved again."""
    settings = {"type": "act", "replace_final_stride_with_dilation": 0, "use_peft": False}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_config(str(tmp_path)).replace_final_stride_with_dilation is False
