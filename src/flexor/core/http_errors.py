"""What an error of an HTTP library says: the status, and how long the server asks to wait."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime


def http_status(error: BaseException) -> int | None:
    """The HTTP status of an error, from the attributes that HTTP libraries use."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def retry_after(error: BaseException) -> float | None:
    """Seconds the server asks to wait: given in seconds, or as a date."""
    headers = getattr(error, "headers", None) or getattr(getattr(error, "response", None), "headers", None)
    value = headers.get("Retry-After") if isinstance(headers, Mapping) else None
    if not value:
        return None
    if re.fullmatch("[0-9]{1,15}", value.strip()):
        return float(value)
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None
