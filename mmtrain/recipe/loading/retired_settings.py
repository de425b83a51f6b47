"""Settings on their way out: recipes with them still load, with a warning that names the replacement.

CONTRIBUTING.md (Compatibility) says when an entry is made and when it may go.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from mmtrain.errors import RetiredSettingWarning
from mmtrain.recipe.raw_tree import Node, Problem, node_at, set_node


@dataclass(frozen=True)
class RetiredSetting:
    """What a setting became."""

    since: str  # the first version that warns; the next one may reject the setting
    replacement: str | None  # dotted path of the setting that takes its value; None: the value has no effect any more


RETIRED_SETTINGS: dict[str, RetiredSetting] = {}  # by dotted path; none so far


def replace_retired(tree: Node, retired: Mapping[str, RetiredSetting] = RETIRED_SETTINGS) -> tuple[Node, list[Problem]]:
    """Return the tree with replacements in the place of retired settings, and warn of each (RetiredSettingWarning).

    A recipe that has both is a problem: which of them was meant, only its author knows.
    """
    problems: list[Problem] = []
    for name, setting in retired.items():
        keys = tuple(name.split("."))
        node = node_at(tree, keys)
        if node is None:
            continue
        tree = _without(tree, keys)
        if setting.replacement is None:
            what = "it has no effect any more; leave it out"
        else:
            new_keys = tuple(setting.replacement.split("."))
            if node_at(tree, new_keys) is not None:
                text = f"was replaced by {setting.replacement}, which the recipe has too; leave {name} out"
                problems.append(Problem(keys, text, node.origin))
                continue
            moved = set_node(tree, new_keys, node)
            if isinstance(moved, Problem):
                problems.append(moved)
                continue
            tree = moved
            what = f"write {setting.replacement}"
        text = f"{name} is retired since mmtrain {setting.since} and will be rejected: {what} ({node.origin})"
        warnings.warn(text, RetiredSettingWarning, stacklevel=2)
    return tree, problems


def _without(tree: Node, keys: tuple[str, ...]) -> Node:
    """Return a tree without what lies at `keys`, and without a section that is then empty."""
    assert isinstance(tree.value, dict)
    key, *rest = keys
    children = dict(tree.value)
    if rest:
        children[key] = _without(children[key], tuple(rest))
    if not rest or children[key].value == {}:
        del children[key]
    return Node(children, tree.origin)
