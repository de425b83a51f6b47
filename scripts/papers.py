"""Plan the experiments of published systems, and print each published table with our figures beside it.

    python -m scripts.papers [--only optimus] [--plans FOLDER]

"predicted" means that both figures state the same quantity, and that ours comes from the cost model: no GPU has
confirmed it. "measured" figures are of runs on a CPU, or counted on lengths; the last column names the script. "not
comparable" says why there. A plan takes seconds to minutes; `--plans` keeps them in a folder and reads those that are
there. `scripts/paper_tables.py` has the published figures with their sources.
"""

import argparse
import hashlib
import os
import time
from pathlib import Path

from mmtrain.errors import PlanError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.planner import plan
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.recipe import load_recipe, recipe_fingerprint
from scripts.paper_tables import ALL_TABLES, PaperRow, PaperTable, PlanRun, all_runs
from scripts.whatif_problems import WHAT_IF_FOLDER, whatif_problem

PlansByRun = dict[PlanRun, Plan | PlanError]


def main() -> None:
    """Print a Markdown table for each table of the papers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted({table.paper for table in ALL_TABLES}))
    parser.add_argument("--plans", type=Path, help="folder of plans: those there are read, others are written")
    parser.add_argument(
        "--no-planning", action="store_true", help="leave out figures whose plans are not in the folder"
    )
    options = parser.parse_args()
    tables = [table for table in ALL_TABLES if options.only in (None, table.paper)]
    plans: PlansByRun = {}
    for run in all_runs(tables):
        made = make_plan(run, options.plans, may_plan=not options.no_planning)
        if made is not None:
            plans[run] = made
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores")
    for table in tables:
        print_table(table, plans)


def make_plan(run: PlanRun, folder: Path | None, *, may_plan: bool = True) -> Plan | PlanError | None:
    """Plan a recipe on the cluster that it names, with every loser explained, or read that plan, if there is one."""
    recipe = load_recipe(WHAT_IF_FOLDER / f"{run.recipe}.yaml", list(run.settings)).recipe
    fingerprint = recipe_fingerprint(recipe)
    name = hashlib.sha256(f"{fingerprint} {recipe.cluster}".encode()).hexdigest()[:16]
    file = None if folder is None else folder / f"{run.recipe.replace('/', '-')}-{name}.json"
    if file is not None and file.exists():
        return Plan.model_validate_json(file.read_text(encoding="utf-8"))
    if not may_plan:
        return None
    try:
        problem = whatif_problem(run.recipe, run.settings, request=PlanRequest(explain=True))
        made = plan(problem)
    except PlanError as error:
        return error
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(made.model_dump_json(), encoding="utf-8")
    return made


def print_table(table: PaperTable, plans: PlansByRun) -> None:
    """Print one table."""
    print(f"\n### {table.title}\n\n{table.source}.\n")
    print("| | published | ours | kind | why they differ |")
    print("|---|---|---|---|---|")
    for row in table.rows:
        published = "not known here" if row.published is None else row.published
        print(f"| {row.what} | {published} | {ours_of(row, plans)} | {row.kind} | {row.why} |", flush=True)


def ours_of(row: PaperRow, plans: PlansByRun) -> str:
    """Return our figure, or that nothing fits."""
    made: list[Plan] = []
    for run in row.runs:
        planned = plans.get(run)
        if planned is None:
            return "not planned yet"
        if isinstance(planned, PlanError):
            return f"no plan of {' '.join(run.settings) or run.recipe} fits"
        made.append(planned)
    return row.ours(made)


if __name__ == "__main__":
    main()
