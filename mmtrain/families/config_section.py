"""Read a `config.json` key by key, so that no key which changes what a model computes is passed over."""

import json
from collections.abc import Mapping
from typing import Any

# Keys that change nothing of what is computed in training: names, generation, initialization, dtype of files.
_WITHOUT_EFFECT = frozenset(
    {
        "architectures", "attn_implementation", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
        "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty",
        "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
        "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
        "id2label", "initializer_factor", "initializer_range", "label2id", "length_penalty", "max_length",
        "max_position_embeddings", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
        "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "pad_token_id", "prefix",
        "pretraining_tp", "problem_type", "projection_dim", "remove_invalid_values", "repetition_penalty",
        "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params",
        "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",
        "transformers_version", "typical_p", "use_bfloat16", "use_cache",
    }
)  # fmt: skip


MAX_COUNT = 10_000  # of blocks and experts, which are described one by one
MAX_SIZE = 1 << 40
_COUNTED_ONE_BY_ONE = ("layers", "depth", "experts")


class ConfigSection:
    """One mapping of a `config.json`. It collects what is wrong or not supported in `problems`."""

    def __init__(self, values: Mapping[str, Any], path: str = "", problems: list[str] | None = None) -> None:
        """Read `values`, which lie at the dotted `path`; sections inside share `problems`."""
        self._values = values
        self._path = path
        self._read: set[str] = set()
        self.problems: list[str] = [] if problems is None else problems

    def __bool__(self) -> bool:
        """Return whether it holds anything."""
        return bool(self._values)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number from 1 to what no model reaches. Without a default the key must be there."""
        value = self._value(key, default)
        limit = MAX_COUNT if key.endswith(_COUNTED_ONE_BY_ONE) else MAX_SIZE
        if type(value) is int and 1 <= value <= limit:
            return value
        self.reject(key, f"found {_json(value)}, allowed: a whole number from 1 to {limit:,}")
        return 1

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """Return a whole number of at least 1, or None if the value is null."""
        return None if self._value(key, default) is None else self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0. Without a default the key must be there."""
        value = self._value(key, default)
        if type(value) in (int, float) and value > 0:
            return float(value)
        self.reject(key, f"found {_json(value)}, allowed: a number above 0")
        return 1.0

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._value(key, default)
        if isinstance(value, bool):
            return value
        self.reject(key, f"found {_json(value)}, allowed: true or false")
        return default

    def choice(self, key: str, supported: Mapping[str, str], default: str) -> str:
        """Return what `supported` holds for the value of `key`."""
        value = self._value(key, default)
        if isinstance(value, str) and value in supported:
            return supported[value]
        self.reject(key, f"{_json(value)} is not supported yet; supported: {', '.join(supported)}")
        return next(iter(supported.values()))

    def require(self, key: str, *supported: object, default: object) -> None:
        """Reject every value but those `supported`; `default` is what the family assumes if the key is missing."""
        value = self._value(key, default)
        if not any(type(value) is type(allowed) and value == allowed for allowed in supported):
            names = " or ".join(_json(allowed) for allowed in supported)
            self.reject(key, f"{_json(value)} is not supported yet; supported: {names}")

    def value(self, key: str) -> Any:
        """Return any value; None if the key is missing."""
        return self._value(key, None)

    def pass_over(self, *keys: str) -> None:
        """Count keys as read: what they say has no effect here, or is read elsewhere."""
        self._read.update(keys)

    def section(self, key: str) -> "ConfigSection":
        """Return the mapping at `key`, empty if it is missing or null."""
        value = self._value(key, None)
        if value is not None and not isinstance(value, dict):
            self.reject(key, f"found {_json(value)}, allowed: a mapping")
            value = None
        return ConfigSection(value or {}, f"{self._path}{key}.", self.problems)

    def reject(self, key: str, text: str) -> None:
        """Add a problem of the value at `key`."""
        self.problems.append(f"{self._path}{key}: {text}")

    def finish(self) -> None:
        """Reject every key with a value that nobody has read, unless it is known to have no effect."""
        for key, value in self._values.items():
            is_known = key in self._read or key in _WITHOUT_EFFECT or key.startswith("_")
            if not is_known and value not in (None, False, 0, "", [], {}):
                self.reject(key, f"{_json(value)} is not supported yet")

    def updated_by(self, other: "ConfigSection") -> "ConfigSection":
        """Return the values of both sections; where both state one, that of `other` holds."""
        return ConfigSection({**self._values, **other._values}, other._path, self.problems)

    def allow_copies_of(self, section: "ConfigSection") -> None:
        """Pass over the keys that were read in `section`: some versions of `transformers` wrote them twice."""
        self._read |= section._read

    def _value(self, key: str, default: object) -> Any:
        self._read.add(key)
        return self._values.get(key, default)


def _json(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
