"""Write down which settings another trainer accepts, for `mmtrain plan --emit`: names, types and allowed values.

    python -m scripts.trainer_settings megatron-lm Megatron-LM --version core_v0.19.0
    python -m scripts.trainer_settings megatron-bridge Megatron-Bridge --version v0.6.0 --core Megatron-LM
    python -m scripts.trainer_settings automodel nemo_automodel-0.7.0-py3-none-any.whl --version 0.7.0

A wheel is only compared: the script says which settings that `--emit` writes the package does not accept.

The trainer's public source is parsed, never imported. What is kept is a JSON file for each trainer in
`mmtrain/planning/emit/accepted`, with the version and the commit that it was read from. Megatron-Bridge inherits from
Megatron-core, which is read at the commit that Megatron-Bridge names.
"""

import argparse
import ast
import json
import re
import subprocess
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ACCEPTED = ROOT / "mmtrain" / "planning" / "emit" / "accepted"
FLAG = "flag"  # of an argument that takes no value
ANY = "any"  # of a type that is none of those below
OR_NONE = "?"  # ends the type of what may be None
PLAIN_TYPES = ("int", "float", "str", "bool")

Kind = str | list[object]  # a type's name, `[type]` of one or more values, or the list of allowed values
Settings = dict[str, Kind]


@dataclass(frozen=True)
class TrainerSource:
    """Where a trainer declares its settings."""

    repository: str
    package: str  # folder of its modules
    # Files with `add_argument`, and dataclasses that become arguments in them.
    argument_files: tuple[str, ...] = ()
    # Sections of its configuration: by the path of keys, the dataclasses whose fields they accept.
    sections: Mapping[str, tuple[str, ...]] = ()  # type: ignore[assignment]
    # Functions that describe known parts by `if config.KIND == NAME`, by file.
    known_parts: tuple[str, str] | None = None
    core: str | None = None  # submodule of what it inherits from
    # Constants that name further settings of a section, or (with a setting's whole name) its allowed values, by file.
    constants: tuple[tuple[str, str, str], ...] = ()


SOURCES = {
    "megatron-lm": TrainerSource(
        "https://github.com/NVIDIA/Megatron-LM",
        "megatron",
        argument_files=(
            "megatron/training/arguments.py",
            "examples/multimodal/multimodal_args.py",
        ),
        known_parts=("examples/multimodal/config.py", "get_vision_model_config"),
    ),
    "megatron-bridge": TrainerSource(
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge",
        "src/megatron/bridge",
        argument_files=("scripts/training/run_recipe.py",),
        sections={
            "model": ("GPTModelProvider", "Qwen25VLModelProvider"),
            "train": ("TrainingConfig",),
            "optimizer": ("OptimizerConfig",),
            "scheduler": ("SchedulerConfig",),
            "ddp": ("DistributedDataParallelConfig",),
            "checkpoint": ("CheckpointConfig",),
            "rng": ("RNGConfig",),
            "peft": ("LoRA",),
        },
        core="3rdparty/Megatron-LM",
    ),
    "mimo": TrainerSource(
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge",
        "src/megatron/bridge",
        argument_files=("examples/megatron_mimo/qwen35_vl/finetune_qwen35_vl.py",),
        sections={"component": ("ModuleParallelismConfig",)},
    ),
    "automodel": TrainerSource(
        "https://github.com/NVIDIA-NeMo/Automodel",
        "nemo_automodel",
        sections={
            "distributed": ("FSDP2Config", "DDPConfig", "ParallelismSizes"),
            "step_scheduler": ("StepSchedulerConfig",),
            "lr_scheduler": ("LRSchedulerConfig",),
            "checkpoint": ("CheckpointingConfig",),
            "peft": ("PeftConfig",),
        },
        constants=(
            ("distributed.strategy", "nemo_automodel/components/distributed/config.py", "_STRATEGY_MAP"),
            ("step_scheduler.", "nemo_automodel/recipes/_typed_config.py", "_STEP_SCHEDULER_RUNTIME_KEYS"),
        ),
    ),
    "veomni": TrainerSource(
        "https://github.com/ByteDance-Seed/VeOmni",
        "veomni",
        sections={
            "model": ("VLMMModelArguments",),
            "data": ("VLMMDataArguments",),
            "train": ("VLMTrainingArguments",),
            "train.optimizer": ("OptimizerConfig",),
            "train.gradient_checkpointing": ("GradientCheckpointingConfig",),
            "train.accelerator": ("AcceleratorConfig",),
            "train.accelerator.fsdp_config": ("FSDPConfig",),
            "train.accelerator.fsdp_config.mixed_precision": ("MixedPrecisionConfig",),
            "train.checkpoint": ("CheckpointConfig",),
            "train.wandb": ("WandbConfig",),
            "model.ops_implementation": ("OpsImplementationConfig",),
        },
    ),
}


