"""Translate arguments of `mmtrain plan` into settings of the recipe: another cluster, or a layout to compare with.

A layout is sizes like `tp=8,pp=8,vpp=3`, or arguments of Megatron-LM or its Bridge.
"""

import re
import shlex

from mmtrain.errors import UserError

CLUSTER_NUMBERS = (
    *("ranks_per_node", "ports_per_node", "memory_gib"),
    *("intra_node_gb_per_s", "intra_node_latency_us", "inter_node_gb_per_s", "inter_node_latency_us"),
    *("time_spread.ranks", "time_spread.layers"),
)
WHOLE_CLUSTER_NUMBERS = ("nodes", "ranks", "ranks_per_node", "ports_per_node")
CLUSTER_SYNTAX = (
    f"HARDWARE:KEY=VALUE,... with keys nodes, ranks, {', '.join(CLUSTER_NUMBERS)}, rail_optimized, as in "
    "h100-80g:nodes=8,ports_per_node=4"
)
SIZES = ("tp", "pp", "vpp", "dp")
MEGATRON_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "num_virtual_stages_per_pipeline_rank": "vpp",
}
LAYERS_PER_CHUNK = "num_layers_per_virtual_pipeline_stage"
PIPELINE_LAYOUT = "pipeline_model_parallel_layout"  # layers of every chunk, such as `Et*3|(t|)*2tL`
BLOCK = "t"  # of the LLM, in a pipeline layout
# Blocks of the LLM on the first and on the last pipeline rank; the others share the rest evenly.
END_LAYERS = {
    "decoder_first_pipeline_num_layers": "first",
    "num_layers_in_first_pipeline_stage": "first",
    "decoder_last_pipeline_num_layers": "last",
    "num_layers_in_last_pipeline_stage": "last",
}
MUST_BE_ONE = ("context_parallel_size", "expert_model_parallel_size")
LAYOUT_SYNTAX = (
    "'tp=8,pp=8,vpp=3' (also dp, sp), or Megatron-LM's arguments, like '--tensor-model-parallel-size 8 "
    "--pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 4'"
)


def cluster_overrides(text: str) -> list[str]:
    """Translate `--cluster h100:nodes=384,ranks_per_node=8` into recipe overrides.

    A unique prefix of a hardware preset's name is enough. The overrides remove what the recipe says of its own cluster:
    `cluster.costs`, since a measured table belongs to it, its links and the spread of its ranks. Raises UserError for a
    key or value that is not understood.
    """
    from mmtrain.costs import preset

    name, _, rest = text.partition(":")
    hardware = preset(name)
    numbers: dict[str, float] = {}
    rail_optimized = "null"
    for part in rest.split(",") if rest else ():
        key, _, value = part.partition("=")
        if key == "rail_optimized":
            if value not in ("true", "false"):
                raise UserError(f"--cluster {text}: {key} is {value!r}; allowed: true or false")
            rail_optimized = value
            continue
        if key not in ("nodes", "ranks", *CLUSTER_NUMBERS):
            raise UserError(f"--cluster {text}: {key!r} is not known; allowed: {CLUSTER_SYNTAX}")
        try:
            numbers[key] = int(value) if key in WHOLE_CLUSTER_NUMBERS else float(value)
        except ValueError:
            whole = "whole " * (key in WHOLE_CLUSTER_NUMBERS)
            raise UserError(f"--cluster {text}: {key} is {value!r}; allowed: a {whole}number") from None
    if "nodes" in numbers and "ranks" in numbers:
        raise UserError(f"--cluster {text}: nodes and ranks both set the size; give one of them")
    per_node = numbers.get("ranks_per_node", hardware.ranks_per_node)
    ranks = numbers.get("ranks", numbers.get("nodes", 1) * per_node)
    stated = {key: numbers.get(key, "null") for key in CLUSTER_NUMBERS}
    settings = {"hardware": hardware.name, "ranks": ranks, **stated, "rail_optimized": rail_optimized, "costs": "null"}
    return [f"cluster.{key}={value}" for key, value in settings.items()]


def parse_gpu_counts(text: str) -> list[int]:
    """Parse `--gpus 64,128,256` into ascending numbers. Raises UserError."""
    try:
        gpu_counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        gpu_counts = []
    if not gpu_counts or gpu_counts[0] < 1:
        raise UserError(f"--gpus {text}: allowed: numbers of at least 1, separated by commas, like 64,128,256")
    return gpu_counts


