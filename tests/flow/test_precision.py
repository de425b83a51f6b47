"""bf16 with fp32 master weights; and the CUDA smoke script, with this machine's CPU in place of a GPU."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mmtrain.models.attention import attend
from mmtrain.recipe import Recipe
from mmtrain.runtime.job import assemble
from mmtrain.runtime.schedule import learning_rate
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.flow.cases import Mesh, plan, recipe, step_data

SCRIPT = Path(__file__).parents[2] / "scripts" / "smoke_cuda.py"
APART = {"vision": Mesh((), (0,)), "llm": Mesh((2,), (1, 2))}


def _losses(settings: Recipe, meshes: dict[str, Mesh]) -> tuple[list[float], set[torch.dtype], set[torch.dtype]]:
    """Return this rank's part of each loss, and the types of the weights it computes with and of those it updates."""
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    job = assemble(settings, plan(settings, **meshes), world)
    optimizer = settings.train.optimizer
    losses = [job.train(step_data(job, s), learning_rate(optimizer, s, 3)).loss for s in range(3)]
    weights = {p.dtype for unit in job.units.values() for s in unit.stages.values() for p in s.parameters()}
    masters = {piece.tensor.dtype for unit in job.optimizer.units.values() for piece in unit.shards()}
    return losses, weights, masters


def test_bf16_follows_fp32_and_updates_fp32_weights() -> None:
    full, half = (run_ranks(3, _losses, recipe(train__precision=p), APART) for p in ("fp32", "bf16"))
    for step in range(3):
        wanted = sum(losses[step] for losses, _, _ in full)
        assert sum(losses[step] for losses, _, _ in half) == pytest.approx(wanted, rel=0.02)
    assert all(weights == {torch.bfloat16} and masters == {torch.float32} for _, weights, masters in half)


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
    monkeypatch.setattr(smoke, "attend", lambda *a: right(*a) * (1.001 if a[-1] == "sdpa" else 1))
    assert verdicts()["attention sdpa, torch.float32"] == "WRONG"


def _train(settings: Recipe, meshes: dict[str, Mesh]) -> list[tuple[float, ...]]:
    curve: list[tuple[float, ...]] = _script().train(settings, meshes, torch.device("cpu"))
    return curve


def test_the_smoke_script_trains_as_it_would_on_gpus() -> None:
    smoke = _script()

    def run(settings: Recipe, meshes: dict[str, Mesh]) -> list[tuple[float, ...]]:
        curve: list[tuple[float, ...]] = run_ranks(smoke.num_ranks(meshes) or 1, _train, settings, meshes)[0]
        return curve

    found = [*smoke.training_rows(torch.device("cpu"), run), *smoke.mesh_rows(1, run)]
    assert [str(row) for row in found if row.verdict != "ok"] == []
    assert len(found) == 5
