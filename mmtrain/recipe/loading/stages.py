"""The stages of a recipe (`stages:`): runs one after another, each with settings of its own laid over the recipe's."""

import re
from collections.abc import Sequence

from mmtrain.errors import RecipeError
from mmtrain.recipe.raw_tree import Node, merge_trees, node_at

STAGES, STAGE = "stages", "stage"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
INIT_FROM = ("train", "init_from")


def is_about_stages(override: str) -> bool:
    """Return whether a `--set` chooses a stage or changes the list of stages, which comes before all others."""
    key = override.partition("=")[0].strip()
    return key == STAGE or key.split(".")[0] == STAGES


def stage_names(tree: Node) -> tuple[str, ...]:
    """Return the names of a recipe's stages, in order; () if it has none. Raises RecipeError for a wrong list."""
    stages = node_at(tree, [STAGES])
    if stages is None or stages.value is None:
        return ()
    if not isinstance(stages.value, list) or not stages.value:
        raise RecipeError(f"{STAGES}: found no list; allowed: a list of mappings with `name` ({stages.origin})")
    names: list[str] = []
    for i, stage in enumerate(stages.value):
        name = node_at(stage, ["name"])
        if name is None or not isinstance(name.value, str) or not _NAME.fullmatch(name.value):
            found = "nothing" if name is None else repr(name.value)
            raise RecipeError(
                f"{STAGES}.{i}.name: found {found}; allowed: letters, digits, `.`, `_` and `-`, the first one a letter "
                f"or a digit ({stage.origin})"
            )
        if name.value in names:
            raise RecipeError(f"{STAGES}.{i}.name: {name.value} is the name of an earlier stage ({name.origin})")
        if i and node_at(stage, INIT_FROM) is not None:
            raise RecipeError(
                f"{STAGES}.{i}.{'.'.join(INIT_FROM)}: a stage starts from the one before it; leave this out "
                f"({stage.origin})"
            )
        names.append(name.value)
    return tuple(names)


def chosen_stage(tree: Node, names: Sequence[str]) -> str | None:
    """Return the stage that `--set stage=NAME` chose; None if none was chosen. Raises RecipeError for another name."""
    chosen = node_at(tree, [STAGE])
    if chosen is None or chosen.value is None:
        return None
    if chosen.value not in names:
        allowed = f"allowed: {', '.join(names)}" if names else "the recipe has no stages"
        raise RecipeError(f"{STAGE}: found {chosen.value!r}; {allowed} ({chosen.origin})")
    return str(chosen.value)


def lay_stage_over(tree: Node) -> Node:
    """Return the recipe of the chosen stage; of a recipe without stages, the recipe.

    Raises RecipeError if none is chosen of several stages, and for a wrong list or name.
    """
    names = stage_names(tree)
    name = chosen_stage(tree, names)
    if not names:
        return _without(tree, STAGES, STAGE)
    if name is None:
        raise RecipeError(
            f"{STAGES}: the recipe has the stages {', '.join(names)}, and this command works on one of them: choose it "
            f"with --set {STAGE}={names[0]}"
        )
    stages = node_at(tree, [STAGES])
    assert stages is not None
    assert isinstance(stages.value, list)
    return merge_trees(_without(tree, STAGES, STAGE), _without(stages.value[names.index(name)], "name"))


def _without(tree: Node, *keys: str) -> Node:
    assert isinstance(tree.value, dict)
    return Node({key: child for key, child in tree.value.items() if key not in keys}, tree.origin)
