"""The order of (interleaved) 1F1B on each rank of a stage graph; `builder` explains it."""

from collections.abc import Iterable

from mmtrain.program.ir.actions import Backward, Compute, Forward
from mmtrain.program.ir.graph import Microbatch, StageGraph, StageId
from mmtrain.program.schedules.pipeline_positions import PipelinePosition, find_positions


def order_1f1b(graph: StageGraph, ranks: Iterable[int]) -> dict[int, list[Compute]]:
    """Return the compute of each rank in the order of 1F1B, with a backward for every forward."""
    locations = {
        stage: (position, number % position.num_pipeline_ranks)
        for position in find_positions(graph)
        for number, stages in enumerate(position.virtual_stages)
        for stage in stages
    }
    order: dict[int, list[Compute]] = {}
    for rank in ranks:
        held = graph.held_by(rank)
        order[rank] = list(_pass_by_pass(dict(held), *locations[held[0][0]])) if held else []
    return order


def _pass_by_pass(replica_of: dict[StageId, int], position: PipelinePosition, pipeline_rank: int) -> Iterable[Compute]:
    chunks = [
        [(stage, replica_of[stage]) for stage in position.stages_at(pipeline_rank, chunk) if stage in replica_of]
        for chunk in range(position.num_chunks)
    ]
    for is_forward, chunk, wave in position.passes(pipeline_rank):
        for stage, replica in chunks[chunk] if is_forward else reversed(chunks[chunk]):
            for index in position.pacing[stage.unit].due(is_forward, wave):
                mb = Microbatch(stage.unit, replica, index)
                yield Forward(stage, mb) if is_forward else Backward(stage, mb)
