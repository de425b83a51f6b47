"""State in README and docs what `mmtrain/costs/published_errors.json` holds, in the words that plans print."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmtrain.costs.hardware_presets import PRESETS
from mmtrain.costs.published_errors import ERRORS_FILE, PublishedErrors, RunKind

ROOT = Path(__file__).resolve().parents[1]
TABLE_START, TABLE_END = "| runs on | layout | what predictions were off by |", ""
PLAN_WIDTH = 110  # of sentences below a plan, without their indentation
_PREDICTED = re.compile(
    r"(?<=\n)    Predicted step \(modelled: [^)]*\)(?P<rest>.*?peak\s+memory\s+[\d.]+\s+GiB\.)\n", re.DOTALL
)


@dataclass(frozen=True)
class StatedPlan:
    """A page that shows the output of `mmtrain plan`, and what that plan is."""

    page: str
    kind: RunKind


STATED_PLANS = (
    StatedPlan("README.md", RunKind("h100-80g", "FSDP", is_multimodal=True)),
    StatedPlan("docs/planning.md", RunKind("h100-80g", "FSDP", is_multimodal=True)),
)


def write_errors(errors: PublishedErrors) -> None:
    """Write the file of the package and all pages anew."""
    (ROOT / "mmtrain" / "costs" / ERRORS_FILE).write_text(errors.model_dump_json(indent=1) + "\n", encoding="utf-8")
    for plan in STATED_PLANS:
        path = ROOT / plan.page
        path.write_text(stated(plan, path.read_text(encoding="utf-8"), errors), encoding="utf-8")


def stated(plan: StatedPlan, page: str, errors: PublishedErrors) -> str:
    """Return a page with the errors stated anew, in its plan and in its table if it has one."""
    source = f"modelled: {plan.kind.hardware}, {errors.text(plan.kind)}"

    def sentence(found: re.Match[str]) -> str:
        words = " ".join(f"Predicted step ({source}){found['rest']}".split())
        return textwrap.indent(textwrap.fill(words, PLAN_WIDTH, break_on_hyphens=False), "    ") + "\n"

    page = _PREDICTED.sub(sentence, page)
    if TABLE_START in page:
        before, after = page.split(TABLE_START)
        _, _, after = after.partition("\n\n")
        page = f"{before}{TABLE_START}\n|---|---|---|\n" + "\n".join(table_rows(errors)) + f"\n\n{after}"
    return page


def table_rows(errors: PublishedErrors) -> Iterator[str]:
    """Yield a row for each kind of layout on each GPU of the runs, and for the presets without any."""
    dense = [run for run in errors.runs if not run.has_experts]
    for gpu in sorted({run.hardware for run in dense}):
        layouts = sorted({run.layout for run in dense if run.hardware == gpu})
        for layout in layouts:
            yield f"| `{gpu}` | {layout} | {errors.text(RunKind(gpu, layout, is_multimodal=False))} |"
    multimodal = {run.hardware for run in errors.runs if run.is_multimodal}
    if not multimodal:
        yield "| any GPU | any, with an encoder or a generator | no multimodal runs were compared |"
    yield f"| any GPU | any, with a mixture of experts | {errors.of_mixtures()} |"
    own = {name: hardware.own_run_ratios for name, hardware in PRESETS.items() if hardware.own_run_ratios}
    for name, (least, largest) in own.items():
        yield f"| `{name}` | any | our own runs took {least:g} to {largest:g} times as long |"
    yield "| others | any | no published run on this GPU was compared |"
