"""Read scripts/papers: the published tables cell by cell, the plans that stand beside them, and the headlines.

`scripts/papers/PAPER_ITEM.yaml` is one table or figure, `scripts/papers/runs/PAPER.yaml` has the plans of a paper,
`scripts/papers/headlines.yaml` what the papers are cited for, and `scripts/papers/runs/changes.yaml` what experiments
change in both systems of a headline.
"""

import re
import shlex
from functools import cached_property
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from mmtrain.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
DATA_FOLDER = Path(__file__).resolve().parent / "papers"
MAX_QUOTE = 100  # characters
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")

PaperName = Literal["omnibal", "mmscale", "optimus", "orchmllm"]
RunKind = Literal["plan", "allocation", "grouping", "isf", "composition", "batches", "spread", "reordering"]
Measure = Literal["step", "gpu_days", "mfu", "tokens"]
PAPERS: dict[PaperName, str] = {  # in the order of the page
    "omnibal": "OmniBal (arXiv 2407.20761, ICML 2025)",
    "mmscale": "MMScale (DistTrain, arXiv 2408.04275)",
    "optimus": "Optimus (arXiv 2408.03505, USENIX ATC 2025)",
    "orchmllm": "OrchMLLM (arXiv 2503.23830)",
}


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Run(_Data):
    """A question to the planner or to a grouping method: a recipe of recipes/whatif with settings replaced.

    `settings` are those that the paper states, `ours` those that it does not, each with a reason.
    """

    recipe: str
    kind: RunKind = "plan"
    settings: tuple[str, ...] = ()
    ours: dict[str, str] = Field({})  # setting -> why we chose it
    baseline: str | None = None  # of `mmtrain plan --baseline`

    @property
    def all_settings(self) -> list[str]:
        """Every `--set`, those of the paper first."""
        return [*self.settings, *self.ours]

    @property
    def path(self) -> Path:
        """The recipe's file."""
        return ROOT / "recipes" / "whatif" / f"{self.recipe}.yaml"

    @property
    def num_ranks(self) -> int:
        """The GPUs of the cluster that the run is planned for."""
        ranks = load_recipe(self.path, self.all_settings).recipe.cluster.ranks
        if ranks is None:
            raise ValueError(f"{self.command}: the recipe names no cluster; set cluster.ranks")
        return ranks

    @property
    def has_command(self) -> bool:
        """Whether one command of mmtrain asks the same question; else only scripts.papers does."""
        return self.kind not in ("batches", "spread", "reordering")

    @property
    def command(self) -> str:
        """The command line that asks the same question."""
        names = {"grouping": "data group", "isf": "data group", "composition": "data stats"}
        parts = ["mmtrain", *names.get(self.kind, "plan").split(), f"recipes/whatif/{self.recipe}.yaml"]
        for setting in self.all_settings:
            parts += ["--set", setting]
        if self.kind == "isf":
            parts.append("--isf")
        if self.kind == "allocation":
            parts.append("--explain")
        if self.baseline is not None:
            parts += ["--baseline", self.baseline]
        return shlex.join(parts)


class Published(_Data):
    """What a paper states, and the words in which it does."""

    published: str
    quote: str = Field(max_length=MAX_QUOTE)

    @property
    def missing_numbers(self) -> list[str]:
        """The numbers of `published` that do not stand in the quotation."""
        stated, quoted = ([n.replace(",", "") for n in NUMBER.findall(text)] for text in (self.published, self.quote))
        return [number for number in stated if number not in quoted]


class Cell(Published):
    """One published figure, and which of ours stands beside it: of runs, measured, or none for a reason."""

    what: str
    runs: tuple[str, ...] = ()
    figure: str | None = None  # a function of `paper_figures.FIGURES`; with `runs`
    argument: str = ""  # of that function, such as a grouping method
    measured: str | None = None  # a figure of a page that is named in it
    not_here: str | None = None  # why nothing of ours can stand beside it
    why: str = ""  # why ours differs, or what the reader has to know

    @model_validator(mode="after")
    def _has_one_answer(self) -> "Cell":
        answers = [bool(self.runs), self.measured is not None, self.not_here is not None]
        if sum(answers) != 1 or bool(self.runs) != (self.figure is not None):
            raise ValueError(
                f"{self.what}: give `runs` with a `figure`, or `measured`, or `not_here`, and only one of the three"
            )
        return self


class Table(_Data):
    """A table or figure of a paper."""

    paper: PaperName
    item: str  # such as `table 2`
    title: str
    note: str = ""
    cells: tuple[Cell, ...] = Field(min_length=1)


class Change(_Data):
    """Settings that an experiment replaces in a run."""

    what: str
    settings: tuple[str, ...]

    def changed(self, run: Run) -> Run:
        """Return the run with these settings in the place of its own."""
        replaced = {_key(setting) for setting in self.settings}
        return run.model_copy(
            update={
                "settings": tuple(setting for setting in run.settings if _key(setting) not in replaced),
                "ours": {key: why for key, why in run.ours.items() if _key(key) not in replaced}
                | dict.fromkeys(self.settings, "an experiment"),
            }
        )


