"""A unit after the LLM, with a loss of its own: the LLM's last stage has a loss and an output.

Toy units on real edges: an encoder feeds the LLM, which feeds a generator some of its last hidden states. Each loss is
a mean over the tokens or items of its unit. Loss and gradients must equal those of one process, sample by sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmtrain.balance import BatchMeta, ItemLengths, SampleLengths, assign
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.program import (
    Microbatch,
    Program,
    StageGraph,
    Step,
    build_1f1b,
    build_program,
    check_program,
    lower,
    step_loads,
)
from mmtrain.program.verify.deadlock import send_window
from mmtrain.recipe.settings.train_settings import OptimizerSettings
from mmtrain.runtime.execution.broker import Broker
from mmtrain.runtime.execution.executor import Executor, StepInput
from mmtrain.runtime.execution.optimizer import Optimizer
from mmtrain.runtime.execution.process_groups import Transport, build_groups
from mmtrain.runtime.execution.rank_context import forward_only
from mmtrain.runtime.execution.unit import UnitRunner
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.program.graphs import Unit, chain
from tests.program.parts import cut

WIDTH = 5
TOKENS = (7, 4, 6, 3, 9, 5, 4, 8)
ITEMS = {  # rows of each item of each sample; the generator's are rows of the LLM that it starts from
    "vision": ((), (3,), (2, 4), (), (5, 1, 2), (2,), (), (6,)),
    "generator": ((2,), (), (1, 3), (4,), (), (), (2, 2), (5,)),
}
NUM_GROUPS = 4  # of two samples
COUNTED = {"llm": sum(TOKENS), "generator": sum(map(sum, ITEMS["generator"]))}


@dataclass(frozen=True)
class Input:
    """A microbatch: input rows, target rows, positions of features, and of rows for the generator."""

    hidden: Tensor
    target: Tensor
    places: Tensor
    handed: Tensor


class Toy(nn.Module):
    """Layers of a unit; the last one of the LLM returns rows and a loss, that of the generator a loss."""

    def __init__(self, unit: str, layers: range, last: int, trainable: bool) -> None:
        super().__init__()
        self.unit, self.indices, self.last = unit, layers, last
        self.feeds_generator, self.shape = unit == "llm", SimpleNamespace(layers=range(last + 1))
        self.layers = nn.ModuleDict()
        for index in layers:
            torch.manual_seed(100 * len(unit) + index)
            self.layers[str(index)] = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.requires_grad_(trainable)

    def context(self, inputs: Input, features: Mapping[str, Tensor]) -> tuple[Input, Mapping[str, Tensor]]:
        return inputs, features

    def run(self, context: Any, hidden: Tensor | None, layers: range) -> Tensor:
        inputs, _ = context
        hidden = self._run_layers(context, hidden, layers)
        if self.unit != "generator" or self.last not in layers:
            return hidden
        return (hidden - inputs.target).square().sum()

    def run_to_queries(self, context: Any, hidden: Tensor | None, layers: range) -> tuple[Tensor, Tensor]:
        inputs, _ = context
        hidden = self._run_layers(context, hidden, layers)
        return hidden[inputs.handed], (hidden - inputs.target).square().sum()

    def _run_layers(self, context: Any, hidden: Tensor | None, layers: range) -> Tensor:
        inputs, features = context
        for index in layers:
            if index == 0:
                hidden = features["llm"] if self.unit == "generator" else inputs.hidden
                if "vision" in features:
                    hidden = hidden.index_add(0, inputs.places, features["vision"])
            hidden = torch.tanh(self.layers[str(index)](hidden))
        assert hidden is not None
        return hidden


class Sums:
    """The smallest optimizer of a unit: it sums gradients over replicas and changes no parameter."""

    def __init__(self, stages: nn.ModuleList, groups: ParallelGroups) -> None:
        self.stages, self.groups = stages, groups
        self.params = [p for p in stages.parameters() if p.requires_grad]

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = torch.zeros_like(param)

    def reduce_grads(self, chunk: int, bucket: int) -> None:
        for param in self.stages[chunk].parameters():
            if param.requires_grad:
                dist.all_reduce(param.grad, group=self.groups.dp)

    def finish_reduction(self) -> None:
        """Wait for nothing: `reduce_grads` has."""

    def grad_sq_sum(self) -> Tensor:
        norms = torch.stack([cast(Tensor, p.grad).square().sum() for p in self.params] or [torch.zeros(())])
        return norms.sum().double() / (self.groups.dp_size * self.groups.tp_size)

    def step(self, lr: float, clip: object) -> None:
        """Change no parameter."""

    def count_update(self) -> None:
        """Count nothing."""

    def start_gather(self, chunk: int, bucket: int) -> None:
        """Gather nothing, as no parameter has changed."""

    def finish_gather(self, chunk: int, bucket: int) -> None:
        """Wait for nothing."""

    def gather_params(self) -> None:
        """Gather nothing, as no parameter has changed."""

    def set_num_updates(self, value: int) -> None:
        """Ignore the number, as nothing depends on it."""


def rows(*key: object, num: int) -> Tensor:
    """Return the same rows for the same key on every rank."""
    return torch.from_numpy(np.random.default_rng([*str(key).encode()]).standard_normal((num, WIDTH)))


def lengths() -> SampleLengths:
    items = {}
    for unit, samples in ITEMS.items():
        sizes = np.array([n for item_sizes in samples for n in item_sizes], dtype=np.int64)
        first = np.cumsum([0, *(len(item_sizes) for item_sizes in samples)], dtype=np.int64)
        items[unit] = ItemLengths(first, sizes, np.ones_like(sizes), sizes, sizes)
    tokens = np.array(TOKENS, dtype=np.int64)
    return SampleLengths(tokens, tokens, items)


def llm_input(samples: list[int]) -> Input:
    """Pack samples one after another; features go to every other row, rows for the generator overlap."""
    starts = np.cumsum([0, *(TOKENS[s] for s in samples)])[:-1].tolist()
    places = [
        b + 2 * k % TOKENS[s] for s, b in zip(samples, starts, strict=True) for k in range(sum(ITEMS["vision"][s]))
    ]
    handed = [
        b + (item + k) % TOKENS[s]
        for s, b in zip(samples, starts, strict=True)
        for item, num in enumerate(ITEMS["generator"][s])
        for k in range(num)
    ]
    hidden, target = (torch.cat([rows(what, s, num=TOKENS[s]) for s in samples]) for what in ("x", "y"))
    return Input(hidden, target, torch.tensor(places, dtype=torch.int64), torch.tensor(handed, dtype=torch.int64))


def item_input(unit: str, items: list[tuple[int, int]]) -> Input:
    """Pack items (sample, position) one after another."""
    none = torch.zeros(0, dtype=torch.int64)
    parts = [rows(unit, *item, num=ITEMS[unit][item[0]][item[1]]) for item in items]
    hidden = torch.cat([torch.zeros(0, WIDTH, dtype=torch.float64), *parts])
    return Input(hidden, hidden, none, none)


def inputs_of(graph: StageGraph, meta: BatchMeta) -> dict[Microbatch, Any]:
    inputs = {}
    for mesh in graph.meshes:
        for r in range(mesh.dp):
            for i in range(mesh.num_microbatches):
                if mesh.unit == "llm":
                    samples = meta.sample_id[(meta.replica == r) & (meta.index == i)].tolist()
                    inputs[Microbatch("llm", r, i)] = llm_input(samples)
                else:
                    table = meta.items[mesh.unit]
                    in_microbatch = table.microbatch(r, i)
                    samples = meta.sample_id[table.sample[in_microbatch]].tolist()
                    items = list(zip(samples, table.position[in_microbatch].tolist(), strict=True))
                    inputs[Microbatch(mesh.unit, r, i)] = item_input(mesh.unit, items)
    return inputs


Outcome = tuple[float, float | None, float, dict[str, Tensor]]  # loss, norm, loss in validation, gradients


def run(units: tuple[Unit, ...], cut_seed: int | None) -> Outcome:
    """Run one step on this rank, and validate its batch; return losses, the gradient norm and gradients."""
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    graph = chain(*units)
    groups = build_groups(graph, world)
    runners = {}
    for unit in groups.units:
        held = [
            s for s in graph.stages if s.id.unit == unit and any(world.rank in tp_group for tp_group in s.tp_groups)
        ]
        stages = {s.id: cast(StageModule, Toy(unit, range(*s.layers), last(graph, unit), s.trainable)) for s in held}
        runners[unit] = UnitRunner(unit, stages, groups.units[unit])
    sums: dict[str, Any] = {u: Sums(nn.ModuleList(r.stages.values()), r.groups) for u, r in runners.items()}
    optimizer = Optimizer(sums, OptimizerSettings(lr=1.0, clip_norm=None), world, None)
    dp, num = ({m.unit: getattr(m, what) for m in graph.meshes} for what in ("dp", "num_microbatches"))
    meta = assign(0, 0, list(np.random.default_rng(3).permutation(8).reshape(NUM_GROUPS, 2)), lengths(), dp, num)
    step = StepInput(inputs_of(graph, meta), step_loads(graph, meta), {u: 1 / n for u, n in COUNTED.items()})

    def executed(graph: StageGraph, optimizer: Optimizer | None) -> Any:
        program = ordered(graph, cut_seed)
        actions = [a for a in program.for_rank(world.rank) if optimizer or not isinstance(a, Step)]
        widths = dict.fromkeys(graph.edges, WIDTH)
        limit = send_window(program)
        broker = Broker(graph, actions, Transport(world.rank, groups, widths, {}, world.device, torch.float64), limit)
        return Executor(graph, actions, runners, broker, optimizer).run(step)

    validated = executed(forward_only(graph), None)
    trained = executed(graph, optimizer)
    gradients = {
        f"{unit}.{name}": param.grad
        for unit, runner in runners.items()
        for stage in runner.stages.values()
        for name, param in stage.named_parameters()
        if param.grad is not None
    }
    return trained.loss, trained.grad_norm, validated.loss, gradients


def ordered(graph: StageGraph, cut_seed: int | None) -> Program:
    if cut_seed is None:
        return build_program(graph)
    whole = build_1f1b(graph)
    pieces = {rank: [p for a in todo for p in cut(graph, a, cut_seed)] for rank, todo in whole.actions.items()}
    program = lower(replace(whole, actions={rank: tuple(todo) for rank, todo in pieces.items()}))
    check_program(program)
    return program


def last(graph: StageGraph, unit: str) -> int:
    """Return the index of the unit's last layer."""
    return max(s.layers[1] for s in graph.stages if s.id.unit == unit) - 1


