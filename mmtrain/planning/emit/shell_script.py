"""Emitted settings as a bash script: arrays of arguments, one for each origin, and a torchrun that takes them all.

Names that begin with `--` are arguments; others become `NAME=VALUE`.
"""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from shlex import quote

from mmtrain.planning.emit.accepted_settings import AcceptedSettings
from mmtrain.planning.emit.emitted_plan import ORIGIN_TEXTS, EmittedSetting, PlannedJob, SettingGroup

COMMENT_WIDTH = 110


@dataclass(frozen=True)
class ShellVariable:
    """A value of the user's own: a shell variable that the environment may set.

    default: None if the script must not start without it.
    """

    name: str
    default: str | None
    comment: str

    def __str__(self) -> str:
        if self.default is None:
            return f'{self.name}="${{{self.name}:?{self.comment}}}"'
        return f'{self.name}="${{{self.name}:-{self.default}}}"  # {self.comment}'


@dataclass(frozen=True)
class ShellScript:
    """What a script runs.

    program: of Python, with paths from the root of the trainer's repository.
    groups: its settings, in the order of their origins.
    variables: values that the user sets.
    exports: lines of the environment that the trainer needs.
    """

    program: str
    groups: tuple[SettingGroup, ...]
    variables: tuple[ShellVariable, ...]
    exports: tuple[str, ...] = ()


def shell_text(job: PlannedJob, accepted: AcceptedSettings, header: Sequence[str], script: ShellScript) -> str:
    """Return the script's text.

    header: sentences for the comment at its top. Raises AssertionError if a setting is none that the trainer accepts.
    """
    lines = ["#!/bin/bash", *comment_lines(header), "set -eu", ""]
    lines += ["# Yours: neither plan nor recipe says these. The environment may set them."]
    lines += [str(variable) for variable in _all_variables(job, script)]
    lines += [f"export {line}" for line in script.exports]
    arrays = []
    for group in script.groups:
        name = group.title.upper()
        arrays.append(f'"${{{name}[@]}}"')
        origin = ORIGIN_TEXTS[group.origin].format(trainer=accepted.trainer)
        lines += ["", f"# {group.title}, {origin}.", f"{name}=("]
        lines += [f"    {line}" for line in _setting_lines(group.settings, accepted)]
        lines += [")"]
    lines += [
        "",
        "torchrun \\",
        f'    --nproc-per-node {job.ranks_per_node} --nnodes {job.num_nodes} --node-rank "$NODE_RANK" \\',
        '    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\',
        f"    {script.program} \\",
        f'    {" ".join(arrays)} "$@"',
    ]
    return "\n".join(lines) + "\n"


def comment_lines(sentences: Iterable[str]) -> Iterator[str]:
    """Wrap sentences into lines that begin with `# `; an empty one makes an empty line."""
    for sentence in sentences:
        indent = "  " if sentence.startswith("* ") else ""
        yield from (
            f"# {line}".rstrip() for line in textwrap.wrap(sentence, COMMENT_WIDTH, subsequent_indent=indent) or [""]
        )


def _all_variables(job: PlannedJob, script: ShellScript) -> Iterator[ShellVariable]:
    yield from script.variables
    yield ShellVariable("NODE_RANK", "${SLURM_NODEID:-0}", "of this node, from 0")
    address = "localhost" if job.num_nodes == 1 else None
    yield ShellVariable("MASTER_ADDR", address, "address of the first node")
    yield ShellVariable("MASTER_PORT", "29500", "a free port there")


def _setting_lines(settings: Iterable[EmittedSetting], accepted: AcceptedSettings) -> Iterator[str]:
    for setting in settings:
        value = setting.value
        is_variable = isinstance(value, str) and value.startswith("$")
        if not is_variable:
            problem = accepted.problem(setting.name, value)
            assert problem is None, problem
        if not setting.name.startswith("--"):
            line = f'"{setting.name}={value}"' if is_variable else _quoted(f"{setting.name}={_assigned(value)}")
        else:
            items = value if isinstance(value, list | tuple) else () if value is True else (value,)
            line = " ".join([setting.name, *(f'"{value}"' if is_variable else _quoted(_text(item)) for item in items)])
        yield f"{line}  # {setting.comment}" if setting.comment else line


def _quoted(word: str) -> str:
    """Quote a word for bash, and one with a comma for those who take that for a mistake in an array."""
    quoted = quote(word)
    return f"'{word}'" if quoted == word and "," in word else quoted


def _assigned(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(_assigned(item) for item in value)}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f'"{value}"' if isinstance(value, str) and not value.isidentifier() else _text(value)


def _text(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)
