"""Names, types and allowed values of the settings of another trainer, as one version of it has them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

ANY_KIND = "any"  # of a type that the file does not describe
FLAG_KIND = "flag"  # of an argument without a value
SEVERAL = "..."  # ends the kind of a list
OR_NONE = "?"  # ends the kind of what may be None
PLAIN_KINDS: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


@dataclass(frozen=True)
class AcceptedSettings:
    """What a version of a trainer accepts.

    kinds: by name, a type, `flag`, a type with `...` for several or `?` for None too, or the list of allowed values.
    encoders: sizes of the image encoders that the trainer knows by name.
    """

    trainer: str
    version: str
    repository: str
    commit: str
    kinds: Mapping[str, Any]
    encoders: Mapping[str, Mapping[str, int]]

    def problem(self, name: str, value: object) -> str | None:
        """Return why the trainer would reject a setting; None if it accepts it."""
        if name not in self.kinds:
            return f"{self.trainer} {self.version} has no {name}"
        kind = self.kinds[name]
        if isinstance(kind, list):
            return None if value in kind else f"{name} is {value!r}; allowed: {', '.join(map(str, kind))}"
        if kind == FLAG_KIND:
            return None if value is True else f"{name} is {value!r}; it takes no value"
        if kind == ANY_KIND or (value is None and kind.endswith(OR_NONE)):
            return None
        kind = kind.removesuffix(OR_NONE)
        values = value if isinstance(value, list | tuple) else (value,)
        if len(values) != 1 and not kind.endswith(SEVERAL):
            return f"{name} is {value!r}; allowed: one {kind}"
        wanted = PLAIN_KINDS[kind.removesuffix(SEVERAL)]
        wrong = [item for item in values if not isinstance(item, wanted) or (bool not in wanted and item is True)]
        return f"{name} is {wrong[0]!r}; allowed: {kind}" if wrong else None


def accepted_settings(trainer: str) -> AcceptedSettings:
    """Read what a trainer accepts."""
    name = f"{trainer.replace('-', '_')}.json"
    text = files("mmtrain.planning.emit").joinpath("accepted", name).read_text(encoding="utf-8")
    kept = json.loads(text)
    return AcceptedSettings(
        kept["trainer"], kept["version"], kept["repository"], kept["commit"], kept["settings"], kept.get("encoders", {})
    )
