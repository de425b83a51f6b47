"""The result of `mmtrain verify`: does a plan compute the losses and gradients of one process?"""

from dataclasses import dataclass
from html import escape

MAX_LOSS_ERROR = 1e-5  # relative
MAX_ROUNDED_LOSS_ERROR = 1e-3  # after an update from gradients that replicas sent each other in bf16
# Of the distance of a gradient, relative to its norm, where replicas send each other gradients in bf16, which rounds
# each contribution by up to 2^-9 of its size. What contributions have in common may cancel, and then that is more of
# their sum.
MAX_ROUNDED_DISTANCE = 2**-7
MAX_DIFFERENCES_IN_MESSAGE = 5


@dataclass(frozen=True)
class Difference:
    """A parameter whose gradient is not that of one process."""

    parameter: str
    ranks: tuple[int, ...]  # that hold wrong elements; empty if no rank holds any
    factor: float | None  # on the right gradient, if the wrong one is a multiple of it
    distance: float  # relative to the norm of the right gradient, or to a thousandth of that of all gradients
    stage: str | None = None  # of the plan, that holds the parameter; None for one that no stage should hold

    def __str__(self) -> str:
        """Say what differs and where."""
        parameter = self.parameter if self.stage is None else f"{self.parameter} of stage {self.stage}"
        if not self.ranks:
            return f"{parameter}: no rank has a gradient for some of its elements"
        where = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        what = f"off by {self.distance:.1e} of its norm"
        if self.factor is not None:
            what = f"{self.factor:.4g} times that of one process"
        return f"{parameter}: its gradient on {where} is {what}"


@dataclass(frozen=True)
class VerifiedStep:
    """One step under the plan and in one process."""

    loss: float
    expected_loss: float
    differences: tuple[Difference, ...]
    num_parameters: int  # that train
    is_rounded: bool = False  # whether replicas send each other gradients in bf16

    @property
    def is_equal(self) -> bool:
        """Whether loss and all gradients are those of one process, but for rounding."""
        error = abs(self.loss - self.expected_loss)
        max_error = MAX_ROUNDED_LOSS_ERROR if self.is_rounded else MAX_LOSS_ERROR
        return not self.differences and error <= max_error * abs(self.expected_loss)


@dataclass(frozen=True)
class Verification:
    """The steps that were compared, and the part of the plan that ran."""

    steps: tuple[VerifiedStep, ...]
    num_ranks: int  # that ran
    note: str | None  # what was left out of the plan; None for a whole plan

    @property
    def is_equal(self) -> bool:
        """Whether all steps are those of one process."""
        return all(step.is_equal for step in self.steps)

    def sentences(self) -> list[str]:
        """Say for every step what is equal and what differs, and what follows for the plan."""
        lines = []
        for number, step in enumerate(self.steps, 1):
            losses = f"loss {step.loss:.6f} on {self.num_ranks} ranks, {step.expected_loss:.6f} in one process"
            verdict = f"all {step.num_parameters} gradients are equal"
            if step.differences:
                verdict = f"{len(step.differences)} of {step.num_parameters} gradients differ"
            lines.append(f"Step {number}: {losses}; {verdict}.")
            lines += [f"  {difference}" for difference in step.differences[:MAX_DIFFERENCES_IN_MESSAGE]]
        if any(step.is_rounded for step in self.steps):
            lines.append(
                f"train.grad_reduce is bf16, so a gradient is equal within {MAX_ROUNDED_DISTANCE:.1%} of its norm."
            )
        if not self.is_equal:
            lines.append("The plan does NOT compute what one process computes. Errors spread from the first one named.")
        elif self.note is None:
            lines.append("The plan computes what one process computes.")
        else:
            lines.append("The plan, cut so, computes what one process computes.")
        return lines

    def __str__(self) -> str:
        """Return what the command prints."""
        return "\n".join([*([] if self.note is None else [self.note]), *self.sentences()])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"
