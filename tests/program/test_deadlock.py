"""The proof that a program ends, against devices that follow NCCL's rules."""

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mmtrain.program import Send, StageGraph, build_program
from mmtrain.program.ir.channels import graph_channels
from mmtrain.program.ir.matching import Join, MatchedActions, MatchedMessage, Post
from mmtrain.program.verify.check import _deadlock_text
from mmtrain.program.verify.deadlock import find_deadlock, send_window
from tests.program.graphs import Unit, chain, graphs
from tests.program.nccl_streams import runs_to_its_end
from tests.program.test_send_window import shuffled

# What the messages of one communicator have in common.
SHARED_BY: dict[str, Callable[[MatchedMessage], object]] = {
    "channel": lambda m: m.channel,
    "both directions": lambda m: (m.send.edge, m.send.payload, frozenset((m.sender, m.send.peer))),
    "replica group": lambda m: (m.send.edge, m.send.payload),  # torch's eager mode, without groups of two ranks
    "pair": lambda m: frozenset((m.sender, m.send.peer)),
}


def with_communicators(matched: MatchedActions, shared_by: str) -> MatchedActions:
    """Return the same messages over other communicators."""
    numbers: dict[object, int] = {}
    messages = tuple(
        m._replace(channel=numbers.setdefault(SHARED_BY[shared_by](m), len(numbers))) for m in matched.messages
    )
    return replace(matched, messages=messages)


@given(graphs(max_n=4), st.sampled_from(["1f1b", "coarse"]), st.integers(0, 99), st.sampled_from(sorted(SHARED_BY)))
def test_the_proof_agrees_with_devices_whatever_shares_a_communicator(
    graph: StageGraph, kind: str, seed: int, shared_by: str
) -> None:
    program = shuffled(build_program(graph, kind=kind), seed)  # type: ignore[arg-type]
    matched = with_communicators(program.matching, shared_by)
    assert (not find_deadlock(matched)) == runs_to_its_end(matched)


@given(graphs(max_n=4), st.integers(1, 3), st.sampled_from(["1f1b", "coarse"]), st.integers(0, 99))
def test_the_proof_agrees_with_devices_whose_sends_are_limited(
    graph: StageGraph, window: int, kind: str, seed: int
) -> None:
    program = shuffled(build_program(graph, kind=kind), seed)  # type: ignore[arg-type]
    assert (not find_deadlock(program.matching, window)) == runs_to_its_end(program.matching, window)
    assert runs_to_its_end(program.matching, send_window(program, window))


def test_activations_and_gradients_of_a_pair_of_ranks_cannot_share_a_communicator() -> None:
    """Rank 0 posts the receive of the first gradient before it sends the second activation, rank 1 needs that first."""
    matched = build_program(chain(Unit("llm", 2), n=4)).matching
    assert not find_deadlock(matched)
    assert any(isinstance(node, MatchedMessage) for node in find_deadlock(with_communicators(matched, "pair")))


def test_a_deadlock_through_a_communicator_names_ranks_and_edges() -> None:
    """Rank 0 runs both forwards before its sends; the second is the first that rank 1 receives."""
    program = build_program(chain(Unit("llm", 2, trainable=(False, False)), n=2))
    matched = with_communicators(program.matching, "pair")
    reordered = {**matched.sequences, 1: tuple(sorted(matched.sequences[1], key=lambda step: isinstance(step, Join)))}
    first, second, *rest = reordered[1]
    swapped = replace(matched, sequences={**reordered, 1: (second, first, *rest)})
    assert isinstance(first, Post)
    text = _deadlock_text(find_deadlock(swapped))
    assert "rank 0 `SA llm.0>llm.1 llm:0.0 llm:0.0 @1`" in text
    assert "rank 0 `SA llm.0>llm.1 llm:0.1 llm:0.1 @1`" in text


@given(graphs())
def test_the_channels_of_a_graph_are_those_of_its_program(graph: StageGraph) -> None:
    program = build_program(graph)
    used = {
        (action.edge, action.payload, rank, action.peer)
        for rank in program.symmetry.location
        for action in program.for_rank(rank)
        if isinstance(action, Send)
    }
    channels = graph_channels(graph)
    assert set(channels) == used
    assert len(set(channels)) == len(channels)
