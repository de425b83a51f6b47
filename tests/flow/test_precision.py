"""bf16 with fp32 master weights; and the CUDA smoke script, with this machine's CPU in place of a GPU."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mmtrain.errors import LaunchError
from mmtrain.models.attention import attend
from mmtrain.models.named_shards import NamedShard
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.precision import compute_dtype
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.training.lr_schedule import learning_rate
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.flow.cases import Mesh, plan, recipe, step_data
from tests.flow.gather import copy, whole

SCRIPT = Path(__file__).parents[2] / "scripts" / "smoke_cuda.py"
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


def _script() -> ModuleType:
    if "smoke_cuda" not in sys.modules:
        spec = importlib.util.spec_from_file_location("smoke_cuda", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["smoke_cuda"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["smoke_cuda"])
    return sys.modules["smoke_cuda"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_the_smoke_script_says_that_it_needs_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    assert _script().main() == 2
    assert "sees no CUDA device here" in capsys.readouterr().err


def test_the_smoke_script_tells_backends_that_agree_from_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    smoke, right = _script(), attend

    def verdicts() -> dict[str, str]:
        return {row.check: row.verdict for row in smoke.attention_rows(torch.device("cpu"))}

    found = verdicts()
    assert found["attention sdpa, torch.float32"] == found["attention sdpa, torch.bfloat16"] == "ok"
    assert found["attention flash_attn, torch.float32"] == "left out"
    monkeypatch.setattr(smoke, "attend", lambda *a: right(*a) * (1.001 if a[-1].backend == "sdpa" else 1))
    assert verdicts()["attention sdpa, torch.float32"] == "WRONG"


def _train(settings: Recipe, meshes: dict[str, Mesh]) -> list[tuple[float, ...]]:
    curve: list[tuple[float, ...]] = _script().train(settings, meshes, torch.device("cpu"))
    return curve


@pytest.mark.slow
def test_the_smoke_script_trains_as_it_would_on_gpus() -> None:
    smoke = _script()

    def run(settings: Recipe, meshes: dict[str, Mesh]) -> list[tuple[float, ...]]:
        curve: list[tuple[float, ...]] = run_ranks(smoke.num_ranks(meshes) or 1, _train, settings, meshes)[0]
        return curve

    found = [*smoke.training_rows(torch.device("cpu"), run), *smoke.mesh_rows(1, run)]
    assert [str(row) for row in found if row.verdict != "ok"] == []
    assert len(found) == 5
