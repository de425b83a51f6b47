"""Read from the folder of a model how its answers are generated: what changes their tokens, and how many they have."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmtrain.data.text.folder_templates import read_json
from mmtrain.errors import DataError
from mmtrain.families.folder_files import GENERATION_FILE

DEFAULT_ANSWER_TOKENS = 512  # at most, where neither the user nor the folder of a model says
# Of `generation_config.json`, with the value that changes nothing: what greedy generation of transformers follows too.
_NEUTRAL_VALUES: dict[str, object] = {
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "min_new_tokens": None,
    "num_beams": 1,
    "penalty_alpha": None,
    "stop_strings": None,
    "max_time": None,
    "guidance_scale": None,
    "token_healing": False,
    "watermarking_config": None,
    "dola_layers": None,
}


@dataclass(frozen=True)
class GreedySettings:
    """What changes the likeliest token while an answer is generated, and how long that may be."""

    repetition_penalty: float = 1.0  # by which logits of tokens seen before are divided, or multiplied if negative
    suppressed_ids: tuple[int, ...] = ()  # never generated
    not_followed: tuple[str, ...] = ()  # names of further settings of the folder
    max_new_tokens: int | None = None  # of an answer
    max_length: int | None = None  # of an answer with its prompt, where `max_new_tokens` is not set

    @property
    def changes_logits(self) -> bool:
        """Whether anything is to be done."""
        return self.repetition_penalty != 1.0 or bool(self.suppressed_ids)

    def answer_limit(self, prompt_tokens: int) -> int | None:
        """Return the most tokens of an answer to a prompt, at least one; None if the folder has no limit."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return None if self.max_length is None else max(1, self.max_length - prompt_tokens)


def read_greedy_settings(folder: Path) -> GreedySettings:
    """Read the settings of a folder. Raises `DataError`."""
    file = folder / GENERATION_FILE
    settings = read_json(file)
    penalty = settings.get("repetition_penalty")
    suppressed = settings.get("suppress_tokens")
    is_number = isinstance(penalty, int | float) and not isinstance(penalty, bool) and penalty > 0
    if penalty is not None and not is_number:
        raise DataError(f"data.tokenizer: {file}: `repetition_penalty` is {penalty!r}, allowed: a number above 0")
    if suppressed is not None and not (isinstance(suppressed, list) and all(type(i) is int for i in suppressed)):
        raise DataError(f"data.tokenizer: {file}: `suppress_tokens` is {suppressed!r}, allowed: a list of ids")
    others = [name for name, neutral in _NEUTRAL_VALUES.items() if settings.get(name) not in (None, neutral)]
    return GreedySettings(
        1.0 if penalty is None else float(penalty),
        tuple(suppressed or ()),
        tuple(others),
        _limit(settings, "max_new_tokens", file),
        _limit(settings, "max_length", file),
    )


def _limit(settings: dict[str, Any], name: str, file: Path) -> int | None:
    limit = settings.get(name)
    if limit is None or (type(limit) is int and limit >= 1):
        return limit
    raise DataError(f"data.tokenizer: {file}: `{name}` is {limit!r}, allowed: a number of at least 1")
