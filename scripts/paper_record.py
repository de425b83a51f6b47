"""Answer the runs of scripts/papers one by one, and keep the answers in scripts/papers/record.json.

The record is written after every run, so planning may be stopped and taken up again. An answer counts as long as the
recipe with its settings, the cluster and the question are the same; the planner that made it is recorded.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mmtrain.api.plans import make_plan
from mmtrain.balance import Grouping
from mmtrain.balance.grouping.summary import composition_shares
from mmtrain.data import DataIndex, build_index
from mmtrain.data.stream.count_groups import count_groups
from mmtrain.data.stream.recipe_summaries import compare_grouping_methods, score_isf_rounds, score_isf_thresholds
from mmtrain.errors import PlanError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.space.problem import Allocation, AllocationWatch, PlanRequest
from mmtrain.recipe import Recipe, load_recipe, recipe_fingerprint
from scripts.measurements import machine
from scripts.paper_batches import random_batch_figures, reordering_figures, stage_spread_figures
from scripts.paper_data import DATA_FOLDER, ROOT, Run

RECORD_FILE = DATA_FOLDER / "record.json"
SIGNIFICANT_DIGITS = 9  # of recorded figures: sums of floats differ in the last digits between machines
CLOCKED = {"seconds", "allocation_s", "inside_ms", "between_ms"}  # figures that a clock measures
Figures = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """The answer to one run: figures, or the text with which it was refused."""

    fingerprint: str
    date: str
    tree: str  # `planner_tree` of what answered
    machine: str
    seconds: float  # of one processor, so that a busy machine does not count
    figures: Figures = field(default_factory=dict)
    refused: str | None = None

    @property
    def lasting(self) -> tuple[str | None, Figures]:
        """What another planning of the same question must answer: all but what a clock measures."""
        return self.refused, _without_clocked(self.figures)


def _without_clocked(figures: Any) -> Any:
    if isinstance(figures, dict):
        return {key: _without_clocked(value) for key, value in figures.items() if key not in CLOCKED}
    return [_without_clocked(value) for value in figures] if isinstance(figures, list) else figures


class Record:
    """The answers by name of the run."""

    def __init__(self, file: Path = RECORD_FILE) -> None:
        self._file = file
        self.entries = self._saved()

    def _saved(self) -> dict[str, Entry]:
        saved = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else {}
        return {name: Entry(**fields) for name, fields in saved.items()}

    def entry(self, name: str, run: Run) -> Entry | None:
        """Return the answer to a run; None if there is none, or if the question has changed since."""
        entry = self.entries.get(name)
        return entry if entry is not None and entry.fingerprint == fingerprint(run) else None

    def add(self, name: str, entry: Entry) -> None:
        """Add an answer and save the file, with what another process has added meanwhile."""
        folder = os.open(self._file.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            self.entries = self._saved() | {name: entry}
            self._save()
        finally:
            os.close(folder)  # which unlocks it

    def _save(self) -> None:
        ordered = {key: dataclasses.asdict(self.entries[key]) for key in sorted(self.entries)}
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(self._file)


def fingerprint(run: Run) -> str:
    """Return what identifies a question: the recipe with its settings, its cluster, the kind and the rule of thumb."""
    recipe = _recipe_text(run.path, tuple(run.all_settings))
    text = f"{recipe} {sorted(run.all_settings)} {run.kind} {run.baseline}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _recipe_text(path: Path, settings: tuple[str, ...]) -> str:
    """Return the recipe's fingerprint and its cluster; pages ask for the same recipe several times."""
    recipe = load_recipe(path, settings).recipe
    return f"{recipe_fingerprint(recipe)} {recipe.cluster}"


def answer(run: Run) -> Entry:
    """Plan, group or count, and return figures, or the planner's refusal."""
    recipe = load_recipe(run.path, run.all_settings).recipe
    start_s = time.process_time()
    figures: Figures = {}
    refused = None
    try:
        figures = _ANSWERS[run.kind](recipe, build_index(recipe), run)
    except PlanError as error:
        refused = " ".join(str(error).split())
    return Entry(
        fingerprint(run),
        time.strftime("%Y-%m-%d"),
        planner_tree(),
        machine(),
        round(time.process_time() - start_s, 1),
        _rounded(figures),
        refused,
    )


def _plan(recipe: Recipe, index: DataIndex, request: PlanRequest) -> Plan:
    """Plan as `mmtrain plan` does, on the cluster that the recipe names."""
    assert recipe.cluster.ranks is not None, "recipes of papers name a cluster"
    return make_plan(recipe, index.lengths, request).plan


