"""What the planner's own choices bring: plans where it may choose, beside plans where the recipe forbids it.

python -m scripts.bench_choices                  # all cases, minutes; predicted on modelled costs
python -m scripts.bench_choices --only slices    # or: chunks, line
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from mmtrain.data import build_index as index
from mmtrain.plan import Plan
from mmtrain.plan.planner import plan
from mmtrain.recipe import load_recipe
from mmtrain.report.scaling import layout_text

WHOLE = ("parallel.vision.sp=false", "parallel.audio.sp=false", "parallel.llm.sp=false")
APART = ("parallel.placement=disaggregated",)
# Of each choice: a recipe of recipes/whatif, what is set for both plans, and what forbids the choice.
CASES: dict[str, list[tuple[str, tuple[str, ...], tuple[str, ...]]]] = {
    "slices": [
        ("internvl_26b", (), WHOLE[::2]),
        ("internvl_26b", ("cluster.memory_gib=40",), WHOLE[::2]),
        ("omnibal_yi_40b", (), WHOLE[::2]),
        ("qwen2_vl_72b", (), WHOLE[::2]),
        ("orchmllm_18b", (), WHOLE),
    ],
    "chunks": [
        ("optimus_14b", APART, ("parallel.vision.vpp=1",)),
        ("optimus_186b", APART, ("parallel.vision.vpp=1",)),
        ("orchmllm_18b", APART, ("parallel.vision.vpp=1", "parallel.audio.vpp=1")),
    ],
    "line": [
        ("orchmllm_18b", ("parallel.placement=unified",), ("parallel.llm.vpp=1",)),
        ("mmscale_7b", ("parallel.placement=unified",), ("parallel.llm.vpp=1",)),
    ],
}


def main() -> None:
    """Print a line for every plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(CASES))
    asked = parser.parse_args()
    for choice, cases in CASES.items():
        if asked.only not in (None, choice):
            continue
        for name, common, forbidden in cases:
            print(f"{choice}: {name} {' '.join(common)}", flush=True)
            for label, overrides in (("forbidden", (*common, *forbidden)), ("free", common)):
                print(f"  {label:9} {_told(name, overrides)}", flush=True)


def _told(name: str, overrides: Sequence[str]) -> str:
    start = time.process_time()
    found = _planned(name, overrides)
    peak = max(found.predicted.peak_memory_gib.values())
    again = sum(len(s.recompute) for u in found.units.values() for s in u.stages)
    sliced = "+".join(unit for unit, u in found.units.items() if u.sp) or "none"
    return (
        f"{found.predicted.step_time_s:.4f} s, {peak:.1f} GiB, {again} layers recomputed, sliced: {sliced}; "
        f"{layout_text(found)} ({time.process_time() - start:.0f} s)"
    )


def _planned(name: str, overrides: Sequence[str]) -> Plan:
    recipe = load_recipe(Path(f"recipes/whatif/{name}.yaml"), list(overrides)).recipe
    cluster = recipe.cluster
    assert cluster.ranks is not None, "what-if recipes name a cluster"
    return plan(
        recipe, index(recipe).lengths, world_size=cluster.ranks, hardware=cluster.hardware, recipe_sha256="", top=1
    )


if __name__ == "__main__":
    main()
