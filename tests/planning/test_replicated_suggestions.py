"""When no sharded replica fits: each change that the message suggests lets one fit, and names what the recipe fixes."""

import re
from typing import Any

import pytest

from mmtrain.errors import PlanError
from mmtrain.planning import Plan
from tests.planning import factory
from tests.plans import plan_recipe

NUM_RANKS = 4
AGAIN: dict[str, Any] = {unit: {"recompute": "all"} for unit in ("llm", "vision")}
# Two blocks of an encoder whose activations are most of what a rank holds, behind a small LLM.
WIDE_VISION = {**factory.VISION, "hidden": 256, "ffn": 1024, "heads": 8}


def planned(memory_gib: float | None = None, num_ranks: int = NUM_RANKS, **changes: Any) -> Plan:
    parallel = {"placement": "replicated", "dispatch": "all", **changes.get("parallel", {})}
    parallel["llm"] = {"tp": 1, **parallel.get("llm", {})}  # larger TP groups would make room, too
    settings = factory.recipe(
        vision=changes.get("vision", factory.VISION),
        parallel=parallel,
        cluster={"memory_gib": memory_gib},
        global_batch=32,
    )
    optimizer = settings.train.optimizer.model_copy(update={"moments": changes.get("moments", "fp32")})
    settings = settings.model_copy(update={"train": settings.train.model_copy(update={"optimizer": optimizer})})
    return plan_recipe(settings, factory.lengths(), world_size=num_ranks, hardware="cpu-core", recipe_sha256="x")


def needed_gib(**changes: Any) -> float:
    """Return what the fullest rank of the plan holds."""
    return max(planned(**changes).predicted.peak_memory_gib.values())


def suggested(memory_gib: float, **changes: Any) -> str:
    with pytest.raises(PlanError, match="no plan fits") as error:
        planned(memory_gib, **changes)
    found = re.search(r"Any one of these makes room: (.*)\. If the ranks", str(error.value), re.S)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(("fixed", "larger"), [(1, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_the_smallest_larger_shard_that_fits_is_suggested_and_the_fixed_one_named(fixed: int, larger: int) -> None:
    of_larger, of_next_smaller = (
        needed_gib(parallel={"shard": shard, "schedule": "1f1b", **AGAIN}) for shard in (larger, larger // 2)
    )
    asked: dict[str, Any] = {"shard": fixed, "schedule": "1f1b", **AGAIN}
    between = (of_larger + of_next_smaller) / 2
    assert f"parallel.shard: {larger} (the recipe fixes {fixed})" in suggested(between, parallel=asked)
    assert planned(between, parallel={**asked, "shard": larger}).shard == larger
    assert "parallel.shard" not in suggested(0.9 * needed_gib(parallel={**asked, "shard": 4}), parallel=asked)


def test_recomputing_is_suggested_where_it_makes_room() -> None:
    never: dict[str, Any] = {"shard": "all", "schedule": "1f1b", **{unit: {"recompute": "none"} for unit in AGAIN}}
    most, least = needed_gib(parallel=never), needed_gib(parallel={**never, "llm": {"recompute": "all"}})
    assert "parallel.llm.recompute: all" in suggested((most + least) / 2, parallel=never)


def test_moments_in_bf16_are_suggested_where_they_make_room() -> None:
    asked: dict[str, Any] = {"shard": 1, "schedule": "1f1b", **AGAIN}
    most, least = (needed_gib(parallel=asked, moments=moments) for moments in ("fp32", "bf16"))
    between = (most + least) / 2
    assert "train.optimizer.moments: bf16" in suggested(between, parallel=asked)
    assert planned(between, parallel=asked, moments="bf16").shard == 1


def test_more_mini_batches_of_an_encoder_are_suggested_where_the_recipe_fixes_too_few() -> None:
    def asked(number: int) -> dict[str, Any]:
        vision = {"recompute": "none", "num_microbatches": number}
        return {"shard": 1, "schedule": "encoder_first", "vision": vision, "llm": {"recompute": "all"}}

    most, least = (needed_gib(parallel=asked(number), vision=WIDE_VISION) for number in (1, 2))
    found = suggested((most + least) / 2, parallel=asked(1), vision=WIDE_VISION)
    assert "parallel.vision.num_microbatches: 2 (the recipe fixes 1)" in found


def test_more_ranks_are_suggested_where_shards_get_small_enough() -> None:
    asked: dict[str, Any] = {"shard": "all", "schedule": "1f1b", **AGAIN}
    on_four, on_eight = (needed_gib(num_ranks=number, parallel=asked) for number in (4, 8))
    assert "8 ranks" in suggested((on_four + on_eight) / 2, parallel=asked)


def test_the_exchange_that_holds_less_is_suggested() -> None:
    asked: dict[str, Any] = {"shard": 1, "schedule": "1f1b", **AGAIN}
    least, most = (needed_gib(parallel={**asked, "exchange": how}) for how in ("all_to_all", "all_gather"))
    found = suggested((most + least) / 2, parallel={**asked, "exchange": "all_gather"})
    assert "parallel.exchange: all_to_all (the recipe fixes all_gather)" in found
