"""Measure kernel grain: encoder kernels in the gaps of the LLM's tensor-parallel communication.

    python -m scripts.bench_kernel_grain                     # collectives take 40 ms more each, then nothing more
    python -m scripts.bench_kernel_grain --delay-ms 20 --steps 40

Every all-reduce, reduce-scatter and all-gather of the processes takes a fixed time more with the core free, as on a
slow link. `mmtrain profile` measures the costs under that delay. From them two colocated plans are made, one that
places layers between the LLM's forwards and backwards (layer grain), one that also places pieces of layers inside them.
Both are trained, in turn step by step in the same processes, and the second one by `mmtrain train` too. Printed are the
predicted and the measured shortening, medians of pairs, and that of the fastest steps, which other work on the machine
disturbed least. Target: at least 80% of what was predicted; without a delay at most 2% longer.
"""

import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.measurements import arguments, set_options, start
from scripts.slow_link import COLLECTIVES, SlowLink

LINK = SlowLink()
LINK.carry(*COLLECTIVES)  # before Megatron-core is imported, which keeps these functions under names of its own
NUM_RANKS = 2
SETTINGS = (
    "model.vision={layers: 4, hidden: 256, heads: 4, ffn: 1024, patch: 12, max_side: 8, positions: grid}",
    "model.llm={layers: 2, hidden: 128, heads: 4, kv_heads: 4, ffn: 384, vocab: 512}",
    "data.image={scheme: fixed, size: 96}",
    "data.validation=[]",
    "parallel.placement=colocated",
    "parallel.llm={tp: 2, pp: 1, sp: false}",
    "parallel.vision={tp: 1, pp: 1}",
    "cluster.hardware=cpu-core",
    f"cluster.ranks={NUM_RANKS}",
    "train.global_batch=8",
    "train.validate_every=0",
    "train.checkpoint.every=1000",
)


@dataclass(frozen=True)
class Comparison:
    """Seconds of a step at both grains."""

    predicted: tuple[float, float]  # layers between passes, pieces inside them too
    measured: tuple[list[float], list[float]]  # step by step
    trained_s: float  # of the second plan, median of a run of `mmtrain train`
    num_fills: int  # lines of the second plan's order in which an encoder runs inside a pass of the LLM

    @property
    def predicted_shortening(self) -> float:
        """Share of the step at layer grain."""
        return 1 - self.predicted[1] / self.predicted[0]

    @property
    def measured_shortening(self) -> float:
        """The same, median of the pairs."""
        return statistics.median(1 - fine / coarse for coarse, fine in zip(*self.measured, strict=True))


def main() -> None:
    """Compare the grains with and without delayed collectives."""
    parser = arguments(__doc__)
    parser.add_argument("--delay-ms", type=float, nargs="+", default=[40.0, 0.0])
    parser.add_argument("--steps", type=int, default=30, help="pairs of steps")
    parser.add_argument("--rounds", type=int, default=1, help="times that costs are measured and plans made and run")
    options = parser.parse_args()
    report = start("Kernel grain, trained", options)
    steps = "predicted: layers, pieces, s", "measured, s", "by `mmtrain train`, s", "fastest steps, s"
    report.table("delay of a collective", "fills on rank 0", *steps, "shortening: predicted, measured, of the fastest")
    with tempfile.TemporaryDirectory() as folder:
        recipe_arguments = make_recipe(Path(folder))
        for delay_ms in options.delay_ms:
            for number in range(options.rounds):
                LINK.delay_s = delay_ms / 1e3
                place = Path(folder) / f"{delay_ms:g}-{number}"
                place.mkdir()
                report.row(f"{delay_ms:g} ms", *cells(compare(recipe_arguments, place, options.steps)))


def make_recipe(folder: Path) -> list[str]:
    """Draw data; return the arguments of `mmtrain` that say what is trained."""
    from mmtrain.data.synthetic.demo import generate_demo

    data = folder / "data"
    generate_demo(data, seed=0, train=400, heldout=10)
    settings = [
        *SETTINGS,
        f"data.sources=[{{path: {data / 'train.json'}}}]",
        f"data.tokenizer={data / 'tokenizer.json'}",
    ]
    demo = Path(__file__).parents[1] / "recipes" / "demo.yaml"
    return [str(demo), *set_options(settings)]


def compare(recipe_arguments: list[str], folder: Path, num_steps: int) -> Comparison:
    """Measure costs, make a plan at each grain from them, and run both."""
    from mmtrain.api.recipe_index import index_recipe
    from mmtrain.cli.app import app
    from mmtrain.planning.formulate import formulate_problem
    from mmtrain.planning.planner import plan
    from mmtrain.planning.space.budget import DEFAULT_BUDGET
    from mmtrain.recipe import load_recipe
    from mmtrain.report import read_metrics
    from mmtrain.runtime.profiling.measure_plans import LocalRanks, measure_plans

    table, plan_file, run = folder / "costs.json", folder / "plan.json", folder / "run"
    app(["profile", *recipe_arguments, "--tp", "1,2", "--out", str(table)], standalone_mode=False)
    recipe_arguments = [*recipe_arguments, "--set", f"cluster.costs={table}"]
    recipe = load_recipe(Path(recipe_arguments[0]), recipe_arguments[2::2]).recipe
    problem = formulate_problem(
        recipe, index_recipe(recipe).lengths, world_size=NUM_RANKS, hardware="cpu-core", recipe_sha256=""
    )
    at_layers = replace(DEFAULT_BUDGET, colocated=replace(DEFAULT_BUDGET.colocated, fills_tp_bubbles=False))
    by_layers = plan(problem, budget=at_layers)
    app(["plan", *recipe_arguments, "--out", str(plan_file)], standalone_mode=False)
    in_pieces = type(by_layers).model_validate_json(plan_file.read_text(encoding="utf-8"))
    runs = measure_plans(recipe, [by_layers, in_pieces], LocalRanks(), num_steps)
    steps = ["--set", f"train.steps={max(10, num_steps // 2)}"]
    app(["train", *recipe_arguments, *steps, "--plan", str(plan_file), "--run-dir", str(run)], standalone_mode=False)
    trained = [step["step_time_s"] for step in read_metrics(run)]
    order = in_pieces.schedule.order or {0: ()}
    return Comparison(
        predicted=(by_layers.predicted.step_time_s, in_pieces.predicted.step_time_s),
        measured=(runs[0].seconds, runs[1].seconds),
        trained_s=statistics.median(trained[len(trained) // 4 :]),
        num_fills=sum(line.startswith(("PF llm", "PB llm")) or "|" in line for line in order[0]),
    )


def cells(comparison: Comparison) -> list[str]:
    """Return what was predicted and measured."""
    medians = [statistics.median(seconds) for seconds in comparison.measured]
    fastest = [min(seconds) for seconds in comparison.measured]
    pairs = [f"{layers:.3f}, {pieces:.3f}" for layers, pieces in (comparison.predicted, medians, fastest)]
    shortening = comparison.predicted_shortening, comparison.measured_shortening, 1 - fastest[1] / fastest[0]
    steps = [*pairs[:2], f"{comparison.trained_s:.3f}", pairs[2]]
    return [str(comparison.num_fills), *steps, ", ".join(f"{share:.1%}" for share in shortening)]


if __name__ == "__main__":
    main()
