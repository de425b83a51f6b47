"""Check that torch, Megatron-core and numpy have every name outside their stable interfaces that mmtrain uses.

    python scripts/check_libraries.py                                    # the installed versions
    python scripts/check_libraries.py --sources unpacked-wheel --only torch

It reads sources and stubs and imports none of them, so a wheel of any version, Python and system can be checked:
`pip download --no-deps --platform macosx_14_0_arm64 --only-binary=:all: torch==2.14.1`, then unpack it. Imports from
Megatron-core and the keywords of calls to it are found in mmtrain's own sources; `USED` lists the rest. The names of
threads are in no source: they are known by the version (`NAMED_THREADS_FROM`).
"""

import argparse
import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
C10D = "torch._C._distributed_c10d"
CORE = "megatron.core"

# (module, name in it, its members or parameters). Private names, and what younger versions have added.
USED: tuple[tuple[str, str, str], ...] = (
    (C10D, "HashStore", ""),
    (C10D, "PrefixStore", ""),
    (C10D, "Store", ""),
    (C10D, "TCPStore", "wait_for_workers"),
    (C10D, "ProcessGroup", "_get_backend"),
    (C10D, "Backend", "eager_connect_single_device"),
    (C10D, "ProcessGroupNCCL.Options", "config is_high_priority_stream"),
    (C10D, "ProcessGroupNCCL.NCCLConfig", "max_ctas"),
    ("torch.distributed.distributed_c10d", "new_group", "use_local_synchronization pg_options backend"),
    ("torch.distributed.distributed_c10d", "init_process_group", "store backend"),
    ("torch.distributed.distributed_c10d", "barrier", "device_ids"),
    (
        "torch.distributed.fsdp",
        "FSDPModule",
        "set_custom_reduce_scatter set_force_sum_reduction_for_comms set_gradient_divide_factor "
        "set_modules_to_backward_prefetch _get_fsdp_state",
    ),
    # Before torch 2.13, which has `set_reduce_scatter_unused_params`.
    ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState", "_fsdp_param_group"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup", "fsdp_params post_backward"),
    (
        "torch.distributed.fsdp._fully_shard._fsdp_param",
        "FSDPParam",
        "_unsharded_param unsharded_accumulated_grad unsharded_param",
    ),
    ("torch.optim.adamw", "AdamW", "fused"),
    ("torch.optim.adamw", "adamw", "grad_scale found_inf fused state_steps maximize"),
    ("torch.nn.attention.varlen", "varlen_attn", "window_size scale cu_seq_q cu_seq_k max_q max_k"),
    ("torch.nn.functional", "rms_norm", "normalized_shape weight eps"),
    ("torch.backends.cuda", "enable_cudnn_sdp", ""),
    ("torch.cuda", "set_sync_debug_mode", ""),
    ("torch.cuda.memory", "memory_stats", ""),
    ("torch.overrides", "TorchFunctionMode", "__torch_function__"),
    ("numpy.typing", "NDArray", ""),  # fields of messages; an alias until numpy 2.4, from 2.5 on a `type` statement
    (f"{CORE}.parallel_state", "_GLOBAL_MEMORY_BUFFER", ""),
    (f"{CORE}.parallel_state", "_set_global_memory_buffer", ""),
    (f"{CORE}.tensor_parallel.layers", "linear_with_grad_accumulation_and_async_allreduce", ""),
    (
        f"{CORE}.optimizer.distrib_optimizer",
        "DistributedOptimizer",
        "_copy_main_params_to_model_params _get_model_param_range_map ddp_config model_param_gbuf_map "
        "model_param_group_index_map optimizer prepare_grads step_with_ready_grads",
    ),
    (
        f"{CORE}.distributed",
        "DistributedDataParallel",
        "bucket_groups buffers expert_parallel_bucket_groups finish_grad_sync start_grad_sync start_param_sync "
        "zero_grad_buffer",
    ),
    (
        f"{CORE}.transformer.attention",
        "SelfAttention",
        "get_query_key_value_tensors hidden_size_per_attention_head k_layernorm linear_qkv q_layernorm tp_group "
        "world_size",
    ),
)

# gloo's listening threads have names from this torch on; without, they are not scheduled apart (`gloo_threads.py`).
NAMED_THREADS_FROM = (2, 13)


