"""Plan files in which ranks share sequences that the model cannot share are refused before anything is built."""

import pytest

from mmtrain.errors import PlanError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_files import require_shareable
from mmtrain.recipe import Recipe
from tests.flow.cases import Mesh, plan, recipe


def _plan(settings: Recipe, llm: Mesh, vision: Mesh | None = None) -> Plan:
    return plan(settings, vision=vision or Mesh((), (0,)), llm=llm)


@pytest.mark.parametrize(
    ("changes", "llm", "message"),
    [
        ({}, Mesh((), (1, 2, 3), cp=3), "3 does not divide the 4 heads of a rank"),
        ({}, Mesh((), tuple(range(1, 9)), tp=2, cp=4), "4 does not divide the 2 heads of a rank"),
        ({"model__llm__window": 4}, Mesh((), (1, 2), cp=2, method="ring"), "found ring, allowed: ulysses or auto"),
        (
            {"model__llm__image_attention": "bidirectional"},
            Mesh((), (1, 2), cp=2, method="ring"),
            "image_attention bidirectional",
        ),
    ],
)
def test_what_heads_and_masks_do_not_allow(changes: dict[str, object], llm: Mesh, message: str) -> None:
    settings = recipe(**changes)
    with pytest.raises(PlanError, match=message):
        require_shareable(_plan(settings, llm), settings)


def test_an_encoder_does_not_share_sequences() -> None:
    settings = recipe()
    with pytest.raises(PlanError, match=r"units\.vision\.cp: found 2, allowed: 1"):
        require_shareable(_plan(settings, Mesh((), (2,)), Mesh((), (0, 1), cp=2)), settings)


def test_what_the_model_allows_passes() -> None:
    settings = recipe()
    require_shareable(_plan(settings, Mesh((), (1, 2, 3), cp=3, method="ring")), settings)
    require_shareable(_plan(settings, Mesh((), (1, 2), cp=2)), settings)
    require_shareable(_plan(settings, Mesh((), (1,))), settings)
