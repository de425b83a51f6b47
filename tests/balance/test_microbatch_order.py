"""Order microbatches in time: blocks move together, in the same way on all replicas, and no step gets longer."""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import BatchMeta, PipelineRank, SampleLengths, SequenceCost, StepTargets, assign
from mmtrain.balance.ordering.makespan_1f1b import makespans_1f1b
from mmtrain.balance.ordering.schedule_recurrence import ScheduleRecurrence
from mmtrain.planning.artifact.plan import SchedulePlan
from mmtrain.planning.artifact.schedule_table import build_schedule_table
from tests.balance.test_assign import make_groups, make_lengths
from tests.program.graphs import Unit, chain

PIPELINE = (
    PipelineRank({"vision": SequenceCost(40, 1)}, {"vision": SequenceCost(80, 2)}),
    PipelineRank({"llm": SequenceCost(9)}, {"llm": SequenceCost(18)}),
    PipelineRank({"llm": SequenceCost(9, 1)}, {"llm": SequenceCost(18, 2)}),
)
LLM_COSTS = SequenceCost(5), SequenceCost(9, 1)  # of one of four stages
TARGETS = StepTargets(pipeline=PIPELINE, item_costs={"vision": SequenceCost(120, 3)})

cases = st.tuples(  # seed, dp of vision and of the llm, microbatches of each
    st.integers(0, 10_000),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3, 4, 6, 12]),
    st.sampled_from([3, 4, 6, 8]),
)
Case = tuple[int, int, int, int, int]


def laid_out(case: Case, targets: StepTargets) -> tuple[SampleLengths, BatchMeta]:
    seed, dp_vision, dp_llm, num_vision, num = case
    rng = np.random.default_rng(seed)
    lengths = make_lengths(rng, 3 * dp_llm * num)
    groups = make_groups(rng, 3 * dp_llm * num, dp_llm * num)
    dp, counts = {"vision": dp_vision, "llm": dp_llm}, {"vision": num_vision, "llm": num}
    return lengths, assign(0, 0, groups, lengths, dp, counts, targets)


def interleaved(case: Case) -> StepTargets:
    """Put vision on separate ranks before an LLM of two chunks on each of two ranks, with the costs of PIPELINE."""
    _, dp_vision, dp_llm, num_vision, num = case
    graph = chain(Unit("vision", dp=dp_vision, n=num_vision), Unit("llm", 2, dp_llm, num_stages=4), n=num)
    counts = {"vision": num_vision, "llm": num}
    costs = {
        s.id: (SequenceCost(40, 1), SequenceCost(80, 2)) if s.id.unit == "vision" else LLM_COSTS for s in graph.stages
    }
    table = build_schedule_table(graph, SchedulePlan(num_microbatches=counts), costs)
    return StepTargets(schedule_table=table, item_costs=TARGETS.item_costs)


def seconds(meta: BatchMeta, case: Case, costs: Sequence[Mapping[str, SequenceCost]]) -> np.ndarray:
    """Return (dp_llm, costs, num) of a layout; the work of each replica group's encoders is shared evenly."""
    _, dp_vision, dp_llm, _, num = case
    g = math.gcd(dp_vision, dp_llm)
    table = meta.items["vision"]
    seconds = np.zeros((dp_llm, len(costs), num))
    for r, c, i in itertools.product(range(dp_llm), range(len(costs)), range(num)):
        if "llm" in costs[c]:
            seconds[r, c, i] = costs[c]["llm"].of(meta.tokens[meta.microbatch(r, i)]).sum()
        else:
            in_group = meta.replica[table.sample] // (dp_llm // g) == r // (dp_llm // g)
            items = in_group & (meta.index[table.sample] == i)
            seconds[r, c, i] = costs[c]["vision"].of(table.tokens[items]).sum() // (dp_vision // g)
    return seconds


def span(meta: BatchMeta, case: Case, targets: StepTargets) -> float:
    """Return the makespan of a layout in its own order, by the recurrence."""
    given_order = np.arange(case[4])[None]
    if targets.schedule_table is None:
        forward, backward = (
            seconds(meta, case, [getattr(p, direction) for p in PIPELINE]) for direction in ("forward", "backward")
        )
        return float(makespans_1f1b(forward, backward, given_order)[0])
    costs = seconds(meta, case, [{task.unit: task.cost} for task in targets.schedule_table.tasks])
    blocks = math.gcd(case[3], case[4])
    for t, task in enumerate(targets.schedule_table.tasks):
        if task.unit == "vision":  # a microbatch holds its share of a block
            by_block = costs[:, t].reshape(case[2], blocks, -1).sum(axis=2)
            costs[:, t] = np.repeat(by_block // (case[3] // blocks), case[4] // blocks, axis=1)
    return float(
        ScheduleRecurrence(targets.schedule_table, {"vision": case[3], "llm": case[4]}).makespans(costs, given_order)[0]
    )


@given(cases, st.booleans())
def test_an_order_in_time_moves_whole_blocks_and_lengthens_no_step(case: Case, chunks: bool) -> None:
    _, _, dp_llm, num_vision, num = case
    timing = interleaved(case) if chunks else TARGETS
    (_, plain), (_, timed) = (
        laid_out(case, targets) for targets in (StepTargets(item_costs=TARGETS.item_costs), timing)
    )

    def block(meta: BatchMeta, b: int) -> list[list[int]]:
        per = num // math.gcd(num, num_vision)
        microbatches = range(b * per, (b + 1) * per)
        return [sorted(meta.sample_id[meta.microbatch(r, i)].tolist()) for r in range(dp_llm) for i in microbatches]

    num_blocks = math.gcd(num, num_vision)
    blocks = [[block(meta, b) for b in range(num_blocks)] for meta in (plain, timed)]
    assert sorted(blocks[0]) == sorted(blocks[1]), "the same blocks, with the same microbatches on the same replicas"
    before, after = (span(meta, case, timing) for meta in (plain, timed))
    assert after <= before


@pytest.mark.parametrize("chunks", [False, True], ids=["1F1B", "two chunks"])
def test_an_uneven_pipeline_comes_near_the_best_of_all_orders(chunks: bool) -> None:
    ratios = []
    orders = np.array(list(itertools.permutations(range(6))))
    for seed in range(12):
        case = seed, 1, 1, 6, 6
        timing = interleaved(case) if chunks else TARGETS
        _, timed = laid_out(case, timing)
        if timing.schedule_table is None:
            durations = (
                seconds(timed, case, [getattr(p, direction) for p in PIPELINE]) for direction in ("forward", "backward")
            )
            spans = makespans_1f1b(*durations, orders)
        else:
            costs = seconds(timed, case, [{task.unit: task.cost} for task in timing.schedule_table.tasks])
            spans = ScheduleRecurrence(timing.schedule_table, {"vision": 6, "llm": 6}).makespans(costs, orders)
        ratios.append(float(spans[0] / spans.min()))  # the first is the given order
    assert max(ratios) < 1.03
    assert np.mean(ratios) < 1.01


@pytest.mark.parametrize("pipeline", [(), PIPELINE[:1]])
def test_without_a_pipeline_microbatches_stay(pipeline: tuple[PipelineRank, ...]) -> None:
    case = 1, 2, 2, 4, 4
    (_, plain), (_, same) = (laid_out(case, StepTargets(pipeline=p)) for p in ((), pipeline))
    assert plain.sample_id.tolist() == same.sample_id.tolist()
    assert plain.index.tolist() == same.index.tolist()
