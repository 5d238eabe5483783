"""Passwords and tokens: how they look, which ones the user has, and texts without them.

Texts that leave the program (its log, errors, settings and records of runs, reports, cards) go through `redacted`. So a
password in a dataset's URL is used, and never written. Files that are uploaded are searched by `secret_scan`.
"""

from __future__ import annotations

import configparser
import netrc
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HIDDEN = "***"
SHORTEST = 8  # of the user's secrets: a shorter one may occur in a text by chance

# Tokens that can be told by their form, and what is in each of them. They have at least SHORTEST_TOKEN characters, all
# of them of TOKEN_LETTERS.
_ALONE = "(?<![A-Za-z0-9])"  # not a part of a longer word
FORMS = (
    ("a Hugging Face token", "hf_", rf"{_ALONE}hf_[A-Za-z0-9]{{30,}}"),
    ("a Hugging Face token", "api_org_", rf"{_ALONE}api_org_[A-Za-z0-9]{{30,}}"),
    *(("a GitHub token", f"gh{kind}_", rf"{_ALONE}gh{kind}_[A-Za-z0-9]{{36,}}") for kind in "pousr"),
    ("a GitHub token", "github_pat_", rf"{_ALONE}github_pat_[A-Za-z0-9_]{{50,}}"),
    ("a GitLab token", "glpat-", rf"{_ALONE}glpat-[A-Za-z0-9_-]{{20,}}"),
    ("a W&B key", "wandb_v1_", rf"{_ALONE}wandb_v1_[A-Za-z0-9_]{{30,}}"),
    (
        "an API key (sk-...)",
        "sk-",
        rf"{_ALONE}sk-(?:(?:proj|ant|svcacct|or)-[A-Za-z0-9_-]{{20,}}|[A-Za-z0-9]{{32,}})",
    ),
    *(
        ("an AWS access key", begin, rf"(?<![A-Za-z0-9/+]){begin}[0-9A-Z]{{16}}(?![A-Za-z0-9/+])")
        for begin in ("AKIA", "ASIA")
    ),
    ("a Google API key", "AIza", rf"{_ALONE}AIza[A-Za-z0-9_-]{{35}}"),
    ("a Slack token", "xox", rf"{_ALONE}xox[abprs]-[A-Za-z0-9-]{{20,}}"),
)
PRIVATE_KEY = r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"
TOKEN_LETTERS = r"A-Za-z0-9_\-/+=.:@"  # noqa: S105  (not a password)
SHORTEST_TOKEN = 20

# user:password@ of a URL. A name alone is a token in https://TOKEN@host, and none in abfs://container@account.
_LOGIN = re.compile(r"(?i)\b(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<login>[^\s/?#\"'<>]+)@")
# one whose password has a / or ? that should be %2F or %3F: no address works with it, but errors name it
_BAD_LOGIN = re.compile(r"://[^\s/?#\"'<>\[:@,]+:(?!\d+(?:[/?#]|$))[^\s\"'<>@,]*[/?#][^\s\"'<>@,]*@")
WEB = ("http", "https", "ws", "wss")
_PARAMETER = re.compile(  # of a URL: ?token=..., and the signature of one that was made for a while
    r"(?i)(?P<name>[?&;#](?:[\w.-]*(?:token|secret|password|passwd|signature|credential|api[_-]?key|accesskey(?:id)?)"
    r"|sig|key|auth|policy|key-pair-id|googleaccessid)=)[^&;#\s\"'<>]+"
)
_TOKENS = [(begin, re.compile(form)) for _, begin, form in FORMS]
_SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY)(?:_|$)")
LONG = 16  # of the value of an environment variable that only its name tells to be a secret


def redacted(text: str) -> str:
    """The text with *** instead of passwords and tokens: in URLs, by their form, and those in the environment."""
    return _redacted(text, _of_environment())


def redacted_values(value: Any) -> Any:
    """Plain data, such as settings, with every text redacted, names too."""
    return _redacted_values(value, _of_environment())


def _redacted(text: str, secrets: Iterable[str]) -> str:
    if "://" in text:
        text = without_login(text)
        text = _PARAMETER.sub(rf"\g<name>{HIDDEN}", text)
    for begin, token in _TOKENS:
        if begin in text:  # a search for the pattern alone takes fifty times as long
            text = token.sub(HIDDEN, text)
    for value in secrets:
        text = text.replace(value, HIDDEN)
    return text


def _redacted_values(value: Any, secrets: Iterable[str]) -> Any:
    if isinstance(value, str):
        return value if value.startswith("data:") else _redacted(value, secrets)  # data: an image in a page
    if isinstance(value, dict):
        return {_redacted_values(k, secrets): _redacted_values(v, secrets) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted_values(part, secrets) for part in value]
    return value


def _without_login(match: re.Match[str]) -> str:
    is_secret = ":" in match["login"] or match["scheme"].lower().split("+")[-1] in WEB
    return f"{match['scheme']}://{HIDDEN}@" if is_secret else match[0]


def without_login(text: str) -> str:
    """The text with *** instead of the user's name and password in URLs."""
    return _BAD_LOGIN.sub(f"://{HIDDEN}@", _LOGIN.sub(_without_login, text))


def own_secrets() -> dict[str, str]:
    """The user's passwords and tokens, with where each is from: environment, login of the Hub, netrc, AWS."""
    from huggingface_hub import get_token

    return {
        **{value: name for name, value in _of_netrc()},
        **dict.fromkeys(_of_aws(), "AWS credentials"),
        **{value: f"${name}" for value, name in _of_environment().items()},
        **({value: "Hub token"} if (value := get_token()) and len(value) >= SHORTEST else {}),
    }


def _of_environment() -> dict[str, str]:
    """Values of variables that are named like secrets; not paths and addresses, and no short words."""
    return {
        value: name
        for name, value in os.environ.items()
        if len(value) >= LONG
        and _SECRET_NAME.search(name.upper())
        and not value.startswith(("/", "~"))
        and "://" not in value
    }


def _of_netrc() -> Iterator[tuple[str, str]]:
    try:
        hosts = netrc.netrc(os.environ.get("NETRC") or str(Path.home() / ".netrc")).hosts
    except (OSError, ValueError, netrc.NetrcParseError, RuntimeError):
        return
    for host, (_, _, password) in hosts.items():
        if password and len(password) >= SHORTEST:
            yield f"password of {host} in .netrc", password


def _of_aws() -> Iterator[str]:
    profiles = configparser.RawConfigParser()
    try:
        profiles.read(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials")
    except (OSError, ValueError, configparser.Error, RuntimeError):
        return
    for profile in profiles.sections():
        for name in ("aws_secret_access_key", "aws_session_token"):
            value = profiles.get(profile, name, fallback="")
            if len(value) >= SHORTEST:
                yield value
