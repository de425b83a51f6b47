"""What another trainer cannot express of a plan, as a table."""

from rich.table import Table

from mmtrain.planning.emit.emitted_plan import EmittedPlan
from mmtrain.report.plain_text import DEFAULT_WIDTH, render_text


def inexpressible_table(emitted: EmittedPlan, width: int = DEFAULT_WIDTH) -> str:
    """Write a row for each part of the plan that the trainer leaves out, with what happens instead."""
    table = Table(title=f"What {emitted.trainer} {emitted.version} cannot express of the plan", title_justify="left")
    for column in ("in the plan", "instead", "a step"):
        table.add_column(column)
    for part in emitted.inexpressible:
        table.add_row(part.what, part.instead, "can take longer" if part.lengthens else "takes as long")
    return render_text(table, width=width)
