"""The schedule table of a plan, evaluated by the recurrence, takes as long as the plan's program."""

from collections import Counter, defaultdict
from collections.abc import Callable
from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance.ordering.makespan_1f1b import makespans_1f1b
from mmtrain.balance.ordering.reordering import reorder_microbatches
from mmtrain.balance.ordering.schedule_recurrence import ScheduleRecurrence
from mmtrain.balance.step_targets import ScheduledTask, ScheduleTable, SequenceCost
from mmtrain.planning.artifact.plan import SchedulePlan
from mmtrain.planning.artifact.schedule_table import build_schedule_table, is_single_chain
from mmtrain.program import Partial, Program, StageGraph, build_1f1b, build_coarse, build_program, lower, simulate
from mmtrain.program.ir.actions import Backward, Compute, Forward, Pass
from mmtrain.program.ir.segments import direction, num_segments, pass_of
from mmtrain.program.ir.serialize import action_to_text
from tests.program.graphs import Unit, chain, graphs, unified
from tests.program.parts import cut, deeper
from tests.program.test_simulate import Given

COST_UNIT = 12  # costs are multiples of it, so that parts of a stage have integer costs


@st.composite
def scheduled(draw: st.DrawFn) -> tuple[StageGraph, SchedulePlan, Program]:
    """Draw a graph of two or more units, a schedule of any kind for it, and its program."""
    graph = deeper(draw(graphs(max_n=5, max_dp=2)), draw(st.integers(1, 4)))
    counts = {mesh.unit: mesh.num_microbatches for mesh in graph.meshes}
    kind = draw(st.sampled_from(["1f1b", "coarse", "explicit"]))
    if kind != "explicit":
        return graph, SchedulePlan(kind=kind, num_microbatches=counts), build_program(graph, kind=kind)
    seed = draw(st.integers(0, 2**32))
    uncut = draw(st.sampled_from([build_1f1b, build_coarse]))(graph)
    pieces = {rank: [p for a in todo for p in cut(graph, a, seed)] for rank, todo in uncut.actions.items()}
    order = {rank: tuple(map(action_to_text, todo)) for rank, todo in pieces.items()}
    program = lower(Program(graph, {rank: tuple(todo) for rank, todo in pieces.items()}))
    return graph, SchedulePlan(kind="explicit", num_microbatches=counts, order=order), program


