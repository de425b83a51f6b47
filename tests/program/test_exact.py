"""Schedules solved by hand: the simulator agrees with the arithmetic in each docstring."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mmtrain.program import (
    Backward,
    Collective,
    Compute,
    Forward,
    GatherParams,
    Microbatch,
    Partial,
    Program,
    ReduceGrads,
    Send,
    StageGraph,
    StageId,
    Step,
    Timeline,
    TransferCost,
    action_from_text,
    action_to_text,
    build_program,
    lower,
    simulate,
)
from tests.program.graphs import Unit, chain, with_buckets


class Table:
    """Seconds of a layer by unit and kind of work (F, B); of messages; of collectives by type."""

    def __init__(
        self,
        graph: StageGraph,
        seconds: Mapping[str, Mapping[str, float]],
        message_s: float = 0.0,
        collectives: Mapping[type, float] | None = None,
        load: Mapping[Microbatch, float] | None = None,
    ) -> None:
        self.graph, self.seconds, self.message_s = graph, seconds, message_s
        self.collectives, self.load = collectives or {}, load or {}

    def compute(self, action: Compute) -> float:
        lo, hi = self.graph.stage(action.stage).layers
        kind = "F" if isinstance(action, Forward) else "B"
        layers = hi - lo
        if isinstance(action, Partial):
            kind = action.kind
            layers = action.hi - action.lo
        return self.seconds[action.stage.unit][kind] * layers * self.load.get(action.mb, 1.0)

    def message(self, sender: int, action: Send) -> TransferCost:
        return TransferCost(self.message_s, 8)

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> TransferCost:
        return TransferCost(self.collectives.get(type(action), 0.0), 8)

    def link_class(self, ranks: tuple[int, ...]) -> int:
        return len(ranks)

    def activation_bytes(self, stage: StageId, mb: Microbatch) -> int:
        return 1


def written(graph: StageGraph, order: Mapping[int, Sequence[str]]) -> Program:
    """Return a program of these compute actions, unchecked."""
    return lower(Program(graph, {rank: tuple(map(action_from_text, todo)) for rank, todo in order.items()}))  # type: ignore[arg-type]


def computed(timeline: Timeline, rank: int) -> list[tuple[str, float, float]]:
    """Return what the rank computed: text, start and end."""
    return [
        (action_to_text(s.action), s.start_s, s.start_s + s.duration_s)
        for s in timeline.spans
        if s.rank == rank and isinstance(s.action, Compute)
    ]


LLM = {"llm": {"F": 0.5, "B": 1.0}}  # stages have two layers: 1 s forward, 2 s backward


def test_1f1b_with_messages() -> None:
    """Two stages, three microbatches, a message takes 1/4 s. Rank 1 starts at 1.25 with what rank 0 sent at 1.

    It runs F0 -2.25, B0 -4.25, F1 -5.25 (whose activation came at 2.25), B1 -7.25. Rank 0 runs F0 and F1 until 2, waits
    for the first gradient until 4.5, then B0 -6.5 and F2 -7.5. So rank 1 has the activation of 2 at 7.75: F2 -8.75,
    B2 -10.75. Rank 0 has had the gradient of 1 since 7.5: B1 -9.5; that of 2 comes at 11: B2 -13.
    """
    graph = chain(Unit("llm", 2), n=3)
    timeline = simulate(build_program(graph), Table(graph, LLM, message_s=0.25))
    assert [end for _, _, end in computed(timeline, 1)] == [2.25, 4.25, 5.25, 7.25, 8.75, 10.75]
    assert [end for _, _, end in computed(timeline, 0)] == [1.0, 2.0, 6.5, 7.5, 9.5, 13.0]
    assert timeline.step_time_s == 13.0
    assert timeline.bubbles[0] == {
        "dp_gather": 0.0,
        "dp_reduce": 0.0,
        "pp_warmup": 0.0,
        "pp_cooldown": 1.5,
        "pp_other": 2.5,
        "tp": 0.0,
        "tp_layers": 0.0,
        "dispatch": 0.0,
        "imbalance": 0.0,
    }
    path = ["F llm.0 llm:0.0", "SA", "F llm.1 llm:0.0", "B llm.1 llm:0.0", "SG", "B llm.0 llm:0.0", "F llm.0 llm:0.2"]
    path += ["SA", "F llm.1 llm:0.2", "B llm.1 llm:0.2", "SG", "B llm.0 llm:0.2"]
    texts = [action_to_text(s.action) for s in timeline.critical_path]
    assert [text if text[0] in "FB" else text.split()[0] for text in texts] == path


def test_interleaved_1f1b_fills_in_chunks() -> None:
    """p = 4 ranks, v = 2 chunks, n = 8: the pipeline fills and drains in p - 1 chunks of 1 + 2 s; work is n * v * 3."""
    graph = chain(Unit("llm", 4, num_stages=8), n=8)
    timeline = simulate(build_program(graph), Table(graph, LLM))
    assert timeline.step_time_s == 3.0 * (8 * 2 + 4 - 1)
    assert all(sum(kinds.values()) == 3.0 * (4 - 1) for kinds in timeline.bubbles.values())


def test_activations_live_until_their_backward() -> None:
    """Rank 0 runs both forwards before the first gradient comes back; rank 1 runs each backward at once."""
    graph = chain(Unit("llm", 2), n=2)
    assert simulate(build_program(graph), Table(graph, LLM)).peak_memory_bytes == {0: 2, 1: 1}


class InPieces(Table):
    """Every segment takes 1/2 s in the LLM, 1 s in vision; the LLM's collective between two takes 1.5 s."""

    def compute(self, action: Compute) -> float:
        is_llm = action.stage.unit == "llm"
        if isinstance(action, Partial):
            return (action.hi - action.lo) * (0.5 if is_llm else 1.0)
        return 0.5 + 1.5 + 0.5 if is_llm else 2.0

    def left_under_way(self, action: Partial) -> float:
        return 1.5 if action.stage.unit == "llm" else 0.0


