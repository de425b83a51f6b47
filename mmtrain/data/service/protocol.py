"""What a trainer and a producer say to each other: a name, JSON, and for a finished step its bytes.

    trainer -> producer    hello facts | want step | got step | ping | bye
    producer -> trainer    welcome credit | refused reason | made step, bytes | failed step | pong | unknown | leaving

A trainer asks for at most `credit` steps that it has not got yet, and a producer keeps what it has made until the
trainer says that it got it; so both know how much they will have to hold. There is no pickle in either direction.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmtrain import __version__
from mmtrain.data.index.data_index import DataIndex
from mmtrain.data.loading.batch_builder import StepData, StepRequest
from mmtrain.data.loading.step_format import WireError, format_fingerprint, from_json, to_json
from mmtrain.data.loading.worker_pool import StepFailure
from mmtrain.errors import DataError
from mmtrain.recipe.schema import Recipe
from mmtrain.recipe.settings import select

PINGS_IN_TIMEOUT = 4
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.1, 86400.0  # as `data.producer_timeout_s` allows
MAX_REQUEST_BYTES = 1 << 20
MAX_STEP_BYTES = 1 << 34


@dataclass(frozen=True)
class Hello:
    """A trainer introduces itself; it will not be silent for `timeout_s` seconds as long as it lives."""

    facts: dict[str, str]
    timeout_s: float


@dataclass(frozen=True)
class Want:
    """Make this step."""

    request: StepRequest


@dataclass(frozen=True)
class Got:
    """This step has arrived."""

    step: int


@dataclass(frozen=True)
class Ping:
    """Are you there?"""


@dataclass(frozen=True)
class Bye:
    """The trainer leaves."""


@dataclass(frozen=True)
class Welcome:
    """The producer will make at most `credit` steps at a time."""

    credit: int


@dataclass(frozen=True)
class Refused:
    """The producer would make other steps than the trainer needs."""

    reason: str


@dataclass(frozen=True)
class Made:
    """A step in wire format follows."""

    step: int


@dataclass(frozen=True)
class Failed:
    """A step could not be made, by no fault of the producer's."""

    step: int
    failure: StepFailure


@dataclass(frozen=True)
class Pong:
    """Yes."""


@dataclass(frozen=True)
class Unknown:
    """Who are you? The producer has been started anew, or had given the trainer up."""


@dataclass(frozen=True)
class Leaving:
    """The producer ends."""


FromTrainer = Hello | Want | Got | Ping | Bye
FromProducer = Welcome | Refused | Made | Failed | Pong | Unknown | Leaving
_KINDS: dict[bytes, type[FromTrainer | FromProducer]] = {
    kind.__name__.lower().encode(): kind
    for kind in (Hello, Want, Got, Ping, Bye, Welcome, Refused, Made, Failed, Pong, Unknown, Leaving)
}


def encode_message(message: FromTrainer | FromProducer) -> list[bytes]:
    """The frames of a message, without a step's bytes."""
    return [type(message).__name__.lower().encode(), to_json(message).encode()]


def decode_message(frames: Sequence[memoryview | bytes]) -> FromTrainer | FromProducer:
    """The message in the first two frames. Raises `WireError`."""
    if len(frames) < 2 or (kind := _KINDS.get(bytes(frames[0][:16]))) is None:
        raise WireError(f"{bytes(frames[0][:16])!r} is no message" if frames else "an empty message")
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
        "SHA-256 of data.tokenizer": hashlib.sha256(recipe.data.tokenizer_file.read_bytes()).hexdigest(),
        **dict(_flat(select(recipe, "steps"), "")),
    }


def describe_differences(ours: Mapping[str, str], theirs: Mapping[str, str], most: int = 5) -> str:
    """The facts that differ, in words; empty where none does."""
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key) != theirs.get(key)]
    shown = [
        f"{key} is {theirs.get(key, 'missing')} in the trainer and {ours.get(key, 'missing')} here" for key in keys
    ]
    return "; ".join(shown[:most]) + (f"; and {len(keys) - most} more" if len(keys) > most else "")


def _flat(value: object, path: str) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [entry for key, part in value.items() for entry in _flat(part, f"{path}.{key}" if path else str(key))]
    return [(path, str(value))]


def require_zmq(what: str) -> None:
    """Raise `DataError`, with what to do, where ZeroMQ is not installed."""
    try:
        import zmq  # noqa: F401
    except ImportError:
        raise DataError(f"{what} needs ZeroMQ: pip install 'mmtrain[serve]'") from None
