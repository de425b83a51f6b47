"""Print which placement is predicted to be the fastest over sizes of encoder and LLM, shares of images, and GPUs.

    python -m scripts.bench_placements [--encoders NAME...] [--llms NAME...] [--gpus N...]

Every row is a model on H100, planned by `auto` with little effort (`QUICK_BUDGET`). Other placements stand beside the
chosen one with how many times as long their best step is, and the nearest of them with the planner's reason. Nothing is
measured. Lengths are stated, not counted in a data set: a few samples hold many of the images.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from mmtrain.data import build_index
from mmtrain.errors import PlanError
from mmtrain.planning.artifact.plan import Alternative, Plan
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.planner import plan
from mmtrain.planning.space.budget import QUICK_BUDGET
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.recipe import load_recipe
from scripts.whatif_problems import WHAT_IF_FOLDER

ENCODERS = ("internvit-300m", "internvit-6b", "optimus-vit-22b")
LLMS = ("qwen2-7b", "qwen2-72b")
GPUS = (64, 256)
SAMPLES_PER_GPU = 2
# By the share of images: rows of `count,text,vision` with tiles of 1,024 patches, each of 256 LLM tokens.
LENGTHS: Mapping[str, Sequence[str]] = {
    "few": ("160,300,", "80,1200,", "60,150,1024", "6,80,8x1024"),
    "many": ("60,200,", "120,150,4x1024", "80,100,12x1024"),
}


@dataclass(frozen=True)
class Case:
    """One row: a model, its samples and a number of GPUs."""

    encoder: str
    llm: str
    images: str  # a name of `LENGTHS`
    num_gpus: int

    def plan(self, folder: Path) -> Plan | None:
        """Return the plan of `auto`; None where nothing fits."""
        file = folder / f"{self.images}.csv"
        file.write_text("\n".join(["count,text,vision", *LENGTHS[self.images]]) + "\n", encoding="utf-8")
        settings = {
            "model.vision.preset": self.encoder,
            "model.llm.preset": self.llm,
            "data.sources": f"[{{path: {file}}}]",
            "cluster.ranks": self.num_gpus,
            "train.global_batch": SAMPLES_PER_GPU * self.num_gpus,
        }
        recipe = load_recipe(
            WHAT_IF_FOLDER / "common.yaml", [f"{name}={value}" for name, value in settings.items()]
        ).recipe
        problem = formulate_problem(
            recipe,
            build_index(recipe).lengths,
            world_size=self.num_gpus,
            hardware=recipe.cluster.hardware,
            recipe_sha256="",
            request=PlanRequest(num_alternatives=20),
            budget=QUICK_BUDGET,
        )
        try:
            return plan(problem, budget=QUICK_BUDGET)
        except PlanError:
            return None


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoders", nargs="+", default=ENCODERS)
    parser.add_argument("--llms", nargs="+", default=LLMS)
    parser.add_argument("--gpus", nargs="+", type=int, default=GPUS)
    asked = parser.parse_args()
    columns = ["encoder", "LLM", "images", "GPUs", "fastest", "step", "MFU", "others", "why the next one is slower"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for num_gpus, llm, encoder, images in product(asked.gpus, asked.llms, asked.encoders, LENGTHS):
            print(row(Case(encoder, llm, images, num_gpus), Path(folder)), flush=True)


def row(case: Case, folder: Path) -> str:
    """Plan a case and return its row."""
    chosen = case.plan(folder)
    cells = [case.encoder, case.llm, case.images, str(case.num_gpus)]
    if chosen is None:
        return f"| {' | '.join([*cells, 'nothing fits', *[''] * 4])} |"
    step_s = chosen.predicted.step_time_s
    others = list(best_of_other_placements(chosen))
    ratios = [f"{other.placement} {seconds / step_s:.2f}" for other, seconds in others]
    reason = f"{others[0][0].placement}: {others[0][0].reason}" if others else "no other fits"
    cells += [summary(chosen), f"{step_s:.3g} s", f"{chosen.predicted.mfu:.1%}", ", ".join(ratios), reason]
    return f"| {' | '.join(cells)} |"


def summary(chosen: Plan) -> str:
    """Name the placement with what makes it up: shards, or the meshes."""
    llm = chosen.units["llm"]
    if chosen.shard is not None:
        return f"replicated, shard {chosen.shard}, dispatch {chosen.dispatch}"
    return f"{chosen.placement}, llm tp{llm.tp} pp{llm.pp} dp{llm.dp}"


def best_of_other_placements(chosen: Plan) -> Iterator[tuple[Alternative, float]]:
    """Yield the fastest alternative of each other placement, and its step, fastest first."""
    seen = {chosen.placement}
    for other in chosen.alternatives:
        if other.step_time_s is not None and other.placement not in seen:
            seen.add(other.placement)
            yield other, other.step_time_s


if __name__ == "__main__":
    main()