def test_work_during_a_collective_takes_no_extra_time() -> None:
    """One LLM layer in two pieces hosts a segment of vision (1 s), and then two of them (2 s).

    Vision F0 0-2. LLM F0 2-2.5, its collective until 4, vision's segment during it 2.5-3.5; the rest 4-4.5. Vision's
    other segment -5.5. LLM F1 5.5-6, its collective until 7.5, vision F2 6-8; the rest waits for that: 8-8.5. LLM F2
    by itself -11.
    """
    vision, llm = Unit("vision", ranks=(0,), trainable=(False,)), Unit("llm", ranks=(0,), trainable=(False,))
    graph = chain(vision, llm, n=3)
    graph = replace(graph, stages=(graph.stages[0], replace(graph.stages[1], layers=(0, 1), pieces=(2,))))
    order = [
        "F vision.0 vision:0.0",
        "F llm.0 llm:0.0 |1| PF vision.0 vision:0.1 0:1",
        "PF vision.0 vision:0.1 1:2",
        "F llm.0 llm:0.1 |1| PF vision.0 vision:0.2 0:2",
        "F llm.0 llm:0.2",
    ]
    program = build_program(graph, kind="explicit", order={0: order})
    timeline = simulate(program, InPieces(graph, {}))
    assert [(start, end) for _, start, end in computed(timeline, 0)] == [
        (0.0, 2.0),
        (2.0, 2.5), (2.5, 3.5), (4.0, 4.5),
        (4.5, 5.5),
        (5.5, 6.0), (6.0, 8.0), (8.0, 8.5),
        (8.5, 11.0),
    ]  # fmt: skip
    assert timeline.bubbles[0]["tp"] == 0.5
    assert [(s.start_s, s.duration_s) for s in timeline.critical_path if s.duration_s][1] == (2.0, 2.0)


