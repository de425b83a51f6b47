"""Timing from a cost model, and the Chrome trace."""

import itertools
import json
from dataclasses import dataclass, replace

import numpy as np
import pytest

from mmtrain.balance.batch_meta import BatchMeta, ItemTable
from mmtrain.costs import PieceCost
from mmtrain.models.shapes.model_shape import LayerShape, ModelEdge, ModelShape, UnitShape
from mmtrain.program import ModelTiming, TransferCost, build_program, chrome_trace, simulate, step_loads
from mmtrain.program.ir.actions import (
    Backward,
    Forward,
    GatherParams,
    Partial,
    Recv,
    ReduceGrads,
    ReduceShared,
    Send,
    Share,
    Step,
)
from mmtrain.program.ir.graph import Microbatch, StageId
from tests.program.graphs import Unit, chain


@dataclass(frozen=True)
class LayerCosts:
    """1 s a token forward, 2 backward (plus 1 for an input gradient), 10 to recompute; 1 s a byte sent."""

    source: str = "given: round numbers"
    sums_on_the_way: bool = False
    reduces_once: bool = False
    gradient_bytes: int = 0

    def seconds(self, work):
        per_token_s = {"forward": 1.0, "backward": 2.0 + work.input_grad, "recompute": 10.0}[work.kind]
        return work.load.tokens * per_token_s / work.tp

    def pieces(self, work):
        """A quarter of a block's pass is a collective of its TP group."""
        total_s = self.seconds(work)
        collective_s = total_s / 4 if work.layer.kind == "decoder_block" and work.tp > 1 else 0.0
        return (PieceCost(total_s - collective_s, collective_s),)

    def activation_bytes(self, layer, tp, load, recompute, *, input_grad=True):
        return load.tokens * (1 if recompute else 100) if layer.trainable or input_grad else 0

    def transfer(self, nbytes, same_node):
        return nbytes * (1.0 if same_node else 10.0)

    def all_to_all(self, on_node_bytes, off_node_bytes, group):
        return max(self.transfer(on_node_bytes, True), self.transfer(off_node_bytes, False))

    def posting(self):
        return 0.0

    def collective(self, kind, nbytes, group):
        return nbytes * {"broadcast": 1.0, "reduce_scatter": 2.0, "all_gather": 3.0, "all_reduce": 4.0}[kind]

    def shard_copies(self, nbytes, kernels):
        return 0.0

    def optimizer(self, parameters):
        return parameters * 0.5


def layer(kind, hidden, out, **more):
    return LayerShape(kind, hidden=hidden, out=out, **more)


VISION = (layer("patch_embed", 4, 4, trainable=False), layer("projector", 4, 8))
LLM = (layer("embedding", 8, 8, vocab=64), *[layer("decoder_block", 8, 8)] * 2, layer("head", 8, 64, vocab=64))
SHAPE = ModelShape(
    (UnitShape("vision", "encoder", VISION), UnitShape("llm", "llm", LLM)), (ModelEdge("vision", "llm", 0, 8),), True
)


@pytest.fixture
def timing():
    """Vision on rank 0, the LLM in two stages of tp 2. The microbatch has 5 patches, 3 feature rows and 6 tokens."""
    graph = chain(Unit("vision"), Unit("llm", 2, tp=2), n=1, tied=True)
    stages = [replace(s, recompute=frozenset({1})) if str(s.id) == "llm.0" else s for s in graph.stages]
    graph = replace(graph, stages=tuple(stages))
    zero = np.zeros(1, dtype=np.int64)
    items = ItemTable(zero, zero, zero + 1, zero + 5, zero + 5, zero + 3, zero, zero)
    meta = BatchMeta(0, 0, zero, zero + 6, zero + 2, zero, zero, {"vision": items})
    return ModelTiming(
        graph,
        SHAPE,
        LayerCosts(),
        step_loads(graph, meta),
        input_grad={"vision": (False, False), "llm": (True,) * 4},
        trained_parameters=lambda layer, tp: 100 // tp if layer.trainable else 0,
        element_bytes=2,
        ranks_per_node=2,
    )


