"""What a run trained on of each of its sources, summed over the logged steps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmtrain.report.metrics_record import compact_number

SOURCE_HEAD = ("source", "samples", "LLM tokens", "share of tokens", "first loss", "last loss")


@dataclass(frozen=True)
class SourceTotals:
    """One source of samples in the steps of a run."""

    name: str
    samples: int
    tokens: int  # of the LLM
    token_share: float  # of the tokens of all sources
    first_loss: float | None  # mean over its target tokens of the first step that had some
    last_loss: float | None  # likewise of the last step

    def cells(self) -> list[str]:
        """Return the row of a table under `SOURCE_HEAD`."""
        losses = ("-" if loss is None else f"{loss:.4f}" for loss in (self.first_loss, self.last_loss))
        tokens = compact_number(self.tokens)
        return [self.name, f"{self.samples:,}", tokens, f"{self.token_share:.2%}", *losses]


def sum_sources(metrics: Sequence[Mapping[str, Any]]) -> list[SourceTotals]:
    """Sum logged steps, as `StepMetrics.to_json` writes them, by source; empty for a run on one source."""
    of_source: dict[str, list[Mapping[str, Any]]] = {}
    for step in metrics:
        for name, values in step.get("sources", {}).items():
            of_source.setdefault(name, []).append(values)
    all_tokens = sum(values["tokens"] for steps in of_source.values() for values in steps)
    totals = []
    for name, steps in of_source.items():
        losses = [values["loss"] for values in steps if values.get("loss") is not None] or [None]
        tokens = sum(values["tokens"] for values in steps)
        totals.append(
            SourceTotals(
                name=name,
                samples=sum(values["samples"] for values in steps),
                tokens=tokens,
                token_share=tokens / max(all_tokens, 1),
                first_loss=losses[0],
                last_loss=losses[-1],
            )
        )
    return totals


def source_sentences(totals: Sequence[SourceTotals]) -> Iterator[str]:
    """Write a line for each source, for the end of a run's log."""
    for source in totals:
        loss = "" if source.last_loss is None else f", loss {source.first_loss:.4f} to {source.last_loss:.4f}"
        yield (
            f"source {source.name}: {source.token_share:.2%} of the tokens ({compact_number(source.tokens)}), "
            f"{source.samples:,} samples{loss}"
        )
