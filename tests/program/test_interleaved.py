"""Interleaved 1F1B: Megatron-core's order where it has one, and no deadlock and short steps everywhere."""

import re
from importlib import import_module
from itertools import product

import pytest

from mmtrain.errors import ProgramError
from mmtrain.program import build_1f1b, build_program, peak_in_flight_by_stage, simulate
from mmtrain.program.ir.actions import Backward, Forward, Recv, ReduceGrads, ReduceShared, Send
from mmtrain.program.ir.graph import StageGraph, StageId
from mmtrain.program.schedules import pipeline_positions
from mmtrain.program.schedules.builder import in_flight_microbatches
from mmtrain.program.schedules.pipeline_positions import PipelinePosition
from tests.program.graphs import Unit, chain, unified
from tests.program.timings import Seconds
from tests.tiers import quick_and_long


def interleaved(pp: int, vpp: int, n: int) -> StageGraph:
    return chain(Unit("llm", pp, num_stages=pp * vpp), n=n)


def megatron_order(pp: int, vpp: int, n: int, rank: int) -> list[tuple[bool, int, int]]:
    """Return (is forward, chunk, microbatch) in the order of `forward_backward_pipelining_with_interleaving`."""
    import_module("mmtrain.models.megatron")  # first, because it keeps Megatron-core's import quiet
    from megatron.core.pipeline_parallel import schedules

    class Communicator:
        class pp_group:  # noqa: N801
            size = staticmethod(lambda: pp)
            rank = staticmethod(lambda: rank)

        virtual_pipeline_model_parallel_size = vpp

    total, _, warm_up, _ = schedules.get_pp_rank_microbatches(n, vpp, pp, p2p_communicator=Communicator)
    table = schedules.get_schedule_table(n, vpp, pp)
    forwards = [(True, chunk, mb) for mb, chunk in table]
    backwards = [(False, vpp - 1 - chunk, mb) for mb, chunk in table]
    order = forwards[:warm_up]
    for k in range(warm_up, total):
        order += [forwards[k], backwards[k - warm_up]]
    return order + backwards[total - warm_up :]