def stage_and_mb(unit, index=0):
    return StageId(unit, index), Microbatch(unit, 0, 0)


def test_stages_sum_their_layers(timing):
    assert timing.compute(Forward(*stage_and_mb("vision"))) == 5 * 2
    assert timing.compute(Forward(*stage_and_mb("llm"))) == 6 * 2 / 2


def test_backward_starts_at_the_first_layer_that_needs_it(timing):
    assert timing.compute(Backward(*stage_and_mb("vision"))) == 5 * 2.0  # the projector alone, without input gradient
    assert timing.compute(Backward(*stage_and_mb("llm", 1))) == 2 * 6 * 3.0 / 2


def test_passes_wait_in_their_blocks_and_in_those_that_are_computed_again(timing):
    """Stage llm.0 holds the embedding and a recomputed block, llm.1 a block and the head."""
    assert timing.tp_wait(Forward(*stage_and_mb("vision"))) == 0.0
    assert timing.tp_wait(Forward(*stage_and_mb("llm"))) == 6 / 2 / 4
    assert timing.tp_wait(Backward(*stage_and_mb("llm"))) == (6 * 3.0 + 6 * 10.0) / 2 / 4
    assert timing.tp_wait(Backward(*stage_and_mb("llm", 1))) == 6 * 3.0 / 2 / 4
    assert timing.tp_wait(Partial(*stage_and_mb("llm"), "F", 0, 1)) == 0.0


def test_recomputed_layers_take_longer_and_keep_less(timing):
    assert timing.compute(Backward(*stage_and_mb("llm"))) == (2 * 6 * 3.0 + 6 * 10.0) / 2
    assert timing.activation_bytes(*stage_and_mb("llm")) == 6 * 100 + 6
    assert timing.activation_bytes(*stage_and_mb("vision")) == 5 * 100


def test_segments_take_the_time_of_their_layers(timing):
    """Stage llm.0 holds the embedding and a recomputed block; the encoder's first layer needs no backward."""
    llm, vision = stage_and_mb("llm"), stage_and_mb("vision")
    assert timing.compute(Partial(*llm, "F", 1, 2)) == 6 / 2
    assert timing.compute(Partial(*llm, "B", 0, 1)) == 6 * 3.0 / 2
    assert timing.compute(Partial(*llm, "B", 1, 2)) == (6 * 3.0 + 6 * 10.0) / 2
    assert timing.compute(Partial(*vision, "B", 0, 1)) == 0
    assert timing.compute(Partial(*vision, "B", 0, 2)) == timing.compute(Backward(*vision))


def test_link_classes_depend_on_the_node(timing):
    """Two ranks a node."""
    assert timing.link_class((0, 1)) == timing.link_class((2, 3))
    assert timing.link_class((0, 1)) != timing.link_class((1, 2))


def test_equal_stages_are_computed_once(timing):
    calls = []

    class Counted(LayerCosts):
        def seconds(self, work):
            calls.append(work.kind)
            return super().seconds(work)

    blocks = ModelShape((UnitShape("llm", "llm", (layer("decoder_block", 8, 8),) * 8),), ())
    graph = chain(Unit("llm", 2, num_stages=4), n=1)
    loads = replace(timing.loads, routes={})
    timing = replace(timing, graph=graph, shape=blocks, costs=Counted(), loads=loads, input_grad={"llm": (True,) * 8})
    times = {timing.compute(Forward(StageId("llm", k), Microbatch("llm", 0, 0))) for k in range(4)}
    assert times == {2 * 6.0}
    assert calls == ["forward"] * 2


