"""Measure whether the plan ranked first is the fastest when run: three tiny models, every plan of two ranks.

`bench_plan --only measured` calls this. Plans use the shipped `cpu-core` table, which holds most of their layers, or a
table measured just before. Every mesh assignment of every placement runs with its best layer partition. All plans run
in the same two processes and alternate step by step, so that other work on the machine slows all of them alike. Leave
the machine idle all the same: other work slows messages more than GEMMs.
"""

import statistics
import tempfile
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmtrain.balance import SampleLengths
from mmtrain.data import build_index
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.data.synthetic.digits import prepare_digits
from mmtrain.errors import PlanError
from mmtrain.planning import Plan
from mmtrain.planning.artifact.plan import StepMeasurement
from mmtrain.planning.space.constraints import sizes_to_measure
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.recipe import Recipe
from mmtrain.runtime.profiling.measure_plans import LocalRanks, measure_plans
from mmtrain.runtime.profiling.profile import ProfileRequest, profile
from scripts.measurements import Report
from scripts.plans import fastest_plan

RANKS = 2
NEAR = 1.05  # of the fastest measured time: the limit for the plan ranked first
RATE, SPEAKERS, TAKES = 8_000, ("ann", "bob"), 12  # sample rate in Hz, speakers and takes of the made-up recordings
HEADS = {"heads": 4}
SIGHT: dict[str, Any] = {"patch": 8, "downsample": "pixel_shuffle", "merge": 2, "max_side": 8, **HEADS}
SOUND: dict[str, Any] = {"mel_bins": 80, "max_frames": 200, "downsample": 2, **HEADS}
TEXT: dict[str, Any] = {"vocab": 512, **HEADS}
# An encoder heavier than the LLM; units about even, whose many parameters make replicas dear; a heavy LLM, and a number
# of microbatches that replicas cannot share out.
MODELS: dict[str, dict[str, Any]] = {
    "vision + llm": {
        "vision": {"layers": 4, "hidden": 192, "ffn": 512, **SIGHT},
        "llm": {"layers": 2, "hidden": 128, "ffn": 320, **TEXT},
    },
    "audio + llm": {
        "audio": {"layers": 4, "hidden": 192, "ffn": 512, **SOUND},
        "llm": {"layers": 4, "hidden": 256, "ffn": 640, "kv_heads": 2, **TEXT},
    },
    "vision + audio + llm": {
        "vision": {"layers": 2, "hidden": 128, "ffn": 256, **SIGHT},
        "audio": {"layers": 2, "hidden": 128, "ffn": 256, **SOUND},
        "llm": {"layers": 4, "hidden": 128, "ffn": 320, **TEXT},
    },
}
GROUPS = {"vision + llm": 8, "audio + llm": 4, "vision + audio + llm": 5}  # LLM microbatches in a step


@dataclass(frozen=True)
class Ranked:
    """A plan and the median time of its steps."""

    plan: Plan
    seconds: float


