"""bitsandbytes' AdamW with 8-bit moments. Its state is saved like that of any other optimizer."""

from __future__ import annotations

from typing import Any

import torch

from flexor.core.errors import ConfigError

try:
    from bitsandbytes.optim import AdamW8bit as Original
except ImportError as error:
    raise ConfigError(
        f"optimizer.type=adamw_8bit, but {error}: pip install 'flexor[8bit]', or use --optimizer.type=adamw."
    ) from error

TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}  # the values that bytes stand for: constant tables


class AdamW8bit(Original):
    def state_dict(self) -> dict[str, Any]:
        """Flat and without tables. bitsandbytes' own state is nested, for FSDP."""
        saved = torch.optim.Optimizer.state_dict(self)
        states = saved["state"].items()
        plain = {i: {k: v for k, v in state.items() if k not in TABLES} for i, state in states}
        return {**saved, "state": plain}

    def load_state_dict(self, saved: dict[str, Any], move_to_device: bool = True) -> None:
        self.fill_qmap()
        for state in saved["state"].values():
            state["step"] = int(state["step"])  # a tensor would be cast to the parameter's dtype and rounded
            if "absmax1" in state:
                state |= {key: self.name2qmap[table] for key, table in TABLES.items()}
        super().load_state_dict(saved, move_to_device)