def _plan_figures(recipe: Recipe, index: DataIndex, run: Run) -> Figures:
    return _figures_of(_plan(recipe, index, PlanRequest(num_alternatives=0, baseline=run.baseline)))


def _figures_of(made: Plan) -> Figures:
    """Return what cells show of a plan."""
    predicted, balance = made.predicted, made.predicted.balance
    figures: Figures = {
        "placement": made.placement,
        "gpus": made.world_size,
        "meshes": {name: unit.mesh_text for name, unit in made.units.items()},
        "shard": made.shard,
        "recomputed": {name: unit.num_recomputed for name, unit in made.units.items()},
        "step_s": predicted.step_time_s,
        "mfu": predicted.mfu,
        "tokens_per_s_per_gpu": predicted.tokens_per_s_per_gpu,
        "peak_gib": max(predicted.peak_memory_gib.values()),
        "bubbles": predicted.bubbles,
        "efficiency": predicted.scheduling_efficiency,
        "coarse_efficiency": predicted.coarse_scheduling_efficiency,
        "seq_len": made.data.seq_len,
        "step_samples": made.data.step_samples,
    }
    if balance is not None:
        figures |= {
            "gpu_days_per_million_samples": balance.gpu_days_per_million_samples,
            "variances": [balance.parameter_variance, balance.layer_variance, balance.forward_variance],
            "sent_gib": balance.sent_gib,
            "memory_left_gib": balance.memory_left_gib,
            "dispatch_s": balance.dispatch_s,
            "phases": {name: load.over_mean for name, load in (balance.phases or {}).items()},
            "off_node": {name: dataclasses.asdict(volume) for name, volume in balance.off_node.items()},
        }
        if balance.shared is not None:
            figures["sp_ratio"] = balance.shared.sp_ratio
    return figures


def _allocation_figures(recipe: Recipe, index: DataIndex, run: Run) -> Figures:
    """Return the processor seconds in which ranks were allocated to units, and the plan."""
    allocations: list[Allocation] = []
    watch = AllocationWatch(time.process_time, allocations.append)
    made = _plan(recipe, index, PlanRequest(num_alternatives=0, allocation_watch=watch))
    allocated = allocations[-1] if allocations else None
    seconds = None if allocated is None else allocated.seconds
    return _figures_of(made) | {"allocation_s": seconds}


def _num_replicas(recipe: Recipe, grouping: Grouping) -> int:
    return recipe.parallel.llm.dp or grouping.row_size


def _grouping_figures(recipe: Recipe, index: DataIndex, run: Run) -> Figures:
    recipe = count_groups(recipe, index.lengths)
    grouping = Grouping.of(recipe.data, recipe.train.num_groups)
    replicas = _num_replicas(recipe, grouping)
    scores = compare_grouping_methods(index, grouping, recipe.train.seed, replicas, time.perf_counter)
    return {score.method: _score_figures(score) for score in scores}


def _isf_figures(recipe: Recipe, index: DataIndex, run: Run) -> Figures:
    recipe = count_groups(recipe, index.lengths)
    grouping = Grouping.of(recipe.data, recipe.train.num_groups)
    arguments = (index, grouping, recipe.train.seed, _num_replicas(recipe, grouping), time.perf_counter)
    rows = {"rounds": score_isf_rounds(*arguments), "thresholds": score_isf_thresholds(*arguments)}
    return {name: [_score_figures(row.score) for row in scores] for name, scores in rows.items()}


def _score_figures(score: Any) -> Figures:
    return {
        "mean_batch": score.mean_batch,
        "pad_ratio": score.pad_ratio or 0.0,
        "dist_ratio": score.dist_ratio,
        "seconds": score.seconds,
    }


def _composition_figures(recipe: Recipe, index: DataIndex, run: Run) -> Figures:
    shares = composition_shares(index.lengths)
    return {share.unit: {"mean": share.mean, "deviation": share.deviation, "p95": share.p95} for share in shares}


_ANSWERS: dict[str, Callable[[Recipe, DataIndex, Run], Figures]] = {
    "plan": _plan_figures,
    "allocation": _allocation_figures,
    "grouping": _grouping_figures,
    "isf": _isf_figures,
    "composition": _composition_figures,
    "batches": random_batch_figures,
    "spread": stage_spread_figures,
    "reordering": reordering_figures,
}


def _rounded(value: Any) -> Any:
    """Round every float inside."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def planner_tree() -> str:
    """Return git's hash of the folder mmtrain, which branches with the same planner share, and whether it changed."""
    found = _git("rev-parse", "--short=8", "HEAD:mmtrain")
    return f"{found}-dirty" if found and _git("status", "--porcelain", "--", "mmtrain") else found or "unknown"


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
