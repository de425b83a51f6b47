"""The send window: the proof of termination against a walk through the program."""

import random
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from mmtrain.errors import ProgramError
from mmtrain.program import Backward, Forward, Program, StageGraph, build_program, check_program
from mmtrain.program.ir.matching import Launch, MatchedActions, Post
from mmtrain.program.verify.deadlock import find_deadlock, send_window
from tests.program.graphs import Unit, chain, graphs


def walks_to_its_end(matched: MatchedActions, window: int) -> bool:
    """Let every rank go on as far as it can, again and again, until no rank moves; return whether all have ended."""
    next_step = dict.fromkeys(matched.sequences, 0)
    received: set[int] = set()
    sent: set[int] = set()
    on_channel: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    done: set[int] = set()
    arrived_at: defaultdict[int, set[int]] = defaultdict(set)
    moved = True
    while moved:
        moved = False
        for rank, steps in matched.sequences.items():
            while next_step[rank] < len(steps):
                step = steps[next_step[rank]]
                if isinstance(step, Post):
                    sender, send, _ = matched.messages[step.message]
                    channel = on_channel[sender, send.edge, send.payload, send.peer]
                    if sender != rank:
                        received.add(step.message)
                    elif len([m for m in channel if m not in received]) < window:
                        channel.append(step.message)
                        sent.add(step.message)
                    else:
                        break
                elif isinstance(step, Launch):
                    arrived_at[step.joint_action].add(rank)
                elif all(m in sent for m in step.reads) and all(
                    arrived_at[number] == set(matched.joint_actions[number].ranks) for number in step.awaits
                ):
                    arrived_at[step.joint_action].add(rank)
                    if arrived_at[step.joint_action] == set(matched.joint_actions[step.joint_action].ranks):
                        done.add(step.joint_action)
                    if step.joint_action not in done:
                        break
                else:
                    break
                next_step[rank] += 1
                moved = True
    return all(next_step[rank] == len(steps) for rank, steps in matched.sequences.items())


def shuffled(program: Program, seed: int) -> Program:
    """Move sends and receives at random, or return the program unchanged if `check_program` rejects the result."""
    rng = random.Random(seed)
    actions = {rank: list(todo) for rank, todo in program.actions.items()}
    for todo in actions.values():
        for _ in range(4):
            k = rng.randrange(len(todo) - 1)
            if not isinstance(todo[k], Forward | Backward) or not isinstance(todo[k + 1], Forward | Backward):
                todo[k], todo[k + 1] = todo[k + 1], todo[k]
    changed = Program(program.graph, {rank: tuple(todo) for rank, todo in actions.items()})
    try:
        check_program(changed)
    except ProgramError:
        return program
    return changed


@given(graphs(max_n=5), st.integers(1, 3), st.sampled_from(["1f1b", "coarse"]), st.integers(0, 99))
def test_the_proof_agrees_with_the_walk(graph: StageGraph, window: int, kind: str, seed: int) -> None:
    program = shuffled(build_program(graph, kind=kind), seed)  # type: ignore[arg-type]
    matched = program.matching
    assert (not find_deadlock(matched, window)) == walks_to_its_end(matched, window)
    assert walks_to_its_end(matched, send_window(program, window))


def test_encoders_that_send_to_each_other_first_need_a_large_window() -> None:
    graph = chain(Unit("vision", dp=3, ranks=(0, 1, 2)), Unit("llm", dp=2, ranks=(0, 1)), n=6)
    program = build_program(graph, kind="coarse")
    assert find_deadlock(program.matching, 4)
    assert send_window(program, 1) == 8


def test_pipelines_need_the_smallest_window() -> None:
    graph = chain(Unit("vision", 2), Unit("llm", 4, dp=2), n=8)
    assert send_window(build_program(graph), 1) == 1
