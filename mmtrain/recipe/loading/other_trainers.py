"""What keys of other trainers are called here, from the table `other_trainers.csv`.

Its columns: the key; trainers that have it; the setting here, if there is one; how a value is converted (a name of
`mmtrain.api.convert_values.RULES`); and what a message says behind the key, by default that it is the setting.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

# Short names in the table.
TRAINERS: Mapping[str, str] = {
    "hf": "the Trainer of transformers",
    "trl": "TRL",
    "lf": "LLaMA-Factory",
    "sw": "ms-swift",
    "ax": "axolotl",
    "mg": "Megatron-LM",
    "ds": "DeepSpeed",
}


@dataclass(frozen=True)
class OtherKey:
    """A key of other trainers."""

    key: str
    trainers: tuple[str, ...]  # of `TRAINERS`
    setting: str | None  # the dotted path here
    rule: str  # how its values are converted; empty: they are not
    says: str  # what follows the key in a sentence


@cache
def other_keys() -> Mapping[str, OtherKey]:
    """Return the table, by keys without case, `-` and `_`."""
    text = files(__package__).joinpath("other_trainers.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines(), delimiter="|")
    keys = {}
    for row in rows:
        setting = row["setting"] or None
        says = row["says"] or f"is {setting}"
        keys[plain_key(row["key"])] = OtherKey(row["key"], tuple(row["trainers"].split()), setting, row["rule"], says)
    return keys


def plain_key(key: str) -> str:
    """Return a key without case, `-` and `_`, in which trainers and command lines differ."""
    return key.replace("-", "").replace("_", "").lower()


def name_here(key: str) -> str | None:
    """Return what follows a key of other trainers in a sentence, such as `is train.epochs`; None for other keys."""
    other = other_keys().get(plain_key(key))
    return None if other is None else other.says
