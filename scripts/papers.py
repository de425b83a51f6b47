"""Plan the models of published systems and print the published figure beside ours.

    python -m scripts.papers [--only RECIPE]

Figures have the public page of the paper that states them. Where a table of the paper has one that no such page shows,
ours is listed alone. "predicted" means that `plan` computes the same quantity by the cost model, and no GPU has
confirmed it; "not comparable" says why in the last column.
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
    """One figure of a paper, and the recipe that is nearest to what it was measured with.

    Without a value, the paper has the figure in a table that its public page does not show; ours is there to compare.
    """

    recipe: str
    quantity: str
    source: str
    note: str
    value: str | None = None
    is_comparable: bool = False


OPTIMUS = "Optimus, arXiv 2408.03505"
MMSCALE = "DistTrain (MMScale), arXiv 2408.04275"
ORCHMLLM = "OrchMLLM, arXiv 2503.23830"
OMNIBAL = "OmniBal, arXiv 2407.20761"
MADE_UP_LENGTHS = "the paper's GPUs and sizes of models, but lengths of our own"

FIGURES = (
    PublishedFigure(
        recipe="optimus_197b",
        quantity="ViT-22B and GPT-175B on 3,072 GPUs: faster than the baselines",
        value="20.5% to 21.3%",
        source=f"{OPTIMUS}, abstract",
        is_comparable=True,
        note="ours: `colocated` beside the `megatron` rule of thumb, both predicted by one cost model",
    ),
    *(
        PublishedFigure(
            recipe=f"papers/optimus_197b_{num_gpus}",
            quantity=f"the same batch on {num_gpus:,} GPUs",
            source=f"{OPTIMUS}, strong scaling",
            note="no value on a public page",
        )
        for num_gpus in (1536, 2048)
    ),
    *(
        PublishedFigure(
            recipe=f"papers/optimus_{size}",
            quantity=f"{encoder} and LLAMA-70B",
            source=f"{OPTIMUS}, weak scaling",
            note="no value on a public page; GPUs and batch are ours",
        )
        for size, encoder in (("82b", "ViT-11B"), ("92b", "ViT-22B"))
    ),
    PublishedFigure(
        recipe="papers/mmscale_70b",
        quantity="MFU of the 72B multimodal LLM on 1,172 GPUs",
        value="54.7%",
        source=f"{MMSCALE}, abstract",
        note=MADE_UP_LENGTHS,
    ),
    PublishedFigure(
        recipe="papers/mmscale_70b",
        quantity="throughput beside Megatron-LM",
        value="up to 2.2x",
        source=f"{MMSCALE}, abstract",
        note="the abstract names no model; `megatron-stages`, its baseline, is listed only where one fits",
    ),
    *(
        PublishedFigure(
            recipe=f"papers/mmscale_{size}",
            quantity=f"the {size.upper()} model on 1,296 GPUs",
            source=f"{MMSCALE}, evaluation",
            note=f"no value on a public page; {MADE_UP_LENGTHS}",
        )
        for size in ("7b", "13b")
    ),
    PublishedFigure(
        recipe="papers/orchmllm_84b",
        quantity="MFU of the 84B model on 2,560 GPUs",
        value="41.6%",
        source=f"{ORCHMLLM}, abstract",
        note=f"{MADE_UP_LENGTHS}; the paper's batch is not known here",
    ),
    *(
        PublishedFigure(
            recipe=f"papers/orchmllm_{size}",
            quantity=f"the {size.upper()} model on 2,560 GPUs",
            source=f"{ORCHMLLM}, evaluation",
            note="no value on a public page; lengths and batch are ours",
        )
        for size in ("10b", "18b")
    ),
    PublishedFigure(
        recipe="internvl_26b",
        quantity="InternVL-Chat instruction tuning: speed-up over its open-source training code",
        value="about 1.8x",
        source=f"{OMNIBAL}, abstract",
        note="that code pads and is not planned here; our rules of thumb have packed groups",
    ),
)


def main() -> None:
    """Print one row of a Markdown table for each figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help="a recipe of recipes/whatif, such as papers/mmscale_70b")
    asked = parser.parse_args()
    print("| recipe | quantity | published | ours | kind | why they differ |")
    print("|---|---|---|---|---|---|")
    for figure in FIGURES:
        if asked.only in (None, figure.recipe):
            kind = "predicted" if figure.is_comparable else "not comparable"
            published = f"{figure.value or 'not known here'} ({figure.source})"
            ours = describe(planned(figure.recipe))
            where = f"`recipes/whatif/{figure.recipe}.yaml`"
            print(f"| {where} | {figure.quantity} | {published} | {ours} | {kind} | {figure.note} |")


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
