"""Read emitted files as their trainers would: as the arguments that a script starts, and as a layout of ours."""

import os
import subprocess
from pathlib import Path

import yaml

Arguments = dict[str, list[str]]
BLOCK = "t"
TEXT = """
name: text
model: {llm: {layers: 7, hidden: 2048, heads: 16, kv_heads: 4, ffn: 8192, vocab: 32000}}
data: {sources: [{path: text.csv}], seq_len: 4096}
cluster: {hardware: h100-80g, ranks: 4}
train: {steps: 100, global_batch: 16, optimizer: {lr: 1.0e-4}}
"""
VISION = """
name: vision
extends: text.yaml
model:
  llm: {layers: 8}
  vision: {layers: 24, hidden: 1024, heads: 16, ffn: 4096, positions: grid, max_side: 24, class_token: true}
data: {sources: [{path: vision.csv}]}
"""
MOE = """
name: moe
extends: text.yaml
model: {llm: {moe: {experts: 8, top_k: 2, ffn: 1024, dense_blocks: [0]}}}
"""
FILES = {
    "text.yaml": TEXT,
    "vision.yaml": VISION,
    "moe.yaml": MOE,
    "text.csv": "count,text\n400,300\n300,900\n100,2000\n",
    "vision.csv": "count,text,vision\n400,300,576\n300,900,576\n100,1200,1152\n",
}


def write_recipes(folder: Path) -> None:
    """Write recipes of a text model, of one with an encoder and of one with experts, `text.yaml` and so on."""
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")


def started_arguments(text: str, folder: Path) -> Arguments:
    """Run a script with a torchrun that notes its arguments; return them by name, with `` for those of no name."""
    script = folder / "emitted.sh"
    script.write_text(text, encoding="utf-8")
    torchrun = folder / "torchrun"
    torchrun.write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n', encoding="utf-8")
    torchrun.chmod(0o755)
    required = [line.partition("=")[0] for line in text.splitlines() if ":?" in line]
    env = {**os.environ, **{name: f"own {name}" for name in required}, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, check=True)
    arguments: Arguments = {"": []}
    name = ""
    for word in done.stdout.split("\0")[:-1]:
        if word.startswith("--"):
            name = word
            arguments.setdefault(name, [])
        else:
            arguments[name].append(word)
    return arguments


def bridge_layout(arguments: Arguments, num_layers: int, encoder_layers: int = 0) -> list[str]:
    """Return the settings that fix the layout which overrides of Megatron-Bridge state.

    num_layers: blocks of the LLM, which the recipe there knows.
    """
    values = dict(word.partition("=")[::2] for words in arguments.values() for word in words if "." in word)
    as_flags = {
        "model.tensor_model_parallel_size": "--tensor-model-parallel-size",
        "model.pipeline_model_parallel_size": "--pipeline-model-parallel-size",
        "model.virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
        "model.pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
        "model.context_parallel_size": "--context-parallel-size",
        "train.global_batch_size": "--global-batch-size",
    }
    flags = {flag: [values[name].strip('"')] for name, flag in as_flags.items() if values.get(name, "null") != "null"}
    if values["model.sequence_parallel"] == "true":
        flags["--sequence-parallel"] = []
    flags |= {name: arguments[name] for name in ("--nproc-per-node", "--nnodes")}
    flags |= {"--seq-length": arguments["--seq_length"], "--num-layers": [str(num_layers)]}
    return megatron_layout(flags, encoder_layers)


def mimo_layout(arguments: Arguments) -> list[str]:
    """Return the settings that fix the layout which components of MegatronMIMO state."""
    settings = ["parallel.placement=disaggregated"]
    units = {"language": "llm", "images": "vision"}
    for component in arguments["--component"]:
        name, _, sizes = component.partition("=")
        of_unit = dict(size.split("=") for size in sizes.split(","))
        fixed = {key: of_unit[key] for key in ("tp", "pp", "dp")} | {"vpp": 1, "sp": "false", "recompute": "none"}
        settings += [f"parallel.{units[name]}.{key}={value}" for key, value in fixed.items()]
        settings += [f"parallel.{units[name]}.tp_overlap=false"]
    return [
        *settings,
        f"train.global_batch={arguments['--global-batch-size'][0]}",
        f"data.seq_len={arguments['--seq-length'][0]}",
    ]


