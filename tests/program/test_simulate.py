"""The simulator is exact: hand-solved pipelines, the 1F1B recurrence, and the interpreter's clock."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.errors import ProgramError
from mmtrain.program import Program, TransferCost, build_1f1b, build_program, simulate
from mmtrain.program.ir.actions import Backward, Compute, Forward, GatherParams, ReduceGrads, Send, Share, Step
from mmtrain.program.ir.graph import Microbatch, StageId
from tests.program.graphs import Unit, chain, graphs, unified
from tests.program.interpreter import interpret


@dataclass(frozen=True)
class Given:
    """Times by stage, or by a rule; fixed times for messages and collectives."""

    forward: dict[str, float]
    backward: dict[str, float]
    message_s: float = 0.0
    posting_s: float = 0.0
    collective_s: float = 0.0
    share_s: float = 0.0
    tp_wait_s: float = 0.0
    rule: Callable[[Compute], float] | None = None
    sizes: dict[str, int] = field(default_factory=dict)

    def compute(self, action):
        if self.rule is not None:
            return self.rule(action)
        return (self.forward if isinstance(action, Forward) else self.backward)[str(action.stage)]

    def tp_wait(self, action):
        return self.tp_wait_s if action.stage.unit == "llm" else 0.0

    def message(self, sender, action):
        return TransferCost(self.message_s, 1, self.posting_s)

    def collective(self, rank, action, group):
        return TransferCost(self.share_s if isinstance(action, Share) else self.collective_s, 1)

    def link_class(self, ranks):
        return len(ranks)

    def activation_bytes(self, stage, mb):
        return self.sizes.get(str(stage), 0)


def one_f_one_b_time(f: list[float], b: list[float], n: int) -> float:
    """Return the time of 1F1B by its recurrence: an action starts when its stage and its neighbor are done."""
    p = len(f)
    ends: dict[tuple[str, int, int], float] = {}
    orders = []
    for s in range(p):
        w = min(p - 1 - s, n)
        order = [("F", i) for i in range(w)]
        for i in range(w, n):
            order += [("F", i), ("B", i - w)]
        orders.append(order + [("B", i) for i in range(n - w, n)])

    def end(kind: str, s: int, i: int) -> float:
        if (kind, s, i) not in ends:
            position = orders[s].index((kind, i))
            before = end(orders[s][position - 1][0], s, orders[s][position - 1][1]) if position else 0.0
            if kind == "F":
                data = end("F", s - 1, i) if s else 0.0
            else:
                data = end("B", s + 1, i) if s + 1 < p else end("F", s, i)
            ends[kind, s, i] = max(before, data) + (f[s] if kind == "F" else b[s])
        return ends[kind, s, i]

    return max(end("B", s, n - 1) for s in range(p))


def test_posting_both_ends_of_a_message_keeps_ranks_from_computing() -> None:
    """Two stages, two microbatches, half a second for each end of a message posted after a pass, solved by hand.

    Each forward of the first stage sends, and awaits a gradient: 2 s of 1. The last stage posts the second receive
    behind its first forward, and sends behind its backwards.
    """
    program = build_program(chain(Unit("llm", pp=2), n=2))
    given_times = Given({"llm.0": 1.0, "llm.1": 1.0}, {"llm.0": 2.0, "llm.1": 2.0}, posting_s=0.5)
    timeline = simulate(program, given_times)
    passes = {(str(s.action.stage), type(s.action).__name__[0], s.action.mb.index): (s.start_s, s.duration_s)
              for s in timeline.spans if isinstance(s.action, Forward | Backward)}  # fmt: skip
    assert passes == {
        ("llm.0", "F", 0): (0.0, 2.0),
        ("llm.0", "F", 1): (2.0, 2.0),
        ("llm.1", "F", 0): (2.0, 1.5),
        ("llm.1", "B", 0): (3.5, 2.5),
        ("llm.1", "F", 1): (6.0, 1.0),
        ("llm.0", "B", 0): (6.0, 2.0),
        ("llm.1", "B", 1): (7.0, 2.5),
        ("llm.0", "B", 1): (9.5, 2.0),
    }
    assert timeline.step_time_s == 11.5


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_equal_stages_take_the_time_of_the_formula(p, n):
    program = build_program(chain(Unit("llm", p), n=n))
    names = [f"llm.{s}" for s in range(p)]
    timeline = simulate(program, Given(dict.fromkeys(names, 1.0), dict.fromkeys(names, 2.0)))
    assert timeline.step_time_s == 3.0 * (n + p - 1)
    assert all(sum(b.values()) == 3.0 * (p - 1) for b in timeline.bubbles.values())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=4), st.integers(1, 8))
def test_unequal_stages_follow_the_recurrence(times, n):
    f, b = [float(x) for x, _ in times], [float(y) for _, y in times]
    program = build_program(chain(Unit("llm", len(times)), n=n))
    names = [f"llm.{s}" for s in range(len(times))]
    timeline = simulate(program, Given(dict(zip(names, f, strict=True)), dict(zip(names, b, strict=True))))
    assert timeline.step_time_s == one_f_one_b_time(f, b, n)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=4), st.integers(1, 6))
def test_an_encoder_counts_as_one_more_stage(times, n):
    f, b = [float(x) for x, _ in times], [float(y) for _, y in times]
    names = ["vision.0", *(f"llm.{s}" for s in range(len(times) - 1))]
    program = build_program(chain(Unit("vision"), Unit("llm", len(times) - 1), n=n))
    timeline = simulate(program, Given(dict(zip(names, f, strict=True)), dict(zip(names, b, strict=True))))
    assert timeline.step_time_s == one_f_one_b_time(f, b, n)


def test_encoder_and_llm_on_one_rank_add_up():
    """Stage 0 of two takes 1 + 2 forward and 2 + 4 backward."""
    program = build_program(unified(2, n=4))
    times = {"vision.0": 1.0, "llm.0": 2.0, "llm.1": 3.0}
    timeline = simulate(program, Given(times, {k: 2 * v for k, v in times.items()}))
    assert timeline.step_time_s == one_f_one_b_time([3, 3], [6, 6], 4)


def test_a_frozen_encoder_runs_ahead():
    """Encoder 2 s a wave, LLM 3 + 3 s: the LLM starts at 2 and never waits again."""
    program = build_program(chain(Unit("vision", trainable=(False,)), Unit("llm"), n=3))
    timeline = simulate(program, Given({"vision.0": 2.0, "llm.0": 3.0}, {"llm.0": 3.0}))
    assert timeline.step_time_s == 2 + 3 * 6
    starts = [span.start_s for span in timeline.spans if span.rank == 0 and isinstance(span.action, Forward)]
    assert starts == [0.0, 2.0, 4.0]


def test_a_wave_waits_for_its_slowest_encoder():
    """Two encoders (1 s and 4 s) feed three LLM replicas (5 s), one wave: all LLMs start at 4; no backward."""
    graph = chain(Unit("vision", dp=2, trainable=(False,)), Unit("llm", dp=3, trainable=(False,)), n=1)
    seconds = {("vision", 0): 1.0, ("vision", 1): 4.0, ("llm", 0): 5.0, ("llm", 1): 5.0, ("llm", 2): 7.0}
    timeline = simulate(build_program(graph), Given({}, {}, rule=lambda a: seconds[a.mb.unit, a.mb.replica]))
    starts = {span.rank: span.start_s for span in timeline.spans if isinstance(span.action, Forward)}
    assert starts == {0: 0.0, 1: 0.0, 2: 4.0, 3: 4.0, 4: 4.0}
    assert timeline.step_time_s == 11.0
    assert timeline.bubbles[2]["pp_warmup"] == 4.0
    assert timeline.bubbles[2]["pp_cooldown"] == 2.0


def test_transfers_overlap_with_compute():
    """F 2 s, no backward, 1 s a message: rank 1 starts at 3 and finds every later message already there."""
    program = build_program(chain(Unit("llm", 2, trainable=(False, False)), n=4))
    timeline = simulate(program, Given({"llm.0": 2.0, "llm.1": 2.0}, {}, message_s=1.0))
    assert timeline.step_time_s == 2 + 1 + 4 * 2


def test_a_message_waits_until_its_receive_is_posted():
    """Rank 1 posts the receive of microbatch 2 with the start of microbatch 1, though it was sent 10 s before."""
    program = build_program(chain(Unit("llm", 2, trainable=(False, False)), n=3))

    def rule(action):
        return 1.0 if action.stage.index == 0 else 5.0

    timeline = simulate(program, Given({}, {}, message_s=6.0, rule=rule))
    sent = [(span.start_s, span.duration_s) for span in timeline.spans if isinstance(span.action, Send)]
    assert sent == [(1.0, 6.0), (7.0, 6.0), (13.0, 6.0)]
    starts = [s.start_s for s in timeline.spans if s.rank == 1 and isinstance(s.action, Forward)]
    assert starts == [7.0, 13.0, 19.0]


def test_messages_of_a_rank_leave_one_after_another():
    """One encoder sends to three LLM replicas, 1 s each."""
    graph = chain(Unit("vision", trainable=(False,)), Unit("llm", dp=3, trainable=(False,)), n=1)
    timeline = simulate(build_program(graph), Given({"vision.0": 2.0, "llm.0": 1.0}, {}, message_s=1.0))
    assert [s.start_s for s in timeline.spans if s.rank > 0 and isinstance(s.action, Forward)] == [3.0, 4.0, 5.0]


def test_sharing_a_tp_group_holds_every_rank_of_it():
    """Encoder 1 s, message 1 s, share 2 s in a TP group of two, LLM 3 s; other collectives take 5 s each.

    The LLM's input is there at 4, its parameters at 5. Of each of its passes, 0.5 s are waiting inside layers.
    """
    graph = chain(Unit("vision", trainable=(False,)), Unit("llm", tp=2), n=1)
    program = build_program(graph)
    given_times = Given(
        {"vision.0": 1.0, "llm.0": 3.0}, {"llm.0": 3.0}, message_s=1.0, share_s=2.0, collective_s=5.0, tp_wait_s=0.5
    )
    timeline = simulate(program, given_times)
    assert timeline.step_time_s == 5 + 6 + 5 + 5
    for rank in (1, 2):
        assert timeline.bubbles[rank] == {
            "pp_warmup": 2.0,
            "tp": 2.0,
            "tp_layers": 1.0,
            "dp_reduce": 10.0,
            "dp_gather": 1.0,
            "pp_other": 0.0,
            "pp_cooldown": 0.0,
            "dispatch": 0.0,
            "imbalance": 0.0,
        }
    assert timeline.bubbles[0]["dp_gather"] == timeline.bubbles[0]["tp_layers"] == 0.0
    assert timeline.bubbles[0]["pp_cooldown"] == 5 + 6 + 5 - 1


def test_a_replica_group_waits_for_the_slowest_one():
    """Two groups of one LLM replica, 1 s and 3 s: the first waits 2 s before gradients are reduced."""
    program = build_program(chain(Unit("llm", dp=2), n=1))

    def rule(action):
        return 0.5 + action.mb.replica

    two_groups = simulate(program, Given({}, {}, rule=rule), num_groups=2)
    assert two_groups.step_time_s == 3.0
    assert two_groups.bubbles[0]["imbalance"] == 2.0
    alone = simulate(program, Given({}, {}, rule=rule))
    assert alone.step_time_s == 1.0
    assert list(alone.bubbles) == [0]


@given(graphs(max_n=4), st.integers(0, 2**32))
def test_any_program_takes_the_time_of_the_interpreter(graph, seed):
    """Compute takes random seconds. Communication takes none, since the two may order it differently."""
    program = build_program(graph)

    def seconds(action):
        if not isinstance(action, Forward | Backward):
            return 0.0
        return float(
            hash((seed, isinstance(action, Forward), action.stage.index, action.mb.replica, action.mb.index)) % 7
        )

    groups = graph.num_groups
    timeline = simulate(program, Given({}, {}, rule=seconds), num_groups=groups)
    all_actions = {rank: program.for_rank(rank) for rank in sorted(program.symmetry.location)}
    clock = interpret(graph, all_actions, seconds).clock
    assert timeline.step_time_s == max(clock.values())


@given(graphs(max_n=4), st.integers(0, 2**32))
def test_bubbles_are_all_the_idle_time_and_spans_never_overlap(graph, seed):
    program = build_program(graph)

    def seconds(action):
        return float(hash((seed, action.stage.index, action.mb.replica, action.mb.index)) % 7)

    timing = Given({}, {}, rule=seconds, message_s=1.0, share_s=2.0, collective_s=3.0)
    timeline = simulate(program, timing, graph.num_groups)
    assert sorted(timeline.bubbles) == sorted(program.symmetry.location)
    for rank, bubbles in timeline.bubbles.items():
        of_rank = [span for span in timeline.spans if span.rank == rank]
        compute = [span for span in of_rank if isinstance(span.action, Compute)]
        busy = sum(span.duration_s for span in compute)
        assert sum(bubbles.values()) == timeline.step_time_s - busy
        assert min(bubbles.values()) >= 0
        asynchronous = [span for span in of_rank if isinstance(span.action, ReduceGrads | GatherParams)]
        others = [span for span in of_rank if span not in compute and span not in asynchronous]
        for stream in (compute, asynchronous, others):
            ends = [(span.start_s, span.start_s + span.duration_s) for span in stream]
            assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    shares = timeline.bubble_shares()
    assert 0 <= sum(shares.values()) <= 1


def test_peak_memory_counts_microbatches_in_flight():
    program = build_program(chain(Unit("llm", 3), n=8))
    names = ["llm.0", "llm.1", "llm.2"]
    timeline = simulate(program, Given(dict.fromkeys(names, 1.0), dict.fromkeys(names, 1.0), sizes={"llm.0": 5}))
    assert timeline.peak_memory_bytes == {0: 15, 1: 0, 2: 0}


def test_data_parallel_collectives_are_timed_for_all_replicas():
    timed = []

    class Recording(Given):
        def collective(self, rank, action, group):
            timed.append((type(action), group))
            return super().collective(rank, action, group)

    simulate(build_program(chain(Unit("llm", 2, 2), n=1)), Recording({}, {}, rule=lambda action: 1.0))
    assert set(timed) == {
        (ReduceGrads, (0, 1)),
        (ReduceGrads, (2, 3)),
        (Step, (0, 1, 2, 3)),
        (GatherParams, (0, 1)),
        (GatherParams, (2, 3)),
    }


def test_a_program_that_deadlocks_is_rejected():
    graph = chain(Unit("llm", 2), n=1)
    program = Program(
        graph, {**build_program(graph).actions, 0: (Backward(StageId("llm", 0), Microbatch("llm", 0, 0)),)}
    )
    with pytest.raises(ProgramError, match=r"rank 1 waits forever at `F llm\.1 llm:0\.0`"):
        simulate(program, Given({}, {}, rule=lambda action: 1.0))


def test_simulating_a_program_again_gives_the_same_step():
    """This holds even after some of its spans were read."""
    program = build_program(chain(Unit("vision"), Unit("llm", 2, tp=2), n=2))
    times = Given({}, {}, rule=lambda action: 1.0 + action.mb.index, message_s=0.5)
    first = simulate(program, times)
    assert len(first.spans[:3]) == 3
    assert simulate(program, times) == first
    assert simulate(program, Given({}, {}, rule=lambda action: 1.0)) != first


def test_a_program_without_communication_can_be_simulated():
    """Without lowering no rank waits for data, so the time is a lower bound for every schedule."""
    program = build_1f1b(chain(Unit("llm", 2), n=3))
    assert simulate(program, Given({}, {}, rule=lambda action: 1.0)).step_time_s == 6.0
