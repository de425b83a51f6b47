"""Gated DeltaNets and gated attention compute under any plan what one process does sample by sample."""

from typing import Any

import pytest

from tests.flow.cases import LONG, Mesh, plan, recipe
from tests.flow.cells import ADAPTED
from tests.flow.equality import assert_equals_one_process
from tests.flow.orders import PIPELINE, TOGETHER
from tests.flow.test_replicated import replicated
from tests.tiers import mostly_long

# The second of three blocks has attention.
DELTA: dict[str, Any] = {
    "model__llm__delta_net": {
        "key_heads": 2, "value_heads": 4, "key_head_dim": 8, "value_head_dim": 12, "taps": 3,
    },
    "model__llm__full_attention_blocks": (1,),
    "model__llm__attention_gate": True,
    "model__llm__qk_norm": True,
    "model__llm__zero_centered_norms": True,
    # Outputs of some heads are nearly 0, and their norm multiplies rounding errors by up to 1 / sqrt(eps).
    "model__llm__norm_eps": 0.01,
}  # fmt: skip

# name -> (recipe changes, meshes). LLM layers: 0 embedding, 1-3 blocks, 4 head.
CASES: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "tp2 with slices of tokens, pp2, recomputed": (
        DELTA,
        {
            "vision": Mesh((), (0, 1), tp=2, sp=True),
            "llm": Mesh((2,), (0, 1, 2, 3), tp=2, sp=True, recompute=(1, 2)),
        },
    ),
    "tp2, a block and parts of another frozen, activations again": (
        DELTA
        | {
            "train__freeze": ("llm.layers.2.*", "llm.*.taps", "llm.*.decay_log", "llm.layers.1.*.linear_in.*"),
            "parallel__llm__recompute": "selective",
        },
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), tp=2)},
    ),
    "dp2 pp2 vpp2": (DELTA, {"vision": Mesh((), (0,)), "llm": Mesh((1, 2, 3), (1, 2, 3, 4), dp=2, vpp=2)}),
    "adapters, tp2": (DELTA | ADAPTED, {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), tp=2)}),
    "experts beside a shared one with a gate, tp2 dp2 ep2": (
        DELTA
        | {
            "model__llm__moe": {"experts": 6, "top_k": 2, "ffn": 16, "shared_ffn": 20, "shared_gate": True},
            "model__llm__norm_eps": 0.1,  # these outputs are smaller still
        },
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2, 3, 4), tp=2, dp=2, ep=2, sp=True, recompute=(1,))},
    ),
    "fewer key-value heads than ranks": (
        DELTA | {"model__llm__kv_heads": 1},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (0, 1), tp=2, sp=True)},
    ),
}
# Key heads that two ranks share beside two TP ranks.
FOUR_HEADS = DELTA | {"model__llm__delta_net": DELTA["model__llm__delta_net"] | {"key_heads": 4}}
# Batches hold text alone, one image or several; where not all sequences are cut, ranks have whole ones beside them.
SHARED: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "cp2, all cut": (
        DELTA,
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), cp=2, split="even")},
    ),
    "cp2 tp2 with slices of tokens, pp2, recomputed": (
        FOUR_HEADS,
        {
            "vision": Mesh((), (0, 1), tp=2),
            "llm": Mesh((2,), tuple(range(2, 10)), cp=2, tp=2, sp=True, recompute=(1, 3)),
        },
    ),
    "cp2 tp2, all cut, parts frozen": (
        FOUR_HEADS | {"train__freeze": ("llm.layers.1.*", "llm.*.taps", "llm.*.decay_log")},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (0, 1, 2, 3), cp=2, tp=2, split="even")},
    ),
    "cp2 dp2": (DELTA, {"vision": Mesh((), tuple(range(4)), dp=4), "llm": Mesh((), tuple(range(4)), cp=2, dp=2)}),
    "cp2, adapters": (
        DELTA | ADAPTED,
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), cp=2, split="even")},
    ),
}
ORDERED: dict[str, tuple[dict[str, Any], dict[str, Mesh], dict[int, Any]]] = {
    "in parts, tp2 with slices of tokens, recomputed": (
        DELTA,
        {
            "vision": Mesh((), (0, 1), tp=2, sp=True, recompute=(1, 2)),
            "llm": Mesh((), (0, 1), tp=2, sp=True, recompute=(1, 3)),
        },
        {0: TOGETHER, 1: TOGETHER},
    ),
    "in parts, a pipeline": (DELTA, {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1))}, PIPELINE),
}


@pytest.mark.parametrize("case", mostly_long(CASES, every=2))
def test_a_delta_net_computes_what_one_process_does(case: str) -> None:
    changes, meshes = CASES[case]
    settings = recipe(**changes)
    assert_equals_one_process(settings, plan(settings, **meshes), texts_between=True)


@pytest.mark.parametrize("case", mostly_long(ORDERED, every=2))
def test_a_delta_net_in_pieces_computes_what_one_process_does(case: str) -> None:
    changes, meshes, order = ORDERED[case]
    settings = recipe(**changes)
    assert_equals_one_process(settings, plan(settings, "explicit", order, **meshes))


@pytest.mark.parametrize(
    ("changes", "recompute"),
    [(DELTA, ()), pytest.param(DELTA | ADAPTED, (1, 2), marks=pytest.mark.slow)],
)
def test_a_sharded_delta_net_computes_what_one_process_does(
    changes: dict[str, Any], recompute: tuple[int, ...]
) -> None:
    settings = recipe(**changes)
    assert_equals_one_process(settings, replicated(settings, 2, 2, recompute, "all"), texts_between=True)


@pytest.mark.slow
def test_a_sharded_delta_net_whose_ranks_share_sequences_computes_what_one_process_does() -> None:
    settings = recipe(**DELTA)
    meshes = {"vision": Mesh((), tuple(range(4)), dp=4), "llm": Mesh((), tuple(range(4)), dp=2, cp=2, split="even")}
    wanted = plan(settings, shard=2, dispatch="none", **meshes)
    assert_equals_one_process(settings, wanted, texts_between=True)


@pytest.mark.parametrize(
    "case", ["cp2, all cut", *(pytest.param(case, marks=pytest.mark.slow) for case in list(SHARED)[1:])]
)
def test_ranks_that_share_sequences_compute_what_one_process_does(case: str) -> None:
    changes, meshes = SHARED[case]
    settings = recipe(**changes)
    assert_equals_one_process(settings, plan(settings, **meshes), texts_between=True)


@pytest.mark.slow
def test_a_giant_sample_is_shared() -> None:
    """Chunks of its rule, 64 tokens each, reach across the cuts, and so does its convolution."""
    settings = recipe(**FOUR_HEADS)
    meshes = {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1, 2, 3), cp=4)}
    assert_equals_one_process(settings, plan(settings, **meshes), texts_between=LONG)
