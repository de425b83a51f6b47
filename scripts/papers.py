"""Plan the models of published systems and print the published figure beside ours.

    python -m scripts.papers [--only RECIPE]

Only figures that a public page of the paper states are listed, with that page. "predicted" means that `plan` computes
the same quantity by the cost model, and no GPU has confirmed it; "not comparable" says why in the last column.
"""

import argparse
from dataclasses import dataclass
from functools import cache

from mmtrain.plan.artifact.plan import Plan
from mmtrain.plan.planner import plan
from mmtrain.plan.problem import PlanRequest
from scripts.whatif_problems import whatif_problem


@dataclass(frozen=True)
class PublishedFigure:
    """One figure of a paper, and the recipe that is nearest to what it was measured with."""

    recipe: str
    quantity: str
    value: str
    source: str
    is_comparable: bool
    note: str


FIGURES = (
    PublishedFigure(
        recipe="optimus_197b",
        quantity="ViT-22B and GPT-175B on 3,072 GPUs: faster than the baselines",
        value="20.5% to 21.3%",
        source="Optimus, arXiv 2408.03505, abstract",
        is_comparable=True,
        note="ours: `colocated` beside the `megatron` rule of thumb, both predicted by one cost model",
    ),
    PublishedFigure(
        recipe="mmscale_70b",
        quantity="MFU of the 72B multimodal LLM on 1,172 GPUs",
        value="54.7%",
        source="DistTrain (MMScale), arXiv 2408.04275, abstract",
        is_comparable=False,
        note="ours: 512 A100 and made-up lengths; the paper's GPUs are A800",
    ),
    PublishedFigure(
        recipe="mmscale_70b",
        quantity="throughput beside Megatron-LM",
        value="up to 2.2x",
        source="DistTrain (MMScale), arXiv 2408.04275, abstract",
        is_comparable=False,
        note="the abstract names no model; `megatron-stages`, its baseline, is listed only where one fits",
    ),
    PublishedFigure(
        recipe="internvl_26b",
        quantity="InternVL-Chat instruction tuning: speed-up over its open-source training code",
        value="about 1.8x",
        source="OmniBal, arXiv 2407.20761, abstract",
        is_comparable=False,
        note="that code pads and is not planned here; our rules of thumb have packed groups",
    ),
)


def main() -> None:
    """Print one row of a Markdown table for each figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help="a recipe of recipes/whatif")
    asked = parser.parse_args()
    print("| recipe | quantity | published | ours | kind | why they differ |")
    print("|---|---|---|---|---|---|")
    for figure in FIGURES:
        if asked.only in (None, figure.recipe):
            kind = "predicted" if figure.is_comparable else "not comparable"
            published = f"{figure.value} ({figure.source})"
            ours = describe(planned(figure.recipe))
            print(f"| `{figure.recipe}.yaml` | {figure.quantity} | {published} | {ours} | {kind} | {figure.note} |")


@cache
def planned(name: str) -> Plan:
    """Plan a recipe on the cluster that it names, with every loser explained."""
    return plan(whatif_problem(name, request=PlanRequest(explain=True)))


def describe(plan: Plan) -> str:
    """Return the chosen step and MFU, and the step of the best loser of each placement and of each rule of thumb."""
    predicted = plan.predicted
    parts = [
        f"{plan.world_size} {plan.hardware}: {plan.placement} {predicted.step_time_s:.2f} s, MFU {predicted.mfu:.1%}"
    ]
    labels: set[str] = {plan.placement}
    for loser in plan.alternatives:  # the fastest first
        rule, _, _ = loser.summary.rpartition(" baseline, ")
        label = f"{rule} rule of thumb" if rule else loser.placement
        if label not in labels and loser.step_time_s is not None:
            labels.add(label)
            parts.append(f"{label} {loser.step_time_s:.2f} s")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
