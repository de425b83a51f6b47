"""A plan to which a run would switch by itself, and that does not fit, is refused with what binds; the run goes on."""

import math
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mmtrain.costs.hardware import GIB
from mmtrain.errors import PlanError
from mmtrain.machine_limits import MachineLimits
from mmtrain.planning import Plan
from mmtrain.planning.artifact.plan_memory import DeviceMemory
from mmtrain.recipe import Recipe, recipe_fingerprint
from mmtrain.runtime.resilience import out_of_memory
from mmtrain.runtime.run_folder import PLAN_FILE
from mmtrain.runtime.training import choose_plan as choose_plan_module
from mmtrain.runtime.training import switch_plan as switch_plan_module
from mmtrain.runtime.training.choose_plan import choose_plan, limited_to_device, plan_that_fits, require_fit
from mmtrain.runtime.training.standby_plans import save_standby_plan
from mmtrain.runtime.training.switch_plan import switch_plan
from mmtrain.runtime.world import World
from tests.planning.factory import lengths, recipe
from tests.plans import plan_recipe
from tests.runtime.background_planners import give

SETTINGS = recipe(parallel={"placement": "unified"}, seq_len=4096)
SMALL = DeviceMemory(0.01 * GIB, "the GPU of rank 0")
LARGE = DeviceMemory(8 * GIB, "the GPU of rank 0")
BINDING = r"the plan does not fit this device: rank 0 needs .*most of it \w+, and the GPU of rank 0 has 0\.01 GiB"
WORLD = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_recipe(
        SETTINGS, lengths(), world_size=1, hardware="cpu-core", recipe_sha256=recipe_fingerprint(SETTINGS)
    )


def test_a_plan_that_is_made_beside_the_training_must_fit(plan: Plan) -> None:
    make = pickle.loads(pickle.dumps(partial(plan_that_fits, SETTINGS, LARGE, partial(give, plan))))
    assert make() == plan
    require_fit(SETTINGS, plan, LARGE)
    with pytest.raises(PlanError, match=BINDING):
        plan_that_fits(SETTINGS, SMALL, partial(give, plan))


def test_plans_are_made_for_what_a_device_has() -> None:
    assert limited_to_device(SETTINGS, "cpu-core", LARGE) is SETTINGS
    assert limited_to_device(SETTINGS, "cpu-core", SMALL).cluster.memory_gib == pytest.approx(0.01)
    of_container = limited_to_device(SETTINGS, "h100-80g", replace(LARGE, nbytes=80 * GIB, host_bytes=3 * GIB))
    assert (of_container.cluster.memory_gib, of_container.cluster.host_memory_gib) == (None, 3)


@pytest.mark.parametrize(("stated_gib", "expected_gib"), [(None, 8), (50, math.inf)])
def test_a_rank_has_its_share_of_what_its_container_is_limited_to(
    monkeypatch: pytest.MonkeyPatch, stated_gib: float | None, expected_gib: float
) -> None:
    monkeypatch.setattr(out_of_memory, "machine_limits", lambda: MachineLimits(memory_bytes=16 * GIB))
    settings = SETTINGS.model_copy(
        update={"cluster": SETTINGS.cluster.model_copy(update={"host_memory_gib": stated_gib})}
    )
    assert out_of_memory.smallest_device_memory(settings, "cpu-core", WORLD).host_bytes == expected_gib * GIB


def test_a_switch_to_a_plan_that_does_not_fit_is_refused(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(switch_plan_module, "smallest_device_memory", lambda *_: SMALL)
    request = SimpleNamespace(recipe=SETTINGS, run_dir=tmp_path, elastic=False)
    claim = SimpleNamespace(require=lambda: None)
    session = cast(Any, SimpleNamespace(request=request, patient_world=WORLD, claim=claim))
    before = plan.model_copy(update={"placement": "disaggregated"})
    chosen = switch_plan(session, before, plan, tmp_path / "step-00000004")
    assert chosen.plan is before
    assert not list(tmp_path.iterdir())
    error = capsys.readouterr().err
    assert error.startswith("mmtrain: the run goes on with its present plan, since the other one is refused: ")
    assert "most of it " in error


@pytest.mark.parametrize("kept", ["standby plan", "plan of the run", "none"])
def test_an_elastic_run_goes_on_with_a_plan_that_fits(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kept: str
) -> None:
    """The plan that lies ready needs more than the devices have, so another one is made for what they have."""
    monkeypatch.setattr(choose_plan_module, "smallest_device_memory", lambda *_: SMALL)
    if kept == "standby plan":
        save_standby_plan(tmp_path, plan)
    elif kept == "plan of the run":
        (tmp_path / PLAN_FILE).write_text(plan.file_text())
    fitting = plan.model_copy(update={"alternatives": ()})
    memory_gib: list[float | None] = []

    def planner(settings: Recipe, *_: object, **__: object) -> Plan:
        memory_gib.append(settings.cluster.memory_gib)
        return fitting

    request = SimpleNamespace(
        recipe=SETTINGS,
        recipe_sha256=recipe_fingerprint(SETTINGS),
        run_dir=tmp_path,
        elastic=True,
        resume=True,
        plan_path=None,
        hardware="cpu-core",
        planner=planner,
    )
    chosen = choose_plan(cast(Any, request), WORLD, cast(Any, SimpleNamespace(lengths=lengths())))
    assert chosen.plan == fitting
    assert memory_gib == pytest.approx([0.01])
    error = capsys.readouterr().err
    assert ("a plan for 1 rank is refused, and the run goes on with another one: " in error) == (kept != "none")
    assert ("most of it " in error) == (kept != "none")
