"""Train miniatures of the papers' main experiments, and record what they take beside what was predicted.

    python -m scripts.paper_miniatures                         all of scripts/papers/miniatures.yaml
    python -m scripts.paper_miniatures --only omnibal mmscale  some of them
    python -m scripts.paper_miniatures --plans                 plans and predictions alone, nothing is recorded

`mmtrain profile` measures costs, from which each case is planned and the steps that it trains are simulated. Then
`mmtrain train` runs the cases in turn, `--rounds` times, with a core for each of two ranks, and a slow link for
collectives. Cases of more ranks are rehearsed: program, messages and launcher are those of training, and stand-ins
take the time that layers have by the measured costs. Results: scripts/papers/miniatures.json.
"""

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mmtrain.api.plans import make_plan
from mmtrain.api.recipe_index import index_recipe
from mmtrain.api.simulated_steps import step_batches
from mmtrain.balance import SampleLengths
from mmtrain.costs import TokenLoad, model_flops
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning import Plan
from mmtrain.planning.evaluate.simulate_plan import plan_timing, simulate_plan
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.report import read_metrics
from mmtrain.report.scaling import layout_text
from scripts.linked_ranks import MEGABYTES_PER_S, link_ranks
from scripts.measurements import machine, set_options
from scripts.miniature_data import write_data
from scripts.paper_data import ROOT
from scripts.paper_miniatures_page import DATA_FILE, FIGURE, RECORD_FILE, miniatures_figure
from scripts.paper_record import planner_tree
from scripts.replayed_steps import replay_steps

PAPER_RECIPES = ROOT / "recipes" / "whatif" / "papers"
NUM_TIMED_RANKS = 2
NUM_SAMPLES = 1200
NUM_WARM_UP = 1  # steps at the beginning of a run that are not counted
NUM_REHEARSED = 2  # steps of each case that are rehearsed


@dataclass(frozen=True)
class Miniature:
    """A small form of a paper's experiment, with its files in a folder of its own."""

    name: str
    fields: Mapping[str, Any]  # of the data file
    folder: Path

    @property
    def ranks(self) -> int:
        """Ranks that are planned for."""
        return int(self.fields.get("ranks", NUM_TIMED_RANKS))

    @property
    def recipe_file(self) -> Path:
        """Where `prepare` writes the recipe."""
        return self.folder / "recipe.yaml"

    @property
    def costs_file(self) -> Path:
        """Where `measure_costs` writes what this machine takes."""
        return self.folder / "costs.json"

    def settings(self, case: Mapping[str, Any], num_steps: int | None = None) -> list[str]:
        """Return the `--set`s of a case; `num_steps`: to train, and without which costs need not have been measured."""
        settings = [*self.fields.get("settings", ()), *case["settings"], f"cluster.ranks={self.ranks}"]
        if self.costs_file.exists():
            settings.append(f"cluster.costs={self.costs_file}")
        return settings if num_steps is None else [*settings, f"train.steps={num_steps}"]


def load_miniatures(folder: Path, file: Path = DATA_FILE) -> list[Miniature]:
    """Read the data file; each miniature gets a folder inside `folder`, shared with the one that it extends."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    miniatures = []
    for name, own in content["miniatures"].items():
        base = content["miniatures"][own["extends"]] if "extends" in own else {"recipe": content["shared"]}
        fields = merged(base, own)
        if "extends" in own:
            fields["recipe"] = merged(content["shared"], fields["recipe"])
        miniatures.append(Miniature(name, fields, folder / own.get("extends", name)))
    return miniatures


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the entries of `over`, level by level."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def prepare(miniature: Miniature) -> None:
    """Write data and recipe, unless a miniature with the same folder has done so."""
    if miniature.recipe_file.exists():
        return
    lengths = index_recipe(paper_recipe(miniature)).lengths
    data = miniature.folder / "data"
    write_data(data, kept_units(lengths, miniature), miniature.fields["scale"], NUM_SAMPLES)
    files = {"sources": [{"path": str(data / "train.json")}], "tokenizer": str(data / "tokenizer.json")}
    recipe = merged(miniature.fields["recipe"], {"data": files})
    miniature.recipe_file.write_text(yaml.safe_dump(recipe), encoding="utf-8")


def kept_units(lengths: SampleLengths, miniature: Miniature) -> SampleLengths:
    """Return a paper's lengths without the items of units that the miniature does not have, such as a generator."""
    items = {unit: items for unit, items in lengths.items.items() if unit in miniature.fields["recipe"]["model"]}
    return replace(lengths, items=items)


def paper_recipe(miniature: Miniature) -> Recipe:
    """Return the recipe of the experiment that the miniature makes small."""
    return load_recipe(PAPER_RECIPES / f"{miniature.fields['paper']}.yaml").recipe