class GitFiles:
    """The modules of a repository at one commit."""

    def __init__(self, git: Path, version: str, folders: Iterable[str]) -> None:
        self._git = git
        self.commit = self._run("rev-parse", f"{version}^{{commit}}").strip()
        names = self._run("ls-tree", "-r", "--name-only", self.commit, "--", *folders).splitlines()
        self.names = {name for name in names if name.endswith(".py")}

    def _run(self, *arguments: str) -> str:
        command = ["git", "-C", str(self._git), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def submodule(self, path: str) -> str:
        """Return the commit that a submodule is at."""
        return self._run("rev-parse", f"{self.commit}:{path}").strip()

    def read(self, path: str) -> str:
        """Return the text of a file."""
        return self._run("show", f"{self.commit}:{path}")

    def with_class(self, name: str) -> set[str]:
        """Return the files that define a class of this name."""
        try:
            found = self._run("grep", "-l", "-E", f"^class {name}\\b", self.commit).splitlines()
        except subprocess.CalledProcessError:  # none does
            return set()
        return {line.partition(":")[2] for line in found} & self.names


class WheelFiles:
    """The modules of a wheel."""

    def __init__(self, wheel: Path) -> None:
        self.commit = wheel.name
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py")]
            self._texts = {name: archive.read(name).decode("utf-8") for name in names}
        self.names = set(self._texts)

    def read(self, path: str) -> str:
        """Return the text of a file."""
        return self._texts[path]

    def with_class(self, name: str) -> set[str]:
        """Return the files that define a class of this name."""
        return {path for path, text in self._texts.items() if re.search(rf"^class {name}\b", text, re.M)}


class SourceTree:
    """The syntax trees of modules, and the dataclasses in them."""

    def __init__(self, files: GitFiles | WheelFiles, core: "SourceTree | None" = None) -> None:
        self.files = files
        self._core = core  # has the classes that those of this repository inherit from
        self._trees: dict[str, ast.Module] = {}

    def module(self, path: str) -> ast.Module:
        """Return the syntax tree of a file; an empty one if there is no such file, as in a wheel without scripts."""
        if path not in self._trees:
            self._trees[path] = ast.parse(self.files.read(path) if path in self.files.names else "")
        return self._trees[path]

    def classes(self, name: str) -> Iterator[ast.ClassDef]:
        """Yield every class of this name."""
        for path in sorted(self.files.with_class(name)):
            for node in self.module(path).body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    yield node

    def fields(self, name: str) -> dict[str, ast.AnnAssign]:
        """Return the fields of the dataclass of this name, with those that it inherits."""
        own = list(self.classes(name))
        fields: dict[str, ast.AnnAssign] = {}
        if not own and self._core is not None:
            fields |= self._core.fields(name)
        for node in own:
            for base in node.bases:
                inherited = ast.unparse(base).rpartition(".")[2]
                if self._core is not None:
                    fields |= self._core.fields(re.sub("^(MCore|MTrain)", "", inherited))
                if inherited != name:
                    fields |= self.fields(inherited)
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    fields[item.target.id] = item
        return fields


def or_none(kind: Kind) -> Kind:
    """Return the kind of a value that may also be None."""
    return [*kind, None] if isinstance(kind, list) else kind if kind == ANY else f"{kind}{OR_NONE}"


def without_none(kind: Kind) -> Kind:
    """Return the kind of the same value where it is given."""
    return [item for item in kind if item is not None] if isinstance(kind, list) else kind.removesuffix(OR_NONE)


def kind_of(annotation: ast.expr) -> Kind:
    """Return the kind of value that a field with this annotation holds."""
    text = ast.unparse(annotation)
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        sides = (annotation.left, annotation.right)
        kinds = [kind_of(side) for side in sides if ast.unparse(side) != "None"]
        return or_none(kinds[0]) if len(kinds) == 1 else ANY
    if isinstance(annotation, ast.Subscript):
        outer, inner = ast.unparse(annotation.value).rpartition(".")[2], annotation.slice
        if outer == "Optional":
            return or_none(kind_of(inner))
        if outer == "Literal":
            values = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return [ast.literal_eval(value) for value in values]
        if outer in ("List", "list"):
            kind = kind_of(inner)
            return f"{kind}..." if isinstance(kind, str) else ANY
    return text if text in PLAIN_TYPES else ANY


def arguments_of_class(tree: SourceTree, name: str, excluded: frozenset[str]) -> Settings:
    """Return the arguments that Megatron-LM makes of a dataclass: its fields, or the names in their metadata."""
    settings: Settings = {}
    for field, node in tree.fields(name).items():
        if field in excluded:
            continue
        kind, names = without_none(kind_of(node.annotation)), [f"--{field.replace('_', '-')}"]
        if kind == "bool":
            kind = FLAG
            default = node.value
            if isinstance(default, ast.Call):
                default = next((word.value for word in default.keywords if word.arg == "default"), None)
            if isinstance(default, ast.Constant) and default.value is True:
                names = [f"--{prefix}-{field.replace('_', '-')}" for prefix in ("no", "disable")]
        for key in ast.walk(node.value) if node.value is not None else ():
            if isinstance(key, ast.Dict):
                for word, value in zip(key.keys, key.values, strict=True):
                    if isinstance(word, ast.Constant) and word.value == "arg_names":
                        names = ast.literal_eval(value)
        settings |= dict.fromkeys(names, kind)
    return settings


def added_argument(call: ast.Call) -> Settings:
    """Return what one `add_argument` accepts."""
    words_before = [str(arg.value) for arg in call.args if isinstance(arg, ast.Constant)]
    names = [name for name in words_before if name.startswith("--")]
    words = {word.arg: word.value for word in call.keywords}
    kind: Kind = ast.unparse(words["type"]) if "type" in words else "str"
    action = ast.unparse(words["action"]).strip("'\"") if "action" in words else ""
    if action in ("store_true", "store_false", "argparse.BooleanOptionalAction"):
        kind = FLAG
    elif "choices" in words and isinstance(words["choices"], ast.List | ast.Tuple):
        kind = list(ast.literal_eval(words["choices"]))
    elif kind not in PLAIN_TYPES:
        kind = ANY
    elif "nargs" in words or action == "append":
        kind = f"{kind}..."
    return dict.fromkeys(names, kind)


def argument_settings(tree: SourceTree, path: str) -> Settings:
    """Return every argument that a file adds, itself or from dataclasses."""
    settings: Settings = {}
    for function in ast.walk(tree.module(path)):
        if not isinstance(function, ast.FunctionDef):
            continue
        lists = {
            ast.unparse(node.targets[0]): node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
        }
        for call in ast.walk(function):
            if not isinstance(call, ast.Call):
                continue
            called = ast.unparse(call.func).rpartition(".")[2]
            if called == "add_argument":
                settings |= added_argument(call)
            elif called == "ArgumentGroupFactory":
                excluded = next((word.value for word in call.keywords if word.arg == "exclude"), None)
                if isinstance(excluded, ast.Name):
                    excluded = lists[excluded.id]
                names = frozenset(ast.literal_eval(excluded)) if excluded is not None else frozenset()
                settings |= arguments_of_class(tree, ast.unparse(call.args[0]).rpartition(".")[2], names)
    return settings


def known_parts(tree: SourceTree, path: str, function_name: str) -> dict[str, dict[str, int]]:
    """Return the sizes that a function sets for each name that it compares with: `if config.KIND == NAME`."""
    parts: dict[str, dict[str, int]] = {}
    for node in ast.walk(tree.module(path)):
        if not (isinstance(node, ast.FunctionDef) and node.name == function_name):
            continue
        for branch in ast.walk(node):
            if not (isinstance(branch, ast.If) and isinstance(branch.test, ast.Compare)):
                continue
            (name,) = (part.value for part in branch.test.comparators if isinstance(part, ast.Constant))
            parts[str(name)] = {
                ast.unparse(item.targets[0]).removeprefix("config."): item.value.value
                for item in branch.body
                if isinstance(item, ast.Assign)
                and isinstance(item.value, ast.Constant)
                and type(item.value.value) is int
            }
    return parts


def constant_names(tree: SourceTree, path: str, constant: str) -> list[str]:
    """Return the texts that a constant of a module lists, or the keys of a dictionary."""
    for node in tree.module(path).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if [ast.unparse(target) for target in targets] == [constant]:
            value = getattr(node, "value", None)
            keys: list[ast.expr] = getattr(value, "keys", None) or getattr(value, "elts", [])
            return [ast.literal_eval(key) for key in keys]
    raise SystemExit(f"{path}: there is no {constant}")


def read_trainer(trainer: str, tree: SourceTree, version: str) -> dict[str, object]:
    """Return all that is kept of a trainer."""
    source = SOURCES[trainer]
    settings: Settings = {}
    for path in source.argument_files:
        settings |= argument_settings(tree, path)
    for section, classes in dict(source.sections).items():
        for name in classes:
            for field, node in tree.fields(name).items():
                settings[f"{section}.{field}"] = kind_of(node.annotation)
    for setting, path, constant in source.constants:
        names = constant_names(tree, path, constant)
        settings |= {f"{setting}{name}": ANY for name in names} if setting.endswith(".") else {setting: list(names)}
    kept: dict[str, object] = {
        "trainer": trainer,
        "version": version,
        "repository": source.repository,
        "commit": tree.files.commit,
        "settings": dict(sorted(settings.items())),
    }
    if source.known_parts is not None:
        kept["encoders"] = known_parts(tree, *source.known_parts)
    return kept


def file_text(kept: Mapping[str, object]) -> str:
    """Return the JSON of a trainer, with a line for each setting."""
    lines = []
    for key, value in kept.items():
        if isinstance(value, dict):
            inside = [f"  {json.dumps(name)}: {json.dumps(kind)}" for name, kind in value.items()]
            lines.append(f" {json.dumps(key)}: {{\n" + ",\n".join(inside) + "\n }")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def emitted_names(trainer: str) -> set[str]:
    """Return the names that the emitter of a trainer states in its module."""
    module = ast.parse((ACCEPTED.parent / f"{trainer.replace('-', '_')}.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call) and node.args]
    return {
        ast.literal_eval(call.args[0])
        for call in calls
        if ast.unparse(call.func) == "EmittedSetting" and isinstance(call.args[0], ast.Constant)
    }


def unknown_names(trainer: str, settings: Iterable[str]) -> list[str]:
    """Return the names that an emitter writes in sections that are known, and that are not among the settings.

    `_target_` names the class of a section, whatever the section.
    """
    known = set(settings)
    sections = {_section(name) for name in known}
    names = emitted_names(trainer) - known
    return sorted(name for name in names if _section(name) in sections and not name.endswith("._target_"))


def _section(name: str) -> str:
    return "--" if name.startswith("--") else name.rpartition(".")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=SOURCES)
    parser.add_argument("source", type=Path, help="a clone of its repository, or a wheel to compare")
    parser.add_argument("--version", required=True, help="tag to read")
    parser.add_argument("--core", type=Path, help="of Megatron-Bridge: a clone of Megatron-LM, or a wheel")
    options = parser.parse_args()
    source, is_wheel = SOURCES[options.trainer], options.source.suffix == ".whl"
    if is_wheel:
        core = None if options.core is None else SourceTree(WheelFiles(options.core))
        tree = SourceTree(WheelFiles(options.source), core)
    else:
        folders = [source.package, *source.argument_files, *(source.known_parts or ())[:1]]
        files = GitFiles(options.source, options.version, folders)
        core = None
        if source.core is not None:
            core = SourceTree(GitFiles(options.core, files.submodule(source.core), ["megatron"]))
        tree = SourceTree(files, core)
    kept = read_trainer(options.trainer, tree, options.version)
    settings: Mapping[str, Kind] = kept["settings"]  # type: ignore[assignment]
    unknown = unknown_names(options.trainer, settings)
    count = f"{len(settings)} settings of {options.trainer} {options.version}"
    if is_wheel:
        print(f"{options.source.name}: {count}; not accepted of what is emitted: {', '.join(unknown) or 'none'}")
        raise SystemExit(bool(unknown))
    path = ACCEPTED / f"{options.trainer.replace('-', '_')}.json"
    path.write_text(file_text(kept), encoding="utf-8")
    print(f"{path}: {count}")


if __name__ == "__main__":
    main()
