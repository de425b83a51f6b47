"""Compare predicted with measured step times and memory on this machine.

    python -m scripts.bench_costs                                  # all cases, about eight minutes
    python -m scripts.bench_costs --only frozen-vision             # one of them
    python -m scripts.bench_costs --only replicated                # the five of sharded replicas
    python -m scripts.bench_costs --only replicated --modelled --steps 2   # their memory alone, on any machine
    python -m scripts.bench_costs --recipe recipes/x.yaml --set a.b=c

Two ranks run on one core each; one case has four, whose step time means something on four cores. For each model,
`mmtrain profile` measures a cost table; each case is then planned with that table and run. The script compares the
simulated with the measured time of the same steps (median of the ratios), and for each rank the predicted peak memory
with the tensors that are alive at the fullest moment of all steps. A plan makes room for larger microbatches than a few
steps have; a second ratio counts those of the same steps, without inputs, which are not among the tensors that are
counted. `--modelled` plans by the figures of the hardware preset.

The cores of a virtual machine do not keep their speed. So a GEMM is timed around the profile and between the steps of
each run, and a second column compares steps as they would have been at the speed of the profile.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmtrain.data import BatchBuilder, GroupStream, build_index
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.models.megatron.zero_adamw import ZeroAdamW
from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.models.stage.fully_sharded import FullyShardedAdamW
from mmtrain.planning import Plan
from mmtrain.planning.artifact.balancing_targets import derive_step_targets
from mmtrain.planning.artifact.plan_change import plan_layout
from mmtrain.planning.evaluate.simulate_plan import simulate_plan
from mmtrain.planning.space.constraints import sizes_to_measure
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.report.comparison import RunTrace, comparison_rows, comparison_text, critical_path_rows
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.optimizer import JoinedOptimizers, UnitOptimizer
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.execution.recorder import StepRecorder, clock_for
from mmtrain.runtime.profiling.measured_turns import counted_memory
from mmtrain.runtime.profiling.profile import ProfileRequest, profile
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.resilience.out_of_memory import predicted_peak_gib
from mmtrain.runtime.training.expert_reduction import ExpertLoadReducer
from mmtrain.runtime.training.hooks.tracing import RunTracer
from mmtrain.runtime.training.step_metrics import StepMetricsReducer
from mmtrain.runtime.world import Address, join, leave
from scripts.measurements import arguments, start
from scripts.plans import fastest_plan

RANKS, WARM_UP = 2, 4
GEMM_SIDE, NUM_GEMMS = 512, 5  # of one timing of the core's speed
MIB = 2**20
DEMO = Path(__file__).parents[1] / "recipes" / "demo.yaml"
WIDE = ("model.vision.hidden=192", "model.vision.ffn=512", "model.vision.layers=2", "model.llm.hidden=256",
        "model.llm.ffn=640", "model.llm.layers=4", "model.llm.kv_heads=2", "data.seq_len=384")  # fmt: skip
UNIFIED = "parallel.placement=unified"
SHARDED = (
    "parallel.placement=replicated",
    "parallel.llm.tp=1",
    "parallel.schedule=1f1b",
    "train.global_batch=8",
)
NUM_RANKS = {"replicated, shard 2 of 4": 4}  # of cases that do not run on `RANKS`
# name -> (model, settings): placements, numbers of microbatches, frozen or not
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "apart": ("demo", ("train.global_batch=4",)),
    "apart, 12 microbatches": ("demo", ("train.global_batch=12",)),
    "frozen-vision": ("demo", ("train.global_batch=6", "model.vision.freeze=true")),
    "pipeline": ("demo", (UNIFIED, "parallel.llm.pp=2", "train.global_batch=8")),
    "replicas": ("demo", (UNIFIED, "parallel.llm.dp=2", "train.global_batch=8")),
    "wide, apart": ("wide", ("train.global_batch=6",)),
    "wide, replicas, frozen LLM": ("wide", (UNIFIED, "parallel.llm.dp=2", "train.global_batch=4",
                                            "model.llm.freeze=true")),
    "wide, pipeline, recompute": ("wide", (UNIFIED, "parallel.llm.pp=2", "train.global_batch=6",
                                           "parallel.llm.recompute=all", "parallel.vision.recompute=all")),
    "wide, tensor-parallel": ("wide", (UNIFIED, "parallel.llm.tp=2", "train.global_batch=4")),
    "replicated, whole": ("wide", (*SHARDED, "parallel.shard=1", "parallel.dispatch=none")),
    "replicated, sharded": ("wide", (*SHARDED, "parallel.shard=all", "parallel.dispatch=all")),
    "replicated, shard 2 of 4": ("wide", (*SHARDED, "parallel.shard=2", "parallel.dispatch=all")),
    "replicated, encoders first": ("wide", (*SHARDED, "parallel.shard=all", "parallel.dispatch=all",
                                            "parallel.schedule=encoder_first")),
    "replicated, frozen-vision": ("wide", (*SHARDED, "parallel.shard=all", "parallel.dispatch=all",
                                           "model.vision.freeze=true")),
    "mixture, ep 2": ("mixture", (UNIFIED, "parallel.llm.dp=2", "parallel.llm.ep=2", "train.global_batch=8")),
    "mixture, ep 2, recompute": ("mixture", (UNIFIED, "parallel.llm.dp=2", "parallel.llm.ep=2", "train.global_batch=8",
                                             "parallel.llm.recompute=all")),
}  # fmt: skip
MIXTURE = (*WIDE, "model.llm.moe={experts: 8, top_k: 2, ffn: 320}")
MODELS: dict[str, tuple[str, ...]] = {"demo": (), "wide": WIDE, "mixture": MIXTURE}


@dataclass(frozen=True)
class Outcome:
    """Ratios of predicted to measured values for one case."""

    step: float
    slowdown: float  # seconds of a GEMM during the steps, over those around the profile
    planned_memory: tuple[float, ...]  # one ratio per rank, for the largest microbatches that are planned for
    memory: tuple[float, ...]  # for those of the same steps, without inputs


def main() -> None:
    options = _options()
    report = start("Predicted beside measured steps and memory", options)
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, cases in _cases(options, folder).items():
            first = next(iter(cases.values()))
            before_s = gemm_seconds(num_timings=40)
            table = None if options.modelled else _profile(first, folder / f"{model}.json")
            gemm_s = statistics.mean([before_s, gemm_seconds(num_timings=40)])
            for case, recipe in cases.items():
                cluster = recipe.cluster.model_copy(update={"costs": table})
                priced = recipe.model_copy(update={"cluster": cluster})
                outcomes[case] = run(case, priced, folder, options, gemm_s)
    report.table("predicted over measured", "step", "at that speed", "memory of each rank", "as planned")
    for case, outcome in outcomes.items():
        memory, planned = (", ".join(f"{r:.2f}" for r in of) for of in (outcome.memory, outcome.planned_memory))
        report.row(case, f"{outcome.step:.2f}", f"{outcome.step * outcome.slowdown:.2f}", memory, planned)
    report.line()
    report.targets()
    for how, steps in (
        ("", [outcome.step for outcome in outcomes.values()]),
        (" at the profile's speed", [outcome.step * outcome.slowdown for outcome in outcomes.values()]),
    ):
        errors = [100 * abs(step - 1) for step in steps]
        report.target(f"error of steps{how}, median, %", statistics.median(errors), 10)
        report.target(f"error of steps{how}, worst, %", max(errors), 20)
    ratios = [ratio for outcome in outcomes.values() for ratio in outcome.memory]
    report.target("memory, the least", min(ratios), 1.0, at_least=True)
    report.target("memory, the most", max(ratios), 1.15)


def _options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--only", action="append", default=[], help=f"cases that begin so, of: {'; '.join(CASES)}")
    parser.add_argument("--recipe", type=Path, help="this recipe alone, instead of the cases")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--modelled", action="store_true", help="plan by the preset, measure no table")
    parser.add_argument("--steps", type=int, default=16, help="that are timed, and whose memory is counted")
    parser.add_argument("--detail", action="store_true", help="stages beside the step")
    return parser.parse_args()


def _cases(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Recipe]]:
    """Return the recipes by model and case."""
    if options.recipe is not None:
        return {"recipe": {options.recipe.stem: load_recipe(options.recipe, options.set).recipe}}
    data = folder / "data"
    generate_demo(data, seed=0, train=2000, heldout=10)
    common = ("cluster.hardware=cpu-core", "data.validation=[]", "train.validate_every=0",
              f"data.sources=[{{path: {data / 'train.json'}}}]", f"data.tokenizer={data / 'tokenizer.json'}",
              "parallel.placement=disaggregated", *options.set)  # fmt: skip
    cases: dict[str, dict[str, Recipe]] = {}
    for case, (model, settings) in CASES.items():
        if not options.only or case.startswith(tuple(options.only)):
            cases.setdefault(model, {})[case] = load_recipe(DEMO, [*common, *MODELS[model], *settings]).recipe
    return cases


def _profile(recipe: Recipe, out: Path) -> Path:
    """Measure the recipe's layers at every tensor-parallel size that its placements allow."""
    free = recipe.model_copy(update={"parallel": type(recipe.parallel)()})
    measured = profile(
        ProfileRequest(free, "cpu-core", RANKS, sizes_to_measure(free, RANKS), build_index(recipe).lengths)
    )
    for name, errors in measured.errors.items():
        print(f"{name:<12} {len(errors)} held-out loads: error {statistics.median(errors):.1%} (median)")
    print(f"all: {measured.median_error:.1%} (limit 10%)", flush=True)
    measured.table.save(out)
    return out


