"""`mmtrain launch ray`: the shipped script for a Ray cluster, for a plan."""

import json
import re

from mmtrain.api.job_files.job_request import JobRequest, JobSize, load_job, origin, require_folder, shipped_text
from mmtrain.api.shipped_recipes import RAY_JOB_FILE
from mmtrain.recipe import Recipe

_CONSTANTS = re.compile(r"^# --- What `mmtrain launch ray` replaces\.\n.*?^# --- End .*?\n", re.MULTILINE | re.DOTALL)
_USAGE = re.compile(r'\A""".*?\n\n.*?\n\n', re.DOTALL)


def ray_job(request: JobRequest, recipe: Recipe, max_restarts: int) -> tuple[str, JobSize]:
    """Return a script that starts a plan's ranks on a Ray cluster, and the nodes that it asks for.

    It is the shipped script with the plan's size and arguments. Raises UserError for a plan that does not match the
    recipe.
    """
    text = shipped_text(RAY_JOB_FILE)
    require_folder(request, "ray")
    plan, size = load_job(request, recipe)
    words = [*request.words, "--run-dir", str(request.run_dir)]
    listed = "".join(f"    {json.dumps(word, ensure_ascii=False)},\n" for word in words)
    constants = (
        f"NUM_NODES = {size.nodes}\n"
        f"RANKS_PER_NODE = {size.ranks_per_node}\n"
        f"USES_GPUS = {size.has_gpus}\n"
        f"MAX_RESTARTS = {max_restarts}\n"
        f"ARGUMENTS = [\n{listed}]\n"
    )
    usage = "Options of `mmtrain train` may follow it: python FILE --set train.steps=1000"
    comment = f'"""{origin("ray", plan, size)}\n\n{usage}\n\n'
    text, count = _CONSTANTS.subn(lambda _: constants, text)
    text, num_comments = _USAGE.subn(lambda _: comment, text)
    assert (count, num_comments) == (1, 1), "the shipped script has other parts than these"
    return text, size