def parse_layout(text: str, num_layers: int) -> list[str]:
    """Translate `--compare` into settings of a recipe: sizes of the LLM in one pipeline behind its encoders.

    num_layers: blocks of the LLM.

    Raises:
        UserError: names what is not understood, and what is.
    """
    sizes: dict[str, str] = {}
    end_layers: dict[str, int] = {}
    for name, value in _pairs(text):
        if name == PIPELINE_LAYOUT:
            division = _stated_division(text, num_layers, value, int(sizes.get("pp", "1")))
            sizes |= {"vpp": str(len(division) // int(sizes.get("pp", "1"))), "layers_per_chunk": str(division)}
            continue
        if name == "sp":
            _require(value in ("true", "false"), text, f"{name} is {value!r}; allowed: true or false")
            sizes[name] = value
            continue
        _require(value.isdecimal() and int(value) > 0, text, f"{name} is {value!r}; allowed: a whole number above 0")
        if name in MUST_BE_ONE:
            _require(value == "1", text, f"{name} is {value}; only 1 can be planned")
        elif name in END_LAYERS:
            end_layers[END_LAYERS[name]] = int(value)
        elif name == LAYERS_PER_CHUNK:
            sizes["vpp"] = _chunks_per_rank(text, num_layers, int(value), int(sizes.get("pp", "1")))
        else:
            sizes[MEGATRON_SIZES.get(name, name)] = value
    if sizes.get("vpp") is None:
        sizes["vpp"] = "1"  # Megatron-LM interleaves only where it is told to
    if end_layers:
        division = _uneven_division(text, num_layers, int(sizes.get("pp", "1")), int(sizes["vpp"]), end_layers)
        sizes["layers_per_chunk"] = str(division)
    return ["parallel.placement=unified", *(f"parallel.llm.{name}={value}" for name, value in sizes.items())]


def _pairs(text: str) -> list[tuple[str, str]]:
    """Split into names, in Python's spelling, and values; `pp` comes before what depends on it."""
    if "--" not in text:
        parts = [part.partition("=") for part in text.replace(" ", ",").split(",") if part]
        pairs = [(name, value) for name, _, value in parts]
    else:
        words = shlex.split(text.replace("=", " "))
        pairs = []
        while words:
            name = words.pop(0).removeprefix("--").replace("-", "_")
            is_flag = not words or words[0].startswith("--")
            pairs.append(("sp", "true") if name == "sequence_parallel" else (name, "" if is_flag else words[0]))
            del words[: 0 if is_flag else 1]
    known = (*SIZES, "sp", *MEGATRON_SIZES, *END_LAYERS, LAYERS_PER_CHUNK, PIPELINE_LAYOUT, *MUST_BE_ONE)
    for name, _ in pairs:
        _require(name in known, text, f"{name!r} is not known")
    _require(bool(pairs), text, "nothing is there")
    return sorted(pairs, key=lambda pair: pair[0] in (LAYERS_PER_CHUNK, PIPELINE_LAYOUT))


def _chunks_per_rank(text: str, num_layers: int, layers_per_chunk: int, pp: int) -> str:
    chunks, rest = divmod(num_layers, layers_per_chunk * pp)
    problem = f"{num_layers} layers of the LLM are no multiple of {layers_per_chunk} layers x {pp} pipeline ranks"
    _require(not rest and chunks > 0, text, problem)
    return str(chunks)


def _stated_division(text: str, num_layers: int, layout: str, pp: int) -> list[int]:
    """Return the blocks of each model chunk that Megatron-core's layout text states.

    `|` ends a chunk. `E`, `L` and `m` are embedding, loss and further heads. `(...)*n` and `x*n` repeat.
    """
    layers = re.sub(r"\(([^()]+)\)\*(\d+)", lambda part: part[1] * int(part[2]), layout.replace(",", ""))
    layers = re.sub(r"(.)\*(\d+)", lambda part: part[1] * int(part[2]), layers)
    unknown = sorted(set(layers) - set("ELtm|"))
    _require(not unknown, text, f"{PIPELINE_LAYOUT} has {''.join(unknown)}; its layers are E, t, m and L")
    division = [chunk.count(BLOCK) for chunk in layers.split("|")]
    _require(not len(division) % pp, text, f"{PIPELINE_LAYOUT} has {len(division)} chunks, no multiple of pp {pp}")
    problem = f"{PIPELINE_LAYOUT} has {sum(division)} blocks, and the LLM {num_layers}"
    _require(sum(division) == num_layers, text, problem)
    return division


def _uneven_division(text: str, num_layers: int, pp: int, vpp: int, ends: dict[str, int]) -> list[int]:
    """Return the blocks of each model chunk, where the ends of the pipeline have numbers of their own."""
    num_others = pp - len(ends)
    rest = num_layers - sum(ends.values())
    _require(pp > 1, text, "the first and last of several pipeline ranks can differ, and pp is not above 1")
    shared, left = divmod(rest, num_others) if num_others else (0, rest)
    problem = (
        f"{num_layers} layers without those of the ends leave {rest}, which {num_others} ranks cannot share evenly"
    )
    _require(not left and rest >= 0, text, problem)
    of_ranks = [shared] * pp
    of_ranks[0], of_ranks[-1] = ends.get("first", shared), ends.get("last", shared)
    odd = [number for number in of_ranks if number % vpp]
    _require(not odd, text, f"{odd[:1]} layers of a rank do not divide into {vpp} chunks")
    return [number // vpp for _ in range(vpp) for number in of_ranks]


def _require(is_right: bool, text: str, problem: str) -> None:
    if not is_right:
        raise UserError(f"--compare {text}: {problem}; allowed: {LAYOUT_SYNTAX}")
