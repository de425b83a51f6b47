import pytest
import torch

from mmtrain.errors import LaunchError
from mmtrain.recipe.settings.base import flatten
from mmtrain.runtime.resilience.config_consensus import require_consensus
from mmtrain.runtime.world import World


class _ThreeRanks(World):
    """A world whose other ranks report what the test says."""

    def __init__(self, others: list[dict[str, object]]) -> None:
        super().__init__(0, 1 + len(others), torch.device("cpu"))
        object.__setattr__(self, "others", others)

    def all_gather(self, value: object) -> list[object]:
        return [value, *(flatten(o) for o in self.others)]  # type: ignore[attr-defined]


def test_flatten_gives_dotted_paths() -> None:
    assert flatten({"a": {"b": [1, {"c": "x"}]}, "d": None}) == {"a.b.0": 1, "a.b.1.c": "x", "d": None}


def test_equal_ranks_pass() -> None:
    facts: dict[str, object] = {"recipe": {"train": {"steps": 3}}}
    require_consensus(_ThreeRanks([facts, facts]), facts)


def test_the_rank_and_the_field_are_named() -> None:
    ours: dict[str, object] = {"recipe": {"train": {"steps": 3, "seed": 1}}}
    theirs: dict[str, object] = {"recipe": {"train": {"steps": 4, "seed": 1}}}
    with pytest.raises(LaunchError, match=r"recipe\.train\.steps: 3 on rank 0, 4 on rank 2"):
        require_consensus(_ThreeRanks([ours, theirs]), ours)
