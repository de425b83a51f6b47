"""All ranks must run the same thing: they compare notes before anything expensive starts."""

from collections.abc import Mapping

from mmtrain.errors import LaunchError
from mmtrain.runtime.world import World


def require_consensus(world: World, facts: Mapping[str, object]) -> None:
    """Raise the same LaunchError on every rank where any rank's facts differ from rank 0's.

    Args:
        world: all ranks.
        facts: nested mappings and lists of plain values (a recipe, versions, a fingerprint of the data); the
            message names the first differing entries by their dotted path.
    """
    everyone = world.all_gather(flatten(facts))
    first = everyone[0]
    assert isinstance(first, dict)
    for rank, theirs in enumerate(everyone[1:], start=1):
        assert isinstance(theirs, dict)
        different = [key for key in sorted(first.keys() | theirs.keys()) if first.get(key) != theirs.get(key)]
        if different:
            shown = [f"{k}: {first.get(k)!r} on rank 0, {theirs.get(k)!r} on rank {rank}" for k in different[:5]]
            more = f" (and {len(different) - 5} more)" if len(different) > 5 else ""
            raise LaunchError(
                f"ranks were started with different settings. {'; '.join(shown)}{more}. "
                "Start all ranks with the same recipe, plan and data"
            )


def flatten(value: object, path: str = "") -> dict[str, object]:
    """Turn nested mappings and sequences into one mapping from dotted path to plain value."""
    if isinstance(value, Mapping):
        parts = [(str(k), v) for k, v in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(str(i), v) for i, v in enumerate(value)]
    else:
        return {path: value}
    flat: dict[str, object] = {}
    for key, part in parts:
        flat.update(flatten(part, f"{path}.{key}" if path else key))
    return flat