@dataclass(frozen=True)
class Sources:
    """The sources and stubs of libraries, by module."""

    roots: tuple[Path, ...]  # folders that hold `torch`, `megatron` or `numpy`

    @cache  # noqa: B019 - one object serves the whole process
    def module(self, name: str) -> list[ast.stmt] | None:
        """Return the statements of a module, those inside `if` and `try` included; None if there is no such module."""
        parts = Path(*name.split("."))
        for root in self.roots:
            for file in (
                parts / "__init__.py",
                parts.with_suffix(".py"),
                parts.with_suffix(".pyi"),
                parts / "__init__.pyi",
            ):
                if (root / file).is_file():
                    return list(_flat(ast.parse((root / file).read_text(encoding="utf-8")).body))
        return None

    def torch_version(self) -> tuple[int, int] | None:
        """Return major and minor version; None without torch."""
        for statement in self.module("torch.version") or []:
            if isinstance(statement, ast.Assign) and "__version__" in _targets(statement):
                major, minor = str(ast.literal_eval(statement.value)).split(".")[:2]
                return int(major), int(minor)
        return None

    def find(self, module: str, name: str) -> "Definition | None":
        """Return the definition of a name in a module, where another module may have it from; None without one."""
        first, _, rest = name.partition(".")
        for statement in reversed(self.module(module) or []):
            if isinstance(statement, ast.ClassDef | ast.FunctionDef) and statement.name == first:
                if not rest:
                    return Definition(self, module, statement)
                inner = [x for x in statement.body if isinstance(x, ast.ClassDef) and x.name == rest]
                return Definition(self, module, inner[0]) if inner else None
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    origin = _origin(module, statement, self)
                    if (alias.asname or alias.name) == first:
                        if self.module(f"{origin}.{alias.name}") is not None:  # a module, perhaps imported from itself
                            return Definition(self, module, statement)
                        if (found := self.find(origin, alias.name)) is not None:
                            return found
                        return Definition(self, module, statement)
                    if alias.name == "*" and (found := self.find(origin, name)) is not None:
                        return found
            if isinstance(statement, ast.Assign | ast.AnnAssign) and first in _targets(statement):
                return Definition(self, module, statement)
        return None


@dataclass(frozen=True)
class Definition:
    """What stands behind a name."""

    sources: Sources
    module: str
    node: ast.stmt

    @cached_property
    def members(self) -> set[str]:
        """Parameters of a function; methods, fields, attributes and parameters of a class and of its bases."""
        if isinstance(self.node, ast.FunctionDef):
            return _parameters(self.node)
        if not isinstance(self.node, ast.ClassDef):
            return set()
        names: set[str] = set()
        for statement in _flat(self.node.body):
            if isinstance(statement, ast.FunctionDef):
                names.add(statement.name)
                if statement.name in ("__init__", "__new__"):
                    names |= _parameters(statement)
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                names |= _targets(statement)
        for node in ast.walk(self.node):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
        for base in self.node.bases:
            if isinstance(base, ast.Name) and (found := self.sources.find(self.module, base.id)) is not None:
                names |= found.members
        return names


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _flat(statement.body)
            for handler in getattr(statement, "handlers", ()):
                yield from _flat(handler.body)
            yield from _flat(getattr(statement, "orelse", ()))


def _origin(module: str, statement: ast.ImportFrom, sources: Sources) -> str:
    """Return the module that an import names, relative or not."""
    if not statement.level:
        return statement.module or ""
    is_package = any((root / Path(*module.split(".")) / "__init__.py").is_file() for root in sources.roots)
    package = module.split(".")[: None if is_package else -1]
    package = package[: len(package) - statement.level + 1]
    return ".".join([*package, *([statement.module] if statement.module else [])])


def _targets(statement: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _parameters(function: ast.FunctionDef) -> set[str]:
    arguments = function.args
    return {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def used_of_megatron() -> dict[tuple[str, str], set[str]]:
    """Return what mmtrain imports from Megatron-core, (module, name), with the keywords that it is called with."""
    used: dict[tuple[str, str], set[str]] = {}
    for path in sorted((ROOT / "mmtrain").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "from megatron" not in text:
            continue
        tree = ast.parse(text)
        local: dict[str, tuple[str, str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
                for alias in node.names:
                    local[alias.asname or alias.name] = (str(node.module), alias.name)
                    used.setdefault((str(node.module), alias.name), set())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in local:
                used[local[node.func.id]] |= {keyword.arg for keyword in node.keywords if keyword.arg}
    return used


def missing(sources: Sources, only: str = "") -> list[str]:
    """Return every name, member and parameter that the sources lack, in words; `only`: of one library."""
    wanted = [(module, name, set(members.split())) for module, name, members in USED]
    wanted += [(module, name, members) for (module, name), members in used_of_megatron().items()]
    problems = []
    for module, name, members in wanted:
        if not module.startswith(only):
            continue
        definition = sources.find(module, name)
        if definition is None:
            if sources.module(f"{module}.{name}") is None:
                problems.append(f"{module} has no {name}")
            continue
        lacking = sorted(members - definition.members)
        problems += [f"{module}.{name} has no {member}" for member in lacking]
    version = sources.torch_version()
    if version is not None and version < NAMED_THREADS_FROM and "torch".startswith(only):
        problems.append("torch gives gloo's threads no names: collectives on CPUs are slower")
    return problems


def installed() -> Sources:
    """Return the sources of the installed libraries."""
    specs = [importlib.util.find_spec(name) for name in ("torch", "megatron", "numpy")]
    places = [place for spec in specs if spec is not None for place in spec.submodule_search_locations or ()]
    return Sources(tuple(dict.fromkeys(Path(place).parent for place in places)))


def main() -> int:
    """Print what is missing; return 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, help="an unpacked wheel; default: what is installed")
    parser.add_argument("--only", choices=["torch", "megatron", "numpy"], default="", help="check one library")
    options = parser.parse_args()
    problems = missing(Sources((options.sources,)) if options.sources else installed(), options.only)
    print("\n".join(problems) or "nothing is missing")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
