"""Follows a Hugging Face job: prints its log until the end, and explains errors of the Hub."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

from flexor.core.console import print_text
from flexor.core.errors import FlexorError, first_line
from flexor.core.log import log

if TYPE_CHECKING:
    from huggingface_hub import HfApi, JobInfo

ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
TRIES = 20  # in a row, over about eight minutes
PERMANENT = (401, 403, 404)


def follow(api: HfApi, job: JobInfo, out: TextIO) -> JobInfo:
    """Print the job's log until it has ended. Reconnects if the connection breaks; prints no line twice."""
    namespace = job.owner.name
    printed = failures = 0
    with _ctrl_c_noted() as pressed:
        while True:
            try:
                for number, line in enumerate(
                    api.fetch_job_logs(job_id=job.id, namespace=namespace, follow=True)
                ):
                    if number >= printed:  # after a reconnect, the Hub sends everything again
                        print_text(line, out)
                        printed, failures = number + 1, 0
                if pressed:
                    raise KeyboardInterrupt
                now = api.inspect_job(job_id=job.id, namespace=namespace)
                if now.status.stage in ENDED:
                    return now
            except HTTPError as error:
                failures += 1
                status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
                if status in PERMANENT or failures == TRIES:
                    raise FlexorError(
                        f"Lost the connection to job {job.id}; the job continues "
                        f"({_explain(error, api.endpoint, namespace)}). "
                        f"Its page: {job.url}"
                    ) from error
                log.warning("lost the connection to the job's log, reconnecting: %s", first_line(error))
            time.sleep(min(2.0**failures, 30))


@contextmanager
def _ctrl_c_noted() -> Iterator[list[int]]:
    """Not empty after Ctrl-C. Some versions of huggingface_hub take that for the end of a log."""
    pressed: list[int] = []

    def note(number: int, frame: object) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield pressed  # who handles Ctrl-C in another way, knows what to do
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def explained(endpoint: str, namespace: str) -> Iterator[None]:
    """Turn errors of the Hub into messages that say how to fix them."""
    try:
        yield
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise FlexorError(_explain(error, endpoint, namespace or "your account")) from error


def _explain(error: Exception, endpoint: str, namespace: str) -> str:
    if not isinstance(error, HfHubHTTPError):
        return f"Can't reach {endpoint}: {first_line(error)}. Check the network, and that HF_HUB_OFFLINE is not set."
    status = error.response.status_code
    advice = {
        401: "The Hub does not accept your token. Log in with `hf auth login`, or set HF_TOKEN to a valid one.",
        402: f"{namespace} has no credit for jobs. Add credit on {endpoint}/settings/billing.",
        403: f"Your token does not have permission for {namespace}. It needs write access and the right to start jobs "
        f"there: {endpoint}/settings/tokens.",
        404: f"{namespace} does not exist on the Hub, or you can't access it. Check --namespace and --bucket.",
        429: "You have sent too many requests to the Hub. Try again in a few minutes.",
    }
    answer = error.server_message or first_line(error)
    return f"{advice.get(status, 'The Hub rejected the request.')} Its answer: {status} {answer}"
