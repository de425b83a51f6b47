"""What a stage graph guarantees, and which graphs are rejected."""

from dataclasses import replace

import pytest

from mmtrain.errors import ProgramError
from mmtrain.program.ir.graph import Edge, Microbatch, StageId
from mmtrain.program.ir.symmetry import symmetry
from tests.program.graphs import Unit, chain, unified


def test_microbatches_of_a_group_exchange_data_across_its_replicas():
    graph = chain(Unit("vision", dp=4), Unit("llm", dp=6))
    assert graph.num_groups == 2
    edge = Edge(StageId("vision", 0), StageId("llm", 0))
    assert [str(s) for s in graph.sources(edge, Microbatch("llm", 4, 1))] == ["vision:2.1", "vision:3.1"]
    assert [str(d) for d in graph.destinations(edge, Microbatch("vision", 0, 0))] == ["llm:0.0", "llm:1.0", "llm:2.0"]


def test_backward_exists_where_something_trains_upstream():
    graph = chain(Unit("vision", 3, trainable=(False, True, False)), Unit("audio", trainable=(False,)), Unit("llm"))
    needed = {str(s.id): graph.needs_backward(s.id) for s in graph.stages}
    assert needed == {"vision.0": False, "vision.1": True, "vision.2": True, "audio.0": False, "llm.0": True}
    carried = {str(e): graph.carries_gradient(e) for e in graph.edges}
    assert not carried["vision.0>vision.1"]
    assert carried["vision.2>llm.0"]
    assert not carried["audio.0>llm.0"]


def test_the_llm_keeps_its_loss_when_it_feeds_a_unit_that_has_one_too():
    graph = chain(Unit("vision", 2), Unit("llm", 2))
    assert [str(s.id) for s in graph.stages if graph.has_loss(s.id)] == ["llm.1"]
    graph = chain(Unit("llm", 2), Unit("generator", 2))
    assert [str(s.id) for s in graph.stages if graph.has_loss(s.id)] == ["llm.1", "generator.1"]


def test_order_puts_sources_first_even_if_listed_last():
    graph = unified(3, vision_pp=2)
    shuffled = replace(graph, stages=tuple(reversed(graph.stages)))
    order = shuffled.order
    assert all(order.index(e.src) < order.index(e.dst) for e in graph.edges)


def test_a_cycle_is_rejected():
    graph = unified(2)
    back = Edge(StageId("llm", 1), StageId("vision", 0))
    with pytest.raises(ProgramError, match=r"vision\.0.*llm\.1.*cycle"):
        symmetry(replace(graph, edges=(*graph.edges, back)))


def test_a_rank_in_two_groups_is_rejected():
    """dp 2 : 2 makes two groups; the LLM's replicas are on the encoder's ranks in reverse order."""
    graph = chain(Unit("vision", dp=2, ranks=(0, 1)), Unit("llm", dp=2, ranks=(1, 0)))
    with pytest.raises(ProgramError, match=r"rank 1 holds vision\.0 in replica group 1 .* llm\.0 in replica group 0"):
        symmetry(graph)


def test_groups_that_do_not_repeat_the_first_are_rejected():
    """Group 0 has both units on rank 0, group 1 has them on ranks 1 and 2."""
    graph = chain(Unit("vision", dp=2, ranks=(0, 1)), Unit("llm", dp=2, ranks=(0, 2)))
    with pytest.raises(ProgramError, match="in replica group 1 ranks 1 and 2 both mirror rank 0"):
        symmetry(graph)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda g: replace(g, meshes=(replace(g.meshes[0], num_microbatches=0), g.meshes[1])),
            "vision has 0 .* at least",
        ),
        (lambda g: replace(g, meshes=g.meshes[1:]), r"stage vision\.0 belongs to no mesh; meshes: llm"),
        (
            lambda g: replace(g, stages=(replace(g.stages[0], tp_groups=((0, 1),)), *g.stages[1:])),
            "1 TP groups of 1 ranks",
        ),
        (lambda g: chain(Unit("llm"), Unit("generator"), Unit("painter")), "the LLM feeds generator and painter"),
        (lambda g: replace(g, stages=g.stages[1:]), r"edge vision\.0>llm\.0 joins a stage that does not exist"),
    ],
)
def test_the_message_names_parts_that_do_not_fit(change, message):
    with pytest.raises(ProgramError, match=message):
        symmetry(change(unified(2)))


def test_two_replicas_of_a_stage_on_a_rank_are_rejected():
    with pytest.raises(ProgramError, match=r"llm\.0 lies more than once on ranks \[0\]"):
        symmetry(chain(Unit("llm", dp=2, ranks=(0, 0))))
