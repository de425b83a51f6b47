"""The planner: exactness against trying everything, against a mixed-integer program, and seconds of planning.

    python -m scripts.bench_plan                    # all but the measured part; processor seconds, one core
    python -m scripts.bench_plan --only speed       # or: exact, larger, milp; --first 5 --instances 5 for some of them
    python -m scripts.bench_plan --only sizes       # seconds of the command by number of GPUs
    python -m scripts.bench_plan --only measured    # runs plans of three tiny models on two ranks here, for minutes

`exact`, `larger` and `milp` need the tools of the tests, so run it from the root of a checkout.
"""

import argparse
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from mmtrain.balance import ItemLengths, SampleLengths
from mmtrain.planning import Plan
from mmtrain.planning.planner import plan_recipe
from mmtrain.planning.space.candidate import EQUAL_STEP_TIME_RATIO
from mmtrain.recipe.settings.schema import Recipe
from scripts.whatif_problems import WHAT_IF_FOLDER
from tests.planning import factory
from tests.planning.exhaustive import (
    Instance,
    by_placement,
    fastest_found,
    larger_instance,
    least_step,
    random_instance,
)
from tests.planning.milp import pipeline, solve

# Ranks, global batch, and GiB of a rank where it is not the hardware's; the first is what the others are compared with.
SIZES = (
    (16, 128, None),
    (7, 128, None),
    (8, 128, None),
    (13, 128, None),
    (16, 64, None),
    (16, 61, None),
    (16, 128, 4),
    (64, 128, None),
    (97, 128, None),
    (256, 256, None),
    (1024, 1024, None),
)
CLOSE = 1.01  # of the best: how far the search may be behind where it does not try everything

TILE, FEATURES = (
    1025,
    256,
)  # an image tile of 448 x 448, in patches of 14 and a class token, and what the LLM sees of it


def main() -> None:
    """Print the parts named by `--only`, or all but the measured one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("exact", "larger", "milp", "speed", "sizes", "measured"))
    parser.add_argument("--first", type=int, default=0, help="number of the first random instance")
    parser.add_argument("--instances", type=int, help="random instances: of `exact` 200, of `larger` 20")
    parser.add_argument("--model", help="of `measured`, this one alone, like `audio + llm`")
    parser.add_argument("--rounds", type=int, default=15, help="of `measured`: steps of each plan")
    parser.add_argument("--costs", type=Path, default=Path("cpu-core"), help="of `measured`: the table to plan by")
    parser.add_argument("--profile", action="store_true", help="of `measured`: measure layers and plan by that instead")
    parser.add_argument("--folder", type=Path, help="of `measured`: keeps data and cost tables, and uses what is there")
    asked = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "exact": lambda: exact(range(asked.first, asked.first + (asked.instances or 200))),
        "larger": lambda: larger(range(asked.first, asked.first + (asked.instances or 20))),
        "milp": against_milp,
        "speed": speed,
        "sizes": sizes,
    }
    if asked.only == "measured":
        from scripts.bench_ranking import ranking  # imports torch

        ranking(asked.model, asked.folder, None if asked.profile else asked.costs, asked.rounds)
    for name, part in parts.items():
        if asked.only in (None, name):
            part()


def exact(seeds: range) -> None:
    """Print how often the search finds the optimum of exhaustive simulation: overall, per placement."""
    start = time.process_time()
    ratios = [_over_the_best(random_instance(seed)) for seed in _with_progress(20, seeds)]
    equal = sum(max(of_instance) <= EQUAL_STEP_TIME_RATIO for of_instance in ratios)
    worst = max(map(max, ratios))
    print(
        f"exact: {equal} of {len(seeds)} random instances as fast as the best of everything; worst {worst:.4f}x, "
        f"{time.process_time() - start:.0f} s"
    )


def larger(seeds: range) -> None:
    """Print how far the search is from the optimum where it does not try everything."""
    near = 0
    for seed in seeds:
        instance = larger_instance(seed)
        start = time.process_time()
        ratios = _over_the_best(instance)
        near += max(ratios) <= CLOSE
        ranks = instance.candidates[0].assignment.ranks
        hardware = instance.evaluator.problem.hardware.name
        print(
            f"  {seed}: {instance.num_partitions} plans on {ranks} ranks of {hardware}: "
            f"{', '.join(f'{ratio:.4f}' for ratio in ratios)} of the best (of all, of each placement); "
            f"{time.process_time() - start:.0f} s",
            flush=True,
        )
    print(f"larger: {near} of {len(seeds)} random instances within {CLOSE - 1:.0%} of the best of everything")


def _over_the_best(full_instance: Instance) -> list[float]:
    """Return the step time found over that of the best: of all plans, then of each placement."""
    best = [least_step(apart) for apart in by_placement(full_instance)]
    best_by_instance = [(full_instance, min(best)), *zip(by_placement(full_instance), best, strict=True)]
    return [fastest_found(instance) / best_s for instance, best_s in best_by_instance if math.isfinite(best_s)]


def _with_progress(number: int, seeds: range) -> Iterator[int]:
    for num_done, seed in enumerate(seeds):
        if num_done and num_done % number == 0:
            print(f"  {num_done} of {len(seeds)}", flush=True)
        yield seed


def against_milp() -> None:
    """Print the simulated step of the planner's partition over that of the MILP, and the seconds of both."""
    print("partition and recompute, one encoder, 1F1B, memory for 0.7 of what no recompute takes")
    for vision, llm, pp, batch in ((3, 5, 3, 8), (6, 9, 4, 16), (44, 78, 8, 32)):
        instance = pipeline(vision, llm, pp, batch, share=0.7)
        start = time.process_time()
        ours = instance.planned()
        seconds = time.process_time() - start
        start = time.process_time()
        solved = solve(instance.chain, instance.num_in_flight, instance.memory_bytes)
        milp_seconds = time.process_time() - start
        ratio = "the MILP found nothing in 60 s"
        if solved is not None and (reference := instance.simulated(solved.partition)) is not None:
            ratio = f"{ours / reference:.4f} of the MILP's step{'' if solved.is_proven else ' (unproven, 60 s)'}"
        model = f"{vision + 2}+{llm + 2} layers, PP {pp}, {batch} microbatches"
        print(f"  {model}: {ratio}; {seconds:.2f} s, MILP {milp_seconds:.1f} s")


