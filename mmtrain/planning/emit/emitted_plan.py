"""What is written of a plan for another trainer, where each value comes from, and what that trainer cannot express."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from mmtrain.costs import machine_for
from mmtrain.planning.artifact.plan import Plan, UnitPlan
from mmtrain.planning.emit.accepted_settings import AcceptedSettings
from mmtrain.program.ir.graph import LLM
from mmtrain.recipe import Recipe

Origin = Literal["plan", "recipe", "trainer", "yours"]
ORIGIN_TEXTS: Mapping[Origin, str] = {
    "plan": "from the plan",
    "recipe": "from the recipe",
    "trainer": "from neither plan nor recipe: what makes {trainer} compute the same",
    "yours": "from neither plan nor recipe: set these",
}


@dataclass(frozen=True)
class EmittedSetting:
    """A value under the name that the other trainer has for it; True for a flag without a value."""

    name: str
    value: object
    comment: str = ""


@dataclass(frozen=True)
class SettingGroup:
    """Settings of one origin that stand together."""

    title: str
    origin: Origin
    settings: tuple[EmittedSetting, ...]


@dataclass(frozen=True)
class Inexpressible:
    """A part of the plan or the recipe that the other trainer does not have.

    lengthens: whether a step can take longer there than predicted.
    """

    what: str
    instead: str
    lengthens: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.instead}{' (a step can take longer)' * self.lengthens}"


@dataclass(frozen=True)
class EmittedPlan:
    """The file for another trainer.

    trainer, version: what it was written for.
    text: the content of the file.
    inexpressible: what it leaves out, which its comments list too.
    """

    trainer: str
    version: str
    text: str
    inexpressible: tuple[Inexpressible, ...]


@dataclass(frozen=True)
class PlannedJob:
    """A plan with the recipe that it was made for."""

    plan: Plan
    recipe: Recipe

    @property
    def llm(self) -> UnitPlan:
        """The LLM's part of the plan."""
        return self.plan.units[LLM]

    @property
    def encoders(self) -> dict[str, UnitPlan]:
        """The encoders' parts of the plan, by name."""
        return {name: unit for name, unit in self.plan.units.items() if name in self.recipe.model.all_encoders}

    @property
    def seq_len(self) -> int:
        """The most LLM tokens of a group."""
        return self.plan.data.seq_len or self.recipe.data.group_tokens

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one node: as many as the hardware has, or the largest number that fills whole nodes."""
        return math.gcd(machine_for(self.recipe, self.plan.hardware).ranks_per_node, self.plan.world_size)

    @property
    def num_nodes(self) -> int:
        """Nodes of the job."""
        return self.plan.world_size // self.ranks_per_node

    @property
    def is_moe(self) -> bool:
        """Whether the LLM has mixtures of experts."""
        return self.recipe.model.llm.moe is not None

    @property
    def weights(self) -> str | None:
        """The pretrained model that the recipe names, as it is written there or as a folder."""
        return None if self.recipe.model.hf is None else str(self.recipe.model.hf)


@dataclass(frozen=True)
class OtherTrainer:
    """What the emitter of a trainer consists of.

    problems: why it cannot run the plan at all, one sentence each.
    fitting_options: options of `mmtrain plan` that leave out what it cannot run.
    inexpressible: what it leaves out of a plan that it can run.
    write: the file, from all groups of settings.
    """

    title: str
    problems: Callable[[PlannedJob], Iterator[str]]
    fitting_options: Callable[[PlannedJob], tuple[str, ...]]
    inexpressible: Callable[[PlannedJob], Iterator[Inexpressible]]
    write: Callable[[PlannedJob, AcceptedSettings, tuple[str, ...]], str]