def unit_ratios(recipe: Recipe) -> dict[str, dict[str, float]]:
    """Return for each unit beside the LLM its FLOPs over the LLM's, and its items a sample."""
    lengths, shape = index_recipe(recipe).lengths, build_model_shape(recipe)
    llm = model_flops(shape, {"llm": TokenLoad.of(np.asarray(lengths.tokens))})
    return {
        unit: {
            "flops": model_flops(shape, {unit: TokenLoad.of(np.asarray(items.tokens))}) / llm,
            "items": len(items.tokens) / len(lengths.tokens),
        }
        for unit, items in lengths.items.items()
    }


def measure_costs(miniature: Miniature) -> None:
    """Let `mmtrain profile` measure the miniature's layers and messages on this machine."""
    words = ["profile", str(miniature.recipe_file), "--tp", "1", "--out", str(miniature.costs_file)]
    run_mmtrain([*words, *set_options([f"cluster.ranks={NUM_TIMED_RANKS}"])])


def run_mmtrain(words: Sequence[str]) -> None:
    """Run the command line in this process, whose ranks are forked from it, without what it prints."""
    from mmtrain.cli.app import app

    with open(os.devnull, "w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing):
        app(list(words), standalone_mode=False)


def train(miniature: Miniature, case: Mapping[str, Any], plan_file: Path, num_steps: int) -> dict[str, Any]:
    """Train a case as two ranks on a core each; return what its steps took, and how much of the cores others had."""
    run = miniature.folder / "run"
    settings = miniature.settings(case, num_steps)
    load_before = os.getloadavg()[0]
    words = ["train", str(miniature.recipe_file), *set_options(settings), "--plan", str(plan_file)]
    run_mmtrain([*words, "--run-dir", str(run)])
    usage = [json.loads((ranks_folder(miniature) / f"rank-{rank}.json").read_text()) for rank in range(NUM_TIMED_RANKS)]
    steps = list(read_metrics(run))[NUM_WARM_UP:]
    shutil.rmtree(run)
    recipe = load_recipe(miniature.recipe_file, settings).recipe
    plan = Plan.model_validate_json(plan_file.read_text(encoding="utf-8"))
    batches = step_batches(recipe, index_recipe(recipe), plan, range(NUM_WARM_UP + 1, num_steps + 1))
    replayed = replay_steps(recipe, plan, batches, ranks_folder(miniature), NUM_WARM_UP)
    return {
        "core_s": [round(seconds, 4) for seconds in replayed.step_s],
        "kinds": rounded(replayed.kinds),
        "wall_s": [round(step["step_time_s"], 4) for step in steps],
        "loss": [round(step["loss"], 6) for step in steps],
        "waited_share": [round(of["waited_s"] / (of["ran_s"] + of["waited_s"]), 3) for of in usage],
        "load": [round(load_before, 2), round(os.getloadavg()[0], 2)],
    }


def ranks_folder(miniature: Miniature) -> Path:
    """Return where ranks record their actions."""
    return miniature.folder.parent


def plan_case(miniature: Miniature, case: Mapping[str, Any], num_steps: int, plan_file: Path) -> dict[str, Any]:
    """Plan a case, save the plan, and return it in words with the predicted seconds of the steps that count."""
    recipe = load_recipe(miniature.recipe_file, miniature.settings(case, num_steps)).recipe
    index = index_recipe(recipe)
    plan = make_plan(recipe, index.lengths, PlanRequest(num_alternatives=1, baseline=case.get("baseline"))).plan
    plan_file.write_text(plan.model_dump_json(), encoding="utf-8")
    batches = step_batches(recipe, index, plan, range(NUM_WARM_UP + 1, num_steps + 1))
    timelines = [simulate_plan(recipe, plan, batch) for batch in batches]
    return {
        "name": case["name"],
        "settings": list(case["settings"]),
        "baseline": case.get("baseline"),
        "layout": layout_text(plan),
        "recomputed": {name: unit.num_recomputed for name, unit in plan.units.items()},
        "peak_gib": round(max(plan.predicted.peak_memory_gib.values()), 3),
        "samples": [len(batch.sample_id) for batch in batches],
        "predicted_s": [round(timeline.step_time_s, 4) for timeline in timelines],
    }


def rehearse_case(miniature: Miniature, case: Mapping[str, Any], plan_file: Path) -> list[float]:
    """Return what steps with stand-ins take over what the simulator says, for one replica group of the plan.

    The time that this machine takes for the actions themselves is left out.
    """
    from tests.rehearsal.rehearse import RehearsalRequest, rehearse

    recipe = load_recipe(miniature.recipe_file, miniature.settings(case, NUM_WARM_UP + NUM_REHEARSED)).recipe
    plan = Plan.model_validate_json(plan_file.read_text(encoding="utf-8"))
    numbers = range(NUM_WARM_UP + 1, NUM_WARM_UP + NUM_REHEARSED + 1)
    batches = step_batches(recipe, index_recipe(recipe), plan, numbers)
    results = [rehearse(RehearsalRequest(plan, plan_timing(recipe, plan, batch), num_steps=1)) for batch in batches]
    return [round(result.scheduled_s[0] / result.predicted_s, 4) for result in results]


def measure(miniature: Miniature, options: argparse.Namespace) -> None:
    """Plan and run all cases of a miniature, and record them; rounds of the same plans are added to those before."""
    prepare(miniature)
    if not options.modelled and not miniature.costs_file.exists():
        measure_costs(miniature)
    is_timed = miniature.ranks == NUM_TIMED_RANKS
    num_steps = NUM_WARM_UP + (options.steps if is_timed else NUM_REHEARSED)
    ratios = {
        "paper": unit_ratios(paper_recipe(miniature)),
        "miniature": unit_ratios(load_recipe(miniature.recipe_file).recipe),
    }
    cases = miniature.fields["cases"]
    plan_files = [miniature.folder / f"plan-{miniature.ranks}-{number}.json" for number in range(len(cases))]
    rows = [plan_case(miniature, case, num_steps, file) for case, file in zip(cases, plan_files, strict=True)]
    print(miniature.name, ratios, flush=True)
    for row in rows:
        print(f"{miniature.name}: {row['name']}: {row['layout']}, {seconds_per_sample(row) * 1e3:.1f} ms a sample, "
              f"peak {row['peak_gib']} GiB, {row['recomputed']}", flush=True)  # fmt: skip
    header = {"paper": miniature.fields["paper"], "title": miniature.fields["title"], "ranks": miniature.ranks}
    about = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "tree": planner_tree()}
    part = {**header, **about, "ratios": rounded(ratios), "cases": rows}
    if options.plans:
        return
    if is_timed:
        keep_rounds(part, miniature.name, options.record)
        for _ in range(options.rounds):
            taken = [train(miniature, case, file, num_steps) for case, file in zip(cases, plan_files, strict=True)]
            for row, each in zip(rows, taken, strict=True):
                row.setdefault("rounds", []).append(each)
            save(miniature.name, part, options.record)
    else:
        for case, file, row in zip(cases, plan_files, rows, strict=True):
            row["rehearsed_ratio"] = rehearse_case(miniature, case, file)
        save(miniature.name, part, options.record)


