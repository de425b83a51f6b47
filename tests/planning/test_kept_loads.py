"""What `LayerCosts` lays out and keeps of the sampled batches: little, and the same as if it laid out all of them."""

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from mmtrain.balance import BatchMeta
from mmtrain.costs import TokenLoad
from mmtrain.costs.cost_model import LayerWork
from mmtrain.planning.colocated.colocated_search import _Attempt, _by_bound, _enumerate, _StepBound
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.layer_costs import sampled_loads
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.planner import plan
from mmtrain.planning.space.budget import DEFAULT_BUDGET, LoadBudget
from mmtrain.planning.space.load_arrays import LoadArrays, LoadSeconds, load_arrays
from mmtrain.planning.space.problem import PlanningProblem
from mmtrain.planning.space.recently_used import RecentlyUsed
from mmtrain.planning.space.sample_batches import BatchSplit, SampledBatches, UnitSplit, num_groups_of
from mmtrain.program.ir.graph import LLM, Microbatch, StageGraph
from mmtrain.program.ir.step_loads import StepLoads, step_loads
from scripts.measurements import run_child
from scripts.whatif_problems import WHAT_IF_FOLDER
from tests.planning.factory import heard, loads_of_steps, speech

UNITS = ("vision", "audio", LLM)


@pytest.fixture(scope="module")
def problem() -> PlanningProblem:
    """Vision, audio and LLM on 16 ranks."""
    settings = speech()
    settings = settings.model_copy(update={"train": settings.train.model_copy(update={"global_batch": 16})})
    return formulate_problem(settings, heard(settings), world_size=16, hardware="h100-80g", recipe_sha256="f" * 64)


def splits(global_batch: int) -> Iterator[BatchSplit]:
    """Draw splits of three units, whose replica groups are as many as their replicas have divisors in common."""
    for vision, audio, llm in product((1, 2, 4, 8), (1, 2, 8), (1, 2, 4)):
        num_llm = global_batch // llm
        for merged in (1, 2):
            yield (
                UnitSplit("vision", vision, num_llm // merged),
                UnitSplit("audio", audio, num_llm),
                UnitSplit(LLM, llm, num_llm),
            )


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, ...]]:
    """Count how often batches are laid out, by the units whose items are."""
    calls: Counter[tuple[str, ...]] = Counter()
    lay_out = SampledBatches.lay_out

    def counting(batches: SampledBatches, *arguments: object) -> list[BatchMeta]:
        calls[tuple(sorted(batches.lengths.items))] += 1
        return lay_out(batches, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SampledBatches, "lay_out", counting)
    return calls


def test_loads_are_those_of_the_whole_layout(problem: PlanningProblem) -> None:
    layer_costs = LayerCosts(problem)
    for split in splits(problem.batches.global_batch):
        dp = {entry.unit: entry.dp for entry in split}
        batches = problem.batches.lay_out(dp, {entry.unit: entry.num_microbatches for entry in split})
        for entry in split:
            found = layer_costs.loads.of_unit(entry.unit, split)
            whole = load_arrays(entry.unit, batches, entry.dp, entry.num_microbatches)
            for name in ("tokens", "sum_sq", "max_len", "num_sequences"):
                assert np.array_equal(getattr(found, name), getattr(whole, name)), (entry, name)


