"""The simulator: replays a checked program event by event, over what its actions take.

Each rank has a compute stream and a communication stream. The rank walks through its actions: it posts sends and
receives without delay; a forward or backward, a part of one, or a collective starts when the rank has come to it, the
messages it reads have arrived and all ranks that take part are there, and holds the rank until it ends. A message is
ready once both ends have posted it; messages and collectives occupy the communication streams of the sender, or of all
members, one after another in the order in which they become ready. What arrives occupies nobody's stream. Collectives
inside compute occupy none either: one that a part leaves under way is done after its time, whatever the rank does then.
"""

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from mmtrain.errors import ProgramError
from mmtrain.program.ir.actions import Compute, Partial, Send
from mmtrain.program.ir.program import Program
from mmtrain.program.ir.serialize import action_to_text
from mmtrain.program.simulation.event_loop import EventTimes, run_events
from mmtrain.program.simulation.sim_graph import SimGraph, SimTask, build_sim_graph
from mmtrain.program.simulation.timing import NO_TRANSFER, Timing, TransferCost
from mmtrain.program.trace.bubble_accounting import BubbleAccount
from mmtrain.program.trace.critical_path import critical_path
from mmtrain.program.trace.timeline import BubbleKind, LazySpans, Span, Timeline
from mmtrain.program.verify.live_activations import peak_of_events

T = TypeVar("T")


def simulate(program: Program, timing: Timing, num_groups: int = 1) -> Timeline:
    """Predict one step of the first `num_groups` replica groups.

    One group stands for all when their loads are alike: it then waits for its own members of data-parallel
    collectives only, though these are timed at their full size. With different loads simulate them all.

    Of ranks that do the same, one is followed (see `twins`). What the bubbles mean is said in `BubbleAccount`.

    Raises:
        ProgramError: the program gets stuck; `check` says why.
    """
    met = build_sim_graph(program, num_groups, timing.link_class)
    costs = [_cost(timing, job) if job else NO_TRANSFER for job in met.tasks]
    transits = [timing.message(parcel.senders[0], parcel.send) for parcel in met.messages]
    if any(transit.posting_s for transit in transits):
        costs = _with_posting(met, costs, transits)
    under_way = {job: _left_under_way(timing, met.tasks[job]) for job in met.resumed_by}
    moments = run_events(
        met, [c.seconds for c in costs], [t.seconds if t.nbytes else None for t in transits], under_way
    )
    _refuse_stuck(met, moments)
    step_time = max(moments.ended)
    bubbles = [_bubbles(met, track, moments, step_time) for track in range(len(met.ranks))]
    memory = [peak_of_events(borders, timing.activation_bytes)[0] for borders in met.activation_events]
    return Timeline(
        spans=LazySpans(partial(_spans, met, moments, costs, transits)),
        step_time_s=step_time,
        bubbles=_by_rank(met, bubbles),
        peak_memory_bytes=_by_rank(met, memory),
        simulated=True,
        pipeline_ranks={mesh.unit: mesh.pp for mesh in program.graph.meshes},
        critical_path=LazySpans(partial(critical_path, met, moments, costs, transits)),
    )


def _cost(timing: Timing, job: SimTask) -> TransferCost:
    if isinstance(job.action, Compute):
        return TransferCost(timing.compute(job.action), 0)
    return timing.collective(job.rank, job.action, job.group)


def _with_posting(met: SimGraph, costs: Sequence[TransferCost], transits: Sequence[TransferCost]) -> list[TransferCost]:
    """Forwards and backwards take as long, and then until the messages behind them are posted, by the slowest rank."""
    posting = [0.0] * (len(met.tasks) + 1)
    for visit in met.participations:
        if visit.task >= 0 and visit.posts:
            own = sum(transits[parcel].posting_s for parcel in visit.posts)
            posting[visit.task] = max(posting[visit.task], own)
    return [
        cost._replace(seconds=cost.seconds + posting[job]) if computes else cost
        for job, (cost, computes) in enumerate(zip(costs, met.is_compute, strict=True))
    ]


def _left_under_way(timing: Timing, job: SimTask | None) -> float:
    assert job is not None
    assert isinstance(job.action, Partial)
    return timing.left_under_way(job.action)


def _by_rank(met: SimGraph, values: Sequence[T]) -> dict[int, T]:
    """What is true of a track, for all ranks on it."""
    found = {rank: value for ranks, value in zip(met.ranks, values, strict=True) for rank in ranks}
    return dict(sorted(found.items()))


def _bubbles(met: SimGraph, track: int, moments: EventTimes, step_time_s: float) -> dict[BubbleKind, float]:
    path = list(met.tasks_of(track))
    account = BubbleAccount.for_actions(job.action for _, job in path)
    for number, job in path:
        account.add(job.action, moments.started[number], moments.ended[number] - moments.started[number])
    account.close(step_time_s)
    return account.bubbles


def _spans(
    met: SimGraph, moments: EventTimes, costs: Sequence[TransferCost], transits: Sequence[TransferCost]
) -> tuple[Span, ...]:
    """All that the ranks do, in the order of its start."""
    spans = []
    for track, ranks in enumerate(met.ranks):
        for number, job in met.tasks_of(track):
            begin, (seconds, nbytes, _) = moments.started[number], costs[number]
            spans += [Span(rank, begin, seconds, job.action, nbytes) for rank in ranks]
    for (send, senders, peers), left, (seconds, nbytes, _) in zip(
        met.messages, moments.departed, transits, strict=True
    ):
        if nbytes:
            for rank, peer in zip(senders, peers, strict=True):
                action = send if peer == send.peer else Send(send.edge, send.src, send.dst, peer, send.payload)
                spans.append(Span(rank, left, seconds, action, nbytes))
    return tuple(sorted(spans, key=lambda span: (span.start_s, span.rank)))


def _refuse_stuck(met: SimGraph, moments: EventTimes) -> None:
    if all(began >= 0 or not of for began, of in zip(moments.started, met.participations_of, strict=True)):
        return
    for track, ranks in enumerate(met.ranks):
        for at, (number, job) in enumerate(met.tasks_of(track)):
            if moments.started[number] < 0:
                raise ProgramError(
                    f"simulate: rank {ranks[0]} waits for ever at `{action_to_text(job.action)}`, number {at} of "
                    "what it computes and joins; let check say why"
                )