def keep_rounds(part: Mapping[str, Any], name: str, file: Path) -> None:
    """Take the rounds of the record over where all cases are predicted as they were: same plans, same costs."""
    saved = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"miniatures": {}}
    old = saved["miniatures"].get(name, {"cases": []})["cases"]
    if [row["predicted_s"] for row in old] == [row["predicted_s"] for row in part["cases"]]:
        for row, before in zip(part["cases"], old, strict=True):
            row["rounds"] = before["rounds"]


def seconds_per_sample(row: Mapping[str, Any]) -> float:
    """Return what a case is predicted to take for a sample."""
    return float(sum(row["predicted_s"]) / sum(row["samples"]))


def rounded(value: Any) -> Any:
    """Round every float inside to four digits."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    """Measure the chosen miniatures; save each when it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of miniatures")
    parser.add_argument("--plans", action="store_true", help="plan, and run nothing")
    parser.add_argument("--modelled", action="store_true", help="plan by the hardware preset, measure no costs")
    parser.add_argument("--rounds", type=int, default=3, help="times that every case is trained")
    parser.add_argument("--steps", type=int, default=6, help="steps that count in a run")
    parser.add_argument("--file", type=Path, default=DATA_FILE, help="that says which miniatures there are")
    parser.add_argument("--record", type=Path, default=RECORD_FILE, help="file to write")
    parser.add_argument("--folder", type=Path, help="to keep data, costs and plans in")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        link_ranks(folder)
        for miniature in load_miniatures(folder, options.file):
            if options.only and miniature.name not in options.only:
                continue
            measure(miniature, options)


def save(name: str, part: Mapping[str, Any], file: Path) -> None:
    """Put a miniature's part into the record, and draw the page's figure again."""
    record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"miniatures": {}}
    record["megabytes_per_s"] = MEGABYTES_PER_S
    parts = record["miniatures"] | {name: part}
    names = yaml.safe_load(DATA_FILE.read_text(encoding="utf-8"))["miniatures"]
    record["miniatures"] = {name: parts[name] for name in names if name in parts}
    file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if file == RECORD_FILE:
        FIGURE.write_text(miniatures_figure(record), encoding="utf-8")


if __name__ == "__main__":
    main()
