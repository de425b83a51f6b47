"""Measure what free choices of the planner gain: plan each case freely, and again with one choice forbidden.

python -m scripts.bench_choices                  # all cases, minutes; predicted on modelled costs
python -m scripts.bench_choices --only sequence-parallel    # or: encoder-chunks, interleaving
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from mmtrain.data import build_index as index
from mmtrain.planning import Plan
from mmtrain.planning.planner import plan_recipe
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.recipe import load_recipe
from mmtrain.report.scaling import layout_text

NO_SEQUENCE_PARALLEL = ("parallel.vision.sp=false", "parallel.audio.sp=false", "parallel.llm.sp=false")
DISAGGREGATED = ("parallel.placement=disaggregated",)
# For each choice: a recipe of recipes/whatif, settings of both plans, and the settings that forbid the choice.
CASES: dict[str, list[tuple[str, tuple[str, ...], tuple[str, ...]]]] = {
    "sequence-parallel": [
        ("internvl_26b", (), NO_SEQUENCE_PARALLEL[::2]),
        ("internvl_26b", ("cluster.memory_gib=40",), NO_SEQUENCE_PARALLEL[::2]),
        ("omnibal_yi_40b", (), NO_SEQUENCE_PARALLEL[::2]),
        ("qwen2_vl_72b", (), NO_SEQUENCE_PARALLEL[::2]),
        ("orchmllm_18b", (), NO_SEQUENCE_PARALLEL),
    ],
    "encoder-chunks": [
        ("optimus_14b", DISAGGREGATED, ("parallel.vision.vpp=1",)),
        ("optimus_186b", DISAGGREGATED, ("parallel.vision.vpp=1",)),
        ("orchmllm_18b", DISAGGREGATED, ("parallel.vision.vpp=1", "parallel.audio.vpp=1")),
    ],
    "interleaving": [
        ("orchmllm_18b", ("parallel.placement=unified",), ("parallel.llm.vpp=1",)),
        ("mmscale_7b", ("parallel.placement=unified",), ("parallel.llm.vpp=1",)),
    ],
}


def main() -> None:
    """Print one line for each plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(CASES))
    asked = parser.parse_args()
    for choice, cases in CASES.items():
        if asked.only not in (None, choice):
            continue
        for name, common, forbidden in cases:
            print(f"{choice}: {name} {' '.join(common)}", flush=True)
            for label, overrides in (("forbidden", (*common, *forbidden)), ("free", common)):
                print(f"  {label:9} {_summary(name, overrides)}", flush=True)


def _summary(name: str, overrides: Sequence[str]) -> str:
    start = time.process_time()
    chosen = _planned(name, overrides)
    peak = max(chosen.predicted.peak_memory_gib.values())
    num_recomputed = sum(len(stage.recompute) for unit in chosen.units.values() for stage in unit.stages)
    sequence_parallel = "+".join(name for name, unit in chosen.units.items() if unit.sp) or "none"
    return (
        f"{chosen.predicted.step_time_s:.4f} s, {peak:.1f} GiB, {num_recomputed} layers recomputed, "
        f"sequence-parallel: {sequence_parallel}; "
        f"{layout_text(chosen)} ({time.process_time() - start:.0f} s)"
    )


def _planned(name: str, overrides: Sequence[str]) -> Plan:
    recipe = load_recipe(Path(f"recipes/whatif/{name}.yaml"), list(overrides)).recipe
    cluster = recipe.cluster
    assert cluster.ranks is not None, "what-if recipes name a cluster"
    return plan_recipe(
        recipe,
        index(recipe).lengths,
        world_size=cluster.ranks,
        hardware=cluster.hardware,
        recipe_sha256="",
        request=PlanRequest(num_alternatives=1),
    )


if __name__ == "__main__":
    main()