def automodel_layout(text: str) -> list[str]:
    """Return the settings that fix the layout which a configuration of Automodel states."""
    config = yaml.safe_load(text)
    sizes, packed = config["distributed"], config["packed_sequence"]
    shard = sizes["dp_size"] * sizes.get("cp_size", 1) // sizes.get("dp_replicate_size", 1)
    return sharded_settings(
        tp=sizes.get("tp_size", 1),
        shard=1 if sizes["strategy"] == "ddp" else shard,
        keeps_weights=not sizes.get("reshard_after_forward", True),
        recomputes=sizes["activation_checkpointing"],
        num_groups=config["step_scheduler"]["global_batch_size"],
        seq_len=packed.get("packed_sequence_size") or packed["pack_size"],
    )


def veomni_layout(text: str) -> list[str]:
    """Return the settings that fix the layout which a configuration of VeOmni states."""
    config = yaml.safe_load(text)
    sizes = config["train"]["accelerator"]
    return sharded_settings(
        tp=1,
        shard=sizes["dp_shard_size"] * sizes["ulysses_size"],
        keeps_weights=not sizes["fsdp_config"]["reshard_after_forward"],
        recomputes=config["train"]["gradient_checkpointing"]["enable"],
        num_groups=config["train"]["global_batch_size"],
        seq_len=config["data"]["max_seq_len"],
    )


def sharded_settings(
    tp: int, shard: int, keeps_weights: bool, recomputes: bool, num_groups: int, seq_len: int
) -> list[str]:
    """Return the settings of whole models that are sharded over all ranks."""
    return [
        "parallel.placement=replicated",
        "parallel.dispatch=none",
        "parallel.schedule=1f1b",
        f"parallel.llm.tp={tp}",
        f"parallel.shard={shard}",
        f"parallel.zero={2 if keeps_weights else 3}",
        f"parallel.llm.recompute={'all' if recomputes else 'none'}",
        f"train.global_batch={num_groups}",
        f"data.seq_len={seq_len}",
    ]


def megatron_layout(arguments: Arguments, encoder_layers: int = 0) -> list[str]:
    """Return the settings that fix the layout which arguments of Megatron-LM state.

    encoder_layers: of an encoder that lies on the first pipeline rank.
    """

    def number(name: str, default: int = 1) -> int:
        return int(arguments[name][0]) if name in arguments else default

    tp, pp, cp = (number(f"--{kind}-parallel-size") for kind in ("tensor-model", "pipeline-model", "context"))
    ranks = number("--nproc-per-node") * number("--nnodes")
    num_layers, vpp = number("--num-layers"), number("--num-virtual-stages-per-pipeline-rank")
    division = [num_layers // (pp * vpp)] * (pp * vpp)
    if "--pipeline-model-parallel-layout" in arguments:
        [layout] = arguments["--pipeline-model-parallel-layout"]
        chunks = layout.split("|")
        division = [_blocks(chunk) for chunk in chunks]
        vpp = len(chunks) // pp
    recompute = "none"
    if "--recompute-granularity" in arguments:
        recompute = {("full", "uniform"): "all"}[
            (arguments["--recompute-granularity"][0], arguments["--recompute-method"][0])
        ]
    llm: dict[str, object] = {
        "tp": tp,
        "pp": pp,
        "vpp": vpp,
        "dp": ranks // (tp * pp * cp),
        "cp": cp,
        "sp": str("--sequence-parallel" in arguments).lower(),
        "layers_per_chunk": division,
        "recompute": recompute,
    }
    if "--expert-model-parallel-size" in arguments:
        llm["ep"] = number("--expert-model-parallel-size")
    settings = [f"parallel.llm.{name}={value}" for name, value in llm.items()]
    if encoder_layers:
        vision = {"tp": tp, "vpp": 1, "layers_per_chunk": [encoder_layers, *[0] * (pp - 1)]}
        settings += [f"parallel.vision.{name}={value}" for name, value in vision.items()]
    return [
        "parallel.placement=unified",
        *settings,
        f"cluster.ranks={ranks}",
        f"train.global_batch={arguments['--global-batch-size'][0]}",
        f"data.seq_len={arguments['--seq-length'][0]}",
    ]


def _blocks(chunk: str) -> int:
    inside = chunk.strip("EL")
    if not inside:
        return 0
    return int(inside.removeprefix(f"{BLOCK}*")) if "*" in inside else len(inside)
