"""Keep credentials out of what a run writes, prints and shows to trackers."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from urllib.parse import unquote

MASK = "***"
MIN_SECRET_CHARACTERS = 8  # shorter values, such as `1` or `true`, stand in too many texts
_SECRET_NAME = re.compile(
    r"(^|_)(API_?KEY|ACCESS_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|PAT|AUTH|DSN)($|_)"
)
_HEADERS = "FSSPEC_"  # start of variables that hold settings of file systems as JSON, headers among them
_URL_PASSWORD = re.compile(r"://[^\s/@:]*:([^\s/@]+)@")
_CONNECTION_URL = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@'\"]+@")
# Names of query parameters that sign or authorize a request at AWS, Azure, Google and elsewhere.
_QUERY_SECRET = re.compile(
    r"(?P<name>[?&;](?:x-amz-[a-z-]+|x-goog-[a-z-]+|sig|signature|token|access_token|api_?key|key|password|secret)=)"
    r"[^&#;\s'\"]+",
    re.IGNORECASE,
)
# How services mark their own tokens: Hugging Face, GitHub, GitLab, OpenAI and alike, Slack, AWS, W&B, bearer headers.
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|wandb_v\d_\w{16,}|(?<=[Bb]earer )[\w.~+/-]{8,}=*)"
)
_NAMED_SECRET = re.compile(
    r"(?P<name>\b[\w.-]*(?:password|passwd|secret|api_?key|access_?key|auth_?token|access_?token)\"?\s*[:=]\s*)"
    r"(?P<quote>[\"']?)[^\s\"',}&]{4,}",
    re.IGNORECASE,
)


class Redactor:
    """Masks credentials in texts: those of the environment by value, others by their form."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        secrets = {secret for name, value in env.items() for secret in _secrets_in(name, value.strip())}
        secrets = {secret for secret in secrets if len(secret) >= MIN_SECRET_CHARACTERS}
        # The longest first: one may begin with another. Paths name where a secret is.
        texts = sorted((s for s in secrets if not os.path.exists(s)), key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, texts))) if texts else None

    def __call__(self, text: str) -> str:
        """Return the text with `***` in place of every credential.

        >>> Redactor({})("https://me:pass@host/x?sig=abc")
        'https://***@host/x?sig=***'
        """
        if self._secrets is not None:
            text = self._secrets.sub(MASK, text)
        text = _CONNECTION_URL.sub(rf"\g<scheme>{MASK}@", text)
        text = _QUERY_SECRET.sub(rf"\g<name>{MASK}", text)
        text = _NAMED_SECRET.sub(rf"\g<name>\g<quote>{MASK}", text)
        return _TOKEN.sub(MASK, text)


def _secrets_in(name: str, value: str) -> Iterator[str]:
    """Yield what is secret in a variable of the environment."""
    if _SECRET_NAME.search(name.upper()):
        yield value
    for password in _URL_PASSWORD.findall(value):  # as of a proxy
        yield password
        yield unquote(password)
    if name.upper().startswith(_HEADERS):
        try:
            settings = json.loads(value)
        except (ValueError, RecursionError):
            yield value
            return
        for text in _texts_in(settings):
            yield text
            yield text.rpartition(" ")[2]  # without `Bearer`


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts_in(inner)


@cache
def process_redactor() -> Redactor:
    """Return the redactor of this process, by the environment that it had when it first needed one."""
    return Redactor()
