"""A conversation with a model, question by question, by what answers the questions of an evaluation."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmtrain.data import Quarantined, SampleTokenizer
from mmtrain.data.formats.sample_split import ChosenSamples
from mmtrain.data.index.data_index import index_chosen
from mmtrain.data.text.greedy_settings import DEFAULT_ANSWER_TOKENS
from mmtrain.errors import DataError
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.data_settings import SourceSettings
from mmtrain.recipe.settings.modalities import MediaKind
from mmtrain.runtime.evaluation.generate import GreedyGenerator
from mmtrain.runtime.evaluation.qa_eval import QuestionAnswerer, select_questions
from mmtrain.runtime.world import World

_ANSWER_TO_COME = "..."  # in the place of the answer, which no prompt holds
_REPLACEMENT = "\ufffd"  # how a tokenizer spells a character of which bytes are still to come


@dataclass(frozen=True)
class Medium:
    """A picture, a clip or a video of a question."""

    kind: MediaKind
    path: Path


QuestionPart = str | Medium


class Dialogue:
    """A conversation. Each answer is generated from its start on, so that pictures of earlier questions are seen."""

    def __init__(
        self,
        recipe: Recipe,
        generator: GreedyGenerator,
        tokenizer: SampleTokenizer,
        world: World,
        max_new_tokens: int | None = None,
        system: str | None = None,
    ) -> None:
        """Talk to the model of `generator`, which this process holds alone. `system`: a text in front of all others."""
        # A conversation that is cut would lose its last question.
        self._recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"too_long": "reject"})})
        self._generator, self._tokenizer, self._world = generator, tokenizer, world
        of_folder = tokenizer.greedy.answer_limit(0)
        self._max_new_tokens = max_new_tokens or (DEFAULT_ANSWER_TOKENS if of_folder is None else None)
        self._system: list[Mapping[str, object]] = [] if system is None else [{"role": "system", "content": system}]
        self.start_anew()

    def start_anew(self) -> None:
        """Forget all questions and answers."""
        self._messages = [*self._system]

    def ask(self, question: Sequence[QuestionPart], show: Callable[[str], None]) -> str:
        """Return the answer to a question, which the conversation then goes on from.

        show: hears of the answer so far, after each token of it.

        Raises DataError for a question that cannot be used; the conversation is then as before.
        """
        message = {"role": "user", "content": [_content_part(part) for part in question]}
        answer = self._answer([*self._messages, message], show)
        self._messages += [message, {"role": "assistant", "content": answer}]
        return answer

    def _answer(self, messages: Sequence[Mapping[str, object]], show: Callable[[str], None]) -> str:
        entry = {"messages": [*messages, {"role": "assistant", "content": _ANSWER_TO_COME}]}
        with tempfile.TemporaryDirectory(prefix="mmtrain-") as folder:
            path = Path(folder, "dialogue.json")
            path.write_text(json.dumps([entry]), encoding="utf-8")
            source = SourceSettings(path=path, image_root=Path(path.anchor))
            index, [unusable] = index_chosen(self._recipe, [source], ChosenSamples([0]))
            if unusable is not None:
                raise _error_of(unusable)
            [asked] = select_questions(index, None)
            answerer = QuestionAnswerer(
                self._generator, self._recipe, self._tokenizer, index, self._world, self._max_new_tokens
            )
            tokens, bad = answerer.generate(
                [asked], blank=False, token_listener=lambda answers: show(self._text_so_far(answers[asked.number]))
            )
        if bad:
            raise _error_of(bad[0])
        return answerer.text(tokens[asked])

    def _text_so_far(self, ids: Sequence[int]) -> str:
        """Return the text of an answer's first tokens, without a character whose last bytes are still to come."""
        return self._tokenizer.final_answer(ids).rstrip(_REPLACEMENT)


def _content_part(part: QuestionPart) -> dict[str, str]:
    if isinstance(part, Medium):
        return {"type": part.kind, part.kind: str(part.path.absolute())}
    return {"type": "text", "text": part}


def _error_of(unusable: Quarantined) -> DataError:
    """Return why a question is not answered, without the file that holds it for a moment."""
    return DataError(f"{unusable.kind}: {unusable.reason}")
