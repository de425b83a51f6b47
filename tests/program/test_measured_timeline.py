"""Measured timelines: the records of a simulated step give the simulated timeline back."""

from collections.abc import Mapping
from itertools import pairwise
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.program import (
    BUBBLE_KINDS,
    Compute,
    Edge,
    Forward,
    GatherParams,
    Microbatch,
    Program,
    Recv,
    ReduceGrads,
    Send,
    Span,
    StageGraph,
    StageId,
    Step,
    Timeline,
    TransferCost,
    build_program,
    chrome_trace,
    simulate,
)
from mmtrain.program.ir.data_dependencies import participants
from mmtrain.program.trace.measured_timeline import MeasuredStep, measured_timeline, run_trace, without_overlaps
from mmtrain.program.trace.step_record import ActionRecord, EdgeTraffic, MessageRecord, StepRecord
from mmtrain.program.trace.timeline import BubbleKind
from tests.program.graphs import Unit, chain, graphs
from tests.program.trace_format import require_trace


class DistinctSeconds:
    """Durations that differ by action."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def compute(self, action: Compute) -> float:
        return 1.0 + crc32(f"{self.seed} {action}".encode()) % 7

    def tp_wait(self, action: Compute) -> float:
        return 0.0

    def message(self, sender: int, action: Send) -> TransferCost:
        return TransferCost(0.25 * (1 + crc32(f"{self.seed} {sender} {action}".encode()) % 3), 8)

    def collective(self, rank: int, action: object, group: tuple[int, ...]) -> TransferCost:
        return TransferCost(0.0 if isinstance(action, GatherParams) else 0.5, 16)

    def link_class(self, ranks: tuple[int, ...]) -> object:
        return ranks

    def activation_bytes(self, stage: object, mb: object) -> int:
        return 1


def recorded(program: Program, timeline: Timeline) -> dict[int, StepRecord]:
    """Return what the ranks would have recorded: actions follow each other without a gap, with waits inside them."""
    graph = program.graph
    arrivals = {(s.rank, s.action): s for s in timeline.spans if isinstance(s.action, Send)}
    records = {}
    for rank in timeline.bubbles:
        actions: list[ActionRecord] = []
        messages: list[MessageRecord] = []
        clock = 0.0
        spans = {s.action: s for s in timeline.spans if s.rank == rank and not isinstance(s.action, Send | Recv)}
        reduced_s = 0.0
        for action in program.for_rank(rank):
            if isinstance(action, Send | Recv | GatherParams):  # parameters are gathered in no time here
                continue
            span = spans[action]
            if isinstance(action, ReduceGrads):  # starts at once, and `Step` waits for its end
                actions.append(ActionRecord(action, clock, clock, 0.0))
                reduced_s = max(reduced_s, span.start_s + span.duration_s)
                continue
            # Only the first rank of a collective records its wait; the others wait inside the collective.
            first = participants(graph, rank, span.action)[0]
            waited = span.start_s - clock if rank == first or isinstance(span.action, Compute) else 0.0
            if isinstance(action, Step):
                waited = max(reduced_s - clock, 0.0)
            end = span.start_s + span.duration_s
            actions.append(ActionRecord(span.action, clock, end, waited))
            clock = end
        for (sender, send), span in arrivals.items():
            end = span.start_s + span.duration_s
            if sender == rank:
                messages.append(MessageRecord(send, span.start_s, timeline.step_time_s, 0.0, span.nbytes))
            if send.peer == rank:
                recv = Recv(send.edge, send.src, send.dst, sender, send.payload)
                messages.append(MessageRecord(recv, 0.0, end, 0.0, span.nbytes))
        records[rank] = StepRecord(0.0, timeline.step_time_s, tuple(actions), tuple(messages))
    return records


@given(graphs(max_n=3), st.integers(0, 9))
def test_records_of_a_simulated_step_give_its_timeline_back(graph: StageGraph, seed: int) -> None:
    program = build_program(graph)
    timeline = simulate(program, DistinctSeconds(seed), graph.num_groups)
    records = recorded(program, timeline)
    measured = measured_timeline(graph, records, lambda rank, action: 16)
    assert measured.step_time_s == pytest.approx(timeline.step_time_s)
    for rank, bubbles in timeline.bubbles.items():
        busy = sum(s.duration_s for s in timeline.spans if s.rank == rank and isinstance(s.action, Compute))
        assert sum(measured.bubbles[rank].values()) == pytest.approx(timeline.step_time_s - busy)
        assert _reductions_joined(measured.bubbles[rank]) == pytest.approx(_reductions_joined(bubbles))
    expected = {(s.rank, s.action): s for s in timeline.spans if not isinstance(s.action, GatherParams)}
    spans = {(s.rank, s.action): s for s in measured.spans}
    assert spans.keys() == expected.keys()
    for key, span in spans.items():
        assert span.nbytes == expected[key].nbytes
        if isinstance(span.action, Compute):
            assert (span.start_s, span.duration_s) == pytest.approx(expected[key][1:3])
        elif isinstance(span.action, ReduceGrads):
            assert span.start_s <= expected[key].start_s + 1e-9
        else:
            assert span.start_s + span.duration_s == pytest.approx(expected[key].start_s + expected[key].duration_s)
    require_trace(chrome_trace(timeline, "abc"))
    require_trace(chrome_trace(measured, "abc"))


def _reductions_joined(bubbles: Mapping[BubbleKind, float]) -> dict[str, float]:
    """Join reductions with waits for other replicas: records tell only when the last reduction has ended."""
    kinds = {kind: seconds for kind, seconds in bubbles.items() if kind not in ("dp_reduce", "imbalance")}
    return {**kinds, "reductions": bubbles["dp_reduce"] + bubbles["imbalance"]}


VISION, LLM = StageId("vision", 0), StageId("llm", 0)
EDGE = Edge(VISION, LLM)
IMAGE, TEXT = Microbatch("vision", 0, 0), Microbatch("llm", 0, 0)
SEND = Send(EDGE, IMAGE, TEXT, 1, "activation")
RECV = Recv(EDGE, IMAGE, TEXT, 0, "activation")


def two_ranks() -> dict[int, StepRecord]:
    """Return records: rank 0 computes until 13 and sends, rank 1 waits for it until 14, both step until 19."""
    return {
        0: StepRecord(
            10.0,
            20.0,
            (
                ActionRecord(Forward(VISION, IMAGE), 10.0, 13.0, 0.0),
                ActionRecord(SEND, 13.0, 13.1, 0.0),
                ActionRecord(Step(), 13.5, 19.0, 0.0),
            ),
            (MessageRecord(SEND, 13.0, 19.5, 0.4, 64),),
        ),
        1: StepRecord(
            11.0,
            19.5,
            (
                ActionRecord(RECV, 11.0, 11.5, 0.0),
                ActionRecord(Forward(LLM, TEXT), 11.5, 17.0, 2.5),
                ActionRecord(Step(), 17.0, 19.0, 0.0),
            ),
            (MessageRecord(RECV, 11.0, 14.0, 2.5, 64),),
        ),
    }


def test_messages_are_on_their_sender_and_collectives_start_together() -> None:
    timeline = measured_timeline(chain(Unit("vision"), Unit("llm"), n=1), two_ranks(), lambda rank, action: 4)
    assert [(s.rank, s.start_s, s.duration_s, s.action, s.nbytes) for s in timeline.spans] == [
        (0, 0.0, 3.0, Forward(VISION, IMAGE), 0),
        (0, 3.0, 1.0, SEND, 64),
        (1, 4.0, 3.0, Forward(LLM, TEXT), 0),
        (0, 7.0, 2.0, Step(), 4),
        (1, 7.0, 2.0, Step(), 4),
    ]
    assert timeline.step_time_s == 10.0
    assert timeline.bubbles[0] == pytest.approx(
        dict.fromkeys(BUBBLE_KINDS, 0.0) | {"pp_cooldown": 4, "dp_reduce": 2, "imbalance": 1}
    )


def test_a_forward_waits_for_its_parameters_and_then_for_messages() -> None:
    """Rank 1 starts the gathering at 1, knows at 4 that it is done, and has the message at 6."""
    gather = GatherParams("llm")
    records = {
        0: StepRecord(
            0.0,
            10.0,
            (ActionRecord(Forward(VISION, IMAGE), 0.0, 5.0, 0.0), ActionRecord(SEND, 5.0, 5.0, 0.0)),
            (MessageRecord(SEND, 5.0, 6.0, 0.0, 64),),
        ),
        1: StepRecord(
            0.0,
            10.0,
            (
                ActionRecord(gather, 1.0, 1.0, 0.0),
                ActionRecord(RECV, 1.0, 1.0, 0.0),
                ActionRecord(Forward(LLM, TEXT), 1.0, 10.0, 5.0),
            ),
            (MessageRecord(RECV, 1.0, 6.0, 2.0, 64),),
        ),
    }
    timeline = measured_timeline(
        chain(Unit("vision", trainable=(False,)), Unit("llm"), n=1), records, lambda rank, action: 4
    )
    [shown] = [s for s in timeline.spans if s.action == gather]
    assert (shown.rank, shown.start_s, shown.duration_s) == (1, 1.0, 3.0)
    bubbles = dict.fromkeys(BUBBLE_KINDS, 0.0) | {"imbalance": 1.0, "dp_gather": 3.0, "pp_warmup": 2.0}
    assert timeline.bubbles[1] == pytest.approx(bubbles)
    assert records[1].seconds_by_kind() == {"compute": 4.0, "communication": 0.0, "wait": 5.0}


def test_a_step_that_waits_for_its_reduction_waits_for_other_replicas_before() -> None:
    """Rank 0 reduces at 4 and waits in its step from 5 to 9; rank 1 reaches the reduction at 7 and its step at 8."""
    first, second = Microbatch("llm", 0, 0), Microbatch("llm", 1, 0)
    reduction = ReduceGrads("llm")

    def record(mb: Microbatch, computed_s: float, reduced_s: float, step_s: float) -> StepRecord:
        actions = (
            ActionRecord(Forward(LLM, mb), 0.0, computed_s, 0.0),
            ActionRecord(reduction, computed_s, reduced_s, 0.0),
            ActionRecord(Step(), step_s, 10.0, 9.0 - step_s),
        )
        return StepRecord(0.0, 10.0, actions, ())

    records = {0: record(first, 4.0, 4.5, 5.0), 1: record(second, 7.0, 7.5, 8.0)}
    timeline = measured_timeline(chain(Unit("llm", dp=2), n=1), records, lambda rank, action: 4)
    shown = {(s.rank, s.start_s, s.duration_s) for s in timeline.spans if s.action == reduction}
    assert shown == {(0, 7.0, 2.0), (1, 7.0, 2.0)}
    bubbles = timeline.bubbles[0]
    assert bubbles["imbalance"] == 2.5  # from 4.5, when rank 0 had started the reduction, to 7
    assert bubbles["dp_reduce"] == 0.5 + 2 + 1  # to start it, to wait for it, and the norm
    assert timeline.bubbles[1]["imbalance"] == 0.0


times = st.integers(0, 20).map(float)


@given(st.lists(times, unique=True, max_size=6).map(sorted), st.lists(st.tuples(times, times).map(sorted)))
def test_communication_is_shown_without_overlaps(borders: list[float], moved: list[tuple[float, float]]) -> None:
    """Collectives stay as they were, messages stay within the time that they may have taken."""
    collectives = [Span(0, a, b - a, Step()) for a, b in zip(borders[::2], borders[1::2], strict=False)]
    messages = [Span(0, a, b - a, SEND, nbytes=k) for k, (a, b) in enumerate(moved)]
    shown = list(without_overlaps(collectives, messages))
    assert [s for s in shown if s.action == Step()] == collectives
    assert sorted(s.nbytes for s in shown if s.action == SEND) == list(range(len(messages)))
    for span, after in pairwise(shown):
        assert span.start_s + span.duration_s <= after.start_s
    for span in (s for s in shown if s.action == SEND):
        first, last = moved[span.nbytes]
        assert span.duration_s >= 0
        assert span.start_s >= first
        assert span.start_s + span.duration_s <= last or span.duration_s == 0


def test_a_record_sums_its_time_by_kind_and_its_traffic_by_edge() -> None:
    record = two_ranks()[1]
    assert record.seconds_by_kind() == pytest.approx({"compute": 5.0, "communication": 0.5, "wait": 2.5})
    assert record.traffic_by_edge() == {EDGE: EdgeTraffic(0, 2.5)}
    assert two_ranks()[0].traffic_by_edge() == {EDGE: EdgeTraffic(64, 0.4)}


def test_steps_of_a_run_share_a_time_axis() -> None:
    timeline = measured_timeline(chain(Unit("vision"), Unit("llm"), n=1), two_ranks(), lambda rank, action: 4)
    trace = run_trace(
        [MeasuredStep(number, start_s, timeline, {"llm": (5, 6)}) for number, start_s in ((3, 50.0), (7, 80.0))],
        "abc",
        2e-6,
    )
    require_trace(trace)
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [e["ts"] for e in spans[5:]] == pytest.approx([e["ts"] + 30e6 for e in spans[:5]])
    idle = timeline.bubble_shares()
    assert 0 < sum(idle.values()) < 1
    assert trace["otherData"] == {
        "simulated": False,
        "step_time_us": 10e6,
        "plan_sha256": "abc",
        "steps": [
            {"step": 3, "ts": 0.0, "dur": 10e6, "bubbles": idle, "tokens": {"llm": [5, 6]}},
            {"step": 7, "ts": 30e6, "dur": 10e6, "bubbles": idle, "tokens": {"llm": [5, 6]}},
        ],
        "clock_error_us": 2.0,
    }
