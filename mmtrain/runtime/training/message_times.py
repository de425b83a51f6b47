"""Measure what messages take, from the records of both their ends."""

import statistics
from typing import cast

from mmtrain.program import Recv, Send, Timing
from mmtrain.program.trace.step_record import MessageRecord, StepRecord
from mmtrain.runtime.training.clock_offset import measure_clock_offset
from mmtrain.runtime.world import World


def measure_message_ratio(world: World, record: StepRecord, timing: Timing) -> float | None:
    """Return on rank 0 the median ratio of recorded to predicted seconds of a step's messages; None if unknown.

    All ranks call this together; it gathers the record of one step from each. Only messages that their receiver stood
    still for count: for the others it is not known when they came.
    """
    offset = measure_clock_offset(world)
    gathered = cast(list[StepRecord], world.gather_to_first(record.shifted(-offset.offset_s)))
    sent: dict[tuple[int, Send], MessageRecord] = {
        (rank, message.message): message
        for rank, of_rank in enumerate(gathered)
        for message in of_rank.messages
        if isinstance(message.message, Send)
    }
    ratios = []
    for rank, of_rank in enumerate(gathered):
        for received in of_rank.messages:
            message = received.message
            if not isinstance(message, Recv) or received.wait_s <= 0:
                continue
            key = (message.peer, Send(message.edge, message.src, message.dst, rank, message.payload))
            predicted_s = timing.message(*key).seconds
            departed_s = max(sent[key].posted_s, received.posted_s)
            if predicted_s > 0 and received.done_s > departed_s:
                ratios.append((received.done_s - departed_s) / predicted_s)
    return statistics.median(ratios) if ratios else None
