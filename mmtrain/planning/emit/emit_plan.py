"""Write a plan for another trainer: `emit` is what `mmtrain plan --emit` does."""

from collections.abc import Mapping

from mmtrain.errors import PlanError, UserError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.emit.accepted_settings import AcceptedSettings, accepted_settings
from mmtrain.planning.emit.automodel import AUTOMODEL
from mmtrain.planning.emit.emitted_plan import EmittedPlan, Inexpressible, OtherTrainer, PlannedJob
from mmtrain.planning.emit.megatron_bridge import MEGATRON_BRIDGE
from mmtrain.planning.emit.megatron_lm import MEGATRON_LM
from mmtrain.planning.emit.mimo import MIMO
from mmtrain.planning.emit.veomni import VEOMNI
from mmtrain.recipe import Recipe
from mmtrain.version import __version__

TRAINERS: Mapping[str, OtherTrainer] = {
    "megatron-lm": MEGATRON_LM,
    "megatron-bridge": MEGATRON_BRIDGE,
    "mimo": MIMO,
    "automodel": AUTOMODEL,
    "veomni": VEOMNI,
}


def emit(plan: Plan, recipe: Recipe, trainer: str) -> EmittedPlan:
    """Write the file that runs a plan's layout in another trainer.

    Args:
        plan: a plan of the recipe.
        recipe: what the plan was made for.
        trainer: a name of `TRAINERS`.

    Raises:
        UserError: there is no such trainer.
        PlanError: it cannot run this plan; the message says why, and with which options a plan is found that it can.
    """
    require_trainer(trainer)
    if recipe.train.steps is None:
        raise PlanError(f"--emit {trainer}: train.epochs is not counted in steps here: set train.steps")
    other, job, accepted = TRAINERS[trainer], PlannedJob(plan, recipe), accepted_settings(trainer)
    problems = list(other.problems(job))
    if problems:
        reasons = "".join(f"\n  {reason}" for reason in problems)
        options = " ".join(other.fitting_options(job))
        raise PlanError(
            f"--emit {trainer}: {other.title} {accepted.version} cannot run this plan:{reasons}\n"
            f"Search for one that it can run with {options}"
        )
    inexpressible = tuple(other.inexpressible(job))
    header = _header(job, other, accepted, inexpressible)
    return EmittedPlan(trainer, accepted.version, other.write(job, accepted, header), inexpressible)


def require_trainer(name: str) -> None:
    """Raise UserError if there is no trainer of this name."""
    if name not in TRAINERS:
        raise UserError(f"--emit {name}: no such trainer; allowed: {', '.join(TRAINERS)}")


def _header(
    job: PlannedJob, other: OtherTrainer, accepted: AcceptedSettings, inexpressible: tuple[Inexpressible, ...]
) -> tuple[str, ...]:
    """Return the sentences at the top of the file."""
    plan = job.plan
    predicted = plan.predicted
    meshes = ", ".join(f"{name} {unit.mesh_text}" for name, unit in plan.units.items())
    return (
        f"{job.recipe.name} in {other.title} {accepted.version} (commit {accepted.commit[:12]}), written by "
        f"`mmtrain plan --emit {accepted.trainer}`, mmtrain {__version__}.",
        f"Plan: {plan.placement} on {plan.world_size} x {plan.hardware}, {meshes}; predicted step "
        f"{predicted.step_time_s:.4g} s, MFU {predicted.mfu:.1%} ({plan.sha256[:12]}).",
        f"Start it in the root of {accepted.repository} at that version, on each of {job.num_nodes} nodes.",
        "",
        "Not expressed, and what happens instead:",
        *(f"* {part}" for part in inexpressible),
        "",
    )