@given(scheduled(), st.integers(0, 10_000))
def test_the_recurrence_takes_as_long_as_the_program(case: tuple[StageGraph, SchedulePlan, Program], seed: int) -> None:
    graph, schedule, program = case
    rng = np.random.default_rng(seed)
    num = schedule.num_microbatches
    costs_by_stage = {
        s.id: tuple(SequenceCost(COST_UNIT * int(p)) for p in rng.integers(1, 9, 2)) for s in graph.stages
    }
    loads = rng.integers(1, 20, num["llm"])
    inside = np.arange(num["llm"]).reshape(gcd(*num.values()), -1)
    order = inside[rng.permutation(len(inside))].ravel()  # blocks move together
    shares = {unit: gcd(count, num["llm"]) for unit, count in num.items()}

    def load(unit: str, microbatch: int, of: np.ndarray) -> float:
        """Return the load of a microbatch: a unit's microbatches in a block share the load of the LLM's in it."""
        per = num[unit] // shares[unit]
        return float(of.reshape(shares[unit], -1).sum(axis=1)[microbatch // per] / per)

    def seconds(action: Compute) -> float:
        cost = costs_by_stage[action.stage][direction(action) == "B"].linear
        share = (action.hi - action.lo) / num_segments(graph, action.stage) if isinstance(action, Partial) else 1.0
        return cost * share * load(action.mb.unit, action.mb.index, loads[order])

    table = build_schedule_table(graph, schedule, costs_by_stage)
    assert table is not None
    costs = np.zeros((1, len(table.tasks), num["llm"]))
    for t, task in enumerate(table.tasks):
        per, width = num[task.unit] // shares[task.unit], num["llm"] // shares[task.unit]
        costs[0, t] = [task.cost.linear * load(task.unit, m // width * per, loads) for m in range(num["llm"])]
    makespan_s = ScheduleRecurrence(table, num).makespans(costs, order[None])
    assert makespan_s[0] == pytest.approx(program_seconds(program, seconds))
    assert makespan_s[0] <= simulate(program, Given({}, {}, rule=seconds)).step_time_s + 1e-6, "its messages queue"


def program_seconds(program: Program, seconds: Callable[[Compute], float]) -> float:
    """Return the seconds of a program whose messages cost nothing, action by action over all ranks."""
    graph = program.graph
    todo = {rank: [a for a in actions if isinstance(a, Compute)] for rank, actions in program.actions.items()}
    left = Counter(pass_of(action) for actions in todo.values() for action in actions)
    end: dict[Pass, float] = defaultdict(float)
    clock = dict.fromkeys(todo, 0.0)
    while any(todo.values()):
        for rank, actions in todo.items():
            if not actions:
                continue
            action = actions[0]
            waits: list[Pass] = []
            if direction(action) == "F":
                waits = [Forward(e.src, m) for e in graph.inputs(action.stage) for m in graph.sources(e, action.mb)]
            else:
                waits = [Forward(action.stage, action.mb)]
                for edge in graph.outputs(action.stage):
                    waits += [Backward(edge.dst, m) for m in graph.destinations(edge, action.mb)]
            if any(left[needed] for needed in waits):
                continue
            clock[rank] = max([clock[rank], *(end[needed] for needed in waits)]) + seconds(action)
            mine = pass_of(action)
            end[mine] = max(end[mine], clock[rank])
            left[mine] -= 1
            actions.pop(0)
    return max(clock.values())


@st.composite
def chains(draw: st.DrawFn) -> StageGraph:
    small = st.integers(1, 3)
    n = draw(st.integers(1, 7))
    if draw(st.booleans()):
        pp = draw(st.integers(1, 4))
        return unified(pp, draw(small), draw(small), draw(st.integers(1, pp)), n)
    return chain(Unit("vision", draw(small), draw(small)), Unit("llm", draw(small), draw(small)), n=n)


@given(chains(), st.integers(0, 10_000))
def test_a_list_of_ranks_describes_a_single_chain(graph: StageGraph, seed: int) -> None:
    assert is_single_chain(graph)
    rng = np.random.default_rng(seed)
    num = {mesh.unit: mesh.num_microbatches for mesh in graph.meshes}
    costs_by_stage = {stage.id: (SequenceCost(1), SequenceCost(1)) for stage in graph.stages}
    table = build_schedule_table(graph, SchedulePlan(num_microbatches=num), costs_by_stage)
    assert table is not None
    costs = rng.gamma(2.0, 1.0, (1, len(table.tasks), num["llm"]))
    orders = np.arange(num["llm"])[None]
    recurrence = ScheduleRecurrence(table, num)
    forward, backward = (work[None] for work in recurrence.rank_seconds(costs[0]))  # ranks count along the chain
    assert recurrence.makespans(costs, orders) == pytest.approx(makespans_1f1b(forward, backward, orders))


@pytest.mark.parametrize(
    "graph",
    [
        chain(Unit("vision"), Unit("audio"), Unit("llm"), n=4),
        chain(Unit("vision", n=2), Unit("llm"), n=4),
        chain(Unit("vision", 2, ranks=(0, 1)), Unit("llm", 2, ranks=(0, 1)), n=4),
        chain(Unit("vision"), Unit("llm", 2, num_stages=4), n=4),
        chain(Unit("vision", trainable=(False,)), Unit("llm"), n=4),
    ],
    ids=["two encoders", "merged microbatches", "the same ranks twice", "chunks", "no backward"],
)
def test_other_pipelines_are_no_single_chains(graph: StageGraph) -> None:
    assert not is_single_chain(graph)


def interleaved(p: int, chunks: int, num: int) -> tuple[ScheduleTable, dict[str, int]]:
    """Make an LLM with several chunks on each of p ranks; forwards cost 1 and backwards 2."""
    graph = chain(Unit("llm", p, num_stages=p * chunks), n=num)
    counts = {"llm": num}
    costs_by_stage = {stage.id: (SequenceCost(1), SequenceCost(2)) for stage in graph.stages}
    table = build_schedule_table(graph, SchedulePlan(num_microbatches=counts), costs_by_stage)
    assert table is not None
    return table, counts


def even(table: ScheduleTable, num: int) -> np.ndarray:
    return np.array([[[float(task.cost.linear)] * num for task in table.tasks]])


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 9))
def test_one_chunk_is_plain_1f1b(seed: int, p: int, num: int) -> None:
    table, counts = interleaved(p, 1, num)
    rng = np.random.default_rng(seed)
    costs = rng.gamma(2.0, 1.0, (2, len(table.tasks), num))
    orders = np.stack([rng.permutation(num) for _ in range(3)])
    forward, backward = (
        costs[:, [i for _, i in sorted((t.stage, i) for i, t in enumerate(table.tasks) if t.is_forward == is_forward)]]
        for is_forward in (True, False)
    )
    recurrence = ScheduleRecurrence(table, counts)
    assert recurrence.makespans(costs, orders) == pytest.approx(makespans_1f1b(forward, backward, orders))
    assert [w.tolist() for w in recurrence.rank_seconds(costs[0])] == [forward[0].tolist(), backward[0].tolist()]


def test_even_chunks_take_as_long_as_megatron_lm_states() -> None:
    p, chunks, num = 4, 3, 8
    table, counts = interleaved(p, chunks, num)
    span = ScheduleRecurrence(table, counts).makespans(even(table, num), np.arange(num)[None])[0]
    assert span == num * chunks * 3 + (p - 1) * 3, "the bubble is (p - 1) (tf + tb) / v"


def test_reordering_several_chunks_never_lengthens_the_step() -> None:
    table, counts = interleaved(4, 2, 16)
    recurrence = ScheduleRecurrence(table, counts)
    gains = []
    first = [i for i, task in enumerate(table.tasks) if task.stage == 0]
    for seed in range(6):
        rng = np.random.default_rng(seed)
        costs = even(table, 16)
        costs[:, first] *= rng.gamma(2.0, 0.6, 16)
        given_order = rng.permutation(16)
        forward, backward = (work[None] for work in recurrence.rank_seconds(costs[0]))
        new_order = reorder_microbatches(
            forward, backward, given_order, 3, rng, score=lambda orders, c=costs: recurrence.makespans(c, orders)
        )
        assert sorted(new_order.tolist()) == list(range(16))
        before, after = recurrence.makespans(costs, np.stack([given_order, new_order]))
        assert after <= before
        gains.append(before - after)
    assert np.mean(gains) > 1


def test_a_cycle_of_passes_is_rejected() -> None:
    tasks = tuple(ScheduledTask(0, "llm", is_forward, SequenceCost(1)) for is_forward in (True, False))
    with pytest.raises(ValueError, match="wait for each other in a cycle"):
        ScheduleRecurrence(ScheduleTable(tasks, ((),), ("1 0",)), {"llm": 1})


def test_fills_and_very_long_steps_have_no_table() -> None:
    graph = deeper(chain(Unit("vision", ranks=(0,)), Unit("llm", ranks=(0,)), n=1), 2)
    costs_by_stage = {stage.id: (SequenceCost(1), SequenceCost(2)) for stage in graph.stages}
    order = ("F vision.0 vision:0.0", "F llm.0 llm:0.0", "B llm.0 llm:0.0 |1| PB vision.0 vision:0.0 0:2")
    schedule = SchedulePlan(kind="explicit", num_microbatches={"vision": 1, "llm": 1}, order={0: order})
    assert build_schedule_table(graph, schedule, costs_by_stage) is None
    many = chain(Unit("llm", 2), n=4000)
    costs_by_stage = {stage.id: (SequenceCost(1), SequenceCost(2)) for stage in many.stages}
    assert build_schedule_table(many, SchedulePlan(num_microbatches={"llm": 4000}), costs_by_stage) is None
