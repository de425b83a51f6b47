"""Which checkpoints a run keeps, on disk and in an object store."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mmtrain.checkpoint.manifest import BEST_STEP, SUSPECT_SINCE, Manifest

T = TypeVar("T")


@dataclass(frozen=True)
class Rating:
    """What decides whether a complete checkpoint is kept."""

    step: int
    is_trusted: bool  # it was not rated suspect when it was saved
    best_step: int | None  # of the best checkpoint so far, as this one says

    @classmethod
    def of(cls, manifest: Manifest) -> "Rating":
        """Rate the checkpoint that a manifest describes."""
        best_step = manifest.state.get(BEST_STEP)
        is_trusted = manifest.state.get(SUSPECT_SINCE) is None
        return cls(manifest.step, is_trusted, best_step if isinstance(best_step, int) else None)


def worth_keeping(checkpoints: Sequence[T], keep: int, rate: Callable[[T], Rating | None]) -> list[T]:
    """Return the `keep` newest checkpoints, the newest trusted one, and the best ones that all these name.

    A run that goes back to any of them still has the one that was the best then.

    checkpoints: newest first. rate: returns None for one that is not complete; no more are rated than must be.
    """
    naming = list(checkpoints[:keep])
    trusted = next((item for item in checkpoints if (rating := rate(item)) is not None and rating.is_trusted), None)
    if trusted is not None:
        naming.append(trusted)
    best_steps = {rating.best_step for item in naming if (rating := rate(item)) is not None} - {None}
    best: dict[int, T] = {}
    if best_steps:
        for item in checkpoints:
            rating = rate(item)
            if rating is not None and rating.step in best_steps:
                best.setdefault(rating.step, item)
    return [item for item in checkpoints if item in naming or item in best.values()]
