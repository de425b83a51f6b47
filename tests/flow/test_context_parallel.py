"""Context parallelism equals one process: loss, norm and every gradient, for methods, meshes, models and media."""

from typing import Any

import pytest

from tests.flow.cases import AUDIO, DEEPSTACK, FINE, LONG, MANY, Mesh, plan, recipe
from tests.flow.cells import ADAPTED, DROPPING
from tests.flow.equality import assert_equals_one_process
from tests.flow.test_master import BIDIRECTIONAL, FROZEN_VISION, WINDOWED

MROPE = {"model__llm__rope_sections": (1, 1, 1)}
TIED = {"model__llm__tie_embeddings": True}

# name -> (recipe changes, meshes). Batches hold text alone, one image or several; every second step text alone.
QUICK: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "ulysses cp2, all cut, an encoder replica on each rank": (
        {},
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), cp=2, split="even")},
    ),
    "ring cp2 pp2, all cut, tied, one encoder": (
        TIED,
        {"vision": Mesh((), (0,)), "llm": Mesh((2,), (1, 2, 3, 4), cp=2, method="ring", split="even")},
    ),
}
SLOW: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "ring cp4": (
        {},
        {"vision": Mesh((), tuple(range(4)), dp=4), "llm": Mesh((), tuple(range(4)), cp=4, method="ring")},
    ),
    "ulysses cp4 with two kv heads, all cut": (
        {},
        {"vision": Mesh((), (0, 1), tp=2), "llm": Mesh((), (2, 3, 4, 5), cp=4, split="even")},
    ),
    "ulysses cp2 tp2 pp2 with slices of tokens, recomputed from host memory": (
        {"parallel__llm__offload": "inputs"},
        {
            "vision": Mesh((), (0, 1), tp=2),
            "llm": Mesh((2,), tuple(range(2, 10)), cp=2, tp=2, sp=True, recompute=(1, 3, 4), split="even"),
        },
    ),
    "ring cp2 tp2 pp2 vpp2 with slices of tokens": (
        {},
        {
            "vision": Mesh((), (0, 1, 2, 3), dp=2, tp=2),
            "llm": Mesh((1, 2, 3), tuple(range(8)), cp=2, tp=2, vpp=2, sp=True, method="ring", split="even"),
        },
    ),
    "ring cp2 dp2, three encoder replicas": (
        {"train__global_batch": 2},
        {"vision": Mesh((), (0, 1, 2), dp=3), "llm": Mesh((), (3, 4, 5, 6), cp=2, dp=2, method="ring")},
    ),
    "ulysses cp2 dp2, two replica groups, all in host memory": (
        {"parallel__llm__offload": "all"},
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (2, 3, 4, 5), cp=2, dp=2, recompute=(0, 1, 2, 3, 4))},
    ),
    "ulysses cp2, adapters": (
        ADAPTED,
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), cp=2, split="even")},
    ),
    "ring cp2, adapters with dropout": (
        DROPPING,
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), cp=2, method="ring", split="even")},
    ),
    "ring cp2, frozen encoder": (
        FROZEN_VISION,
        {"vision": Mesh((), (0,)), "llm": Mesh((), (0, 1), cp=2, method="ring", split="even")},
    ),
    "ring cp2, parts of the llm frozen": (
        {"train__freeze": ("llm.layers.[0-2].*", "vision.*")},
        {"vision": Mesh((), (0,)), "llm": Mesh((2,), (1, 2, 3, 4), cp=2, method="ring", split="even")},
    ),
    "ring cp2, positions in time, row and column": (
        MROPE,
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (2, 3, 4, 5), cp=2, method="ring", split="even")},
    ),
    "ulysses cp2, windows": (WINDOWED, {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), cp=2, split="even")}),
    "ulysses cp2, images see themselves": (
        BIDIRECTIONAL,
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), cp=2)},
    ),
    "ulysses cp2 pp2, deepstack": (
        DEEPSTACK,
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1, 2, 3), cp=2, split="even")},
    ),
    "ring cp2, two image encoders and speech": (
        {"model__audio": AUDIO, "model__encoders": {"fine": FINE}},
        {
            "vision": Mesh((), (0,)),
            "audio": Mesh((), (1,)),
            "fine": Mesh((), (0, 1), dp=2),
            "llm": Mesh((), (0, 1), cp=2, method="ring", split="even"),
        },
    ),
}


def _assert_equals(changes: dict[str, Any], meshes: dict[str, Mesh], texts: bool | range) -> None:
    settings = recipe(**changes)
    assert_equals_one_process(settings, plan(settings, **meshes), texts_between=texts)


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow, id=case) for case in SLOW)])
def test_ranks_that_share_sequences_compute_what_one_process_does(case: str) -> None:
    _assert_equals(*(QUICK | SLOW)[case], texts=True)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_a_giant_sample_with_many_images_is_shared(method: str) -> None:
    meshes = {
        "vision": Mesh((), (0, 1, 2, 3), dp=4),
        "llm": Mesh((), (0, 1, 2, 3), cp=4, method=method),  # type: ignore[arg-type]
    }
    _assert_equals({}, meshes, LONG)


# 64 images in one sample, clips in two, and text beside them.
CLIPS_AND_IMAGES: dict[str, dict[str, Mesh]] = {
    "ulysses cp2 pp2": {
        "vision": Mesh((), (0, 1), dp=2),
        "audio": Mesh((), (0, 1), dp=2),
        "llm": Mesh((2,), (0, 1, 2, 3), cp=2, split="even"),
    },
    "ring cp2 tp2": {
        "vision": Mesh((), (0, 1), tp=2),
        "audio": Mesh((), (2, 3), tp=2),
        "llm": Mesh((), (0, 1, 2, 3), cp=2, tp=2, sp=True, method="ring"),
    },
    "ulysses cp4": {
        "vision": Mesh((), (0, 1, 2, 3), dp=4),
        "audio": Mesh((), (0, 1), dp=2),
        "llm": Mesh((), (0, 1, 2, 3), cp=4),
    },
    "ring cp4": {
        "vision": Mesh((), (0, 1, 2), dp=3),
        "audio": Mesh((), (3,)),
        "llm": Mesh((), (0, 1, 2, 3), cp=4, method="ring", split="even"),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CLIPS_AND_IMAGES)
def test_a_sample_with_64_images_and_clips_is_shared(case: str) -> None:
    _assert_equals({"model__audio": AUDIO}, CLIPS_AND_IMAGES[case], MANY)