def test_two_encoders_feed_one_llm() -> None:
    """Vision (2 s forward) and audio (3 s) on ranks of their own, frozen; one LLM stage, 1 + 2 s; messages 1 s.

    Vision ends its microbatches at 2, 4, audio at 3, 6. The LLM waits for the later of both: 3 + 1 = 4 for the
    first, F0 -5, B0 -7; the second came at 6 + 1 = 7: F1 -8, B1 -10.
    """
    graph = chain(Unit("vision", trainable=(False,)), Unit("audio", trainable=(False,)), Unit("llm"), n=2)
    table = Table(graph, {"vision": {"F": 1.0}, "audio": {"F": 1.5}, "llm": LLM["llm"]}, message_s=1.0)
    timeline = simulate(build_program(graph), table)
    assert [end for _, _, end in computed(timeline, 2)] == [5.0, 7.0, 8.0, 10.0]
    assert timeline.bubbles[2]["pp_warmup"] == 4.0
    assert [(action_to_text(s.action).split()[:2], s.duration_s) for s in timeline.critical_path][:3] == [
        (["F", "audio.0"], 3.0),
        (["SA", "audio.0>llm.0"], 1.0),
        (["F", "llm.0"], 1.0),
    ]


def test_two_encoder_replicas_feed_three_llm_replicas() -> None:
    """Brokers 2:3, one microbatch each, messages 1 s, one after another from each encoder to all three LLM replicas.

    Encoder 0 (load 1) ends at 1 and sends until 4, encoder 1 (load 2) ends at 2 and sends until 5. The LLM replicas
    have all at 3, 4, 5; F 1 s, B 2 s: gradients for encoder 0 leave at 6, 7, 8, those for encoder 1 after them at 7,
    8, 9. Encoders have theirs at 9 and 10: backwards end at 9 + 2 and 10 + 4.
    """
    graph = chain(Unit("vision", dp=2), Unit("llm", dp=3), n=1)
    table = Table(
        graph, {"vision": LLM["llm"], "llm": LLM["llm"]}, message_s=1.0, load={Microbatch("vision", 1, 0): 2.0}
    )
    timeline = simulate(build_program(graph), table)
    starts = {s.rank: s.start_s for s in timeline.spans if isinstance(s.action, Forward)}
    assert starts == {0: 0.0, 1: 0.0, 2: 3.0, 3: 4.0, 4: 5.0}
    ends = {s.rank: s.start_s + s.duration_s for s in timeline.spans if isinstance(s.action, Backward)}
    assert ends == {2: 6.0, 3: 7.0, 4: 8.0, 0: 11.0, 1: 14.0}
    assert timeline.step_time_s == 14.0


def test_a_reduction_overlaps_with_the_work_of_other_ranks() -> None:
    """Encoder on rank 0, LLM on rank 1, one microbatch: F 1 s, B 2 s each; reductions and gathers take 3 s, the step 1.

    Both gather until 3. LLM: F 4-5, B -7, reduces its gradients 7-10 while the encoder runs its backward 7-9 and
    reduces 9-12: the step does not see the LLM's reduction. Then the optimizer 12-13. With both units on one rank the
    encoder's forward, 3-4, overlaps with the LLM's gathering, 3-6, the LLM's reduction, 9-12, with the encoder's
    backward, 9-11, and the encoder's follows it, 12-15. The critical path goes through all four.
    """
    apart = chain(Unit("vision"), Unit("llm"), n=1)
    slow = {ReduceGrads: 3.0, GatherParams: 3.0, Step: 1.0}
    seconds = {"vision": LLM["llm"], "llm": LLM["llm"]}
    timeline = simulate(build_program(apart), Table(apart, seconds, collectives=slow))
    reduced = {
        s.rank: (s.start_s, s.start_s + s.duration_s) for s in timeline.spans if isinstance(s.action, ReduceGrads)
    }
    assert reduced == {0: (9.0, 12.0), 1: (7.0, 10.0)}
    assert timeline.step_time_s == 3 + 6 + 3 + 1
    assert timeline.bubbles[1] == {
        "pp_warmup": 1.0,
        "dp_reduce": 3.0 + 1.0,
        "pp_cooldown": 2.0,  # until the encoder has reduced too
        "dp_gather": 3.0,
        "pp_other": 0.0,
        "tp": 0.0,
        "tp_layers": 0.0,
        "dispatch": 0.0,
        "imbalance": 0.0,
    }
    together = chain(Unit("vision", ranks=(0,)), Unit("llm", ranks=(0,)), n=1)
    timeline = simulate(build_program(together), Table(together, seconds, collectives=slow))
    assert timeline.step_time_s == 3 + 3 + 3 + 3 + 3 + 1
    assert timeline.bubbles[0]["dp_reduce"] == 4 + 1
    assert timeline.bubbles[0]["dp_gather"] == 3 + 2
    assert [span.action for span in timeline.critical_path] == [
        GatherParams("vision"),
        GatherParams("llm"),
        Forward(StageId("llm", 0), Microbatch("llm", 0, 0)),
        Backward(StageId("llm", 0), Microbatch("llm", 0, 0)),
        ReduceGrads("llm"),
        ReduceGrads("vision"),
        Step(),
    ]