def test_spans_of_parts_have_their_segments(timing):
    order = {
        0: ["PF vision.0 vision:0.0 0:1", "PF vision.0 vision:0.0 1:2", "B vision.0 vision:0.0"],
        **{rank: [f"{kind} llm.{(rank - 1) // 2} llm:0.0" for kind in "FB"] for rank in range(1, 5)},
    }
    timeline = simulate(build_program(timing.graph, kind="explicit", order=order), timing)
    parts = [e for e in chrome_trace(timeline, "")["traceEvents"] if e.get("args", {}).get("kind") == "partial"]
    assert [(e["name"], e["pid"], e["tid"], e["dur"]) for e in parts] == [
        ("F vision.0 vision:0.0 0:1", 0, 0, 5e6),
        ("F vision.0 vision:0.0 1:2", 0, 0, 5e6),
    ]
    location = {"unit": "vision", "stage": 0, "chunk": 0, "replica": 0, "microbatch": 0}
    assert parts[1]["args"] == {"kind": "partial", **location, "lo": 1, "hi": 2}


def test_messages_carry_routed_rows_between_units_and_all_tokens_inside_a_unit(timing):
    between, inside = timing.graph.edges[1], timing.graph.edges[0]
    assert str(between) == "vision.0>llm.0"
    image, text = Microbatch("vision", 0, 0), Microbatch("llm", 0, 0)
    assert timing.message(0, Send(between, image, text, 1, "activation")) == TransferCost(3 * 8 * 2, 3 * 8 * 2)
    assert timing.message(1, Send(inside, text, text, 3, "gradient")) == TransferCost(10 * 6 * 8 * 2, 6 * 8 * 2)
    assert timing.collective(1, Share(between, text, "activation"), (1, 2)) == TransferCost(3 * 8 * 2, 3 * 8 * 2)