def ranking(report: Report, only: str | None, folder: Path | None, costs: Path | None, rounds: int) -> None:
    """Print both rankings for each model; data and cost tables stay in `folder` for the next time.

    costs: the cost table, a file or the name of a shipped one; None measures the layers.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder or Path(scratch)
        if not (folder / "digits").exists():
            make_data(folder)
        good = [compared(report, name, folder, costs, rounds) for name in MODELS if only in (None, name)]
    report.targets()
    label = f"models whose plan ranked first is within {NEAR - 1:.0%} of the fastest"
    report.target(label, sum(good), len(good), at_least=True)
    report.line()


def compared(report: Report, name: str, folder: Path, costs: Path | None, rounds: int) -> bool:
    """Run all plans of a model side by side; return whether the plan ranked first is near the fastest."""
    settings = recipe(name, folder)
    index = build_index(settings)
    table = costs or folder / f"{name.replace(' ', '')}.json"
    if costs is None and not table.exists():
        print(f"{name}: measuring layers", flush=True)
        sizes = sizes_to_measure(settings, RANKS)
        profile(ProfileRequest(settings, "cpu-core", RANKS, sizes, index.lengths)).table.save(table)
    settings = settings.model_copy(update={"cluster": settings.cluster.model_copy(update={"costs": table})})
    plans = every_plan(settings, index.lengths)
    print(f"{name}: {rounds} rounds of {len(plans)} plans", flush=True)
    steps = [run.seconds for run in measure_plans(settings, plans, LocalRanks(), rounds)]
    measured = [Ranked(p, statistics.median(seconds)) for p, seconds in zip(plans, steps, strict=True)]
    report.table(f"{name}, {rounds} rounds", "measured", "ranked", "ms", "predicted ms", "ratio")
    in_order = sorted(measured, key=lambda ranked: ranked.seconds)
    for place, ranked in enumerate(in_order):
        predicted = ranked.plan.predicted.step_time_s
        ms, predicted_ms = 1e3 * ranked.seconds, 1e3 * predicted
        figures = f"{ms:.1f}", f"{predicted_ms:.1f}", f"{predicted / ranked.seconds:.2f}"
        report.row(_sizes(ranked.plan), place + 1, plans.index(ranked.plan) + 1, *figures)
    ratio = measured[0].seconds / in_order[0].seconds
    report.row(f"the plan ranked first takes {ratio:.3f} of the fastest measured", *[""] * 5)
    report.line()
    return ratio <= NEAR


def _sizes(candidate: Plan) -> str:
    counts = candidate.schedule.num_microbatches
    units = (f"{n} tp{u.tp} pp{u.pp} vpp{u.vpp} dp{u.dp} mb{counts[n]}" for n, u in candidate.units.items())
    return f"{candidate.placement}: {', '.join(units)}"


def every_plan(settings: Recipe, lengths: SampleLengths) -> list[Plan]:
    """Return every plan of two ranks: the ranked ones, then those of placements that the ranking lacks."""
    plans: list[Plan] = []

    def as_predicted(candidates: Sequence[Plan]) -> list[StepMeasurement]:
        plans.extend(candidates)
        return [StepMeasurement(candidate.predicted.step_time_s) for candidate in candidates]

    for placement in ("auto", "unified", "disaggregated", "colocated"):
        if placement not in {candidate.placement for candidate in plans}:
            parallel = settings.parallel.model_copy(update={"placement": placement})
            restricted = settings.model_copy(update={"parallel": parallel})
            try:
                request = PlanRequest(num_alternatives=1_000, measure=as_predicted)
                fastest_plan(restricted, lengths, RANKS, "cpu-core", request)
            except PlanError as error:
                print(f"  {placement}: {str(error).splitlines()[0]}")
    return plans


def recipe(name: str, folder: Path) -> Recipe:
    """Make a recipe of the model on pictures, on recordings, or on both in turns."""
    model = MODELS[name]
    kinds = [kind for kind, unit in (("demo", "vision"), ("digits", "audio")) if unit in model]
    return Recipe.model_validate(
        {
            "name": "ranking",
            "model": model,
            "data": {
                "sources": [{"path": folder / kind / "train.json"} for kind in kinds],
                "tokenizer": folder / kinds[-1] / "tokenizer.json",  # that of the recordings knows both
                "seq_len": 320,
                "image": {"min_pixels": 256, "max_pixels": 2304},
                "audio": {"max_seconds": 2.0},
            },
            "cluster": {"hardware": "cpu-core", "ranks": RANKS},
            "train": {"steps": 100, "global_batch": GROUPS[name], "seed": 1, "optimizer": {"lr": 1e-3}},
        }
    )


def make_data(folder: Path) -> None:
    """Make the demo's pictures, and recordings of noise as long as a spoken digit."""
    generate_demo(folder / "demo", seed=0, train=1_000, heldout=10)
    recordings = folder / "recordings"
    rng = np.random.default_rng(0)
    recordings.mkdir(exist_ok=True)
    for digit in range(10):
        for speaker in SPEAKERS:
            for take in range(TAKES):
                noise = rng.integers(-9_000, 9_000, int(RATE * rng.uniform(0.25, 0.8)), dtype=np.int16)
                with wave.open(str(recordings / f"{digit}_{speaker}_{take}.wav"), "wb") as file:
                    file.setnchannels(1)
                    file.setsampwidth(2)
                    file.setframerate(RATE)
                    file.writeframes(noise.tobytes())
    prepare_digits(recordings, folder / "digits", seed=0, sequences=1_000)