def gemm_seconds(num_timings: int) -> float:
    """Return the median seconds of a GEMM on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    a, b = (torch.randn(GEMM_SIDE, GEMM_SIDE) for _ in range(2))
    seconds = []
    for _ in range(num_timings):
        start_s = time.perf_counter()
        for _ in range(NUM_GEMMS):
            a @ b
        seconds.append((time.perf_counter() - start_s) / NUM_GEMMS)
    torch.set_num_threads(threads)
    return statistics.median(seconds)


def run(case: str, recipe: Recipe, folder: Path, options: argparse.Namespace, gemm_s: float) -> Outcome:
    """Plan the case, train some steps, and compare; `gemm_s`: what a GEMM took around the profile."""
    num_ranks = NUM_RANKS.get(case, RANKS)
    lengths = build_index(recipe).lengths
    chosen = fastest_plan(recipe, lengths, num_ranks, "cpu-core")
    if recipe.model.llm.moe is not None:
        recipe = _with_recorded_spread(recipe, chosen, folder)
        chosen = fastest_plan(recipe, lengths, num_ranks, "cpu-core")
    trace_file, memory_file = folder / "trace.json", folder / "memory.json"
    launch_local(num_ranks, partial(run_rank, recipe, chosen, options.steps, trace_file, memory_file))
    trace = RunTrace.load(trace_file)
    stream = GroupStream.of(recipe, build_index(recipe))
    dp = {name: unit.dp for name, unit in chosen.units.items()}
    counts = chosen.schedule.num_microbatches
    targets = derive_step_targets(recipe, chosen, lengths)
    batches = [stream.batch(number - 1, recipe.train.num_groups, dp, counts, targets) for number in trace.steps]
    timelines = [simulate_plan(recipe, chosen, batch) for batch in batches]
    measured = [step["dur"] * 1e-6 for step in trace.content["otherData"]["steps"]]
    ratios = [line.step_time_s / took for line, took in zip(timelines, measured, strict=True)]
    lines, planned_memory, memory, run_gemm_s = json.loads(memory_file.read_text())
    print(f"\n{case}: {chosen.placement}, {_sizes(chosen)}; step {statistics.median(measured) * 1e3:.0f} ms")
    print(*lines, sep="\n", flush=True)
    if options.detail:
        print(
            comparison_text(
                comparison_rows(timelines, trace), timelines[0].bubble_shares(), critical_path_rows(timelines)
            )
        )
    return Outcome(statistics.median(ratios), run_gemm_s / gemm_s, tuple(planned_memory), tuple(memory))


def _with_recorded_spread(recipe: Recipe, chosen: Plan, folder: Path) -> Recipe:
    """Train a few steps to learn how unevenly the router loads experts, and state it in the recipe."""
    file = folder / "spread.json"
    launch_local(chosen.world_size, partial(record_spread, recipe, chosen, file))
    spread, fullest = json.loads(file.read_text())
    print(f"experts deviate by {spread:.2f} of the mean, the fullest rank has {fullest:.2f}x", flush=True)
    llm = recipe.parallel.llm.model_copy(update={"expert_spread": spread})
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"llm": llm})})


def record_spread(recipe: Recipe, chosen: Plan, file: Path, address: Address) -> None:
    """Train some steps; write how unevenly experts and the ranks that hold them were loaded."""
    torch.set_num_threads(1)
    world = join(address)
    job = build_rank_context(recipe, chosen, world)
    index = build_index(recipe)
    stream, batch_builder = GroupStream.of(recipe, index), BatchBuilder(index, recipe, job.needs, job.num_microbatches)
    targets = derive_step_targets(recipe, chosen, index.lengths)
    for step in range(WARM_UP):
        content = stream.batch(step, recipe.train.num_groups, job.dp, job.num_microbatches, targets)
        job.train(batch_builder.build(content), lr=1e-4)
    loads = ExpertLoadReducer(job).reduce()
    assert loads is not None
    if world.is_first:
        file.write_text(json.dumps([loads.spread, loads.fullest_rank]))
    leave()


def _sizes(chosen: Plan) -> str:
    if chosen.placement == "replicated":
        return plan_layout(chosen).summary.removeprefix("replicated: ")
    return ", ".join(f"{name} tp{u.tp} pp{u.pp} dp{u.dp}" for name, u in chosen.units.items())


def run_rank(
    recipe: Recipe, chosen: Plan, num_steps: int, trace_file: Path, memory_file: Path, address: Address
) -> None:
    """Train some steps and record the later ones, a GEMM between them; then repeat those and count memory."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[address.rank % len(cores)]})
    torch.set_num_threads(1)
    world = join(address)
    job = build_rank_context(recipe, chosen, world, Activity(recorder=StepRecorder(clock_for(world.device))))
    index = build_index(recipe)
    stream = GroupStream.of(recipe, index)
    batch_builder = BatchBuilder(index, recipe, job.needs, job.num_microbatches)
    meter = StepMetricsReducer(job, stream, chosen.hardware)
    recorded = frozenset(range(WARM_UP + 1, WARM_UP + num_steps + 1))
    targets = derive_step_targets(recipe, chosen, index.lengths)
    tracer = RunTracer(job.graph, world, meter.timing, chosen.sha256, trace_file)
    contents = [
        stream.batch(step, recipe.train.num_groups, job.dp, job.num_microbatches, targets)
        for step in range(WARM_UP + num_steps)
    ]
    batches = [batch_builder.build(content) for content in contents]
    gemms_s = []
    for step, data in enumerate(batches):
        world.barrier()
        gemms_s.append(gemm_seconds(num_timings=1))
        world.barrier()
        outcome = job.train(data, lr=1e-4)
        if step + 1 in recorded:
            tracer.add_step(step + 1, outcome)
    params = [p for unit in job.units.values() for stage in unit.stages.values() for p in stage.parameters()]
    shards = [shard.tensor for unit in job.optimizer.units.values() for shard in _held_shards(unit)]
    gradients = [p.main_grad for p in params if hasattr(p, "main_grad")]
    gradients += [p.grad for p in params if p.grad is not None]  # of sharded units
    alive = Alive()
    alive.see([*params, *shards, *gradients])
    lasting = alive.bytes
    del gradients  # else those that a sharded unit drops when a step begins would count beside the new ones
    with alive:
        for data in batches[WARM_UP:]:
            job.train(data, lr=1e-4)
    counted = alive.peak
    planned = predicted_peak_gib(world.rank, chosen.predicted.peak_memory_gib)
    assert planned is not None
    of_steps = [counted_memory(recipe, chosen, job, content) for content in contents[WARM_UP:]]
    predicted = max(memory.total - memory.inputs for memory in of_steps)
    line = (
        f"rank {world.rank}: predicted {predicted / MIB:.1f} MiB for these steps over {lasting / MIB:.1f} + "
        f"{(counted - lasting) / MIB:.1f} counted (weights, gradients and optimizer, the step's tensors) = "
        f"{predicted / counted:.2f}; planned {planned * 1024:.1f} MiB, with inputs"
    )
    lines, ratios = world.all_gather(line), world.all_gather(predicted / counted)
    planned_ratios = world.all_gather(planned * 2**30 / counted)
    gemm_s = statistics.mean(world.all_gather(statistics.median(gemms_s)))
    if world.is_first:
        memory_file.write_text(json.dumps([lines, planned_ratios, ratios, gemm_s]))
    leave()


