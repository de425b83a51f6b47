"""What a run does before its first step: claim its folder, restore a checkpoint, introduce itself.

`choose_plan` has a module of its own.
"""

import sys
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import getitem

from mmtrain.balance import StepTargets
from mmtrain.balance.grouping.methods import GROUPING_VERSIONS
from mmtrain.checkpoint import Ranks, SavingRun, find, foreign_drafts
from mmtrain.data import DataIndex, read_quarantine, write_quarantine
from mmtrain.data.loading.step_format import from_json, to_json
from mmtrain.data.text.tokenizer_folder import tokenizer_sha256
from mmtrain.durable_files import cut_log, disk_errors_named, set_aside, write_whole
from mmtrain.errors import UserError
from mmtrain.models.kernels.choice import KernelChoice, describe_kernels
from mmtrain.planning.artifact.balancing_targets import derive_step_targets
from mmtrain.planning.artifact.plan import Plan, sharding_text
from mmtrain.planning.artifact.plan_change import describe_data_drift
from mmtrain.recipe import Recipe, dump_recipe
from mmtrain.recipe.settings.base import POSITION_KEY, select_for_saving, text_for_saving
from mmtrain.report.console import Console
from mmtrain.runtime.execution.attention_choice import AttentionChoice
from mmtrain.runtime.resilience.failures import clear_failures
from mmtrain.runtime.resilience.folder_lock import FolderLock
from mmtrain.runtime.run_folder import (
    CHECKPOINTS_FOLDER,
    QUARANTINE_FILE,
    RECIPE_FILE,
    RUN_STATE_FILE,
    SKIPPED_STEPS_FILE,
    read_run_state,
    write_run_state,
)
from mmtrain.runtime.run_owner import FolderClaim
from mmtrain.runtime.training.choose_plan import ChosenPlan, keeps_files
from mmtrain.runtime.training.go_back import go_back
from mmtrain.runtime.training.stored_runs import check_store, fetch_run
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import World
from mmtrain.weights import start_folders


def claim_run_folder(request: TrainRequest, lock: FolderLock) -> FolderClaim:
    """Create the run's folder, take it by `lock`, and write a new run's recipe there; call this on rank 0 only.

    Raises UserError for a folder that a run is using, or with checkpoints of another run, and for `--resume` without a
    run; RemoteReadError for an object store (`train.checkpoint.remote`) that cannot be written to.
    """
    folder = request.run_dir
    stored = check_store(request.recipe, may_hold_run=request.resume, notify=_notify)
    holds_run = (folder / RECIPE_FILE).exists() or bool(find(folder / CHECKPOINTS_FOLDER))
    if request.resume and not request.may_be_new and not (holds_run or stored):
        raise UserError(f"--resume: {folder} holds no run; leave --resume out to start one there")
    with disk_errors_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
    claim = lock.claim(force=request.force_unlock)
    if not request.resume and find(folder / CHECKPOINTS_FOLDER):
        raise UserError(f"{folder} holds a run already: continue it with --resume, or choose another --run-dir")
    if foreign := foreign_drafts(folder / CHECKPOINTS_FOLDER, claim.run_id):
        _notify(
            f"unfinished checkpoints of other runs ({len(foreign)}) are left as they are: those runs may be alive; if "
            f"they are over, remove {', '.join(map(str, foreign))}"
        )
    with disk_errors_named(folder):
        if request.go_back is not None:
            run = SavingRun(claim.run_id, claim.require)
            fetch_run(request.recipe, folder, Ranks.alone(), run, notify=_notify, go_back=request.go_back)
            _notify(go_back(folder, request.go_back, run))
        if not keeps_files(request):
            write_whole(folder / RECIPE_FILE, dump_recipe(request.recipe))
        clear_failures(folder)
        if (folder / RUN_STATE_FILE).exists() and not read_run_state(folder):
            _notify(set_aside(folder / RUN_STATE_FILE, "the step is that of the checkpoint"))
        write_run_state(folder, "running", None if request.resume else 0)
    return claim


def _notify(text: str) -> None:
    print(f"mmtrain: {text}", file=sys.stderr, flush=True)


def share_step_targets(world: World, recipe: Recipe, plan: Plan, index: DataIndex) -> StepTargets:
    """Return rank 0's balancing targets on all ranks: another machine may lack its cost table, or have another one."""

    text: str = world.on_first(lambda: to_json(derive_step_targets(recipe, plan, index.lengths)))
    return from_json(StepTargets, text)