def compute(graph: StageGraph, rank: int, pp: int) -> list[tuple[bool, int, int]]:
    return [(isinstance(a, Forward), a.stage.index // pp, a.mb.index) for a in build_1f1b(graph).actions[rank]]


def test_the_picture_of_a_position_shows_the_order_of_its_passes():
    [position] = pipeline_positions.find_positions(interleaved(pp=4, vpp=2, n=4))
    rows = re.findall(r"rank (\d) +([\d. abAB]+)$", pipeline_positions.__doc__, re.M)
    assert [rank for rank, _ in rows] == ["0", "1", "2", "3"]
    for rank, row in rows:
        letters = {True: "ab", False: "AB"}
        passes = [f"{p.wave}{letters[p.is_forward][p.chunk]}" for p in position.passes(int(rank))]
        assert [cell for cell in row.split() if cell != ".."] == passes


@pytest.mark.parametrize(("pp", "vpp", "groups"), [*product((2, 3, 4), (2, 3), (1, 2, 3))])
def test_the_order_is_that_of_megatron_core(pp, vpp, groups):
    n = groups * pp
    graph = interleaved(pp, vpp, n)
    for rank in range(pp):
        assert compute(graph, rank, pp) == megatron_order(pp, vpp, n, rank)


@pytest.mark.parametrize(("pp", "vpp", "groups"), [*product((2, 3, 4), (2, 3), (1, 2, 3))])
def test_the_pipeline_fills_and_drains_in_one_chunk_per_rank(pp, vpp, groups):
    """No order is faster: a rank has its own work, and waits for one chunk to come down to it and back up."""
    n = groups * pp
    timeline = simulate(build_program(interleaved(pp, vpp, n)), Seconds(llm=1))
    assert timeline.step_time_s == 3 * (n * vpp + pp - 1)


@pytest.mark.parametrize(("pp", "vpp"), [*product((2, 3, 4), (2, 3))])
def test_an_incomplete_group_takes_no_longer_than_a_full_one(pp, vpp):
    for n in range(1, 3 * pp):
        full = simulate(build_program(interleaved(pp, vpp, -(-n // pp) * pp)), Seconds(llm=1)).step_time_s
        assert simulate(build_program(interleaved(pp, vpp, n)), Seconds(llm=1)).step_time_s <= full


def test_an_incomplete_group_skips_the_passes_that_are_missing():
    full = [entry for entry in compute(interleaved(2, 2, 4), 0, 2) if entry[2] < 3]
    assert compute(interleaved(2, 2, 3), 0, 2) == full


def test_no_deadlock_with_any_units_before_and_after():
    """`build_program` proves it: rounds that end early, microbatches that do not fill a group, units around it."""
    cases = product((2, 3, 4), (1, 2, 3), (1, 3, 4, 5, 9), (0, 2), (0, 1, 3))
    for pp, extra, n, before, after in cases:
        middle = Unit("llm", pp, num_stages=pp + extra * pp - (n % 2))
        ends = [[Unit("vision", before)] if before else [], [Unit("generator", after)] if after else []]
        graph = chain(*ends[0], middle, *ends[1], n=n)
        program = build_program(graph)
        in_flight = in_flight_microbatches(graph)
        for stage in graph.stages:
            assert (
                peak_in_flight_by_stage(graph, program.actions[stage.tp_groups[0][0]])[stage.id] == in_flight[stage.id]
            )


def test_a_fast_encoder_never_makes_an_interleaved_llm_wait_once_it_runs():
    graph = chain(Unit("vision"), Unit("llm", 2, num_stages=4), n=6)
    assert simulate(build_program(graph), Seconds(vision=0.25, llm=1)).step_time_s == 0.25 + 3 * (6 * 2 + 2 - 1) + 0.5


def test_encoder_and_llm_on_the_same_ranks_are_chunks_of_one_round():
    """Unified: the encoder's two stages and the LLM's two visit two ranks in rounds, as four LLM chunks would."""
    graph = chain(Unit("vision", 2, ranks=(0, 1)), Unit("llm", 2, ranks=(0, 1)), n=4)
    mixed = [(isinstance(a, Forward), int(a.stage.unit == "llm"), a.mb.index) for a in build_1f1b(graph).actions[1]]
    assert mixed == megatron_order(2, 2, 4, 1)


def test_stages_of_two_units_on_a_rank_make_one_virtual_stage():
    """Vision ends on the rank where the LLM starts: rounds 0, 1, 0, 1 over vision.0, vision.1 + llm.0, llm.1, llm.2."""
    graph = chain(Unit("vision", 2, ranks=(0, 1)), Unit("llm", 2, ranks=(1, 0), num_stages=3), n=2)
    order = [f"{type(a).__name__[0]}{a.stage}" for a in build_1f1b(graph).actions[1] if a.mb.index == 0]
    assert order == ["Fvision.1", "Fllm.0", "Fllm.2", "Bllm.2", "Bllm.0", "Bvision.1"]


def test_one_pipeline_rank_with_chunks_computes_them_in_a_row_without_messages():
    program = build_program(interleaved(1, 3, 2))
    assert not any(isinstance(a, Send | Recv) for a in program.actions[0])
    order = [f"{type(a).__name__[0]}{a.stage.index}" for a in program.actions[0] if isinstance(a, Forward | Backward)]
    assert order == ["F0", "F1", "F2", "B2", "B1", "B0"] * 2


def test_the_edge_back_to_the_first_rank_is_a_channel_of_its_own():
    sends = [
        a for a in build_program(interleaved(2, 2, 2)).actions[1] if isinstance(a, Send) and a.payload == "activation"
    ]
    assert {str(a.edge) for a in sends} == {"llm.1>llm.2"}
    sent_by_first = [
        a for a in build_program(interleaved(2, 2, 2)).actions[0] if isinstance(a, Send) and a.payload == "activation"
    ]
    assert {str(a.edge) for a in sent_by_first} == {"llm.0>llm.1", "llm.2>llm.3"}


@pytest.mark.parametrize(("pp", "num_shared"), [(1, 0), (2, 1)])
def test_tied_embeddings_are_reduced_only_between_ranks(pp, num_shared):
    graph = chain(Unit("llm", pp, num_stages=2 * pp), tied=True)
    assert sum(isinstance(a, ReduceShared) for a in build_program(graph).actions[0]) == num_shared


def test_the_chunk_that_holds_shared_weights_is_reduced_after_them():
    """On the last rank that is its last chunk, whose backwards end first; the other chunk does not wait for them."""
    graph = chain(Unit("llm", 2, num_stages=4), tied=True)
    first, last = (build_program(graph).actions[rank] for rank in (0, 1))
    kinds = (ReduceShared, ReduceGrads)
    assert [a for a in first if isinstance(a, kinds)] == [
        ReduceGrads("llm", 1),
        ReduceShared("embeddings"),
        ReduceGrads("llm", 0),
    ]
    after_last_backward = last[max(k for k, a in enumerate(last) if isinstance(a, Backward)) :]
    assert [a for a in after_last_backward if isinstance(a, kinds)] == [
        ReduceGrads("llm", 0),  # before what holds the rank
        ReduceShared("embeddings"),
        ReduceGrads("llm", 1),
    ]


def test_interleaving_needs_stages_for_every_rank():
    graph = unified(2)
    meshes = (graph.meshes[0], type(graph.meshes[1])("llm", 1, 2, 1, (0, 1), 2, vpp=2))
    with pytest.raises(ProgramError, match="llm has 2 stages; pp 2 with vpp 2 takes 3 to 4"):
        build_program(StageGraph(meshes, graph.stages, graph.edges))


def test_two_encoders_of_a_unified_pipeline_are_chunks_like_others():
    """Vision on ranks 0 and 1, audio on 0, the LLM on 1, 0 and 1: three rounds over two ranks."""
    vision, audio = Unit("vision", 2, ranks=(0, 1)), Unit("audio", 1, ranks=(0,))
    graph = chain(vision, audio, Unit("llm", 2, ranks=(1, 0), num_stages=3), n=4)
    order = {"vision.0": 0, "vision.1": 0, "audio.0": 1, "llm.0": 1, "llm.1": 2, "llm.2": 2}
    for rank in (0, 1):
        mixed = [(isinstance(a, Forward), order[str(a.stage)], a.mb.index) for a in build_1f1b(graph).actions[rank]]
        assert mixed == megatron_order(2, 3, 4, rank)
    build_program(graph)


@pytest.mark.parametrize(
    ("cut", "n"), quick_and_long(product([*product((1, 2, 3), (1, 2, 3), (1, 2, 3))], (1, 2, 3, 5)), every=5)
)
def test_two_encoders_and_an_llm_in_a_row_run_on_any_ranks(cut, n):
    """Units may start and end anywhere in the rounds; `build_program` proves that there is no deadlock."""
    units = []
    first = 0
    for name, num_stages in zip(("vision", "audio", "llm"), cut, strict=True):
        pipeline_ranks = [(first + k) % 2 for k in range(num_stages)]
        units.append(Unit(name, min(2, num_stages), ranks=tuple(dict.fromkeys(pipeline_ranks)), num_stages=num_stages))
        first += num_stages
    graph = chain(*units, n=n)
    program = build_program(graph)
    in_flight = in_flight_microbatches(graph)
    for stage in graph.stages:
        assert peak_in_flight_by_stage(graph, program.actions[stage.tp_groups[0][0]])[stage.id] == in_flight[stage.id]


def passes_in_flight(position: PipelinePosition) -> list[list[int]]:
    """Count pass by pass the most waves between forward and backward, by pipeline rank and chunk."""
    most = [[0] * position.num_chunks for _ in range(position.num_pipeline_ranks)]
    for rank, of_rank in enumerate(most):
        current = [0] * position.num_chunks
        for is_forward, chunk, _ in position.passes(rank):
            current[chunk] += 1 if is_forward else -1
            of_rank[chunk] = max(of_rank[chunk], current[chunk])
    return most


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_a_long_step_holds_as_many_waves_as_a_few_groups(num_ranks):
    for num_stages, warmup in product(range(num_ranks + 1, 3 * num_ranks + 1), (0, 1, num_ranks, 2 * num_ranks + 1)):
        stages = tuple((StageId("llm", number),) for number in range(num_stages))
        for num_waves in (1, num_ranks, 7 * num_ranks + 1, 9 * num_ranks, 12 * num_ranks + 1):
            position = PipelinePosition(stages, num_ranks, num_waves, warmup, {})
            assert position._most_waves == passes_in_flight(position), (num_stages, warmup, num_waves)
