"""Write the answers of an evaluation to a file of JSON lines while it runs."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from mmtrain.durable_files import disk_errors_named, file_named
from mmtrain.runtime.evaluation.metrics import Metric
from mmtrain.runtime.evaluation.qa_eval import AnsweredRound, HeldOutQuestion, QuestionAnswerer, asked_text
from mmtrain.runtime.evaluation.text_metrics import TextMetric, exact
from mmtrain.runtime.world import World


@dataclass(frozen=True)
class AnswerLine:
    """One line of the file: a held-out question and what the model answered.

    media: where its images, videos and clips are: a path, or the file that holds them and their place in it.
    score: of this answer, by the name of the metric.
    tokens: that the model generated, thoughts included.
    """

    id: str
    question: str
    media: tuple[str, ...]
    expected: str
    answer: str
    score: dict[str, float]
    tokens: int

    def to_json(self) -> str:
        """Return the line without its end."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)


class AnswersFile:
    """Appends whole lines to a file that starts empty: a full disk leaves none of the line that it stopped."""

    def __init__(self, path: Path) -> None:
        """Open the file, and empty it if it exists. Raises RunError that names it."""
        self._path = path
        with disk_errors_named(path.parent), file_named(path):
            self._file = path.open("wb", buffering=0)

    def write(self, lines: Iterable[AnswerLine]) -> None:
        """Append lines, each by a write of its own, so that a reader and a kill find whole ones. Raises RunError."""
        with disk_errors_named(self._path.parent), file_named(self._path):
            for line in lines:
                self._append(f"{line.to_json()}\n".encode())

    def _append(self, line: bytes) -> None:
        start = self._file.tell()
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            os.ftruncate(self._file.fileno(), start)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class AnswerRecorder:
    """Scores the answers of each round and writes them on the first rank; all ranks call it together."""

    def __init__(
        self,
        path: Path,
        answerer: QuestionAnswerer,
        right: Mapping[HeldOutQuestion, str],
        metrics: Sequence[Metric],
        world: World,
    ) -> None:
        """Open the file at `path`. right: the answers of a perfect model. Raises RunError on all ranks.

        Lines have the scores of exact matches and of `metrics`, but for plug-ins, which score all answers together.
        """
        self._path, self._answerer, self._right, self._world = path, answerer, right, world
        texts = [metric for metric in metrics if isinstance(metric, TextMetric) and metric.name != "exact"]
        self._metrics = [TextMetric("exact", exact), *texts]
        self._file: AnswersFile | None = None
        world.on_first(self._open)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def record(self, answered: AnsweredRound) -> None:
        """Write a line for each answer of a round. Raises RunError on all ranks."""
        self._world.on_first(lambda: self._write(answered))

    def _open(self) -> None:
        self._file = AnswersFile(self._path)

    def _write(self, answered: AnsweredRound) -> None:
        assert self._file is not None, "only the first rank has it, and only this one writes"
        self._file.write(self._line(question, ids) for question, ids in answered.tokens.items())

    def _line(self, question: HeldOutQuestion, ids: Sequence[int]) -> AnswerLine:
        expected, answer = self._right[question], self._answerer.text(ids)
        return AnswerLine(
            id=question.sample.id,
            question=asked_text(question),
            media=tuple(map(str, question.media)),
            expected=expected,
            answer=answer,
            score={metric.name: metric.score([(expected, answer)]) for metric in self._metrics},
            tokens=len(ids),
        )
