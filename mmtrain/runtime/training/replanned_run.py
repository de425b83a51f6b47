"""What a run keeps of planning again: the costs that it recorded."""

import sys

from mmtrain.costs import CostTable
from mmtrain.durable_files import disk_errors_named, set_aside
from mmtrain.errors import PlanError
from mmtrain.runtime.run_folder import RECORDED_COSTS_FILE
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import World


def share_recorded_costs(world: World, request: TrainRequest) -> CostTable | None:
    """Return on all ranks the costs that a run recorded before it was resumed; None if it has none.

    A damaged table is set aside.
    """

    def read() -> str | None:
        path = request.run_dir / RECORDED_COSTS_FILE
        if not request.resume or not path.exists():
            return None
        try:
            return CostTable.load(path).model_dump_json()
        except PlanError as error:
            with disk_errors_named(request.run_dir):
                print(f"mmtrain: {set_aside(path, 'the costs are recorded again')} ({error})", file=sys.stderr)
            return None

    table_text = world.on_first(read)
    return None if table_text is None else CostTable.model_validate_json(table_text)
