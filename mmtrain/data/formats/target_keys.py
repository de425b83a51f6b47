"""Read the keys by which data says what is learned of it; other trainers have many names for that.

A turn says with `train: false`, `loss: false`, `weight: 0` and the like that it is not learned. A key that looks like
one of these and is not understood rejects its sample: ignored, it would teach what the data says not to teach.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Keys whose 1 or true says that a turn is learned, and 0 or false that it is not. `weight` is OpenAI's; `train` and
# `training` are Axolotl's, `loss` and `loss_scale` ms-swift's.
_LEARN_KEYS = frozenset(
    (
        *("train", "training", "trainable", "is_trainable", "train_on", "train_on_turn", "is_trained"),
        *("learn", "learnable", "is_learnable", "learned"),
        *("loss", "loss_mask", "loss_weight", "loss_scale", "has_loss", "compute_loss", "calculate_loss", "use_loss"),
        *("weight", "is_target", "supervise", "supervised"),
    )
)
_NEUTRAL_KEYS = frozenset(("weight", "loss_weight", "loss_scale"))  # 1 asks for nothing: the context may have it too
# Words in the names of other keys of a turn that say what is learned, such as `mask`, `ignore_loss`, `train_detail`.
_TURN_WORDS = frozenset(
    (
        *("train", "training", "trainable", "trained", "learn", "learnable", "learned", "loss", "losses"),
        *("mask", "masks", "masked", "weight", "weights", "supervise", "supervised", "ignore", "ignored"),
    )
)
# A whole entry has keys of other meanings too (`mask`: of a picture), so only these and `_ENTRY_WORDS` count.
_ENTRY_LEARN_KEYS = _LEARN_KEYS - {"training", "learned", "learn", "supervised"} | {"sample_weight"}
_ENTRY_WORDS = frozenset(("loss", "losses", "trainable", "learnable"))
_ENTRY_REJECTED = frozenset(
    (
        *("completion_mask", "assistant_mask", "assistant_masks", "assistant_tokens_mask", "label_mask", "labels"),
        *("mask_history", "mask_prompt", "mask_inputs", "train_on_inputs", "train_on_prompt", "train_on_prompts"),
        *("train_on_input", "train_on_source", "train_on_target", "train_on_eos", "roles_to_train", "completion_only"),
    )
)
_DEFAULTS: Mapping[str, tuple[Any, ...]] = {  # values of these that say what is done anyway
    **dict.fromkeys(("mask_history", "train_on_inputs", "train_on_input"), (False,)),
    **dict.fromkeys(("train_on_prompt", "train_on_prompts", "train_on_source"), (False,)),
    **dict.fromkeys(("mask_prompt", "mask_inputs", "completion_only", "train_on_target"), (True,)),
    "train_on_eos": ("turn", True),
    "roles_to_train": (["assistant"], ["gpt"], ["gpt", "assistant"], ["assistant", "gpt"], "assistant", "gpt"),
    "mask": ("User", "user", "human"),  # NeMo's: the role that is not learned
}
_ROLES_IN_MASK = ("User", "user", "human", "Assistant", "assistant", "gpt")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_MAX_SHOWN_CHARACTERS = 60


class BadTargetKeyError(Exception):
    """A key that says something about what is learned which cannot be followed; the reason follows a subject."""


def says_what_is_learned(key: str) -> bool:
    """Return whether a key of an entry, such as the name of a column, may say what is learned of it."""
    return key in _ENTRY_LEARN_KEYS or key in _ENTRY_REJECTED or key == "mask" or bool(_words(key) & _ENTRY_WORDS)


def learns_entry(entry: Mapping[str, Any]) -> bool:
    """Return whether anything of an entry is to be learned. Raises `BadTargetKeyError`."""
    known = [key for key in entry if isinstance(key, str) and says_what_is_learned(key)]
    is_learned = True
    for key in known:
        value = entry[key]
        names_no_role = key == "mask" and value not in _ROLES_IN_MASK  # the mask of a picture
        if value is None or names_no_role or _is_default(key, value):
            continue
        if key not in _ENTRY_LEARN_KEYS:
            raise BadTargetKeyError(_describe(key, value))
        is_learned = _read_flag(key, value) and is_learned
    return is_learned


def learns_turn(turn: Mapping[str, Any], keys: Iterable[str], *, is_answer: bool) -> bool:
    """Return whether a turn is to be learned, by its keys. Raises `BadTargetKeyError`, also for a turn of a user that
    is to be learned: only answers are.
    """
    is_learned = True
    for key in keys:
        value = turn[key]
        if value is None or not (key in _LEARN_KEYS or _words(key) & _TURN_WORDS):
            continue
        if key not in _LEARN_KEYS:
            raise BadTargetKeyError(_describe(key, value))
        flag = _read_flag(key, value)
        if flag and not is_answer and key not in _NEUTRAL_KEYS:
            raise BadTargetKeyError(f"{_describe(key, value)}, but only what assistants say is learned")
        is_learned = flag and is_learned
    return is_learned


def _read_flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise BadTargetKeyError(f"{_describe(key, value)}, allowed: true or false, 1 or 0")
    return bool(value)


def _is_default(key: str, value: Any) -> bool:
    return any(value == default and type(value) is type(default) for default in _DEFAULTS.get(key, ()))


def _describe(key: str, value: Any) -> str:
    shown = repr(value)
    if len(shown) > _MAX_SHOWN_CHARACTERS:
        shown = f"{shown[:_MAX_SHOWN_CHARACTERS]}..."
    if key in _LEARN_KEYS:
        return f"has `{key}` {shown}"
    return f"has `{key}` {shown}, which may change what is learned; say it with `train: false` in a turn, or remove it"


def _words(key: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORDS.findall(key))
