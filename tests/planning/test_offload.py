"""Plans with activations in host memory: where the recipe asks for it, where nothing else fits, and within the host."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmtrain.balance import SampleLengths
from mmtrain.costs.hardware import GIB
from mmtrain.errors import PlanError, ProgramError
from mmtrain.models.shapes.model_shape import build_model_shape, unit_offload
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_graph import planned_shape, stage_graph
from mmtrain.planning.artifact.plan_memory import DeviceMemory, plan_memory, prove_memory
from mmtrain.program import build_program
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.report.plan_view import plan_table
from tests.planning.factory import recipe
from tests.plans import plan_recipe

LLM = {"layers": 16, "hidden": 256, "heads": 4, "ffn": 640}
LONG = np.full(64, 16000)  # tokens of each sample
ROOMY_GIB = 1.7  # in which some blocks can keep their activations, and not all


def planned(settings: Recipe, hardware: str = "h100-80g") -> Plan:
    lengths = SampleLengths(LONG, LONG // 2, {})
    return plan_recipe(settings, lengths, world_size=2, hardware=hardware, recipe_sha256="a" * 64)


def long_text(memory_gib: float | None = None, host_memory_gib: float | None = None, **llm: Any) -> Recipe:
    """Return a recipe of a pipeline with two ranks, whose activations are large beside its weights."""
    cluster = {"memory_gib": memory_gib, "host_memory_gib": host_memory_gib}
    parallel = {"placement": "unified", "llm": {"tp": 1, "pp": 2, "vpp": 1, **llm}}
    return recipe(vision=None, llm=LLM, parallel=parallel, cluster=cluster, seq_len=16384)


def peak_gib(plan: Plan) -> float:
    return max(plan.predicted.peak_memory_gib.values())


@pytest.fixture(scope="module")
def tight_gib() -> float:
    """Memory in which no plan fits that keeps the inputs of all blocks on the device."""
    return 0.9 * peak_gib(planned(long_text(recompute="all")))


def test_inputs_in_host_memory_make_room_where_nothing_else_does(tight_gib: float) -> None:
    with pytest.raises(PlanError, match=r"parallel\.llm\.offload: inputs"):
        planned(long_text(tight_gib, recompute="all"))
    plan = planned(long_text(tight_gib, recompute="all", offload="inputs"))
    assert plan.units["llm"].offload == "inputs"
    assert peak_gib(plan) <= tight_gib
    assert "Inputs of recomputed blocks of llm wait in host memory, at most" in " ".join(plan_table(plan).split())
    chosen = planned(long_text(tight_gib, recompute="all", offload="auto"))
    assert (chosen.units, chosen.predicted) == (plan.units, plan.predicted)


def test_as_few_blocks_as_memory_demands_give_all_away() -> None:
    settings = long_text(ROOMY_GIB, offload="all")
    plan = planned(settings)
    assert 0 < plan.units["llm"].num_recomputed < LLM["layers"]
    assert peak_gib(plan) <= ROOMY_GIB
    text = " ".join(plan_table(plan).split())
    assert "Blocks of llm that are listed as recomputed are not: their activations wait in host memory" in text
    assert Plan.model_validate_json(plan.file_text()) == plan
    counted = plan_memory(settings, plan, build_model_shape(settings))
    host_gib = max(memory.host_activations for memory in counted.values()) / GIB
    assert host_gib == pytest.approx(max(plan.predicted.host_gib.values()), abs=1e-4)
    # The file alone says it: a run builds the same model under a recipe that leaves it open.
    shape = planned_shape(plan, build_model_shape(long_text(offload="auto")))
    assert unit_offload(shape.unit("llm")) == "all"


def test_auto_keeps_everything_on_the_device_where_a_plan_fits_so() -> None:
    for memory_gib in (None, ROOMY_GIB):
        chosen = planned(long_text(memory_gib, offload="auto"))
        assert chosen.units == planned(long_text(memory_gib)).units
        assert not chosen.predicted.host_gib


def test_a_plan_for_a_cpu_says_that_nothing_is_freed() -> None:
    plan = planned(long_text(offload="all", recompute="all"), hardware="cpu-core")
    assert not plan.predicted.host_gib
    assert "which frees nothing: ranks compute in it" in " ".join(plan_table(plan).split())


def test_the_checker_counts_host_memory_too() -> None:
    settings = long_text(ROOMY_GIB, offload="all")
    plan, shape, device = planned(settings), build_model_shape(settings), DeviceMemory(ROOMY_GIB * GIB, "a GPU")
    needed_gib = max(plan.predicted.host_gib.values())
    graph, limit = stage_graph(plan, shape), prove_memory(settings, plan, shape, device)
    build_program(graph, limit, plan.schedule.kind, plan.schedule.order)
    too_small = 0.9 * needed_gib
    with pytest.raises(PlanError, match=r"a rank of h100-80g may use .* GiB of it; what makes room is"):
        prove_memory(long_text(ROOMY_GIB, too_small, offload="all"), plan, shape, device)
    with pytest.raises(PlanError, match=r"a rank here may use .* GiB of it; what makes room is"):
        prove_memory(settings, plan, shape, replace(device, host_bytes=too_small * GIB))
    counted = plan_memory(settings, plan, shape)
    assert limit is not None
    assert limit.host is not None
    assert set(limit.host.limit_bytes.values()) == {125e9}
    in_flight = {rank: memory.host_activations for rank, memory in counted.items()}
    for factor, fits in ((1.0, True), (0.99, False)):
        limit.host.limit_bytes.update({rank: int(factor * nbytes) for rank, nbytes in in_flight.items()})  # type: ignore[attr-defined]
        if fits:
            build_program(graph, limit, plan.schedule.kind, plan.schedule.order)
            continue
        with pytest.raises(ProgramError, match=r"GiB of activations are alive in host memory at `F llm"):
            build_program(graph, limit, plan.schedule.kind, plan.schedule.order)
    with pytest.raises(PlanError, match=r"in host memory, of which it may use .*cluster\.host_memory_gib"):
        planned(long_text(ROOMY_GIB, 0.01 * needed_gib, offload="all", recompute="all"))
