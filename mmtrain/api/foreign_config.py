"""Read the configurations of other trainers: YAML or JSON, or a shell script or line with arguments."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmtrain.errors import UserError
from mmtrain.foreign_json import parse_json
from mmtrain.foreign_yaml import parse_yaml

_ENDS = frozenset({";", "&&", "||", "|", "&"})  # of a command in a script
_BRACKETS = ("(", ")")
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PROCESSES = "NPROC_PER_NODE"  # the variable of ms-swift's launcher


def read_foreign_config(path: Path) -> dict[str, Any]:
    """Return the keys and values of a configuration, in order.

    Raises:
        UserError: the file cannot be read, or holds no keys.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read the configuration: {getattr(error, 'strerror', None) or error}") from None
    is_script = path.suffix.lower() not in (".yaml", ".yml", ".json")
    values = read_arguments(text) if is_script else _parsed(path, text)
    if not isinstance(values, dict) or not values:
        raise UserError(f"{path}: found no keys; allowed: a mapping in YAML or JSON, or a script with `--key value`")
    return {str(key).removeprefix("--"): value for key, value in values.items() if value is not None}


def _parsed(path: Path, text: str) -> Any:
    try:
        return parse_json(text) if path.suffix.lower() == ".json" else parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{path}: cannot read the configuration: {error}") from None


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments `--key value` of a script; a key alone is true, and several values are a list.

    They are those of its arrays, and of the command that has most. Variables that the script sets are put in; others
    stay as they are written.
    """
    reader = _ScriptReader()
    for token in _tokens(text):
        reader.read(token)
    return reader.values()


class _ScriptReader:
    """Collects the arguments of a script, token by token."""

    def __init__(self) -> None:
        self._variables: dict[str, str] = {}
        self._of_arrays: dict[str, Any] = {}
        self._commands: list[dict[str, Any]] = [{}]
        self._key: str | None = None
        self._in_array = False

    def read(self, token: str) -> None:
        arguments = self._of_arrays if self._in_array else self._commands[-1]
        assignment = _ASSIGNMENT.fullmatch(token)
        if token in _ENDS or token in _BRACKETS:
            self._key = None
            self._in_array = token == "(" or (self._in_array and token != ")")
            if token in _ENDS and not self._in_array:
                self._commands.append({})
        elif token.startswith("--") and len(token) > 2:
            self._key, equals, value = token[2:].partition("=")
            arguments[self._key] = self._resolved(value) if equals else True
        elif assignment and self._key is None:
            self._variables[assignment[1]] = self._resolved(assignment[2])
        elif self._key is not None:
            value, before = self._resolved(token), arguments[self._key]
            if before is True:
                arguments[self._key] = value
            else:
                arguments[self._key] = [*(before if isinstance(before, list) else [before]), value]

    def values(self) -> dict[str, Any]:
        """Return all arguments."""
        longest: dict[str, Any] = max(self._commands, key=len)
        values = {**self._of_arrays, **longest}
        if _PROCESSES in self._variables:
            values.setdefault(_PROCESSES.lower(), self._variables[_PROCESSES])
        return values

    def _resolved(self, text: str) -> str:
        def value_of(match: re.Match[str]) -> str:
            name = match[1] or match[3]
            return self._variables.get(name, match[2] if match[2] is not None else match[0])

        return _VARIABLE.sub(value_of, text)


def _tokens(text: str) -> Iterator[str]:
    """Divide a script into words and signs; `;` ends each line that is not continued, unless it is in brackets."""
    text = re.sub(r"\\\r?\n", " ", text)
    depth = 0
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();&|")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a text over several lines, which holds no arguments
            words = line.split()
        depth = max(0, depth + words.count("(") - words.count(")"))
        yield from words
        if not depth:
            yield ";"