def describe_changed_facts(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Describe which facts of a run, by dotted path, are others than when its checkpoint was saved.

    What only the checkpoint has is a setting of an earlier version and changes nothing, except for an encoder that the
    recipe no longer names, and adapters.
    """
    removed = [key for key in before if (_is_encoder_position(key) or key in _OPTIONAL_FACTS) and key not in now]
    keys = [*removed, *now]
    changes = []
    for key in keys:
        if before.get(key) != now.get(key):
            hint = _GROUPING_VERSION_HINT if key == _GROUPING_VERSION else ""
            changes.append(f"{key}: {before.get(key)} then, {now.get(key)} now{hint}")
    return changes


_GROUPING_VERSION = "data.grouping_version"
_GROUPING_VERSION_HINT = " (mmtrain groups the same samples into other steps now: continue with the mmtrain of then)"
# Missing facts have a meaning: no LoRA; AdamW; version 1 of a grouping method; `train.steps` and not `train.epochs`.
_WHOLE_EPOCHS = "train.epochs is set"
_OPTIONAL_FACTS = ("train.lora", "train.optimizer.kind", _GROUPING_VERSION, _WHOLE_EPOCHS)


def _is_encoder_position(key: str) -> bool:
    """Return whether a fact says which of the named encoders this one is; there is one such fact for each of them."""
    return key.startswith("model.encoders.") and key.endswith(f".{POSITION_KEY}")


def resume_facts(recipe: Recipe, index: DataIndex) -> dict[str, object]:
    """Return what a resumed run must share with the saved one, because weights or the order of data depend on it.

    These are the settings that declare the effect `resume`, and the content of the data.
    """
    facts = select_for_saving(recipe, "resume")
    # As one text each: `restore_run` compares the facts of now, and would miss an entry that was removed.
    facts["train"]["freeze"] = " ".join(recipe.train.freeze)
    if recipe.train.lora is not None:
        facts["train"]["lora"] = text_for_saving(recipe.train.lora)
    if recipe.train.epochs is not None:  # then they end with steps; their number may change
        facts["train"][_WHOLE_EPOCHS.removeprefix("train.")] = True
    for folder in start_folders(recipe):  # it may move, but must hold the same model
        *sections, name = folder.keys
        reduce(getitem, sections, facts)[name] = folder.read().config_sha256
    facts["data"]["budgets"] = " ".join(f"{unit}={budget}" for unit, budget in sorted(recipe.data.budgets.items()))
    facts["data"]["isf"] = str(recipe.data.isf)
    version = GROUPING_VERSIONS[recipe.data.grouping]
    if version > 1:
        facts["data"][_GROUPING_VERSION.removeprefix("data.")] = version
    if recipe.data.sources[0].share is not None:  # the fingerprint covers shares; this names them
        facts["data"]["shares"] = str([source.share for source in recipe.data.sources])
    facts["data"] |= {
        "tokenizer_sha256": tokenizer_sha256(recipe.data.tokenizer_path, recipe.model.hf),
        "samples": len(index.samples),
        "fingerprint": index.fingerprint,
    }
    return facts


def introduce_run(
    console: Console,
    request: TrainRequest,
    chosen: ChosenPlan,
    index: DataIndex,
    first_step: int,
    attention: AttentionChoice,
    kernels: Iterable[KernelChoice],
) -> None:
    """Print plan, attention, kernels, data and folder of the run; make its records agree with `first_step` (from 0)."""
    plan = chosen.plan
    if changes := chosen.describe_change(request.run_dir):
        train = request.recipe.train
        as_before = (
            f"as before: global batch {train.num_groups}, the order of the data, the learning rate, and weights and "
            f"optimizer state of step {first_step}"
        )
        text = "\n  ".join(["the run goes on with another number of ranks:", *changes, as_before])
        console.print(text, style="yellow", highlight=False, soft_wrap=True)
    meshes = ", ".join(f"{name} {u.mesh_text}" for name, u in plan.units.items())
    if plan.placement == "replicated":
        meshes += f", {sharding_text(plan.shard, plan.keeps_weights)}"
    if plan.schedule.kind == "encoder_first":
        meshes += ", encoders first"
    console.print(
        f"{plan.placement} plan on {plan.world_size} ranks: {meshes}; predicted {plan.predicted.step_time_s:.3f} s "
        f"a step ({plan.predicted.cost_source})",
        highlight=False,
        soft_wrap=True,
    )
    console.print(attention.summary, highlight=False, soft_wrap=True)
    console.print(describe_kernels(kernels), highlight=False, soft_wrap=True)
    for warning in attention.warnings:
        console.print(warning, style="yellow", highlight=False, soft_wrap=True)
    if changed := describe_data_drift(plan, index.lengths):
        console.print(
            f"the plan was made for other data ({changed}): its prediction does not hold, and another plan may be "
            "faster; `mmtrain plan` makes one",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
    cached = f" known from the index cached in {index.cache_folder}" if index.cache_folder else ""
    aside = f", {len(index.quarantined)} set aside (see {QUARANTINE_FILE})" if index.quarantined else ""
    console.print(
        f"{len(index.samples)} samples{cached}{aside}; writing to {request.run_dir}", highlight=False, soft_wrap=True
    )
    for warning in index.warnings:
        console.print(warning, style="yellow", highlight=False, soft_wrap=True)
    if not console.quiet:
        _update_records(request, index, first_step)


def _update_records(request: TrainRequest, index: DataIndex, first_step: int) -> None:
    """Make the files that later steps add to say what is known before `first_step`, whatever they said."""
    quarantine, skipped = request.run_dir / QUARANTINE_FILE, request.run_dir / SKIPPED_STEPS_FILE
    write_run_state(request.run_dir, "running", first_step)
    cut_log(skipped, lambda entry: entry["step"] <= first_step, _notify, lambda entry: type(entry.get("step")) is int)
    cut_log(quarantine, lambda _: request.resume, _notify)
    # A resumed run keeps the samples that it could not decode before.
    write_quarantine(quarantine, dict.fromkeys((*index.quarantined, *read_quarantine(quarantine))))
