"""bf16 with fp32 master weights."""

from dataclasses import dataclass

import pytest
import torch

from mmtrain.errors import LaunchError
from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.runtime.execution.precision import compute_dtype
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.training.hooks.learning_rate import learning_rate
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.flow.cases import Mesh, plan, recipe, step_data
from tests.flow.gather import copy, whole

APART = {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (2, 3, 4), dp=3)}  # all that travels goes through brokers
NUM_STEPS = 5


@dataclass(frozen=True)
class Seen:
    """What a rank saw: its part of every loss, the norms, gradients of the first step, bytes received, and types."""

    losses: list[float]
    norms: list[float]
    gradients: list[NamedShard]
    nbytes: int
    weights: set[torch.dtype]
    masters: set[torch.dtype]


def _train_apart(precision: str) -> Seen:
    settings = recipe(train__global_batch=6)
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    chosen = plan(settings, **APART).model_copy(update={"precision": precision})
    job = build_rank_context(settings, chosen, world)
    outcomes, gradients, nbytes = [], [], 0
    for step in range(NUM_STEPS):
        lr = learning_rate(settings.train.optimizer, step, NUM_STEPS)
        outcomes.append(job.train(step_data(job, step), lr))
        if step == 0:
            gradients = [copy(g) for unit in job.optimizer.units.values() for g in unit.gradients()]
            nbytes = sum(traffic.nbytes for traffic in outcomes[0].record.traffic_by_edge().values())
    weights = {p.dtype for unit in job.units.values() for s in unit.stages.values() for p in s.parameters()}
    masters = {piece.tensor.dtype for unit in job.optimizer.units.values() for piece in unit.shards()}
    return Seen([o.loss for o in outcomes], [o.grad_norm or 0.0 for o in outcomes], gradients, nbytes, weights, masters)


def test_brokers_carry_bf16_and_training_stays_near_fp32() -> None:
    full: list[Seen]
    half: list[Seen]
    full, half = (run_ranks(5, _train_apart, precision) for precision in ("fp32", "bf16"))
    assert all(seen.weights == {torch.bfloat16} and seen.masters == {torch.float32} for seen in half)
    assert 0 < 2 * sum(seen.nbytes for seen in half) == sum(seen.nbytes for seen in full)
    for step in range(NUM_STEPS):
        wanted = sum(seen.losses[step] for seen in full)
        assert sum(seen.losses[step] for seen in half) == pytest.approx(wanted, rel=0.02), f"loss of step {step}"
        assert half[0].norms[step] == pytest.approx(full[0].norms[step], rel=0.1), f"gradient norm of step {step}"
    wanted_gradients, found = (whole([g for seen in ranks for g in seen.gradients]) for ranks in (full, half))
    assert found.keys() == wanted_gradients.keys()
    for unit in APART:
        one, other = (
            torch.cat([g.flatten() for name, g in gradients.items() if name.startswith(f"{unit}.")])
            for gradients in (wanted_gradients, found)
        )
        assert float((one - other).norm()) <= 0.05 * float(one.norm()), f"gradients of {unit}"


def test_a_plan_for_bf16_is_refused_on_a_gpu_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla K80")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    with pytest.raises(
        LaunchError, match=r"made for bf16, which Tesla K80 cannot compute in; set train\.precision: fp32"
    ):
        compute_dtype("bf16", gpu)
    assert compute_dtype("fp32", gpu) == torch.float32
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert compute_dtype("bf16", gpu) == torch.bfloat16
