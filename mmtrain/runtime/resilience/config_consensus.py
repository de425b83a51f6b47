"""Check that all ranks were started with the same settings, before anything expensive starts."""

from collections.abc import Mapping
from typing import cast

from mmtrain.errors import LaunchError
from mmtrain.recipe.settings.base import flatten
from mmtrain.runtime.world import World

MAX_SHOWN_DIFFERENCES = 5  # in a message


def require_consensus(world: World, facts: Mapping[str, object]) -> None:
    """Raise the same LaunchError on every rank where any rank's facts differ from rank 0's.

    Args:
        world: all ranks.
        facts: nested mappings and lists of plain values (a recipe, versions, a fingerprint of the data); the
            message names the first differing entries by their dotted path.
    """
    first, *others = cast(list[dict[str, object]], world.all_gather(flatten(facts)))
    for rank, other in enumerate(others, start=1):
        keys = sorted(first.keys() | other.keys())
        different = [key for key in keys if first.get(key) != other.get(key)]
        if different:
            shown = [
                f"{key}: {first.get(key)!r} on rank 0, {other.get(key)!r} on rank {rank}"
                for key in different[:MAX_SHOWN_DIFFERENCES]
            ]
            num_more = len(different) - len(shown)
            more = f" (and {num_more} more)" if num_more else ""
            raise LaunchError(
                f"ranks were started with different settings. {'; '.join(shown)}{more}. "
                "Start all ranks with the same recipe, plan and data"
            )
