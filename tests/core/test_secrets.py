"""No password and no token in what the program writes or says."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.core.console import print_error, print_result
from flexor.core.log import log, log_file
from flexor.core.secrets import own_secrets, redacted, redacted_values
from flexor.pages.page import page

HARMLESS = [
    "step 100  loss 0.1234  lr 1.00e-04",
    "s3://bucket/pens",
    "hf://datasets/ann/pens@main",
    "abfs://container@account.dfs.core.windows.net/pens",
    "sftp://ann@host/pens",
    "http://127.0.0.1:8000/status?episode=3&camera=top",
    "http://host:8000/datasets/pens@v1",
    "http://[::1]:8000/datasets/pens@v1",
    "ann@example.com wrote task: sk-learn is not a token",
    "commit 35e25b5aa9b8f7c1d2e3f4a5b6c7d8e9f0a1b2c3",
]
CUT = {
    "https://ann:secret@host/pens": "https://***@host/pens",
    "HTTPS://ann:sec:r@t@host": "HTTPS://***@host",
    "https://hf_short@host/x": "https://***@host/x",
    "ftp://ann:secret@host:21/x, s3://b/y": "ftp://***@host:21/x, s3://b/y",
    "https://ann:sec/ret@host/pens": "https://***@host/pens",
    "ftp://ann:sec#re?t@host, s3://b/y": "ftp://***@host, s3://b/y",
    "https://host/x#access_token=secret&n=1": "https://host/x#access_token=***&n=1",
    "wss://secret@host:8000": "wss://***@host:8000",
    "url='https://:secret@host/x'": "url='https://***@host/x'",
    "https://host/x?token=secret&n=1": "https://host/x?token=***&n=1",
    "https://b.s3.amazonaws.com/k?X-Amz-Credential=me%2F1&X-Amz-Date=2&X-Amz-Signature=secret": (
        "https://b.s3.amazonaws.com/k?X-Amz-Credential=***&X-Amz-Date=2&X-Amz-Signature=***"
    ),
    "https://a.blob.core.windows.net/c/x?sv=2022&sig=secret%3D": (
        "https://a.blob.core.windows.net/c/x?sv=2022&sig=***"
    ),
    f"token hf_{'aB3' * 12}!": "token ***!",
    f"ghp_{'a1' * 18}": "***",
    f"sk-{'a1' * 20}, sk-ant-{'a1' * 20}": "***, ***",
    "AKIAIOSFODNN7EXAMPLE": "***",
}


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text):
    assert redacted(text) == text


@pytest.mark.parametrize(("text", "without"), CUT.items())
def test_what_is_one_does_not(text, without):
    assert redacted(text) == without
    assert redacted(without) == without


@given(
    st.text("abc:@/?#.%", min_size=1).filter(lambda text: not set(text) & set("/?#")),
    st.text("xyz", min_size=1),
)
def test_no_login_of_a_url_is_left(login, host):
    assert redacted(f"see https://{login}@{host}/data") == f"see https://***@{host}/data"


def test_data_of_any_shape():
    value = {"root": "https://ann:secret@host/x", "more": [("https://ann:secret@host/x", 3)], "x": None}
    assert "secret" not in str(redacted_values(value)) and redacted_values(value)["x"] is None


def test_values_of_the_environment(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "just-some-long-words")
    monkeypatch.setenv("SHORT_TOKEN", "pens")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "something-very-long")
    monkeypatch.setenv("SECRET_FILE", "/home/ann/of-a-secret")
    monkeypatch.setenv("TOKEN_URL", "https://host/where-tokens-are")
    text = "pens something-very-long /home/ann/of-a-secret https://host/where-tokens-are"
    assert redacted(f"just-some-long-words {text}") == f"*** {text}"


def test_the_users_own_secrets(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password 0123456789abcdef\n")
    (tmp_path / "netrc").chmod(0o600)
    (tmp_path / "aws").write_text(
        "[default]\naws_access_key_id = AKIA\naws_secret_access_key = wJalr/XUtnFEMI\n"
    )
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws"))
    monkeypatch.setenv("HF_TOKEN", "an-old-form-of-token")
    assert own_secrets() == {
        "0123456789abcdef": "password of api.wandb.ai in .netrc",
        "wJalr/XUtnFEMI": "AWS credentials",
        "an-old-form-of-token": "Hub token",
    }
    for file in ("netrc", "aws"):  # damaged ones are no error
        (tmp_path / file).write_bytes(b"\xff machine \0")
    assert own_secrets() == {"an-old-form-of-token": "Hub token"}


def test_everything_that_is_said_goes_through_it(tmp_path, monkeypatch, capsys):
    url = "https://ann:secret@host/x"
    monkeypatch.setattr(log, "level", logging.INFO)
    with log_file(tmp_path / "train.log"):
        log.info("reading %s", url)
    print_result({"root": url}, True, "")
    print_result({}, False, f"read {url}")
    print_error(f"can't read {url}")
    output = capsys.readouterr()
    html = page(f"of {url}", body=f"<p>{url}</p>", data={"root": url}, scripts=[("flexor.pages", "plots.js")])
    for text in (output.out, output.err, html, (tmp_path / "train.log").read_text()):
        assert "secret" not in text and "https://***@host/x" in text
