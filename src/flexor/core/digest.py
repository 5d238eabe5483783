"""Hashes of plain data."""

from __future__ import annotations

import hashlib
import json


def hash_json(value: object) -> str:
    """The SHA-256 of a value as JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