def test_gathers_run_in_the_order_in_which_ranks_start_them() -> None:
    """Both ranks gather the encoder together until 3, then each its own stage of the LLM until 6.

    The encoder runs 3-4 on both; the LLM's first stage starts at 6 and its second at 7.
    """
    graph = chain(Unit("vision", dp=2, ranks=(0, 1)), Unit("llm", 2, ranks=(0, 1)), n=1)
    table = Table(graph, {"vision": LLM["llm"], "llm": LLM["llm"]}, collectives={GatherParams: 3.0})
    timeline = simulate(build_program(graph, kind="coarse"), table)
    gathered = {(s.rank, s.action): s.start_s for s in timeline.spans if isinstance(s.action, GatherParams)}
    assert gathered == {
        (rank, GatherParams(unit)): start for rank in (0, 1) for unit, start in (("vision", 0.0), ("llm", 3.0))
    }
    assert [start for _, start, _ in computed(timeline, 1)][:2] == [3.0, 7.0]


def test_collectives_of_a_chunk_overlap_with_the_work_of_others() -> None:
    """Two chunks on one rank, one microbatch: F 1 s, B 2 s each; a reduction takes 3 s, the step 1, a gather 3.

    Gathers until 3 and 6, forwards 3-4 and 6-7, the backward of chunk 1 until 9 and of chunk 0 until 11; reductions
    9-12 and 12-15. Nothing differs if the chunks hold one matrix: it is reduced with its first layer.
    """
    slow = {ReduceGrads: 3.0, GatherParams: 3.0, Step: 1.0}
    graph = chain(Unit("llm", num_stages=2), n=1)
    timeline = simulate(build_program(graph), Table(graph, LLM, collectives=slow))
    reduced = [(s.action, s.start_s) for s in timeline.spans if isinstance(s.action, ReduceGrads)]
    assert reduced == [(ReduceGrads("llm", 1), 9.0), (ReduceGrads("llm", 0), 12.0)]
    assert [s.start_s for s in timeline.spans if isinstance(s.action, Forward)] == [3.0, 6.0]
    assert timeline.step_time_s == 16.0
    tied = replace(graph, tied_embeddings=True)
    timeline = simulate(build_program(tied), Table(tied, LLM, collectives=slow))
    assert timeline.step_time_s == 16.0


def test_reductions_overlap_with_the_backward_of_the_layers_before() -> None:
    """One chunk of two layers, a bucket each, two microbatches: F 1 s, B 2 s a layer; collectives take 3 s, the step 1.

    Gathers end at 3 and 6, the first forward runs 3-4 and 6-7 and the next 7-9 (1F1B: F0 B0 F1 B1). B0 7-11, F1 11-13;
    B1 of the last layer 13-15, of the first 15-17. Reductions 15-18 and 18-21, then the optimizer. In one bucket the
    gather of 6 ends first, and the reduction of 6 starts at 18.
    """
    slow = {ReduceGrads: 3.0, GatherParams: 3.0, Step: 1.0}
    seconds = {"llm": {"F": 1.0, "B": 2.0}}
    graph = with_buckets(chain(Unit("llm"), n=2))
    timeline = simulate(build_program(graph), Table(graph, seconds, collectives=slow))
    spans = [(action_to_text(s.action), s.start_s, s.start_s + s.duration_s) for s in timeline.spans]
    assert sorted(spans, key=lambda span: (span[1], span[2])) == [
        ("GP llm 0", 0, 3),
        ("PF llm.0 llm:0.0 0:1", 3, 4),
        ("GP llm 0 1", 3, 6),
        ("PF llm.0 llm:0.0 1:2", 6, 7),
        ("B llm.0 llm:0.0", 7, 11),
        ("F llm.0 llm:0.1", 11, 13),
        ("PB llm.0 llm:0.1 1:2", 13, 15),
        ("PB llm.0 llm:0.1 0:1", 15, 17),
        ("RS llm 0 1", 15, 18),
        ("RS llm 0", 18, 21),
        ("STEP", 21, 22),
    ]
    assert timeline.bubbles[0]["dp_gather"] == 3 + 2
    assert timeline.bubbles[0]["dp_reduce"] == 4 + 1
    assert timeline.bubbles[0]["tp"] == 0
    assert timeline.step_time_s == 22.0
    slower = {ReduceGrads: 6.0, GatherParams: 6.0, Step: 1.0}
    whole = simulate(build_program(chain(Unit("llm"), n=2)), Table(graph, seconds, collectives=slower))
    assert whole.step_time_s == 6 + 2 * 6 + 6 + 1


