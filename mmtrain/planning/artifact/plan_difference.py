"""Compare two plans: what they were made for, where layers run and in what order, and what is predicted of them."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from mmtrain.planning.artifact.plan import Plan, StagePlan, UnitPlan
from mmtrain.program.ir.program import ranges_text

Part = Literal["setting", "made for", "layout", "predicted"]
Measure = Literal["", "s", "GiB", "share", "tokens/s"]  # the unit of a number
Value = str | int | float | bool | None
SHOWN_DIGITS_OF_SHA256 = 12


@dataclass(frozen=True)
class PlanDifference:
    """One thing in which two plans differ; None: a plan has no such thing, or does not say it."""

    part: Part
    what: str  # a setting by its dotted path, or `llm mesh`
    first: Value
    second: Value
    measure: Measure = ""

    @property
    def ratio(self) -> float | None:
        """The second number over the first; None for what has no measure."""
        is_number = isinstance(self.first, int | float) and isinstance(self.second, int | float)
        if not self.measure or not is_number or not self.first:
            return None
        return float(self.second or 0.0) / float(self.first)


@dataclass(frozen=True)
class _Fact:
    part: Part
    what: str
    value: Value
    measure: Measure = ""


def plan_differences(first: Plan, second: Plan) -> list[PlanDifference]:
    """Return everything in which two plans differ: settings, cluster and data, layout, prediction; empty if nothing.

    Settings are compared if both plans record them, else fingerprints of the recipes. Alternatives are not compared.
    """
    records_settings = bool(first.settings and second.settings)
    facts = [
        {(fact.part, fact.what): fact for fact in _facts(plan, records_settings=records_settings)}
        for plan in (first, second)
    ]
    differences = []
    for key in dict.fromkeys((*facts[0], *facts[1])):
        of_first, of_second = (of_plan.get(key) for of_plan in facts)
        fact = of_first or of_second
        assert fact is not None, "a key of one of them"
        values = None if of_first is None else of_first.value, None if of_second is None else of_second.value
        if values[0] != values[1]:
            differences.append(PlanDifference(fact.part, fact.what, *values, fact.measure))
    return sorted(differences, key=lambda difference: _PARTS.index(difference.part))


_PARTS: tuple[Part, ...] = ("setting", "made for", "layout", "predicted")


def _facts(plan: Plan, *, records_settings: bool) -> Iterator[_Fact]:
    """Yield what is compared of a plan."""
    if records_settings:
        yield from (_Fact("setting", key, value) for key, value in plan.settings.items())
    else:
        yield _Fact("made for", "fingerprint of the recipe", plan.recipe_sha256[:SHOWN_DIGITS_OF_SHA256])
    yield _Fact("made for", "hardware", plan.hardware)
    yield _Fact("made for", "ranks", plan.world_size)
    yield _Fact("made for", "precision", plan.precision)
    yield _Fact("made for", "costs", plan.predicted.cost_source)
    yield _Fact("made for", "samples", plan.data.samples)
    for name, tokens in plan.data.tokens.items():
        yield _Fact("made for", f"{name} tokens of a sample, mean", tokens)
    yield from _layout_facts(plan)
    yield from _predicted_facts(plan)


def _layout_facts(plan: Plan) -> Iterator[_Fact]:
    schedule = plan.schedule
    order = None
    if schedule.order is not None:  # thousands of actions: only whether they are the same is of interest
        order = f"explicit, {hashlib.sha256(repr(schedule.order).encode()).hexdigest()[:SHOWN_DIGITS_OF_SHA256]}"
    facts: dict[str, Value] = {
        "placement": plan.placement,
        "ranks that shard a copy": plan.shard,
        "weights gathered through a step": plan.keeps_weights,
        "dispatch": plan.dispatch,
        "schedule": schedule.kind,
        "order of actions": order,
        "pieces of blocks": schedule.pieces,
    }
    for name, unit in plan.units.items():
        facts |= {f"{name} {what}": value for what, value in _unit_facts(unit).items()}
        facts[f"{name} microbatches"] = schedule.num_microbatches[name]
    yield from (_Fact("layout", what, value) for what, value in facts.items())


def _unit_facts(unit: UnitPlan) -> dict[str, Value]:
    return {
        "mesh": unit.mesh_text,
        "vpp": unit.vpp,
        "ranks": ranges_text(unit.ranks) or "none",
        "layers by stage": _layer_counts(unit.stages),
        "recomputed layers": ranges_text([layer for stage in unit.stages for layer in stage.recompute]) or "none",
        "recomputed activation functions": unit.recompute_activation_function,
        "activations in host memory": unit.offload,
        "sp": unit.sp,
        "tp chunks": unit.tp_chunks,
        "cp method": unit.cp_method,
        "cp split": unit.cp_split,
        "exchange": unit.exchange,
    }


def _predicted_facts(plan: Plan) -> Iterator[_Fact]:
    predicted = plan.predicted
    yield _Fact("predicted", "step", predicted.step_time_s, "s")
    yield _Fact("predicted", "MFU", predicted.mfu, "share")
    yield _Fact("predicted", "LLM tokens/s", predicted.tokens_per_s_per_gpu * plan.world_size, "tokens/s")
    yield _Fact("predicted", "LLM tokens/s per rank", predicted.tokens_per_s_per_gpu, "tokens/s")
    peak_gib = max(predicted.peak_memory_gib.values(), default=None)
    yield _Fact("predicted", "memory of the fullest rank", peak_gib, "GiB")
    yield _Fact("predicted", "memory of a rank", predicted.memory_gib, "GiB")
    yield _Fact("predicted", "idle time", sum(predicted.bubbles.values()), "share")
    measured_s = None if plan.measured is None else plan.measured.step_time_s
    yield _Fact("predicted", "step as run by --measure", measured_s, "s")


def _layer_counts(stages: Sequence[StagePlan]) -> str:
    """Write `9 + 2 x 8` for three stages of 9, 8 and 8 layers."""
    counts = groupby(stage.layers[1] - stage.layers[0] for stage in stages)
    runs = [(count, len(list(run))) for count, run in counts]
    return " + ".join(str(count) if num == 1 else f"{num} x {count}" for count, num in runs)
