"""How the choice of a plan depends on the constants of its cost model: what `explain.sensitivity` finds."""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from mmtrain.costs.perturbed_costs import CostConstant, Perturbation


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ComparedPlan(_Frozen):
    """A plan that is simulated again: the chosen one, or one that is near it."""

    summary: str
    placement: str
    step_time_s: float  # with the constants as stated


class PerturbedStep(_Frozen):
    """The predicted step of one plan with one constant changed, its layout and order as they were."""

    step_time_s: float
    # Whether it was simulated on the first sampled batch alone, and scaled: where the plan stays clearly behind.
    from_first_batch: bool


class PerturbedRanking(_Frozen):
    """The steps of all plans with one constant at `ratio` of its stated value; the chosen plan's comes first."""

    constant: CostConstant
    ratio: float
    steps: tuple[PerturbedStep, ...]

    @property
    def perturbation(self) -> Perturbation:
        """What was changed."""
        return Perturbation(self.constant, self.ratio)


class Sensitivity(_Frozen):
    """The chosen plan and its closest rivals under changed constants of the cost model."""

    plans: tuple[ComparedPlan, ...]  # the chosen plan first, then its rivals by step time
    rankings: tuple[PerturbedRanking, ...]  # empty without rivals

    def where_faster(self, rival: int, ratio: float) -> Iterator[PerturbedRanking]:
        """Yield the rankings in which plan number `rival` is faster than the chosen plan by more than `ratio`."""
        for ranking in self.rankings:
            if ranking.steps[rival].step_time_s * ratio < ranking.steps[0].step_time_s:
                yield ranking