class Experiment(_Data):
    """The two systems of a headline with something changed, which shows what their order depends on."""

    what: str  # is changed
    slower: str  # run, or `RUN+CHANGE`
    faster: str


class Headline(Published):
    """A comparison for which a paper is cited: the slower of two systems over the faster, and ours of the same two."""

    paper: PaperName
    name: str  # of its picture, `docs/papers_PAPER_NAME.png`
    what: str
    slower: str  # run
    faster: str
    figure: Measure
    # The paper's gain, from least to most: a number of `published`, or the first over the last of them, or what an
    # `n% less` is. None where the paper states none.
    gain: tuple[float, float] | None = None
    kept: str  # why, if our order is the paper's
    reversed: str  # why, if it is not
    experiments: tuple[Experiment, ...] = ()
    # Of a fact that is no comparison, such as an MFU, `slower` and `faster` are the same run.

    @property
    def is_fact(self) -> bool:
        """Whether one system is stated, and none that it is compared with."""
        return self.slower == self.faster

    @property
    def run_names(self) -> list[str]:
        """The full names of all its runs, each once."""
        pairs = [(self.slower, self.faster), *((e.slower, e.faster) for e in self.experiments)]
        return list(dict.fromkeys(f"{self.paper}/{name}" for pair in pairs for name in pair))


CHANGED = "+"  # between a run's name and the name of what is changed in it


def _key(setting: str) -> str:
    return setting.partition("=")[0]


class Papers:
    """All data files, read when they are asked for."""

    def __init__(self, folder: Path = DATA_FOLDER) -> None:
        self.folder = folder

    @cached_property
    def tables(self) -> list[Table]:
        """Every table, by paper and in the order of their items' numbers."""
        files = sorted(self.folder.glob("*_*.yaml"))
        tables = [Table.model_validate(_read(file)) for file in files]
        papers = list(PAPERS)
        return sorted(tables, key=lambda table: (papers.index(table.paper), _item_order(table.item)))

    @cached_property
    def runs(self) -> dict[str, Run]:
        """Every run by its name, `PAPER/NAME`."""
        runs: dict[str, Run] = {}
        for paper in PAPERS:
            data = _read(self.folder / "runs" / f"{paper}.yaml")
            shared = data["shared"]
            for name, fields in data["runs"].items():
                runs[f"{paper}/{name}"] = _run(fields, shared)
        for name in dict.fromkeys(name for headline in self.headlines for name in headline.run_names):
            base, _, change = name.partition(CHANGED)
            if change:
                runs[name] = self.changes[change].changed(runs[base])
        return runs

    @cached_property
    def changes(self) -> dict[str, Change]:
        """What experiments change, by name."""
        fields = _read(self.folder / "runs" / "changes.yaml")
        return {name: Change.model_validate(change) for name, change in fields.items()}

    @cached_property
    def headlines(self) -> list[Headline]:
        """What each paper is cited for."""
        return [self._headline(fields) for fields in _read(self.folder / "headlines.yaml")]

    def _headline(self, fields: dict) -> Headline:  # type: ignore[type-arg]
        """Fill in the experiments that name a `change`, of the headline's own two systems unless they name others."""
        experiments = []
        for experiment in fields.pop("experiments", []):
            change = experiment.pop("change", None)
            filled = {name: fields[name] for name in ("slower", "faster")} | experiment
            if change is not None:
                filled["what"] = ", ".join([*filter(None, [filled.get("what")]), self.changes[change].what])
                filled |= {name: f"{filled[name]}{CHANGED}{change}" for name in ("slower", "faster")}
            experiments.append(filled)
        return Headline.model_validate(fields | {"experiments": experiments})

    def run_names(self, table: Table) -> list[str]:
        """Return the full names of a table's runs, each once."""
        return list(dict.fromkeys(f"{table.paper}/{name}" for cell in table.cells for name in cell.runs))


def _read(file: Path) -> dict:  # type: ignore[type-arg]
    return yaml.safe_load(file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _run(fields: dict, shared: dict) -> Run:  # type: ignore[type-arg]
    """Put the settings of the groups that a run names with `use` before its own."""
    settings: list[str] = []
    ours: dict[str, str] = {}
    for name in fields.pop("use", []):
        settings += shared[name].get("settings", [])
        ours |= shared[name].get("ours", {})
    settings += fields.pop("settings", [])
    return Run(settings=tuple(settings), ours=ours | fields.pop("ours", {}), **fields)


def _item_order(item: str) -> tuple[bool, bool, int]:
    """Sort tables before figures, appendices last, and by number."""
    number = re.search(r"\d+", item)
    return item.startswith("appendix"), "figure" in item.split(" ")[0], int(number.group()) if number else 0
