"""The planner: exactness against trying everything, against a mixed-integer program, and seconds of planning.

    python -m scripts.bench_plan                    # all but the measured part; processor seconds, one core
    python -m scripts.bench_plan --only speed       # or: exact, milp
    python -m scripts.bench_plan --only measured    # runs plans of three tiny models on two ranks here, for minutes

`exact` and `milp` need the tools of the tests, so run it from the root of a checkout.
"""

import argparse
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from mmtrain.balance import ItemLengths, SampleLengths
from mmtrain.plan import Plan, plan
from mmtrain.plan.cut import alive_of, graph_for, laid_out, tracks_of
from mmtrain.plan.fit import Fitted, fitted
from mmtrain.plan.judge import judge
from mmtrain.plan.search import SAME, search
from mmtrain.plan.sizes import sizings
from mmtrain.plan.story import machine_for
from mmtrain.program.builder import in_flight
from mmtrain.recipe.schema import Recipe
from tests.plan import factory
from tests.plan.exhaustive import everything, random_instance
from tests.plan.milp import best_cuts

TILE, FEATURES = (
    1025,
    256,
)  # an image tile of 448 x 448, in patches of 14 and a class token, and what the LLM sees of it


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("exact", "milp", "speed", "measured"))
    parser.add_argument("--instances", type=int, default=200, help="random small instances of `exact`")
    asked = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "exact": lambda: exact(asked.instances),
        "milp": against_milp,
        "speed": speed,
    }
    if asked.only == "measured":
        measured()
    for name, part in parts.items():
        if asked.only in (None, name):
            part()


def exact(instances: int) -> None:
    """How often the search finds what simulating every sizing and cut finds."""
    equal, worst = 0, 1.0
    for seed in range(instances):
        given = random_instance(seed, most_cuts=300)
        best = min(judged.step_time_s for judged in everything(given))
        found = search(given.sizings, given.pricing, given.choices, given.machine, at_least=1).judged[0].step_time_s
        equal += found <= best * SAME
        worst = max(worst, found / best)
    print(f"exact: {equal} of {instances} random instances as fast as the best of everything; worst {worst:.4f}x")


def against_milp() -> None:
    """Simulated step of the planner's cut over that of the MILP's, and the seconds of both."""
    print("partition and recompute, one encoder, 1F1B, memory for 0.7 of what no recompute takes")
    for vision, llm, pp, batch in ((3, 5, 3, 8), (6, 9, 4, 16), (44, 78, 8, 32)):
        settings = factory.recipe(
            vision={**factory.VISION, "layers": vision}, llm={"layers": llm}, global_batch=batch, parallel={}
        )
        pricing, choices = factory.pricing_for(settings)
        machine = machine_for(settings, "cpu-core")
        sizing = next(s for s in sizings(choices, pp) if str(s) == f"unified: tp1 pp{pp} dp1")
        (track,) = tracks_of(sizing, pricing, choices)
        assert track.anchor is not None
        graph = graph_for(laid_out(sizing, pricing, (track.anchor,)), pricing)
        alive = in_flight(graph)
        limit = 0.7 * max(m.total for m in pricing.memory(graph).values())
        small = machine.__class__(**{**machine.__dict__, "memory_bytes": limit})
        start = time.process_time()
        ours = search([(0.0, sizing)], pricing, choices, small, at_least=1).judged[0]
        seconds = time.process_time() - start
        start = time.process_time()
        solved = best_cuts(track, alive_of(track, alive), limit)
        milp_seconds = time.process_time() - start
        ratio = "the MILP found nothing in 60 s"
        if solved is not None:
            cuts = (solved.cuts,)
            reference = fitted(
                sizing, pricing, cuts, small, in_flight(graph_for(laid_out(sizing, pricing, cuts), pricing))
            )
            if isinstance(reference, Fitted):
                value = ours.step_time_s / judge(reference.layout, pricing, machine).step_time_s
                ratio = f"{value:.4f} of the MILP's step{'' if solved.is_proven else ' (unproven, 60 s)'}"
        model = f"{vision + 2}+{llm + 2} layers, PP {pp}, {batch} microbatches"
        print(f"  {model}: {ratio}; {seconds:.2f} s, MILP {milp_seconds:.1f} s")


def speed() -> None:
    """Processor seconds of whole plans."""
    for name, settings, world_size, hardware, target in (
        ("demo", factory.recipe(), 2, "cpu-core", 1.0),
        ("26B on 64 H100", model_26b(), 64, "h100-80g", 10.0),
        ("197B on 3,072 H100", model_197b(), 3072, "h100-80g", 60.0),
    ):
        lengths = factory.lengths() if name == "demo" else tiles()
        start = time.process_time()
        found = plan(settings, lengths, world_size=world_size, hardware=hardware, recipe_sha256="0" * 64)
        seconds = time.process_time() - start
        print(f"{name}: {seconds:.1f} s (target {target:.0f} s); {told(found)}")


def measured() -> None:
    """For three tiny models, the plan ranked first beside the fastest measured one, two ranks."""
    raise SystemExit("use `mmtrain plan RECIPE --measure --top 50` on an idle machine: it prints both rankings")


def told(found: Plan) -> str:
    """A plan in a line."""
    units = ", ".join(f"{n} tp{u.tp} pp{u.pp} vpp{u.vpp} dp{u.dp}" for n, u in found.units.items())
    return f"{found.placement}: {units}; step {found.predicted.step_time_s:.3f} s, MFU {found.predicted.mfu:.1%}"


def tiles(num_samples: int = 20_000) -> SampleLengths:
    """Text with up to seven tiles a sample; every third without."""
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