def speed() -> None:
    """Print the processor seconds of whole plans."""
    for name, settings, world_size, hardware, target in (
        ("demo", factory.recipe(), 2, "cpu-core", 1.0),
        ("26B on 64 H100", model_26b(), 64, "h100-80g", 10.0),
        ("197B on 3,072 H100", model_197b(), 3072, "h100-80g", 60.0),
    ):
        lengths = factory.lengths() if name == "demo" else tiles()
        start = time.process_time()
        chosen = plan_recipe(settings, lengths, world_size=world_size, hardware=hardware, recipe_sha256="0" * 64)
        seconds = time.process_time() - start
        print(f"{name}: {seconds:.1f} s (target {target:.0f} s); {summarize(chosen)}")


def sizes() -> None:
    """Print the seconds of `mmtrain plan` by number of GPUs, odd ones too, as rows of docs/benchmarks.md.

    They include imports, data, the LLM alone, hints and the proof. Processor seconds hardly depend on what else runs.
    """
    normal_s = 0.0
    for ranks, batch, memory_gib in SIZES:
        changes = [f"train.global_batch={batch}", "cluster.hardware=h100-80g", f"cluster.ranks={ranks}"]
        name = f"7B on {ranks:,}, batch {batch:,}"
        if memory_gib is not None:
            changes.append(f"cluster.memory_gib={memory_gib}")
            name = f"7B on {ranks:,} of {memory_gib} GiB, batch {batch:,}"
        normal_s = (
            _print_row(name, [str(WHAT_IF_FOLDER / "qwen2_vl_7b.yaml"), *_as_arguments(changes)], normal_s) or normal_s
        )
    _print_row("197B on 3,072, batch 1,536", [str(WHAT_IF_FOLDER / "optimus_197b.yaml")], normal_s)


def _as_arguments(changes: list[str]) -> list[str]:
    return [argument for change in changes for argument in ("--set", change)]


def _print_row(name: str, arguments: list[str], normal_s: float) -> float | None:
    """Plan once and print the row; return its processor seconds if it is the first, which others are compared with."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "mmtrain", "plan", *arguments, "--out", str(path)]
        used, start = _processor_seconds(), time.perf_counter()
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, check=False)
        seconds, clock_s = _processor_seconds() - used, time.perf_counter() - start
        found = "none fits | "
        if done.returncode == 0:
            chosen = Plan.model_validate_json(path.read_text(encoding="utf-8"))
            llm, step_s = chosen.units["llm"], chosen.predicted.step_time_s
            found = f"{chosen.placement}, LLM tp{llm.tp} pp{llm.pp} vpp{llm.vpp} dp{llm.dp} | {step_s:.2f} s"
    ratio = f"{seconds / normal_s:.1f}" if normal_s else "1"
    print(f"| {name} | {seconds:.1f} | {clock_s:.0f} | {ratio} | {found} |", flush=True)
    return None if normal_s else seconds


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def summarize(chosen: Plan) -> str:
    """Return a plan in one line."""
    units = ", ".join(f"{n} tp{u.tp} pp{u.pp} vpp{u.vpp} dp{u.dp}" for n, u in chosen.units.items())
    return f"{chosen.placement}: {units}; step {chosen.predicted.step_time_s:.3f} s, MFU {chosen.predicted.mfu:.1%}"


def tiles(num_samples: int = 20_000) -> SampleLengths:
    """Make lengths of texts with up to seven tiles a sample; every third sample has none."""
    rng = np.random.default_rng(0)
    counts = np.where(rng.random(num_samples) < 0.3, 0, rng.integers(1, 8, num_samples))
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    sides = np.full(int(first[-1]), 32, dtype=np.int64)
    text = np.clip(rng.lognormal(5.5, 1.0, num_samples), 10, 200).astype(np.int64)
    assert all(a <= b for a, b in pairwise(first.tolist()))
    items = ItemLengths(first, sides, sides, np.full_like(sides, TILE), np.full_like(sides, FEATURES))
    return SampleLengths(text + counts * FEATURES, text // 2, {"vision": items})


def model_26b() -> Recipe:
    """InternViT-6B and InternLM2-20B, as in InternVL's 26B."""
    vision = {"layers": 45, "hidden": 3200, "heads": 25, "ffn": 12800, "patch": 14, "max_side": 32}
    llm = {"layers": 48, "hidden": 6144, "heads": 48, "kv_heads": 8, "ffn": 16384, "vocab": 92544}
    return factory.recipe(vision=vision, llm=llm, global_batch=128, seq_len=4096)


def model_197b() -> Recipe:
    """A ViT of 22B and GPT-175B (Optimus)."""
    vision = {"layers": 48, "hidden": 6144, "heads": 48, "ffn": 24576, "patch": 14, "max_side": 32}
    llm = {"layers": 96, "hidden": 12288, "heads": 96, "ffn": 49152, "mlp": "gelu", "vocab": 51200}
    return factory.recipe(vision=vision, llm=llm, global_batch=1536, seq_len=2048)


if __name__ == "__main__":
    main()