def test_a_stage_in_pieces_and_what_an_order_cuts_stay_as_they_are() -> None:
    """Their reductions start behind the first of their tasks that ends a bucket."""
    graph = with_buckets(chain(Unit("llm"), n=1))
    in_pieces = replace(graph, stages=tuple(replace(s, pieces=(2, 2)) for s in graph.stages))
    [whole] = build_program(in_pieces).actions.values()
    assert [action_to_text(a) for a in whole][:3] == ["GP llm 0", "GP llm 0 1", "F llm.0 llm:0.0"]
    assert [action_to_text(a) for a in whole][-4:] == ["B llm.0 llm:0.0", "RS llm 0 1", "RS llm 0", "STEP"]
    order = {0: ("F llm.0 llm:0.0", "PB llm.0 llm:0.0 3:4", "PB llm.0 llm:0.0 2:3", "PB llm.0 llm:0.0 0:2")}
    [cut] = build_program(in_pieces, kind="explicit", order=order).actions.values()
    assert [action_to_text(a) for a in cut][-5:] == [
        "PB llm.0 llm:0.0 2:3",
        "RS llm 0 1",
        "PB llm.0 llm:0.0 0:2",
        "RS llm 0",
        "STEP",
    ]


def test_work_in_a_gap_ends_before_its_host() -> None:
    """Encoder and LLM stage 0 on rank 0, stage 1 on rank 1; layers take 1/2 s forward, 1 s backward, in all units.

    Rank 0: vision F0 0-1; LLM F0 with vision F1 between its two layers: 1-1.5, 1.5-2.5, 2.5-3; LLM F1 3-4. Rank 1
    starts at 3 and goes on until 5.
    """
    vision, llm = Unit("vision", ranks=(0,), trainable=(False,)), Unit("llm", 2, ranks=(0, 1), trainable=(False, False))
    graph = chain(vision, llm, n=2)
    filled = written(
        graph,
        {
            0: ["F vision.0 vision:0.0", "F llm.0 llm:0.0 |1| PF vision.0 vision:0.1 0:2", "F llm.0 llm:0.1"],
            1: ["F llm.1 llm:0.0", "F llm.1 llm:0.1"],
        },
    )
    timeline = simulate(filled, Table(graph, {"vision": LLM["llm"], "llm": LLM["llm"]}))
    assert computed(timeline, 0) == [
        ("F vision.0 vision:0.0", 0.0, 1.0),
        ("PF llm.0 llm:0.0 0:1", 1.0, 1.5),
        ("PF vision.0 vision:0.1 0:2", 1.5, 2.5),
        ("PF llm.0 llm:0.0 1:2", 2.5, 3.0),
        ("F llm.0 llm:0.1", 3.0, 4.0),
    ]
    assert [start for _, start, _ in computed(timeline, 1)] == [3.0, 4.0]
    assert timeline.step_time_s == 5.0
    assert [s.rank for s in timeline.critical_path if s.duration_s] == [0, 0, 0, 0, 1, 1]