def test_messages_to_another_rail_of_another_node_take_a_hop_more(timing):
    """Nodes of two ranks: messages hop where node and place on it differ, whatever the edge."""
    between, inside = timing.graph.edges[1], timing.graph.edges[0]
    image, text = Microbatch("vision", 0, 0), Microbatch("llm", 0, 0)
    railed = replace(timing, rail_hop_s=7.0)
    for sender, peer in itertools.permutations(range(5), 2):
        hop_s = 7.0 if (sender // 2 != peer // 2 and sender % 2 != peer % 2) else 0.0
        for edge, src in ((between, image), (inside, text)):
            send = Send(edge, src, text, peer, "activation")
            assert railed.message(sender, send).seconds == timing.message(sender, send).seconds + hop_s


def test_messages_carry_what_travels_beside_the_hidden_states(timing):
    """The encoder keeps the outputs of two blocks, and each of the LLM's two blocks adds one of them."""
    projector = replace(VISION[1], carried_in=2, carried_out=2)
    embedding, first, second, head = LLM
    blocks = (replace(first, carried_in=2, carried_out=1), replace(second, carried_in=1, carried_out=0))
    llm = (replace(embedding, carried_out=2), *blocks, head)
    units = (UnitShape("vision", "encoder", (VISION[0], projector)), UnitShape("llm", "llm", llm))
    deep = replace(timing, shape=ModelShape(units, (ModelEdge("vision", "llm", 0, projector.out_width),), True))
    between, inside = timing.graph.edges[1], timing.graph.edges[0]
    image, text = Microbatch("vision", 0, 0), Microbatch("llm", 0, 0)
    assert deep.message(0, Send(between, image, text, 1, "activation")) == TransferCost(3 * 24 * 2, 3 * 24 * 2)
    assert deep.message(1, Send(inside, text, text, 3, "gradient")) == TransferCost(10 * 6 * 16 * 2, 6 * 16 * 2)
    received = 6 * 8 * 2  # beside the hidden states of the second stage, one tensor
    assert deep.activation_bytes(*stage_and_mb("llm", 1)) == timing.activation_bytes(*stage_and_mb("llm", 1)) + received


def test_collectives_move_only_parameters_that_train(timing):
    assert timing.collective(0, ReduceGrads("vision"), (0,)) == TransferCost(2 * 100 * 4, 100 * 4)
    assert timing.collective(1, GatherParams("llm"), (1,)) == TransferCost(3 * 2 * 50 * 2, 2 * 50 * 2)
    assert timing.collective(1, ReduceShared("embeddings"), (1, 3)) == TransferCost(4 * 64 * 8 * 4 / 2, 64 * 8 * 4 // 2)
    norm_s, optimizer_s = 4 * 4, 0.5 * 100  # the optimizer of the rank with most parameters
    assert timing.collective(1, Step(), (0, 1, 2, 3, 4)) == TransferCost(norm_s + optimizer_s, 4)


def test_nothing_is_sent_for_a_text_only_microbatch(timing):
    loads = replace(timing.loads, routes={("vision", "llm"): replace(timing.loads.routes["vision", "llm"], spans={})})
    timing = replace(timing, loads=loads)
    timeline = simulate(build_program(timing.graph), timing)
    between = [s for s in timeline.spans if isinstance(s.action, Send) and s.action.edge.crosses_units]
    assert between == []
    image, text = (
        next(s for s in timeline.spans if s.action == Forward(*stage_and_mb(unit))) for unit in ("vision", "llm")
    )
    assert text.start_s == image.start_s + timing.compute(image.action)


def test_chrome_trace_has_the_fields_of_the_design(timing):
    timeline = simulate(build_program(timing.graph), timing)
    trace = chrome_trace(timeline, "abc")
    assert json.loads(json.dumps(trace)) == trace
    assert trace["otherData"] == {
        "simulated": True,
        "step_time_us": timeline.step_time_s * 1e6,
        "plan_sha256": "abc",
    }
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(timeline.spans)
    forward = next(e for e in spans if e["pid"] == 1 and e["args"]["kind"] == "F")
    assert forward["tid"] == 0
    assert forward["args"] == {"kind": "F", "unit": "llm", "stage": 0, "chunk": 0, "replica": 0, "microbatch": 0}
    assert forward["dur"] == 6e6
    kinds = {e["args"]["kind"] for e in spans if e["tid"] == 1}
    assert kinds == {"p2p", "broadcast", "all_reduce"}
    assert {e["args"]["kind"] for e in spans if e["tid"] == 2} == {"reduce_scatter", "all_gather"}
    message = next(e for e in spans if e["args"]["kind"] == "p2p")
    assert message["args"] == {"kind": "p2p", "edge": "vision.0>llm.0", "bytes": 48}
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(5)}


def test_a_stage_of_a_later_round_is_a_later_chunk():
    graph = chain(Unit("llm", pp=2, num_stages=4), n=1)

    class EqualTimes:
        compute = staticmethod(lambda action: 1.0)
        message = staticmethod(lambda sender, action: TransferCost(0.0, 0))
        collective = staticmethod(lambda rank, action, group: TransferCost(0.0, 0))
        link_class = staticmethod(len)
        activation_bytes = staticmethod(lambda stage, mb: 0)

    trace = chrome_trace(simulate(build_program(graph), EqualTimes()), "")
    chunks = {
        (e["args"]["stage"], e["args"]["chunk"]) for e in trace["traceEvents"] if e.get("tid") == 0 and "dur" in e
    }
    assert chunks == {(0, 0), (1, 0), (2, 1), (3, 1)}


def test_spans_of_receives_look_like_those_of_sends(timing):
    timeline = simulate(build_program(timing.graph), timing)
    sent = next(s for s in timeline.spans if isinstance(s.action, Send))
    send = sent.action
    recv = Recv(send.edge, send.src, send.dst, sent.rank, send.payload)
    received = sent._replace(rank=send.peer, action=recv)
    events = chrome_trace(replace(timeline, spans=(sent, received), simulated=False), "")["traceEvents"][-2:]
    assert events[0]["args"] == events[1]["args"]
    assert [e["pid"] for e in events] == [0, 1]
