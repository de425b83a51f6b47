"""Credentials of any form are masked, and other texts stay as they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmtrain.redaction import Redactor
from mmtrain.report.trackers.git_state import read_git_state


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("git clone https://bob:hunter2@host/x.git", "git clone https://***@host/x.git"),
        ("s3://key:secret@bucket/a", "s3://***@bucket/a"),
        ("https://h/x?X-Amz-Signature=abc&part=2", "https://h/x?X-Amz-Signature=***&part=2"),
        ("https://h/x?sv=1&sig=a%2Fb", "https://h/x?sv=1&sig=***"),
        ("use hf_abcdefghijklmnopqrstu here", "use *** here"),
        ("ghp_0123456789abcdefghij", "***"),
        ("Authorization: Bearer abc.def-12345678", "Authorization: Bearer ***"),
        ("password: correct-horse", "password: ***"),
        ('"api_key": "k-12345"', '"api_key": "***"'),
        ("db_password='x y'", "db_password='x y'"),  # shorter than anything that guards something
    ],
)
def test_credentials_are_masked_by_their_form(text: str, masked: str) -> None:
    assert Redactor({})(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        "path: /data/tokens/train.json",
        "tokenizer: /models/key/tokenizer.json",
        "git@github.com:lab/repo.git",
        "special_tokens:\n  image: <image>\n",
        "token_budget: seq_len",
        "see https://host/page?step=3#key",
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert Redactor({})(text) == text


def test_values_of_the_environment_are_masked_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "key.json").touch()
    env = {
        "LAB_TOKEN": "opaque-value-1",
        "WANDB_API_KEY": "0" * 40,
        "SSH_AUTH": "1",
        "GOOGLE_CREDENTIALS": str(tmp_path / "key.json"),
        "HOME": "opaque-value-2",
    }
    redact = Redactor(env)
    assert redact("a opaque-value-1 b opaque-value-2 c " + "0" * 40) == "a *** b opaque-value-2 c ***"
    assert redact("1 of 2") == "1 of 2"
    assert redact(f"read {tmp_path}/key.json") == f"read {tmp_path}/key.json"


def test_git_state_outside_of_git_is_empty(tmp_path: Path) -> None:
    assert read_git_state(tmp_path) == {}
    assert read_git_state(tmp_path / "missing") == {}


def test_credentials_in_headers_and_proxies_of_the_environment_are_masked() -> None:
    headers = {"X-Session": "opaque-1234", "Authorization": "Bearer ab-7654321"}
    redact = Redactor(
        {
            "FSSPEC_HTTP": json.dumps({"client_kwargs": {"headers": headers}}),
            "HTTPS_PROXY": "http://lab:pass%40word1@proxy:3128",
        }
    )
    assert redact("asked with opaque-1234 and ab-7654321, by pass@word1 or pass%40word1") == (
        "asked with *** and ***, by *** or ***"
    )


SECRETS = {
    "LAB_API_KEY": "env-secret-0123",
    "FSSPEC_HTTP": '{"headers": {"X-Session": "header-secret-0123"}}',
    "HTTPS_PROXY": "http://me:proxy-secret-0123@host:1",
}
PRINTING = """
import os, sys
from mmtrain.printed_text import escape_output
escape_output()
url = "https://me:url-secret-0123@host/x?sig=query-secret-0123"
print(os.environ["LAB_API_KEY"], url)
raise OSError(f"headers {os.environ['FSSPEC_HTTP']} through {os.environ['HTTPS_PROXY']}: {url}")
"""


def test_tracebacks_show_no_credentials() -> None:
    done = subprocess.run([sys.executable, "-c", PRINTING], env=os.environ | SECRETS, capture_output=True, text=True)
    assert "Traceback" in done.stderr
    assert done.stdout.startswith("*** https://***@host/x?sig=***")
    assert "secret-0123" not in (done.stdout + done.stderr).replace(PRINTING, "")
