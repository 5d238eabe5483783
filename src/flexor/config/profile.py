"""Which steps of a run are profiled."""

import re

from flexor.core.errors import ConfigError


def parse_profile(text: str) -> tuple[int, int]:
    """STEP:COUNT as the first and the last step to profile. Steps count as in the log: the first one is 1."""
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if match is None or min(map(int, match.groups())) < 1:
        raise ConfigError(
            f"profile={text} is not valid: expected STEP:COUNT, both at least 1. 100:5 profiles the steps 100 to 104."
        )
    return int(match[1]), int(match[1]) + int(match[2]) - 1
