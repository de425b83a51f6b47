"""The messages between a trainer and a producer: a name, JSON, and for a finished step its bytes.

    trainer -> producer    hello facts | want step | got step | ping | bye
    producer -> trainer    welcome credit | refused reason | made step, bytes | failed step | pong | unknown | leaving

The name of a message is that of its class. A trainer requests at most `credit` steps beyond those that it has received.
A producer counts a step until the trainer confirms that it has received it. So both know how much memory they need at
most. There is no pickle in either direction.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmtrain.data.index.data_index import DataIndex
from mmtrain.data.loading.batch_builder import StepData, StepRequest
from mmtrain.data.loading.step_format import WireError, format_fingerprint, from_json, to_json
from mmtrain.data.loading.worker_pool import StepFailure
from mmtrain.data.text.tokenizer_folder import tokenizer_sha256
from mmtrain.errors import DataError
from mmtrain.recipe.settings.base import select
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.version import __version__

PINGS_PER_TIMEOUT = 4  # so that a lost or late one does not matter
MIN_TIMEOUT_S = 0.1  # as `data.producer_timeout_s` allows
MAX_TIMEOUT_S = 86400.0
MAX_REQUEST_BYTES = 1 << 20  # a request is a few kilobytes; more comes from a stranger
MAX_STEP_BYTES = 1 << 34
MAX_DIFFERENCES_SHOWN = 5
_MAX_NAME_BYTES = 16


@dataclass(frozen=True)
class Hello:
    """A trainer introduces itself; while it lives, it is never silent for `timeout_s` seconds."""

    facts: dict[str, str]
    timeout_s: float


@dataclass(frozen=True)
class Want:
    """The trainer requests a step."""

    request: StepRequest


@dataclass(frozen=True)
class Got:
    """The trainer has received a step."""

    step: int


@dataclass(frozen=True)
class Ping:
    """The trainer asks whether the producer lives, and shows that it lives itself."""


@dataclass(frozen=True)
class Bye:
    """The trainer leaves."""


@dataclass(frozen=True)
class Welcome:
    """The producer accepts the trainer, which may request `credit` steps at a time."""

    credit: int


@dataclass(frozen=True)
class Refused:
    """The producer would build other steps than the trainer needs, or could not read a message."""

    reason: str


@dataclass(frozen=True)
class Made:
    """A step is built; it follows in wire format. `digest` is its `step_digest`."""

    step: int
    digest: str


@dataclass(frozen=True)
class Failed:
    """A step could not be built: the error would be the same anywhere."""

    step: int
    failure: StepFailure


@dataclass(frozen=True)
class Pong:
    """The producer lives."""


@dataclass(frozen=True)
class Unknown:
    """The producer does not know the trainer: it was restarted, or had given up the trainer as dead."""


@dataclass(frozen=True)
class Leaving:
    """The producer ends."""


FromTrainer = Hello | Want | Got | Ping | Bye
FromProducer = Welcome | Refused | Made | Failed | Pong | Unknown | Leaving
_MESSAGE_TYPES: dict[bytes, type[FromTrainer | FromProducer]] = {
    kind.__name__.lower().encode(): kind
    for kind in (Hello, Want, Got, Ping, Bye, Welcome, Refused, Made, Failed, Pong, Unknown, Leaving)
}


def encode_message(message: FromTrainer | FromProducer) -> list[bytes]:
    """Return the frames of a message, without a step's bytes."""
    return [type(message).__name__.lower().encode(), to_json(message).encode()]


def decode_message(frames: Sequence[memoryview | bytes]) -> FromTrainer | FromProducer:
    """Return the message in the first two frames. Raises `WireError`."""
    if not frames:
        raise WireError("an empty message")
    name = bytes(frames[0][:_MAX_NAME_BYTES])
    kind = _MESSAGE_TYPES.get(name)
    if kind is None or len(frames) < 2:
        raise WireError(f"{name!r} is not a message")
    return from_json(kind, bytes(frames[1]))


def step_facts(recipe: Recipe, index: DataIndex) -> dict[str, str]:
    """Return all that decides what is in a step, as texts by name; equal facts make equal steps.

    Trainer and producer may keep their files in different folders: the fingerprint of the samples covers the content.
    """
    return {
        "mmtrain": __version__,
        "format of steps": format_fingerprint(StepData),
        "format of requests": format_fingerprint(StepRequest),
        "samples": str(len(index.samples)),
        "fingerprint of the samples": index.fingerprint,
        "SHA-256 of data.tokenizer": tokenizer_sha256(recipe.data.tokenizer_path, recipe.model.hf),
        "train.epochs is set": str(recipe.train.epochs is not None),  # then epochs end with steps
        **_flatten(select(recipe, "steps"), ""),
    }


def step_digest(request: StepRequest, facts: Mapping[str, str], content: bytes | memoryview) -> str:
    """Return a sum over what was requested, for which data and settings, and what was made of it.

    By it a trainer notices bytes that changed on the way, and a step that was made for another request.
    """
    digest = hashlib.blake2b(digest_size=16)
    for text in (to_json(request), json.dumps(dict(facts), sort_keys=True)):
        digest.update(f"{len(text)}:{text}".encode())
    digest.update(content)
    return digest.hexdigest()


def describe_differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Describe the facts in which a producer (`ours`) and a trainer (`theirs`) differ; empty where there are none."""
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key) != theirs.get(key)]
    descriptions = [
        f"{key} is {theirs.get(key, 'missing')} in the trainer and {ours.get(key, 'missing')} here"
        for key in keys[:MAX_DIFFERENCES_SHOWN]
    ]
    if len(keys) > MAX_DIFFERENCES_SHOWN:
        descriptions.append(f"and {len(keys) - MAX_DIFFERENCES_SHOWN} more")
    return "; ".join(descriptions)


def _flatten(value: object, path: str) -> dict[str, str]:
    """Return the leaves of nested mappings as texts, by their dotted path."""
    if not isinstance(value, Mapping):
        return {path: str(value)}
    leaves: dict[str, str] = {}
    for key, part in value.items():
        leaves |= _flatten(part, f"{path}.{key}" if path else str(key))
    return leaves


def require_zmq(what: str) -> None:
    """Raise `DataError`, with what to install, if ZeroMQ is missing; `what` is the feature that needs it."""
    try:
        import zmq  # noqa: F401
    except ImportError:
        raise DataError(f"{what} needs ZeroMQ: pip install 'mmtrain[serve]'") from None
