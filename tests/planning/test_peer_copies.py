"""Plans of runs that copy their state into host memory: copies count there, beside activations."""

import numpy as np
import pytest

from mmtrain.balance import SampleLengths
from mmtrain.costs.hardware import GIB
from mmtrain.errors import PlanError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_memory import DeviceMemory, plan_memory, prove_memory
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.report.plan_view import plan_table
from tests.planning.factory import recipe
from tests.plans import plan_recipe

LLM = {"layers": 16, "hidden": 256, "heads": 4, "ffn": 640}
LONG = np.full(64, 16000)  # tokens of each sample
MEMORY_GIB = 1.7  # in which some blocks can keep their activations, and not all


def planned(settings: Recipe, hardware: str = "h100-80g", world_size: int = 2) -> Plan:
    lengths = SampleLengths(LONG, LONG // 2, {})
    return plan_recipe(settings, lengths, world_size=world_size, hardware=hardware, recipe_sha256="a" * 64)


def with_copies(every: int, host_memory_gib: float | None = None, **llm: object) -> Recipe:
    cluster = {"memory_gib": MEMORY_GIB, "host_memory_gib": host_memory_gib}
    parallel = {"placement": "unified", "llm": {"tp": 1, "pp": 2, "vpp": 1, "offload": "all", **llm}}
    settings = recipe(vision=None, llm=LLM, parallel=parallel, cluster=cluster, seq_len=16384)
    train = settings.train.model_copy(
        update={"peer_copies": settings.train.peer_copies.model_copy(update={"every": every})}
    )
    return settings.model_copy(update={"train": train})


def test_copies_take_room_in_host_memory_beside_activations() -> None:
    plain, settings = planned(with_copies(0)), with_copies(5)
    plan = planned(settings)
    assert plain.predicted.copies is None
    assert plan.predicted.copies is not None
    shape = build_model_shape(settings)
    memory = plan_memory(settings, plan, shape)
    # Of a model in bf16, optimizer state holds the weights too, in fp32; there are two copies of it.
    assert plan.predicted.copies.gib == pytest.approx(max(m.host_copies for m in memory.values()) / GIB, abs=1e-4)
    assert max(m.host_copies for m in memory.values()) == pytest.approx(2 * max(m.optimizer for m in memory.values()))
    assert "A copy of the state takes" in " ".join(plan_table(plan).split())
    needed_gib = max(m.on_host for m in memory.values()) / GIB
    assert needed_gib > max(plan.predicted.host_gib.values())
    device = DeviceMemory(MEMORY_GIB * GIB, "a GPU")
    prove_memory(with_copies(5, 1.01 * needed_gib), plan, shape, device)
    with pytest.raises(PlanError, match=r"GiB of activations and copies of its state of a rank in host memory"):
        prove_memory(with_copies(5, 0.99 * needed_gib), plan, shape, device)


def test_on_several_nodes_each_keeps_copies_of_another_one_too() -> None:
    for num_replicas, number in ((4, 2), (8, 4)):  # a node has eight ranks
        settings = with_copies(1, dp=num_replicas)
        plan = planned(settings, world_size=2 * num_replicas)
        memory = plan_memory(settings, plan, build_model_shape(settings)).values()
        assert [m.host_copies for m in memory] == pytest.approx([number * m.optimizer for m in memory])
        assert plan.predicted.copies is not None
        assert plan.predicted.copies.gib == pytest.approx(max(m.host_copies for m in memory) / GIB, abs=1e-4)


def test_where_ranks_compute_in_host_memory_copies_take_of_that() -> None:
    settings = with_copies(1, offload="none", recompute="all")
    plan = planned(settings, "cpu-core")
    memory = plan_memory(settings, plan, build_model_shape(settings))
    assert all(m.host_copies == 0 < m.copies for m in memory.values())
    assert all(m.copies == pytest.approx(2 * 1.5 * m.optimizer) for m in memory.values()), "fp32: weights and moments"
    kinds = next(iter(plan.predicted.memory_kinds_gib.values()))
    assert kinds["copies"] > 0
