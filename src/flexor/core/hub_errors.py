"""Errors of the Hugging Face Hub: what they mean, whether another attempt may help, and no token in any of them."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from flexor.core.errors import FlexorError, first_line
from flexor.core.http_errors import http_status, retry_after
from flexor.core.log import log
from flexor.core.secret_scan import find_secret
from flexor.core.secrets import HIDDEN, SHORTEST, own_secrets, redacted

T = TypeVar("T")
Content = Path | bytes

FIRST_WAIT = 2.0
"""Seconds before the second attempt; doubled for each further attempt, with random jitter in the upper half."""
LONGEST_WAIT = 300.0
PATIENCE = 300.0
"""Seconds after the first failure of a command during which it tries again."""
FULL = ("storage limit", "quota", "storage is full", "exceeded your storage")


class HubError(FlexorError):
    """The Hub can't be reached or rejects a request."""

    def __init__(self, text: str, may_help: bool = False, wait: float | None = None, offline: bool = False):
        super().__init__(text)
        self.may_help = may_help  # whether another attempt may
        self.wait = wait  # seconds that the server asks to wait
        self.offline = offline or may_help  # nothing is wrong but the network


class Interrupted(FlexorError):
    """An upload was told to stop."""


class Backoff:
    """How long to wait before the next attempt."""

    def __init__(self) -> None:
        self.failures = 0

    def seconds(self, error: HubError) -> float:
        self.failures += 1
        if error.wait is not None:
            return min(error.wait, LONGEST_WAIT)
        return random.uniform(0.5, 1) * min(FIRST_WAIT * 2 ** (self.failures - 1), LONGEST_WAIT)


def persist(
    operation: str,
    action: Callable[[], T],
    patience: float | None = None,
    stop: threading.Event | None = None,
) -> T:
    """The result of `action`. Tries again while that may help, until `patience` seconds after the first failure."""
    stop, backoff, first = stop or threading.Event(), Backoff(), None
    limit = PATIENCE if patience is None else patience
    while True:
        try:
            return action()
        except HubError as error:
            first = time.monotonic() if first is None else first
            wait = backoff.seconds(error)
            if not error.may_help or time.monotonic() + wait > first + limit:
                raise
            log.warning("%s: %s Trying again in %.0f s.", operation, error, wait)
            if stop.wait(wait):
                raise Interrupted(f"{operation} was interrupted.") from error


def token() -> str | None:
    """The user's token: from HF_TOKEN, or from `hf auth login`."""
    from huggingface_hub import get_token

    return get_token()


def without_token(text: str) -> str:
    """The text without passwords and tokens, also the token of `hf auth login`."""
    secret = token()
    text = text.replace(secret, HIDDEN) if secret and len(secret) >= SHORTEST else text
    return redacted(text)


def refuse_secrets(files: Mapping[str, Content]) -> None:
    """Refuse to upload files that contain a password or a token: others could read it."""
    secrets = own_secrets()
    for name, content in files.items():
        secret = find_secret(content, secrets)
        if secret is not None:
            raise HubError(
                f"{name} contains {secret}, so nothing was uploaded. Remove it from the file. If it is not a secret, "
                "upload the file with `hf upload`."
            )


def require_token() -> None:
    if token() is None:
        raise HubError(
            "You are not logged in to the Hugging Face Hub. Log in with `hf auth login`, or set HF_TOKEN, to a token "
            "with write access."
        )


def explain(error: Exception, url: str) -> HubError:
    """What an error of the Hub's client means, and whether another attempt may help."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    chain = list(_causes(error))
    if isinstance(error, ValueError) and "metadata in README" in str(error):
        reason = without_token(" ".join(str(error).split()))
        return HubError(f"The Hub rejects the card (README.md): {reason} Check the licence and the tags.")
    answer = next((cause for cause in chain if isinstance(cause, HfHubHTTPError)), None)
    if answer is not None:
        message = answer.server_message or first_line(answer)
        return _rejected(http_status(answer) or 0, message, url, retry_after(answer))
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in chain):
        return HubError("HF_HUB_OFFLINE is set, so the Hub can't be used. Unset it.", offline=True)
    message = without_token(first_line(chain[-1]))
    # of hf_xet, which uploads large files
    if status := re.search(r"HTTP status \w+ error \((\d{3})", message):
        return _rejected(int(status[1]), message, url)
    # an error page; no answer
    unreachable = isinstance(error, json.JSONDecodeError | LocalEntryNotFoundError)
    if isinstance(error, ValueError | FileNotFoundError | PermissionError) and not unreachable:
        return HubError(f"The upload to {url} failed: {message}")
    return HubError(f"Can't reach {url}: {message}. Check the network.", may_help=True)


def _rejected(status: int, message: str, url: str, wait: float | None = None) -> HubError:
    message = without_token(message).rstrip(".")
    full = status in (402, 403, 413, 507) and any(word in message.lower() for word in FULL)
    owner = url.split("/")[-2]
    advice = {
        401: "The Hub does not accept your token. Log in with `hf auth login`, or set HF_TOKEN to a valid one.",
        403: f"Your token has no permission to write to {url}. It needs write access to {owner}.",
        404: f"{url} does not exist, or your token can't read it. Check the name.",
        429: "The Hub has received too many requests from you.",
    }.get(status, "The Hub fails." if status >= 500 else "The Hub rejects the request.")
    if full:
        advice = f"The storage of {owner} on the Hub is full. Delete what is not needed there, or get more."
    may_help = not full and (status in (408, 409, 412, 425, 429) or status >= 500)
    return HubError(f"{advice} Its answer: {status} {message}.", may_help, wait)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
