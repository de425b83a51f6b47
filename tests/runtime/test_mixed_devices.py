"""Ranks whose GPUs differ: planned as the slowest, or refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from mmtrain.errors import PlanError
from mmtrain.recipe import LoadedRecipe
from mmtrain.runtime.training import rank_session
from mmtrain.runtime.training.rank_session import with_common_hardware
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import World
from tests.planning import factory


class _Ranks(World):
    """A world whose ranks have the hardware that the test says."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(0, len(names), torch.device("cpu"))
        object.__setattr__(self, "names", names)

    def all_gather(self, value: object) -> list[object]:
        return [(name, name) for name in self.names]  # type: ignore[attr-defined]


def _request(hardware: str, named: str = "auto") -> TrainRequest:
    loaded = LoadedRecipe.__new__(LoadedRecipe)
    object.__setattr__(loaded, "recipe", factory.recipe(cluster={"hardware": named}))
    nothing = cast(Any, None)
    return TrainRequest(loaded, nothing, nothing, hardware, ranks=2, run_dir=Path("run"))


@pytest.fixture(autouse=True)
def own_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_session, "detect_hardware", lambda device: "h100-80g")


def test_gpus_of_two_kinds_are_planned_as_the_slowest(capsys: pytest.CaptureFixture[str]) -> None:
    common = with_common_hardware(_request("h200-141g"), _Ranks(["h200-141g", "h100-80g", "h200-141g"]))
    assert (common.hardware, common.mixed_devices) == ("h100-80g", True)
    said = capsys.readouterr().err
    assert "GPUs of several kinds (2 x h200-141g, 1 x h100-80g); all are planned as h100-80g, the slowest" in said


def test_gpus_that_differ_too_much_are_refused_on_every_rank() -> None:
    ranks = _Ranks(["a100-80g", "b200-180g"])
    for rank in (ranks, replace_rank(ranks, 1)):
        with pytest.raises(PlanError, match=r"b200-180g \(rank 1\) computes 6\.2 times as fast as a100-80g \(rank 0\)"):
            with_common_hardware(_request("a100-80g"), rank)


def test_equal_gpus_and_a_named_preset_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    request = _request("h100-80g")
    assert with_common_hardware(request, _Ranks(["h100-80g"] * 2)) == request
    measured = [f"measured/X/bf16={rate},fp32=1,memory=1,gib=1,processors=1,ranks=1" for rate in (10, 11)]
    of_second = with_common_hardware(replace(request, hardware=measured[1]), _Ranks(measured))
    assert (of_second.hardware, of_second.mixed_devices) == (measured[0], False), "that of the first rank"
    named = _request("a100-80g", named="a100-80g")
    assert with_common_hardware(named, _Ranks(["a100-80g", "b200-180g"])) is named
    assert capsys.readouterr().err == ""


def replace_rank(ranks: _Ranks, rank: int) -> _Ranks:
    """Return the world as another rank sees it."""
    other = _Ranks(ranks.names)  # type: ignore[attr-defined]
    object.__setattr__(other, "rank", rank)
    return other