def _held_shards(unit: UnitOptimizer) -> Iterable[NamedShard]:
    """Return what a rank holds of a unit, also where another rank has the same and saves it."""
    if isinstance(unit, FullyShardedAdamW):
        yield from unit._all_shards()
        return
    if isinstance(unit, JoinedOptimizers):
        yield from (shard for part in unit._parts for shard in _held_shards(part))
        return
    assert isinstance(unit, ZeroAdamW)
    for param, shard in unit._shards.items() if unit._trained else ():
        yield from unit._named_shards(param, shard)


class Alive(TorchDispatchMode):
    """Count the bytes of tensors that operations made and that are still alive, each storage once.

    The input of steps is left out, as it is of the prediction.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, int] = {}
        self._inputs: dict[int, torch.UntypedStorage] = {}  # held, so that no other storage takes their addresses
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
        if func is torch.ops.aten.lift_fresh.default:  # of the step's input, which the host made
            self._inputs.update((tensor.untyped_storage()._cdata, tensor.untyped_storage()) for tensor in tensors)
        self.see(tensors)
        return out

    def __enter__(self) -> "Alive":
        self._resize = resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> object:
            """Resize and count: FSDP frees gathered weights so, and keeps their tensors."""
            result = resize(storage, size)
            self._count(storage)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def see(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._count(local.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, or what has changed of it."""
        key = storage._cdata
        if key in self._inputs:
            return
        if key not in self._seen:
            weakref.finalize(storage, self._gone, key)
        self.bytes += storage.nbytes() - self._seen.get(key, 0)
        self._seen[key] = storage.nbytes()
        self.peak = max(self.peak, self.bytes)

    def _gone(self, key: int) -> None:
        self.bytes -= self._seen.pop(key)


if __name__ == "__main__":
    main()
