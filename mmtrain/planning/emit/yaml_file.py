"""Emitted settings as a YAML file, with where each value comes from beside it."""

from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from mmtrain.planning.emit.accepted_settings import AcceptedSettings
from mmtrain.planning.emit.emitted_plan import ORIGIN_TEXTS, EmittedSetting, SettingGroup
from mmtrain.planning.emit.shell_script import comment_lines

INDENT = "  "
CLASS_KEY = "_target_"  # names the class of a section, whatever the section


def yaml_text(accepted: AcceptedSettings, header: Sequence[str], groups: Sequence[SettingGroup]) -> str:
    """Return the file's text; the comment behind a value names its origin.

    Raises AssertionError if a setting is none that the trainer accepts in a section that is known.
    """
    sections = {name.rpartition(".")[0] for name in accepted.kinds}
    tree: dict[str, Any] = {}
    for group in groups:
        for setting in group.settings:
            section, _, key = setting.name.rpartition(".")
            if section in sections and key != CLASS_KEY:
                problem = accepted.problem(setting.name, setting.value)
                assert problem is None, problem
            inside = tree
            for part in section.split(".") if section else ():
                inside = inside.setdefault(part, {})
            inside[key] = (setting, group.origin)
    legend = [
        f"{group.origin}: {ORIGIN_TEXTS[group.origin].format(trainer=accepted.trainer)}"
        for group in {group.origin: group for group in groups}.values()
    ]
    lines = [*comment_lines([*header, "Comments behind values say where they come from.", *legend]), ""]
    return "\n".join([*lines, *_lines(tree, "")]) + "\n"


def _lines(tree: dict[str, Any], indent: str) -> Iterable[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            if not indent:
                yield ""
            yield f"{indent}{key}:"
            yield from _lines(value, indent + INDENT)
            continue
        setting, origin = value
        comment = f"{origin}: {setting.comment}" if setting.comment else origin
        yield f"{indent}{key}: {_scalar(setting)}  # {comment}"


def _scalar(setting: EmittedSetting) -> str:
    text = yaml.safe_dump(setting.value, default_flow_style=True, width=2**16)
    return text.removesuffix("...\n").strip()