def one_process(units: tuple[Unit, ...]) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients, computed sample by sample."""
    graph = chain(*units)
    stages = {
        (s.id.unit, s.id.index): Toy(s.id.unit, range(*s.layers), last(graph, s.id.unit), s.trainable)
        for s in graph.stages
    }

    def through(unit: str, inputs: Input, features: Mapping[str, Tensor]) -> Any:
        out: Any = None
        for (name, _), stage in sorted(stages.items()):
            if name == unit:
                ends_llm = unit == "llm" and stage.last in stage.indices
                out = (stage.run_to_queries if ends_llm else stage.run)((inputs, features), out, stage.indices)
        return out

    total = torch.zeros((), dtype=torch.float64)
    for s in range(len(TOKENS)):
        media = item_input("vision", [(s, k) for k in range(len(ITEMS["vision"][s]))])
        handed, loss = through("llm", llm_input([s]), {"vision": through("vision", media, {})})
        goal = item_input("generator", [(s, k) for k in range(len(ITEMS["generator"][s]))])
        drawn = through("generator", goal, {"llm": handed})
        total = total + loss / COUNTED["llm"] + drawn / COUNTED["generator"]
    total.backward()
    gradients = {
        f"{unit}.{name}": param.grad
        for (unit, _), stage in stages.items()
        for name, param in stage.named_parameters()
        if param.grad is not None
    }
    return float(total.detach()), gradients


def frozen(name: str) -> Unit:
    return Unit(name, n=4, trainable=(False,))


CASES: dict[str, tuple[Unit, ...]] = {
    "one rank": (Unit("vision", n=4), Unit("llm", ranks=(0,), n=4), Unit("generator", ranks=(0,), n=4)),
    "each on its own": (Unit("vision", n=4), Unit("llm", n=4), Unit("generator", n=4)),
    "llm pp2, generator pp2": (Unit("vision", n=4), Unit("llm", 2, n=4), Unit("generator", 2, n=4)),
    "generator on the llm's last": (Unit("vision", n=4), Unit("llm", 2, n=4), Unit("generator", ranks=(2,), n=4)),
    "dp 2:1": (Unit("vision", n=2), Unit("llm", dp=2, n=2), Unit("generator", n=2)),
    "dp 1:2 of a pipeline": (Unit("vision", n=4), Unit("llm", 2, n=4), Unit("generator", dp=2, n=4)),
    "two replica groups": (Unit("vision", dp=2, n=2), Unit("llm", dp=2, n=2), Unit("generator", dp=4, n=2)),
    "llm tp2": (Unit("vision", n=4), Unit("llm", tp=2, n=4), Unit("generator", n=4)),
    "generator tp2": (Unit("vision", n=4), Unit("llm", n=4), Unit("generator", tp=2, n=4)),
    "merged and split": (Unit("vision", n=2), Unit("llm", 2, n=4), Unit("generator", n=2)),
    "only the generator trains": (frozen("vision"), frozen("llm"), Unit("generator", n=4)),
    "only the encoder trains": (Unit("vision", n=4), frozen("llm"), frozen("generator")),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "cut_seed"), [*((case, None) for case in CASES), ("one rank", 1), ("dp 1:2 of a pipeline", 2)]
)
def test_two_losses_and_all_gradients_equal_those_of_one_process(case: str, cut_seed: int | None) -> None:
    units = CASES[case]
    outcomes = run_ranks(chain(*units).world_size, run, units, cut_seed)
    [(loss, expected)] = run_ranks(1, one_process, units)
    assert sum(trained for trained, *_ in outcomes) == pytest.approx(loss, rel=1e-12)
    assert sum(validated for _, _, validated, _ in outcomes) == pytest.approx(loss, rel=1e-12)
    norm = float(torch.cat([g.flatten() for g in expected.values()]).norm())
    assert all(norm_of_rank == pytest.approx(norm, rel=1e-12) for _, norm_of_rank, _, _ in outcomes)
    held = [gradients for *_, gradients in outcomes]
    assert {name for gradients in held for name in gradients} == set(expected)
    for gradients in held:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-11, atol=1e-13)
