"""What a change of the planner chooses otherwise: every what-if recipe, planned with two trees.

    git worktree add BEFORE COMMIT
    python -m scripts.bench_choices BEFORE             # against this checkout; or AFTER, another one
    python -m scripts.bench_choices BEFORE --only mmscale --only optimus_14b

All recipes together take both planners about half an hour of a core. Step times are those that each tree predicts, so a
row also changes where costs do. Both trees plan a recipe one after the other, so that both meet the same machine;
seconds are those of processors.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

from scripts.compare_plans import ROOT, plan
from scripts.measurements import arguments, start

RECIPES = ("recipes/whatif/*.yaml", "recipes/whatif/papers/*.yaml")
PARTS = ("common", "omnibal", "optimus")  # that recipes extend; papers/optimus.yaml and others are none


def recipes(tree: Path) -> list[str]:
    """Return the paths in `tree` of the recipes that can be planned."""
    found = sorted(path for pattern in RECIPES for path in tree.glob(pattern))
    return [str(path.relative_to(tree)) for path in found if path.stem not in PARTS]


def layout(plan: dict[str, Any]) -> str:
    """Describe in a line the sizes that a plan chose."""
    if "code" in plan:
        return f"none: {plan['reason'].splitlines()[0]}" if plan["reason"] else "none"
    microbatches = plan["schedule"]["num_microbatches"]
    units = (
        f"{name} tp{unit['tp']} pp{unit['pp']} dp{unit['dp']} mb{microbatches.get(name, '-')}"
        for name, unit in plan["units"].items()
    )
    return f"{plan['placement']}: {', '.join(units)}"


def step_s(plan: dict[str, Any]) -> float | None:
    """Return the predicted seconds of a step; None without a plan."""
    return None if "code" in plan else float(plan["predicted"]["step_time_s"])


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--only", action="append", default=[], help="recipes whose path holds this; repeatable")
    options = parser.parse_args()
    trees = options.before.resolve(), options.after.resolve()
    names = [name for name in recipes(trees[1]) if (trees[0] / name).exists()]
    if options.only:
        names = [name for name in names if any(words in name for words in options.only)]
    report = start("Choices of the planner before and after", options)
    report.table("recipe", "step before, s", "after", "ratio", "planning before, s", "after", "layout")
    ratios, seconds = [], [0.0, 0.0]
    for name in names:
        (old, old_s), (new, new_s) = (plan(tree, [name]) for tree in trees)
        times, layouts = (step_s(old), step_s(new)), (layout(old), layout(new))
        ratio = "-"
        if times[0] is not None and times[1] is not None:
            ratios.append(times[1] / times[0])
            ratio = f"{ratios[-1]:.3f}"
        texts = ["-" if time is None else f"{time:.4g}" for time in times]
        change = "same" if layouts[0] == layouts[1] else " -> ".join(layouts)
        report.row(name.removeprefix("recipes/whatif/"), *texts, ratio, f"{old_s:.1f}", f"{new_s:.1f}", change)
        seconds = [seconds[0] + old_s, seconds[1] + new_s]
    report.line()
    if ratios:
        report.line(f"Ratio of step times: median {statistics.median(ratios):.3f}, worst {max(ratios):.3f}.")
    report.line(f"Planning all: {seconds[0]:.0f} -> {seconds[1]:.0f} processor seconds.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