def test_loads_of_a_replica_group_are_a_part_of_the_whole(problem: PlanningProblem) -> None:
    layer_costs = LayerCosts(problem)
    for split in splits(problem.batches.global_batch):
        num_groups = num_groups_of(split)
        group = num_groups - 1
        whole, found = layer_costs.loads.of_step(split, 1), layer_costs.loads.of_group(split, 1, group)
        first = {entry.unit: group * entry.dp // num_groups for entry in split}

        def in_whole(mb: Microbatch, first: dict[str, int] = first) -> Microbatch:
            return mb._replace(replica=mb.replica + first[mb.unit])

        assert len(found.loads) == sum(entry.dp // num_groups * entry.num_microbatches for entry in split)
        assert all(whole.loads[in_whole(mb)] == load for mb, load in found.loads.items())
        assert all(whole.rows_out[in_whole(mb)] == rows for mb, rows in found.rows_out.items())
        for pair, route in found.routes.items():
            spans = {(a, b): rows for (a, b), rows in whole.routes[pair].spans.items() if a.replica >= first[a.unit]}
            assert list(spans) == [(in_whole(a), in_whole(b)) for a, b in route.spans]
            assert all(map(np.array_equal, spans.values(), route.spans.values()))


def test_a_units_loads_are_laid_out_once_for_all_splits_of_other_units(
    problem: PlanningProblem, laid_out: Counter[tuple[str, ...]]
) -> None:
    layer_costs, all_splits = LayerCosts(problem), list(splits(problem.batches.global_batch))
    for split in all_splits:
        for unit in UNITS:
            layer_costs.loads.of_unit(unit, split)
    of_llm = {split[2] for split in all_splits}
    of_encoder = [{(split[number], split[2], num_groups_of(split)) for split in all_splits} for number in (0, 1)]
    assert laid_out == {(): len(of_llm), ("vision",): len(of_encoder[0]), ("audio",): len(of_encoder[1])}
    assert len(of_llm) + len(of_encoder[0]) + len(of_encoder[1]) < len(all_splits)
    assert len(layer_costs.loads._laid_out) == 0


def test_bounds_of_colocated_meshes_need_no_layouts(
    problem: PlanningProblem, laid_out: Counter[tuple[str, ...]]
) -> None:
    evaluator = Evaluator(problem, replace(DEFAULT_BUDGET, colocated=replace(DEFAULT_BUDGET.colocated, max_laid_out=0)))
    bound = _StepBound(evaluator.layer_costs)
    attempts = [_Attempt(candidate, evaluator, []) for candidate in _enumerate(evaluator, 16, bound)]
    assert list(_by_bound(attempts, evaluator, bound, lambda: math.inf)) == []
    assert len({attempt.candidate.assignment.batch_split for attempt in attempts}) > 20
    assert laid_out == {(): 1, ("vision",): 1, ("audio",): 1}


def test_few_whole_layouts_stay_in_memory(problem: PlanningProblem) -> None:
    budget = replace(
        DEFAULT_BUDGET,
        evaluation=replace(
            DEFAULT_BUDGET.evaluation,
            max_kept_batch_bytes=200_000,
            max_kept_time_bytes=100_000,
            max_kept_step_bytes=600_000,
        ),
    )
    layer_costs, all_splits = LayerCosts(problem, budget=budget), list(splits(problem.batches.global_batch))
    for split in all_splits:
        loads_of_steps(layer_costs, split)
        layer_costs.unit_times("vision", 1, split)
        assert layer_costs.loads._laid_out.size <= budget.evaluation.max_kept_batch_bytes
        assert layer_costs._unit_times.size <= budget.evaluation.max_kept_time_bytes
        assert layer_costs.loads._step_loads.size <= budget.evaluation.max_kept_step_bytes
    assert 1 < len(layer_costs.loads._laid_out) < len(all_splits)
    assert 1 < len(layer_costs._unit_times) < len(all_splits)


def test_loads_of_small_steps_are_summed_up_once(problem: PlanningProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    summed_up = []

    def counted(graph: StageGraph, batch: BatchMeta) -> StepLoads:
        summed_up.append(batch)
        return step_loads(graph, batch)

    monkeypatch.setattr(sampled_loads, "step_loads", counted)
    layer_costs, few_splits = LayerCosts(problem), list(splits(problem.batches.global_batch))[:8]
    for split in few_splits * 3:  # as sizes of shards and ways to dispatch come back to them
        loads_of_steps(layer_costs, split)
    assert (
        len(summed_up) == len(set(few_splits)) * len(problem.batches.groups) > DEFAULT_BUDGET.evaluation.min_kept_steps
    )


def test_the_entries_asked_for_last_are_kept() -> None:
    made: list[int] = []
    kept: RecentlyUsed[int] = RecentlyUsed(2)
    for key in (1, 2, 1, 3, 1, 2):
        assert kept.get(key, lambda key=key: made.append(key) or key) == key  # type: ignore[func-returns-value,misc]
    assert made == [1, 2, 3, 2]
    assert len(kept) == 2


def test_entries_are_kept_up_to_their_size_together_but_the_last_one_always() -> None:
    kept: RecentlyUsed[str] = RecentlyUsed(5, len)
    for word in ("two", "is", "one"):
        kept.get(word, word.__str__)
    assert "two" not in kept
    assert (len(kept), kept.size) == (2, 5)
    kept.get("longest", "longest".__str__)
    assert (len(kept), kept.size) == (1, 7)


def test_a_plan_of_three_units_lays_out_few_batches(
    problem: PlanningProblem, laid_out: Counter[tuple[str, ...]]
) -> None:
    plan(problem)
    assert laid_out[("audio", "vision")] < 100
    assert math.fsum(laid_out.values()) < 300


@pytest.mark.long
@pytest.mark.timeout(1800)  # minutes on a machine that does other work too
@pytest.mark.parametrize("name", ["orchmllm_84b", "mmscale_70b"])
def test_the_largest_recipes_are_planned_in_one_gigabyte(name: str, tmp_path: Path) -> None:
    recipe, plan_file = WHAT_IF_FOLDER / f"papers/{name}.yaml", tmp_path / "plan.json"
    used = run_child([sys.executable, "-m", "mmtrain", "plan", str(recipe), "--out", str(plan_file)])
    assert used.exit_code == 0
    assert plan_file.exists()
    assert used.peak_bytes < 1e9


def test_columns_are_of_32_bits_where_no_sum_of_them_overflows(problem: PlanningProblem) -> None:
    batch = problem.batches.with_items_of(()).lay_out({LLM: 2}, {LLM: 8})[0]
    small = load_arrays(LLM, [batch], 2, 8)
    assert {column.dtype for column in small._columns} == {np.dtype(np.int32)}
    long = replace(batch, tokens=batch.tokens * 100_000)
    large = load_arrays(LLM, [long], 2, 8)
    assert large.sum_sq.dtype == np.int64
    assert large.total(0).sum_sq == 100_000**2 * small.total(0).sum_sq
    assert large.total(0).tokens == 100_000 * small.total(0).tokens


def test_forgotten_times_are_worked_out_again(problem: PlanningProblem) -> None:
    layer_costs = LayerCosts(problem)
    split = layer_costs.loads.undivided
    times = layer_costs.unit_times(LLM, 1, split)
    assert layer_costs.unit_times(LLM, 1, split) is times
    layer_costs.forget_times()
    again = layer_costs.unit_times(LLM, 1, split)
    assert again is not times
    assert np.array_equal(again.by_kind, times.by_kind)


@pytest.mark.parametrize("num_nodes", [1, 2, 24])
def test_seconds_between_nodes_are_interpolated_in_tokens_squares_and_sequences(num_nodes: int) -> None:
    rng = np.random.default_rng(num_nodes)
    tokens, count = rng.integers(0, 5000, (2, 3, 50)), rng.integers(1, 9, (2, 3, 50))
    loads = LoadArrays(tokens, tokens**2 // count, tokens // count, count)

    def seconds(load: TokenLoad) -> float:
        return 1e-3 + 2e-6 * load.tokens**1.1 + 3e-9 * load.sum_sq + 4e-5 * load.num_sequences

    found = LoadSeconds(loads, LoadBudget(max_exact_loads=0, num_token_nodes=num_nodes)).of(seconds)
    nodes = np.unique(np.linspace(tokens[tokens > 0].min(), tokens.max(), num_nodes).astype(np.int64))
    squares_per_token, sequences_per_token = loads.sum_sq.sum() / tokens.sum(), count.sum() / tokens.sum()
    at_nodes = []
    for node in nodes.tolist():
        squares, sequences = max(int(node * squares_per_token), 2), max(int(node * sequences_per_token), 2)
        load = TokenLoad(node, squares, min(node, int(loads.max_len.max())), sequences)
        more_squared = seconds(replace(load, sum_sq=2 * squares)) - seconds(load)
        more_sequences = seconds(replace(load, num_sequences=2 * sequences)) - seconds(load)
        at_nodes.append([seconds(load), more_squared / squares, more_sequences / sequences])
    base, per_square, per_sequence = (np.interp(tokens, nodes, values) for values in np.transpose(at_nodes))
    expected = base + per_square * (loads.sum_sq - np.maximum(np.floor(tokens * squares_per_token), 2))
    expected += per_sequence * (count - np.maximum(np.floor(tokens * sequences_per_token), 2))
    assert np.array_equal(found, np.where(tokens > 0, np.maximum(expected, 0.0), 0.0))


def test_a_load_is_priced_once_for_all_splits(problem: PlanningProblem) -> None:
    asked = Counter[LayerWork]()

    class CountedCosts:
        def __getattr__(self, name: str) -> object:
            return getattr(problem.costs, name)

        def seconds(self, work: LayerWork) -> float:
            asked[work] += 1
            return problem.costs.seconds(work)

    layer_costs = LayerCosts(replace(problem, costs=CountedCosts()))
    for dp in (1, 2, 4, 8):
        layer_costs.unit_times(LLM, 1, (UnitSplit(LLM, dp, problem.batches.global_batch // dp),))
    assert set(asked.values()) == {1}
