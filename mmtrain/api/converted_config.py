"""Convert the configuration of another trainer into a recipe, with comments on what has no match."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmtrain.api.convert_values import NoMatchError, as_list, convert_value, is_true
from mmtrain.api.foreign_config import read_foreign_config
from mmtrain.errors import UserError
from mmtrain.recipe.loading.other_trainers import TRAINERS, OtherKey, other_keys, plain_key
from mmtrain.recipe.loading.strict_yaml import dump_yaml

_SOURCE_SUFFIXES = (".json", ".jsonl", ".parquet", ".tar", ".yaml")
_HF_DEFAULTS = {
    "train.epochs": 3.0,
    "train.optimizer.lr": 5e-5,
    "train.optimizer.schedule": "linear",
    "train.optimizer.betas": [0.9, 0.999],
}
# What trainers take where a configuration says nothing, and mmtrain takes something else or must be told.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "hf": _HF_DEFAULTS,
    "trl": {**_HF_DEFAULTS, "train.optimizer.lr": 2e-5},
    "lf": _HF_DEFAULTS,
    "sw": {
        "train.epochs": 3.0,
        "train.optimizer.lr": 1e-4,
        "train.optimizer.weight_decay": 0.1,
        "train.optimizer.warmup_ratio": 0.05,
    },
    "ax": {"train.epochs": 1.0, "train.optimizer.lr": 2e-4, "train.optimizer.betas": [0.9, 0.999]},
    "mg": {
        "train.steps": 1000,
        "train.optimizer.lr": 1e-4,
        "train.optimizer.schedule": "linear",
        "train.optimizer.weight_decay": 0.01,
        "train.optimizer.betas": [0.9, 0.999],
    },
}
_DEFAULT_DEVICE_BATCH = {"hf": 8, "trl": 8, "lf": 8, "sw": 1, "ax": 1, "mg": 1}
_DEFAULT_SEQ_LEN = 2048
_SECTIONS = ("name", "run_dir", "model", "data", "parallel", "cluster", "train")  # in the order of a recipe
_TUNING_WITHOUT_ADAPTERS = ("full", "freeze", "none", "false", "")
_OWN_OPTIMIZERS = ("adamw", "adam")
_LIST_RULES = ("targets", "loggers")
_LENGTHS = ("train.epochs", "train.steps")
_TUNING_KEYS = ("finetuningtype", "traintype", "tunertype", "adapter", "usepeft")


@dataclass
class ConvertedConfig:
    """A recipe, and what is to be said of it."""

    trainer: str  # of `TRAINERS`
    settings: dict[str, Any]  # of the recipe, by dotted path
    unmatched: dict[str, str] = field(default_factory=dict)  # key and value -> why it has no match
    not_needed: list[str] = field(default_factory=list)  # keys of what mmtrain does anyway, or by itself
    to_check: list[str] = field(default_factory=list)  # sentences

    def text(self, source: str) -> str:
        """Write the recipe as YAML; source: what it was converted from."""
        lines = [f"# Converted from {source}, a configuration of {TRAINERS[self.trainer]}.", "#"]
        if self.to_check:
            lines += ["# To check:", *(f"#   * {_one_line(sentence)}" for sentence in self.to_check), "#"]
        if self.unmatched:
            lines += ["# Without a match:"]
            lines += [f"#   * {_one_line(key)}: {_one_line(reason)}" for key, reason in self.unmatched.items()]
            lines += ["#"]
        if self.not_needed:
            lines += [f"# Not needed here: {', '.join(self.not_needed)}.", "#"]
        tree: dict[str, Any] = {}
        for path, value in self.settings.items():
            *sections, name = path.split(".")
            section = tree
            for key in sections:
                section = section.setdefault(key, {})
            section[name] = value
        ordered = {key: tree[key] for key in _SECTIONS if key in tree}
        return "\n".join(lines[:-1]) + "\n" + dump_yaml(ordered)


def convert_config(path: Path) -> ConvertedConfig:
    """Convert a configuration: YAML, JSON, or a script with arguments.

    Raises:
        UserError: the file cannot be read, or no key of it is known.
    """
    values = read_foreign_config(path)
    known = {key: other_keys()[plain_key(key)] for key in values if plain_key(key) in other_keys()}
    if not known:
        listed, read = ", ".join(list(values)[:8]), ", ".join(TRAINERS.values())
        raise UserError(f"{path}: no key of another trainer in it; found: {listed}; read are those of {read}")
    converter = _Converter(values, known, _trainer_of(known, values))
    return converter.convert(path)


def _trainer_of(known: Mapping[str, OtherKey], values: Mapping[str, Any]) -> str:
    """Return the trainer that has most of the keys; keys that only few have count more."""
    scores = dict.fromkeys(_DEFAULTS, 0.0)
    for other in known.values():
        for trainer in other.trainers:
            if trainer in scores:
                scores[trainer] += 1 / len(other.trainers) ** 2 + 1e-6
    if "stage" in values and "model_name_or_path" in values:
        return "lf"
    return max(scores, key=lambda trainer: scores[trainer])


class _Converter:
    """Converts the keys of one configuration."""

    def __init__(self, values: Mapping[str, Any], known: Mapping[str, OtherKey], trainer: str) -> None:
        self._values, self._known = values, known
        self._plain = {plain_key(key): value for key, value in values.items()}
        self._converted = ConvertedConfig(trainer, {})
        self._settings = self._converted.settings
        self._batch, self._accumulation = 0, 1
        self._min_lr_ratio: float | None = None
        self._betas: dict[int, float] = {}

    def convert(self, path: Path) -> ConvertedConfig:
        """Convert all keys, then what several of them say together, and what they leave open."""
        self._settings["name"] = convert_value("name", path.stem)
        for key, value in self._values.items():
            other = self._known.get(key)
            if other is None:
                self._no_match(key, value, "is not known here")
                continue
            try:
                self._convert_key(key, value, other)
            except NoMatchError as reason:
                if str(reason):
                    self._no_match(key, value, f"{reason} ({other.says})")
        self._set_batch()
        self._finish_adapters()
        self._finish_lengths()
        self._finish_optimizer()
        self._finish_validation()
        self._add_what_is_missing()
        return self._converted

    def _convert_key(self, key: str, value: Any, other: OtherKey) -> None:
        special = getattr(self, f"_rule_{other.rule}", None)
        if special is not None:
            special(key, value, other)
        elif not other.rule:
            self._no_match(key, value, other.says)
        else:
            assert other.setting is not None, f"{other.key}: a rule for a value has a setting"
            if isinstance(value, list) and value and other.rule not in _LIST_RULES:
                value = value[0]  # what follows on a command line is no value
            self._settings[other.setting] = convert_value(other.rule, value)

    def _no_match(self, key: str, value: Any, reason: str) -> None:
        self._converted.unmatched[f"{key}: {value}"] = reason

    def _check(self, sentence: str) -> None:
        self._converted.to_check.append(sentence)

    def _rule_quiet(self, key: str, value: Any, other: OtherKey) -> None:
        self._converted.not_needed.append(key)

    def _rule_sharding(self, key: str, value: Any, other: OtherKey) -> None:
        self._check(f"{key} is left to the planner, which chooses what is sharded (parallel.placement, parallel.shard)")

    def _rule_unless(self, key: str, value: Any, other: OtherKey) -> None:
        """Handle a key that matters only where it is set to something."""
        if str(value).lower() in ("0", "0.0", "false", "none"):
            self._converted.not_needed.append(key)
        else:
            self._no_match(key, value, other.says)

    def _rule_batch(self, key: str, value: Any, other: OtherKey) -> None:
        self._batch = convert_value("steps", value)

    def _rule_accumulation(self, key: str, value: Any, other: OtherKey) -> None:
        self._accumulation = convert_value("steps", value)

    def _rule_beta1(self, key: str, value: Any, other: OtherKey) -> None:
        self._betas[0] = convert_value("float", value)

    def _rule_beta2(self, key: str, value: Any, other: OtherKey) -> None:
        self._betas[1] = convert_value("float", value)

    def _rule_min_lr_ratio(self, key: str, value: Any, other: OtherKey) -> None:
        self._min_lr_ratio = convert_value("float", value)

    def _rule_optimizer(self, key: str, value: Any, other: OtherKey) -> None:
        name = str(value).lower()
        if name == "muon":
            self._settings["train.optimizer.kind"] = name
        elif "8bit" in name or not name.startswith(_OWN_OPTIMIZERS):
            self._no_match(key, value, other.says)
        else:
            self._converted.not_needed.append(key)

    def _rule_tuning(self, key: str, value: Any, other: OtherKey) -> None:
        if str(value).lower() in _TUNING_WITHOUT_ADAPTERS:
            return
        if not (is_true(value) or "lora" in str(value).lower()):
            self._no_match(key, value, other.says)
            return
        self._settings.setdefault("train.lora.rank", 8)
        if str(value).lower() == "qlora":
            self._check("qlora: the frozen weights stay bf16 here, and take four times the memory of 4 bits")

    def _rule_stage(self, key: str, value: Any, other: OtherKey) -> None:
        if str(value) not in ("sft", "pt"):
            self._no_match(key, value, other.says)

    def _rule_fraction(self, key: str, value: Any, other: OtherKey) -> None:
        if str(value) in ("0", "0.0"):
            return
        assert other.setting is not None
        self._settings[other.setting] = convert_value("fraction", value)

    def _rule_media_root(self, key: str, value: Any, other: OtherKey) -> None:
        return  # of each source, once all are known

    def _rule_max_samples(self, key: str, value: Any, other: OtherKey) -> None:
        return

    def _rule_sources(self, key: str, value: Any, other: OtherKey) -> None:
        assert other.setting is not None
        sources = [source for entry in as_list(value) if (source := self._source(key, entry)) is not None]
        if sources:
            self._settings[other.setting] = [*self._settings.get(other.setting, []), *sources]

    def _source(self, key: str, entry: Any) -> dict[str, Any] | None:
        """Return a source; an entry may be a path, a name of a data set with `#samples`, or a mapping with a path."""
        if isinstance(entry, Mapping):
            name = entry.get("data_files") or entry.get("path")
            rest = {k: v for k, v in entry.items() if k not in ("path", "data_files", "ds_type")}
            if rest:
                self._no_match(key, rest, "the layout of entries is found from their keys (columns of a source)")
            name = name[0] if isinstance(name, list) and name else name
        else:
            name = entry
        if not isinstance(name, str):
            self._no_match(key, entry, "names no file")
            return None
        name, _, number = name.partition("#")
        source: dict[str, Any] = {"path": name}
        if not name.endswith(_SOURCE_SUFFIXES):
            source["path"] = f"{re.sub(r'[^A-Za-z0-9._/-]+', '-', name).rstrip('/')}.json"
            self._check(f"{key}: {name} is no file here; give the file of its samples in place of {source['path']}")
        number = number or str(self._plain.get("maxsamples") or "")
        if number.isdecimal() and int(number):
            source["max_samples"] = int(number)
        root = self._plain.get("mediadir") or self._plain.get("imagefolder")
        if root:
            source["image_root"] = str(root)
        return source

    def _set_batch(self) -> None:
        if "train.global_batch" in self._settings:
            return
        trainer = self._converted.trainer
        per_device = self._batch or _DEFAULT_DEVICE_BATCH[trainer]
        ranks = self._settings.get("cluster.ranks")
        samples = per_device * self._accumulation * (ranks or 1)
        self._settings["train.global_batch"] = {"samples": samples}
        of_ranks = f" x {ranks} devices" if ranks else "; multiply it by the devices that it was made for"
        self._check(
            f"train.global_batch: {per_device} samples a device x {self._accumulation} accumulated{of_ranks}. Samples "
            "are packed, and a step holds that many on average"
        )

    def _finish_adapters(self) -> None:
        """Drop settings of adapters where the configuration trains the whole model."""
        tuning = [str(self._plain[key]).lower() for key in _TUNING_KEYS if key in self._plain]
        if tuning and all(name in _TUNING_WITHOUT_ADAPTERS for name in tuning):
            for setting in [name for name in self._settings if name.startswith("train.lora.")]:
                del self._settings[setting]

    def _finish_lengths(self) -> None:
        if "train.steps" in self._settings:
            self._settings.pop("train.epochs", None)
        if "data.seq_len" not in self._settings:
            self._settings["data.seq_len"] = _DEFAULT_SEQ_LEN
            self._check(f"data.seq_len: not stated; {_DEFAULT_SEQ_LEN} tokens of a packed sequence")

    def _finish_optimizer(self) -> None:
        warmup = "train.optimizer.warmup_steps"
        if self._settings.get(warmup):
            self._settings.pop("train.optimizer.warmup_ratio", None)
        elif "train.optimizer.warmup_ratio" in self._settings:
            self._settings.pop(warmup, None)
        for setting, value in _DEFAULTS[self._converted.trainer].items():
            if setting in ("train.epochs", "train.steps") and not self._settings.keys().isdisjoint(_LENGTHS):
                continue
            if setting.endswith("warmup_ratio") and warmup in self._settings:
                continue
            if setting not in self._settings and not (setting.endswith("betas") and self._betas):
                self._settings[setting] = value
                self._check(f"{setting}: not stated; {value} is the default there")
        if self._betas:
            default = _DEFAULTS[self._converted.trainer].get("train.optimizer.betas", [0.9, 0.95])
            self._settings["train.optimizer.betas"] = [self._betas.get(place, default[place]) for place in (0, 1)]
        if self._min_lr_ratio is not None:
            self._settings["train.optimizer.min_lr"] = self._min_lr_ratio * self._settings["train.optimizer.lr"]

    def _finish_validation(self) -> None:
        held_out = ("data.validation", "data.validation_fraction")
        if all(setting in self._settings for setting in held_out):
            del self._settings["data.validation_fraction"]
        holds_out = any(setting in self._settings for setting in held_out)
        if not holds_out and self._settings.pop("train.validate_every", None) is not None:
            self._check("train.validate_every: nothing is held out; set data.validation or data.validation_fraction")

    def _add_what_is_missing(self) -> None:
        if "model.hf" not in self._settings and "model.llm.layers" not in self._settings:
            self._settings["model.hf"] = "MODEL"
            self._check("model.hf: not stated; the folder of the model to start from, or its name on the hub")
        if "data.sources" not in self._settings:
            self._settings["data.sources"] = [{"path": "mine.json"}]
            self._check("data.sources: not stated; a file of conversations")
        for setting in ("model.hf", "data.sources"):
            if "$" in str(self._settings.get(setting, "")):
                self._check(f"{setting}: a variable of the script has no value here; replace it")
        _add_shapes(self._settings)


def _add_shapes(settings: dict[str, Any]) -> None:
    """Complete the shape of an LLM that a configuration describes by its sizes, as Megatron-LM does."""
    if "model.hf" in settings:
        for setting in [name for name in settings if name.startswith("model.llm.") and not name.endswith("freeze")]:
            del settings[setting]
        return
    hidden = settings.setdefault("model.llm.hidden", 4096)
    settings.setdefault("model.llm.heads", 32)
    settings.setdefault("model.llm.ffn", 4 * hidden)
    settings.setdefault("model.llm.vocab", 32000)
    settings.setdefault("data.tokenizer", "tokenizer.json")


def _one_line(text: str) -> str:
    return " ".join(str(text).split())
