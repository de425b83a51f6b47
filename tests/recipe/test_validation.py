"""Validation reports all problems at once, each with what is allowed instead."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mmtrain.errors import RecipeError
from mmtrain.recipe import dump_recipe, load_recipe
from mmtrain.recipe.checks.cross_checks import CHECKS
from mmtrain.recipe.loading import json_schema
from mmtrain.recipe.loading.other_trainers import TRAINERS, other_keys
from mmtrain.recipe.raw_tree import dotted_path

DIT = "model.generator={kind: dit, widths: [8], heads: [4], layers: 2, context_width: 8}"
GENERATOR = "model.generator={preset: stable-diffusion-2.1}"
DELTA_NET = "{key_heads: 2, value_heads: 4, key_head_dim: 8, value_head_dim: 8}"
RESAMPLER = "model.vision.projector={kind: resampler, queries: 8}"
AUDIO = "model.audio={layers: 2, hidden: 32, heads: 4, ffn: 64}"
HELD_OUT = "data.validation_fraction=0.1"
Write = Callable[[str, str], Path]


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as rejected:
        load_recipe(path, overrides, {})
    return [line.strip() for line in str(rejected.value).splitlines()[1:]]


def test_all_problems_are_reported_at_once(base: Path, write: Write) -> None:
    child = write(
        "child.yaml",
        """
        extends: base.yaml
        nme: x
        model:
          llm: {heads: four}
          vision: {hidden: 33, freeze: on}
        data:
          seq_len: 010
          image: {scheme: nativ}
        train:
          steps: 5
          steps: 0
          optimizer: {min_lr: 0.1, betas: [0.9, 1.0]}
        parallel:
          llm: {dp: 3}
          vision: {tp: 3}
        """,
    )
    reported = problems(child)
    starts = [
        "nme: unknown key; did you mean name? Allowed here: name, model, data",
        "model.llm.heads: found the text 'four', allowed: a whole number of at least 1",
        "model.vision.freeze: found the text 'on', allowed: true or false",
        "data.seq_len: found the text '010', allowed: a whole number of at least 1",
        "data.image.scheme: found the text 'nativ', allowed: native, tiles, pinpoints or fixed; did you mean native?",
        f"train.steps: written twice, first at {child}:10; keep one",
        "train.optimizer.betas.1: found 1.0, allowed: a number of at least 0 and below 1",
        "train.optimizer.min_lr: 0.1 is above train.optimizer.lr 0.001",
        "parallel.llm.dp: 3 does not divide train.global_batch 4",
        "parallel.vision.tp: 3 does not divide model.vision.heads 4 or model.vision.ffn 64",
    ]
    assert len(reported) == len(starts)
    assert all(line.startswith(start) for line, start in zip(reported, starts, strict=True)), reported
    lines = [int(line.rstrip(")").rpartition(":")[2]) for line in reported]
    assert lines == [2, 4, 5, 7, 8, 11, 12, 12, 14, 15] == sorted(lines)


EXPERTS = "model.llm.moe={experts: 6, top_k: 2, ffn: 6}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=0", "found 0, allowed: a whole number of at least 1"),
        ("train.steps=1.5", "found 1.5, allowed: a whole number of at least 1"),
        ("train.steps=true", "found true, allowed: a whole number"),
        ("train.steps=null", "train.steps: missing; allowed: a number of steps, or train.epochs"),
        ("train.num_train_epochs=3", "what other trainers call num_train_epochs is train.epochs"),
        ("train.per_device_train_batch_size=3", "mmtrain packs samples into sequences; set data.seq_len"),
        ("cluster.nodes=8", "cluster.nodes: unknown key; set cluster.ranks, the ranks of all nodes; `plan --cluster"),
        ("train.optimizer.name=adamw", "train.optimizer.name: unknown key; the optimizer is AdamW; train.optimizer.m"),
        (
            "train.mtp=true",
            "train.mtp: unknown key; blocks that predict further tokens (mtp.*) are not trained; export",
        ),
        (
            "train.mtp_num_layers=1",
            "what other trainers call mtp_num_layers has no setting: blocks that predict further",
        ),
        ("train.lr=1e-3", "unknown key here; it belongs to train.optimizer.lr"),
        ("train.save_steps=3", "is train.checkpoint.every"),
        ("data.max_length=3", "is data.seq_len, of a packed sequence"),
        ("train.bf16=true", "is train.precision: bf16"),
        ("train.steps='5'", "found the text '5', allowed: a whole number"),
        ("train.optimizer.lr=.inf", "found Infinity, allowed: a number above 0"),
        ("train.optimizer.lr=[1]", "found a list, allowed: a number above 0"),
        ("train.optimizer.clip_norm=0", "found 0, allowed: a number above 0, or null"),
        ("data.max_bad_rate=2", "found 2, allowed: a number of at least 0 and at most 1"),
        ("data.sources=[]", "at least 1 item"),
        ("data.sources.0.path=3", "found 3, allowed: a path"),
        ("data.image.std=[1, 1]", "missing; allowed: a number above 0"),
        ("data.image.std=[1, 1, 1, 1]", "allowed: a list of 3: a number above 0 each"),
        ("name=../x", "found the text '../x', allowed: text like ^[A-Za-z0-9]"),
        ("name=5", "found 5, allowed: text like"),
        ("model.llm=3", "found 3, allowed: a mapping"),
        ("model.vision=[]", "found a list, allowed: a mapping, or null"),
        ("train.precision=fp16", "allowed: auto, fp32 or bf16; did you mean bf16?"),
        ("parallel.llm.sp=on", "parallel.llm.sp: found the text 'on', allowed: true or false, or auto"),
        ("parallel.llm.tp_overlap=4", "parallel.llm.tp_overlap: found 4, allowed: true or false, or auto"),
        ("parallel.llm.recompute_activation_function=Auto", "allowed: true or false, or auto; did you mean auto?"),
        ("parallel.shard=0", "parallel.shard: found 0, allowed: a whole number of at least 1, or all or auto"),
        ("parallel.shard=al", "allowed: a whole number of at least 1, or all or auto; did you mean all?"),
        ("data.lr=1", "unknown key here; it belongs to train.optimizer.lr"),
        ("parallel.zero_stage=3", "what parallel.shard says: `all` everything (ZeRO-3), 1 nothing"),
        ("parallel.tensor-model-parallel-size=8", "is tp of each unit, such as parallel.llm.tp"),
        ("parallel.llm.num_layers_in_first_pipeline_stage=1", "is parallel.llm.layers_per_chunk, the blocks of each"),
        ("parallel.llm.layers_per_chunk=4", "parallel.llm.layers_per_chunk: found 4, allowed: a list"),
        ("parallel.llm.layers_per_chunk=[1,-1]", "parallel.llm.layers_per_chunk.1: found -1, allowed: a whole number"),
        ("train.micro_batch_size=1", "is one packed group of at most data.seq_len tokens"),
        ("train.gradient_checkpointing=true", "is parallel.llm.recompute and parallel.vision.recompute"),
        ("data.sources.0.captions=draw", "draw, but there is no model.generator; allowed: describe, or a generator"),
        ("data.sources.0.captions=both", "allowed: describe or draw"),
        ("data.zzz=1", "unknown key; allowed here: sources, validation, validation_fraction"),
        ("data.sources.0.wieght=1", "unknown key; did you mean weight?"),
        ("model.vision.merge=2", "merge is 2, but downsample `identity` merges nothing: set merge to 1"),
        ("model.audio={layers: 1, hidden: 33, heads: 3, ffn: 8}", "hidden 33 is odd, but sinusoidal positions"),
        ("model.audio={layers: 1, hidden: 8, heads: 2, ffn: 8, chunk: 31}", "chunk 31 is odd"),
        ("model.audio={layers: 1, hidden: 8, heads: 2, ffn: 8, chunk: 3002}", "chunk 3002 is above max_frames 3000"),
        (
            "model.audio={layers: 1, hidden: 8, heads: 2, ffn: 8, chunk: 30, clip_end: silence}",
            "clip_end silence is behind a clip",
        ),
        ("model.audio={layers: 1, hidden: 30, heads: 4, ffn: 8}", "hidden 30 is not divisible by heads 4"),
        ("model.llm.kv_heads=3", "heads 4 is not divisible by kv_heads 3"),
    ],
)
def test_an_invalid_setting_is_the_only_problem_reported(base: Path, override: str, message: str) -> None:
    reported = problems(base, override)
    assert len(reported) == 1
    assert message in reported[0]
    assert reported[0].startswith(override.partition("=")[0].partition(".std")[0].rpartition(".")[0])


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        (
            "{kind: dit, widths: [8], heads: [4], layers: 2, context_width: 8, flow_shift: 3}",
            "flow_shift is 3.0, but prediction noise has no times of flow matching: remove it",
        ),
        ("{kind: dit, widths: [8, 8], heads: [2, 2], layers: 1, context_width: 8}", "2 widths, but a transformer"),
        ("{preset: stable-diffusion-2.1, heads: [5, 3, 5, 5]}", "width 640 is not divisible by 3 heads"),
        ("{preset: stable-diffusion-2.1, heads: [5, 5, 5]}", "3 heads for 4 widths"),
        ("{preset: stable-diffusion-2.1, patch: 2}", "patch is 2, but a U-Net reads every position"),
    ],
)
def test_an_invalid_generator_is_reported(base: Path, generator: str, message: str) -> None:
    (reported,) = problems(base, "data.sources=[{path: a.csv}]", f"model.generator={generator}")
    assert reported.startswith(f"model.generator: {message}")


def test_missing_settings_say_what_they_are(write: Write) -> None:
    reported = problems(write("r.yaml", "name: x\ntrain: {steps: 3}\n"))
    assert [line.partition(":")[0] for line in reported] == ["model", "data", "train.global_batch", "train.optimizer"]
    assert "missing; allowed: a whole number of at least 1, or a mapping (One optimizer step" in reported[2]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.llm.tp=8"], "parallel.llm.tp: 8 does not divide model.llm.heads 4"),
        (["parallel.llm.ep=2"], "parallel.llm.ep: found 2, but model.llm has no experts (`moe`)"),
        ([EXPERTS, "parallel.llm.ep=4"], "parallel.llm.ep: 4 does not divide the 6 experts of model.llm.moe"),
        (
            [EXPERTS, "parallel.llm.ep=3", "parallel.llm.dp=4"],
            "parallel.llm.ep: 3 does not divide parallel.llm's dp, 4: as many replicas hold experts",
        ),
        (
            [EXPERTS, "parallel.llm.ep=2", "parallel.placement=replicated", "parallel.shard=3"],
            "parallel.llm.ep: 2 neither divides nor is a multiple of parallel.shard 3",
        ),
        ([EXPERTS, "model.llm.moe.top_k=7"], "model.llm.moe: top_k: found 7, but there are only 6 experts"),
        ([EXPERTS, "model.llm.moe.groups=4"], "model.llm.moe: groups: 4 does not divide the 6 experts"),
        ([EXPERTS, "model.llm.moe.groups=6"], "model.llm.moe: groups: 6 groups of 6 experts have 1 each"),
        (
            [EXPERTS, "model.llm.moe.groups=3", "model.llm.moe.top_k=3"],
            "model.llm.moe: top_k: found 3, but `top_groups`",
        ),
        ([EXPERTS, "model.llm.moe.top_groups=2"], "model.llm.moe: top_groups: found 2, but there are only 1 groups"),
        ([EXPERTS, "model.llm.moe.selection_bias_rate=0.1"], "model.llm.moe: selection_bias_rate: without"),
        ([EXPERTS, "model.llm.moe.shared_gate=true"], "model.llm.moe: shared_gate: without `shared_ffn`"),
        (
            [EXPERTS, "model.llm.moe.shared_ffn=9", "parallel.llm.tp=2"],
            "parallel.llm.tp: 2 does not divide model.llm.moe.shared_ffn 9",
        ),
        ([EXPERTS, "model.llm.moe.dense_blocks=[9]"], "model.llm: moe.dense_blocks: found 9, but the last of"),
        (
            [EXPERTS, "model.llm.mlp=gelu"],
            "model.llm: moe: experts are gated by SiLU (`mlp: swiglu`), found mlp",
        ),
        ([EXPERTS, "parallel.llm.tp=4"], "parallel.llm.tp: 4 does not divide"),
        (["parallel.llm.tp=3"], "parallel.llm.tp: 3 neither divides nor is a multiple of model.llm.kv_heads 2"),
        (
            ["parallel.llm.tp=8", "model.llm.kv_heads=1", "model.llm.head_dim=2", "model.llm.heads=8"],
            "parallel.llm.tp: 8 does not divide the 4 outputs of the key and value projections (kv_heads 1)",
        ),
        (
            ["parallel.llm={tp: 1, sp: true}"],
            "parallel.llm.sp: sequence parallelism needs a tensor-parallel degree above 1",
        ),
        (["parallel.llm.pp=5"], "parallel.llm.pp: 5 is more than the unit's 4 layers"),
        (
            ["parallel.llm.num_microbatches=3"],
            "parallel.llm.num_microbatches: 3 does not divide train.global_batch 4",
        ),
        (
            ["parallel.llm={dp: 2, num_microbatches: 4}"],
            "parallel.llm.num_microbatches: 4 times parallel.llm.dp 2 is not train.global_batch 4",
        ),
        (
            ["parallel.llm.dp=1", "parallel.vision.num_microbatches=3"],
            "parallel.vision.num_microbatches: 3 neither divides nor is a multiple of the LLM's 4 microbatches",
        ),
        (["parallel.vision.dp=3"], "parallel.vision.dp: 3 does not divide train.global_batch 4"),
        (
            ["parallel.placement=unified", "parallel.vision.tp=2", "parallel.llm.tp=1"],
            "parallel.vision.tp: 2 does not divide parallel.llm.tp 1; in `unified` an encoder has it or a divisor",
        ),
        (
            ["parallel.placement=disaggregated", "model.vision=null"],
            "parallel.placement: found disaggregated, which needs a second unit",
        ),
        (
            ["cluster.ranks=2", "parallel.llm={tp: 2, dp: 2}"],
            "parallel.llm: tp x pp x dp needs 4 ranks, cluster.ranks is 2",
        ),
        (
            ["cluster.ranks=2", "parallel.placement=disaggregated", "parallel.llm.tp=2"],
            "parallel.placement: disaggregated units need 2 (llm) + 1 (vision) ranks, cluster.ranks is 2",
        ),
        (
            ["parallel.placement=colocated", "parallel.vision.pp=2", "parallel.llm.pp=3"],
            "parallel.vision.pp: 2 does not divide parallel.llm.pp 3",
        ),
        (
            ["parallel.placement=colocated", "parallel.vision.tp=2", "parallel.llm.tp=1"],
            "parallel.vision.tp: 2 does not divide parallel.llm.tp 1",
        ),
        (["parallel.placement=colocated", "parallel.vision.vpp=2"], "parallel.vision.vpp: found 2, allowed: 1"),
        (
            ["parallel.placement=replicated", "parallel.llm.tp=2", "parallel.vision.tp=1"],
            "parallel.vision.tp: 1 differs from parallel.llm.tp 2; in `replicated` a TP group runs every unit, so all "
            "have one tp: set both to 2 or to 1, leave one out, or let parallel.placement be unified",
        ),
        (["parallel.placement=colocated", "parallel.llm.cp=2"], "parallel.llm.cp: found 2, allowed in"),
        (["parallel.llm={cp: 1, cp_method: ring}"], "parallel.llm.cp_method: found ring with parallel.llm.cp 1"),
        (
            ["parallel.llm={cp: 2, tp: 4, cp_method: ulysses}"],
            "parallel.llm.cp: 2 does not divide the 1 heads of a rank",
        ),
        (
            ["parallel.llm={cp: 2, cp_method: ring}", "model.llm.window=8"],
            "parallel.llm.cp_method: found ring, allowed: ulysses or auto",
        ),
        (
            ["parallel.llm={cp: 3}", "model.llm.image_attention=bidirectional"],
            "parallel.llm.cp: 3 does not divide the 4 heads of a rank",
        ),
        (
            ["parallel.llm={cp: 4}", f"model.llm.delta_net={DELTA_NET}", "model.llm.full_attention_blocks=[1]"],
            "parallel.llm.cp: 4 does not divide the 2 key heads of a rank's gated DeltaNets (model.llm.delta_net."
            "key_heads 2, parallel.llm.tp 1); allowed: 1, 2 (cp_method ring is not possible: model.llm.delta_net: ",
        ),
        (
            ["parallel.llm={cp: 2, tp: 2}", f"model.llm.delta_net={DELTA_NET}", "model.llm.full_attention_blocks=[1]"],
            "parallel.llm.cp: 2 does not divide the 1 key heads of a rank's gated DeltaNets",
        ),
        (
            [
                "parallel.llm={cp: 2, cp_method: ring}",
                f"model.llm.delta_net={DELTA_NET}",
                "model.llm.full_attention_blocks=[1]",
            ],
            "parallel.llm.cp_method: found ring, allowed: ulysses or auto (model.llm.delta_net: the state of a head",
        ),
        (
            ["parallel.placement=unified", "parallel.vision.dp=2", "parallel.llm={dp: 2, cp: 2}"],
            "parallel.vision.dp: 2 differs from parallel.llm.dp 2 times cp 2",
        ),
        (
            ["parallel.placement=unified", "parallel.vision={tp: 1, dp: 2}", "parallel.llm={tp: 2, dp: 2}"],
            "parallel.vision.dp: 2 differs from parallel.llm.dp 2 times tp over the encoder's 2",
        ),
        (
            ["parallel.llm.layers_per_chunk=[1, 2]"],
            "parallel.llm.layers_per_chunk: 1 + 2 make 3 blocks, model.llm.layers is 2; the embedding, head or",
        ),
        (
            ["model.llm.layers=3", "parallel.llm.layers_per_chunk=[1, 0, 2]"],
            "parallel.llm.layers_per_chunk: chunk 1 (counted from 0) has none, and blocks lie before and after it",
        ),
        (
            ["model.vision=null", "parallel.llm.layers_per_chunk=[0, 0, 2]"],
            "parallel.llm.layers_per_chunk: chunk 1 (counted from 0) has none, and only the first or last chunk may",
        ),
        (
            ["parallel.placement=disaggregated", "parallel.llm={pp: 2, vpp: 2, layers_per_chunk: [1, 1]}"],
            "parallel.llm.layers_per_chunk: it has 2 numbers, and parallel.llm.pp 2 x parallel.llm.vpp 2 makes 4",
        ),
        (
            ["model.llm.layers=3", "parallel.llm={pp: 2, layers_per_chunk: [1, 1, 1]}"],
            "parallel.llm.layers_per_chunk: it has 3 numbers, and parallel.llm.pp 2 does not divide that",
        ),
        (
            ["parallel.placement=unified", "parallel.llm={pp: 1, layers_per_chunk: [1, 1]}"],
            "parallel.llm.layers_per_chunk: it has 2 numbers, and parallel.llm.pp 1 makes 1 chunk",
        ),
        (
            ["parallel={placement: unified, vision: {layers_per_chunk: [2]}, llm: {layers_per_chunk: [1, 1]}}"],
            "parallel.llm.layers_per_chunk: it has 2 numbers and parallel.vision.layers_per_chunk 1; in `unified` both",
        ),
        (
            ["parallel={placement: unified, vision: {layers_per_chunk: [1, 1]}, llm: {layers_per_chunk: [1, 1]}}"],
            "parallel.llm.layers_per_chunk: chunk 0 (counted from 0) has blocks, but those of vision, which come first",
        ),
        (
            ["parallel.placement=replicated", "parallel.llm.layers_per_chunk=[1, 1]"],
            "parallel.llm.layers_per_chunk: found [1, 1], but in `replicated` every rank runs the whole unit",
        ),
        (
            [DIT, "data.sources=[{path: a.csv}]", "parallel.generator.layers_per_chunk=[1, 1]"],
            "parallel.generator.layers_per_chunk: found for the generator, allowed for encoders and the LLM",
        ),
        (["parallel.placement=replicated", "parallel.llm.pp=2"], "parallel.llm.pp: found 2, allowed: 1"),
        (
            ["parallel.placement=replicated", "parallel.shard=3", "cluster.ranks=4"],
            "parallel.shard: 3 does not divide cluster.ranks 4",
        ),
        (
            ["parallel={placement: replicated, shard: 4, llm: {tp: 2}}", "cluster.ranks=4"],
            "parallel.shard: 4 does not divide cluster.ranks 4 by tp 2",
        ),
        (["parallel.shard=2"], "parallel.shard: found 2 with placement auto"),
        (["parallel.zero=1"], "parallel.zero: found 1 with placement auto"),
        (
            ["parallel.placement=replicated", "parallel.shard=1", "train.grad_reduce=bf16"],
            "train.grad_reduce: found bf16 with parallel.shard 1, whose copies add up gradients in fp32",
        ),
        (
            ["train.optimizer.kind=muon", "train.lora={}"],
            "train.optimizer.kind: found muon with train.lora, which freezes the linears that it trains",
        ),
        (["train.optimizer.kind=sgd"], "train.optimizer.kind"),
        (
            ["train.optimizer.kind=muon", "train.optimizer.moments=bf16"],
            "train.optimizer: moments: found bf16 with kind muon, whose momentum is in fp32; allowed: fp32",
        ),
        (["train.optimizer.muon_momentum=1"], "train.optimizer.muon_momentum"),
        (["train.optimizer.layer_lr_decay=0"], "train.optimizer.layer_lr_decay"),
        (["train.optimizer.layer_lr_decay=1.5"], "train.optimizer.layer_lr_decay"),
        (
            ["parallel.placement=replicated", "parallel.zero=1", "parallel.shard=2"],
            "parallel.shard: found 2 with parallel.zero 1, which keeps weights whole",
        ),
        (["parallel.dispatch=all"], "parallel.dispatch: found all with placement auto"),
        (["parallel.exchange=all_gather"], "parallel.exchange: found all_gather with placement auto"),
        (
            ["parallel.placement=replicated", "parallel.dispatch=llm", "parallel.exchange=all_gather"],
            "parallel.exchange: found all_gather with parallel.dispatch llm, which exchanges nothing",
        ),
        (
            ["parallel.vision.balance_policy=padded"],
            "parallel.vision.balance_policy: found padded with placement auto; it is used in parallel.placement: repl",
        ),
        (
            ["parallel.placement=replicated", "parallel.dispatch=llm", "parallel.vision.balance_policy=packed"],
            "parallel.vision.balance_policy: found packed with parallel.dispatch llm, where items stay with their",
        ),
        (
            ["parallel.placement=replicated", "parallel.dispatch=none", "parallel.llm.balance_policy=padded"],
            "parallel.llm.balance_policy: found padded with parallel.dispatch none, where samples stay where they are",
        ),
        (
            ["parallel.placement=replicated", "data.grouping=matched", "parallel.llm.balance_policy=padded"],
            "parallel.llm.balance_policy: found padded, but ranks exchange samples only with data.reorder: true",
        ),
        (["parallel.schedule=encoder_first"], "parallel.schedule: found encoder_first with placement auto"),
        (
            ["model.vision=null", "parallel.placement=replicated", "parallel.schedule=encoder_first"],
            "parallel.schedule: found encoder_first, but the model has no encoder",
        ),
        (
            [DIT, "data.sources=[{path: a.csv}]", "parallel={placement: colocated, generator: {pp: 2}, llm: {pp: 3}}"],
            "parallel.generator.pp: 2 does not divide parallel.llm.pp 3",
        ),
        (
            ["parallel.placement=unified", "parallel.vision.vpp=2", "parallel.llm.vpp=1"],
            "parallel.vision.vpp: 2 differs from parallel.llm.vpp 1",
        ),
        (
            ["parallel.placement=disaggregated", "parallel.llm={pp: 2, vpp: 3}"],
            "parallel.llm.vpp: 3 chunks on each of parallel.llm.pp 2 ranks are more than the unit's 4 layers",
        ),
        (["model.vision=null", "parallel.llm.vpp=5"], "parallel.llm.vpp: 5 chunks are more than the unit's 4 layers"),
        (
            ["parallel.placement=disaggregated", "parallel.max_gpus=1"],
            "parallel.placement: disaggregated units need 1 (llm) + 1 (vision) ranks, parallel.max_gpus is 1",
        ),
        (["model.llm.head_dim=15"], "model.llm.head_dim: a head is 15 wide; allowed: an even width"),
        (
            ["model.llm.rope_scaling={kind: dynamic, factor: 2, original_positions: 1024}"],
            "data.seq_len: 2048 is above 1024, the context that model.llm.rope_scaling `dynamic` can be trained with",
        ),
        (
            ["model.llm.rope_sections=[1, 2, 3]"],
            "model.llm.rope_sections: they add up to 6; allowed: 8, the pairs of features of a head",
        ),
        (
            ["model.llm.rope_sections=[2, 3, 3]", "data.image={scheme: tiles, tile: 448, max_tiles: 1}"],
            "data.image.scheme: found `tiles`, allowed with model.llm.rope_sections: native or fixed",
        ),
        (
            ["model.vision.layers=6", "model.vision.deepstack=[0, 1, 2, 3, 4]"],
            "model.vision.deepstack: 5 blocks feed as many blocks of the LLM, which has 2",
        ),
        (
            [RESAMPLER, "model.llm.rope_sections=[2, 3, 3]"],
            "model.llm.rope_sections: features of a resampler (model.vision.projector.kind) have no rows and columns",
        ),
        (
            ["model.vision.projector={kind: resampler, queries: 8, heads: 2}", "parallel.vision.tp=4"],
            "parallel.vision.tp: 4 does not divide model.vision.projector.heads 2",
        ),
        (
            ["model.vision.projector={kind: resampler, queries: 2048}"],
            "data.image.max_pixels: one image becomes up to 2048 LLM tokens, data.seq_len is 2048",
        ),
        (
            ["model.vision.projector={kind: resampler}"],
            "model.vision.projector: queries is not set; kind `resampler` needs the number of LLM tokens of each item",
        ),
        (
            ["model.vision.projector={kind: resampler, queries: 8, ffn: 64}"],
            "model.vision.projector: ffn is set beside kind `resampler`; allowed with `mlp`",
        ),
        (
            ["model.vision.projector={queries: 8, heads: 2}"],
            "model.vision.projector: queries is set beside kind `mlp`; allowed with `resampler`; heads is set beside",
        ),
        (["train.optimizer.min_lr=0.01"], "train.optimizer.min_lr: 0.01 is above train.optimizer.lr 0.001"),
        (["train.validate_every=5"], "train.validate_every: 5, but data.validation is empty"),
        (["train.evaluate_every=5"], "train.evaluate_every: 5, but data.validation is empty"),
        (
            ["train.best.metric=val_loss"],
            "train.best.metric: found 'val_loss', allowed with this recipe: nothing, since train.validate_every and "
            "train.evaluate_every are 0; train.validate_every measures losses",
        ),
        (
            [HELD_OUT, "train.validate_every=5", "train.evaluate_every=5", "train.best.metric=val_f1"],
            "train.best.metric: found 'val_f1', allowed with this recipe: val_loss, val_exact; train.validate_every",
        ),
        (
            [HELD_OUT, "train.evaluate_every=5", "train.metrics=['p:length']", "train.best.metric=val_length"],
            "train.best.higher_is_better: missing; val_length is a plug-in's, which may be better when it is higher",
        ),
        (
            [HELD_OUT, "train.validate_every=5", "train.best={metric: val_loss, min_gain: 0.1}"],
            "train.best: min_gain: found 0.1 without patience, which alone reads it; set patience",
        ),
        (
            ["train.checkpoint={hf_keep: 2, hf_part: adapter}"],
            "train.checkpoint: hf_keep: found 2 without hf_every, which alone reads it; set hf_every; hf_part: found "
            "adapter without hf_every",
        ),
        (
            ["train.checkpoint.remote=https://host/run"],
            "train.checkpoint: remote: found the protocol https; allowed: the URL of an object store that takes files, "
            "as s3://bucket/run",
        ),
        (
            ["train.checkpoint.remote=/mnt/run"],
            "train.checkpoint: remote: found the path /mnt/run; allowed: the URL of an object store that takes files",
        ),
        (
            ["train.checkpoint.remote=s3://key:secret@bucket/run"],
            "train.checkpoint.remote: found a s3 URL with a user name or password; allowed: credentials in the",
        ),
        (
            ["data.validation_fraction=0.1", "data.validation=[{path: a.json}]"],
            "data.validation_fraction: 0.1, but data.validation names sources of held-out samples; give one",
        ),
        (
            ["data.validation_fraction=1"],
            "data.validation_fraction: found 1, allowed: a number above 0 and below 1, or null",
        ),
        (
            ["data.sources=[{path: a.csv}]", "data.validation_fraction=0.5"],
            "data.validation_fraction: 0.5, but sources that state lengths have no samples to hold out; remove it",
        ),
        (
            ["data.sources=[{path: a.csv, max_samples: 3}]"],
            "data.sources.0.max_samples: set for a source that states lengths, which has no samples; remove it",
        ),
        (
            ["data.sources.0.max_samples=0"],
            "data.sources.0.max_samples: found 0, allowed: a whole number of at least 1, or null",
        ),
        (["data.sources.0.columns={turns: messages}"], "data.sources.0.columns: found the key 'turns' (the key is"),
        (["data.max_sample_tokens=4096"], "data.max_sample_tokens: 4096 is above data.seq_len 2048"),
        (["data.budgets={audio: 5}"], "data.budgets.audio: no encoder of this model is called audio; allowed: vision"),
        (
            ["model.vision=null", "data.budgets={generator: 5}"],
            "data.budgets.generator: no encoder of this model is called generator; it has none, and no generator",
        ),
        (["data.budgets={llm: 5}"], "data.budgets.llm: the LLM's budget is data.seq_len; remove it here"),
        (
            ["data.grouping=isf", "data.isf.encoder_budget=items", "data.budgets.vision=512"],
            "data.isf.encoder_budget: found `items`, but data.budgets are in tokens",
        ),
        (["data.pad=true"], "data.pad: found true with data.grouping: matched, which packs; allowed with random"),
        (["data.isf.rounds=0"], "data.isf.rounds"),
        (["data.image.scheme=fixed", "data.image.size=225"], "data.image.size: 225 is not a multiple of 14"),
        (["data.image.scheme=fixed", "model.vision.max_side=8"], "data.image.size: a square image becomes 16 patches"),
        (["model.vision.max_side=8"], "data.image.max_pixels: a square image becomes 32 patches a side"),
        (["data.image.min_pixels=200705"], "data.image.min_pixels: 200705 is above data.image.max_pixels 200704"),
        (
            ["data.image={min_pixels: 1, max_pixels: 100}"],
            "data.image.max_pixels: 100 is less than one merged patch of 196 pixels",
        ),
        ([AUDIO, "parallel.audio.tp=3"], "parallel.audio.tp: 3 does not divide model.audio.heads 4"),
        ([AUDIO, "parallel.audio.pp=5"], "parallel.audio.pp: 5 is more than the unit's 4 layers"),
        ([AUDIO, "model.audio.max_frames=2000"], "data.audio.max_seconds: 30 s become 3000 frames"),
        ([AUDIO, "model.audio.downsample=7"], "model.audio.max_frames: 3000 is not a multiple of 2 x"),
        (
            [AUDIO, "data.audio.item_seconds=10"],
            "data.audio.item_seconds: found 10, allowed where model.audio.chunk is set",
        ),
        ([AUDIO, "data.audio.item_seconds=0"], "data.audio.item_seconds: found 0"),
        (
            [AUDIO, "parallel.placement=unified", "parallel.audio.dp=2", "parallel.llm.dp=1"],
            "parallel.audio.dp: 2 differs from parallel.llm.dp 1",
        ),
        (
            ["data.sources=[{path: a.csv}, {path: b.json}]"],
            "data.sources.0: states lengths, other sources hold samples",
        ),
        (["data.validation=[{path: a.txt, format: lengths}]"], "data.validation.0: states lengths, which is nothing"),
        ([GENERATOR, "model.generator.image_size=64"], "model.generator.channels: found 4; allowed with samples: 3"),
        (
            [GENERATOR, "data.sources=[{path: a.csv}]", "parallel.generator.pp=2"],
            "parallel.generator.pp: found 2, allowed: 1",
        ),
        (
            [DIT, "data.sources=[{path: a.csv}]", "parallel.generator.tp=3"],
            "parallel.generator.tp: 3 does not divide model.generator.heads 4",
        ),
        (
            [DIT, "data.sources=[{path: a.csv}]", "parallel.generator.pp=6"],
            "parallel.generator.pp: 6 is more than the unit's 5 layers",
        ),
        (
            [DIT, "data.sources=[{path: a.csv}]", "parallel.generator={tp: 2, sp: true}"],
            "parallel.generator.sp: found true, allowed: false or auto",
        ),
        (
            [
                DIT,
                "data.sources=[{path: a.csv}]",
                "parallel.generator.recompute_activation_function=true",
            ],
            "parallel.generator.recompute_activation_function: found true, allowed: false",
        ),
        (
            [DIT, "data.sources=[{path: a.csv}]", "parallel.generator.offload=all"],
            "parallel.generator.offload: found all, allowed: none or auto",
        ),
        (
            ["parallel.llm={recompute: selective, recompute_activation_function: false}"],
            "parallel.llm.recompute_activation_function: found false with recompute selective, which computes",
        ),
        (
            ["parallel.vision={offload: all, recompute: selective}"],
            "parallel.vision.offload: found all with recompute selective, which keeps all activations on the device",
        ),
        (
            [DIT, "data.sources=[{path: a.csv}]", "parallel.generator.recompute=selective"],
            "parallel.generator.recompute: found selective, allowed: auto, none or all",
        ),
        (
            ["parallel.llm={offload: inputs, recompute: none}"],
            "parallel.llm.offload: found inputs with recompute none, which keeps all activations on the device",
        ),
        (["data.tokenizer=null"], "data.tokenizer: missing; allowed: a folder with tokenizer.json and a chat template"),
        (
            ["parallel.max_gpus=4", "cluster.ranks=8", "parallel.llm={tp: 2, dp: 4}"],
            "parallel.llm: tp x pp x dp needs 8 ranks, parallel.max_gpus is 4",
        ),
        (["data.seq_len=1024"], "data.image.max_pixels: one image becomes up to 1024 LLM tokens, data.seq_len is 1024"),
    ],
)
def test_settings_that_do_not_fit_together(base: Path, overrides: list[str], message: str) -> None:
    reported = problems(base, *overrides)
    assert len(reported) == 1
    assert reported[0].startswith(message)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.vision.deepstack=[2]"], "deepstack names 2, but blocks are 0 to 1"),
        (["model.vision.deepstack=[1, 0]"], "deepstack is [1, 0]; allowed: numbers that ascend"),
        (
            ["model.vision.deepstack=[1]", "model.vision.projector.kind=linear"],
            "deepstack is set, but projector.kind is `linear`; allowed: mlp",
        ),
        (
            [RESAMPLER, "model.vision.deepstack=[1]"],
            "deepstack is set, but projector.kind is `resampler`; allowed: mlp",
        ),
        (
            ["model.vision.projector={kind: resampler, queries: 8, heads: 5}"],
            "hidden 32 is not divisible by projector.heads 5",
        ),
        (
            [RESAMPLER, "model.vision.merge=2", "model.vision.downsample=pixel_shuffle"],
            "projector.kind is `resampler`, but 4 tokens are merged into one; its queries replace downsampling",
        ),
        (
            [RESAMPLER, "model.vision.class_token=true", "model.vision.class_feature=true"],
            "projector.kind is `resampler`; its queries leave no place for class tokens and newlines",
        ),
        (
            ["model.vision.position_interpolation=bicubic"],
            "position_interpolation is set; allowed with position_grid",
        ),
        (
            ["model.vision.rotary_frequencies=alternating"],
            "rotary_frequencies is set beside positions `factorized`; allowed with `rotary`",
        ),
        (
            ["model.vision.downsample=linear", "model.vision.projector.norm=true"],
            "projector.norm is set, but downsample is `linear`, which reads patches behind post_norm; leave it out",
        ),
        (
            ["model.vision.downsample=linear", "model.vision.projector.kind=merger"],
            "projector.kind is `merger`, but downsample is `linear`; allowed beside it: mlp, linear",
        ),
        (
            ["model.vision.downsample=linear", "model.vision.positions=rotary", "model.vision.deepstack=[0]"],
            "deepstack is set, but downsample is `linear`; allowed: identity, pixel_shuffle",
        ),
        (
            ["model.llm.query_growth=0.1"],
            "query_growth: without `rope_scaling.original_positions` queries have no length to grow by; set it",
        ),
        (
            ["data.image.pixel_limits=sides", "data.image.max_pixels=200000"],
            "max_pixels is 200000; allowed with pixel_limits `sides`: squares, like 199809",
        ),
        (
            ["model.vision.projector={kind: merger, norm: true}"],
            "norm is set beside kind `merger`, which has a layer norm of its own; leave it out",
        ),
        (["model.vision.position_grid=3"], "position_grid is set beside positions `factorized`; allowed with `rotary`"),
        (["model.llm.rope_interleaved=true"], "rope_interleaved is set, but there are no rope_sections to interleave"),
    ],
)
def test_settings_of_a_unit_that_do_not_fit_together(base: Path, overrides: list[str], message: str) -> None:
    [reported] = problems(base, *overrides)
    assert message in reported


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.vision=null"],
        ["parallel.placement=unified", "parallel.llm.tp=2"],
        ["parallel.placement=unified", "parallel.llm={pp: 2, vpp: 3}"],
        ["data.sources=[{path: a.csv}]", "data.tokenizer=null", "model.vision.max_side=8"],
    ],
)
def test_checks_accept_what_fits(base: Path, overrides: list[str]) -> None:
    load_recipe(base, overrides, {})


@pytest.mark.parametrize("section", ["name", "model", "data", "parallel", "cluster", "train"])
@pytest.mark.parametrize("value", ["null", "3", "[]", "{}", "{llm: 3, sources: 3, steps: x, optimizer: null}"])
def test_checks_do_not_fail_on_recipes_with_other_problems(base: Path, section: str, value: str) -> None:
    if (section, value) not in {("parallel", "{}"), ("cluster", "{}")}:
        assert problems(base, f"{section}={value}")


def test_no_check_is_forgotten() -> None:
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS) == 37


FINE = "model.encoders.fine={modality: vision, layers: 2, hidden: 32, heads: 4, ffn: 64, patch: 16, max_side: 32}"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.encoders.llm={}"], "model.encoders.llm: llm is a key of `model` itself; give this encoder another"),
        (["model.encoders.vision={}"], "model.encoders.vision: vision is a key of `model` itself"),
        (["model.encoders.count={}"], "model.encoders.count: count is a column of files of stated lengths"),
        (["model.encoders.2b={}"], "model.encoders.2b: found the name '2b'; allowed: a letter, then letters, digits"),
        (["model.encoders.fine={layers: 2}"], "model.encoders.fine.modality: missing; allowed: audio or vision"),
        ([FINE, "model.encoders.fine.modality=sound"], "model.encoders.fine.modality: found the text 'sound', allowed"),
        ([FINE, "model.encoders.fine.patc=7"], "model.encoders.fine.patc: unknown key; did you mean patch?"),
        ([FINE, "model.encoders.fine.heads=x"], "model.encoders.fine.heads: found the text 'x', allowed: a whole"),
        ([FINE, "model.encoders.fine.mel_bins=80"], "model.encoders.fine.mel_bins: unknown key here; it belongs to"),
        ([FINE, "model.encoders.fine.merge=2"], "model.encoders.fine: merge is 2, but downsample `identity`"),
        (["model.encoders.fine=3"], "model.encoders.fine: found 3, allowed: a mapping"),
        (["model.encoders.fine={modality: vision, preset: vit-hug}"], "model.encoders.fine.preset: found the text"),
        ([FINE, "parallel.encoders.fin.tp=2"], "parallel.encoders.fin: model.encoders has no fin; allowed: fine"),
        ([FINE, "parallel.encoders.vision.tp=2"], "parallel.encoders.vision: model.encoders has no vision; degrees of"),
        (
            [FINE, "parallel.encoders.fine.tp=3"],
            "parallel.encoders.fine.tp: 3 does not divide model.encoders.fine.heads",
        ),
        ([FINE, "parallel.encoders.fine.dp=3"], "parallel.encoders.fine.dp: 3 does not divide train.global_batch 4"),
        ([FINE, "parallel.encoders.fine.tpp=3"], "parallel.encoders.fine.tpp: unknown key; did you mean tp?"),
        (
            [FINE, "data.budgets.fin=9"],
            "data.budgets.fin: no encoder of this model is called fin; allowed: vision, fine",
        ),
        (
            [FINE, "data.seq_len=1800"],
            "data.image.max_pixels: one image becomes up to 1808 LLM tokens from vision and fine together",
        ),
        (
            [FINE, "data.image={scheme: fixed, size: 168}"],
            "data.image.size: 168 is not a multiple of 16 (model.encoders.fine.patch 16 x merge 1)",
        ),
        (
            [FINE, "model.encoders.fine.max_side=8"],
            "data.image.max_pixels: a square image becomes 28 patches a side, model.encoders.fine.max_side is 8",
        ),
        (
            ["model.encoders.ear={modality: audio, layers: 2, hidden: 32, heads: 4, ffn: 64, max_frames: 300}"],
            "data.audio.max_seconds: 30 s become 3000 frames, model.encoders.ear.max_frames is 300",
        ),
    ],
)
def test_problems_of_named_encoders_name_them(base: Path, overrides: list[str], expected: str) -> None:
    reported = problems(base, *overrides)
    assert [line for line in reported if line.startswith(expected)], reported


def test_a_named_encoder_takes_what_it_leaves_out_from_its_preset(base: Path) -> None:
    settings = ["model.encoders.ear={modality: audio, preset: whisper-6b, layers: 3}", "data.seq_len=4096"]
    ear = load_recipe(base, settings, {}).recipe.model.all_encoders["ear"]
    assert (ear.layers, ear.hidden, ear.cell_features) == (3, 3072, 128)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("share: 0.5", "weight: 1", "data.sources.1.share: missing, while other sources have shares; allowed: a share"),
        ("share: 0.5, weight: 2", "share: 0.5", "data.sources.0.weight: found 2 beside a share; allowed: a share or"),
        ("share: 0.5", "share: 0.4", "data.sources: shares of step 0 add up to 0.5 + 0.4 = 0.9; allowed: 1"),
        ("share: {0: 0.7, 100: 0.3}", "share: 0.3", "data.sources: shares of step 100 add up to 0.3 + 0.3 = 0.6"),
        ("share: {10: 0.7}", "share: 0.3", "data.sources.0.share: the schedule has the steps 10; allowed: one that"),
        ("share: {}", "share: 0.3", "data.sources.0.share: the schedule has the steps none; allowed: one that starts"),
        ("share: -0.5", "share: 1", "data.sources.0.share: found -0.5, allowed: a number from 0 to 1"),
        ("share: {0: 2}", "share: 1", "data.sources.0.share: found 2, allowed: a number from 0 to 1"),
        ("share: {first: 1}", "share: 0", "data.sources.0.share: found the key 'first', allowed: steps"),
        ("share: half", "share: 1", "data.sources.0.share: found 'half', allowed: a number from 0 to 1, or"),
    ],
)
def test_shares_of_sources(base: Path, first: str, second: str, expected: str) -> None:
    sources = f"data.sources=[{{path: a.json, {first}}}, {{path: b.json, {second}}}]"
    (problem,) = problems(base, sources)
    assert problem.startswith(expected), problem


def test_shares_are_checked_beside_other_problems(base: Path) -> None:
    sources = "data.sources=[{path: a.json, share: {0: 0.5, 9: 0.7}}, {path: b.json, share: 0.5}]"
    found = [problem.split(" (")[0] for problem in problems(base, sources, "data.seq_len=0")]
    assert found == [
        "data.seq_len: found 0, allowed: a whole number of at least 1, or auto",
        "data.sources: shares of step 9 add up to 0.7 + 0.5 = 1.2; allowed: 1",
    ]


def test_shares_go_with_neither_validation_nor_steps_of_long_samples(base: Path) -> None:
    changes = ["data.sources.0.share=1", "data.long_sample_tokens=100", "data.validation=[{path: v.json, share: 1}]"]
    found = {problem.split(":")[0] for problem in problems(base, *changes)}
    assert found == {"data.validation.0.share", "data.long_sample_tokens"}


def test_a_schedule_of_shares_survives_the_recipe_of_a_run(base: Path, tmp_path: Path) -> None:
    changes = [
        "data.sources=[{path: a.json, share: {0: 0.7, 100: 0.334}}, {path: b.json, share: {0: 0.3, 100: 0.666}}]"
    ]
    loaded = load_recipe(base, changes, {}).recipe
    assert loaded.data.sources[0].share == {0: 0.7, 100: 0.334}
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump_recipe(loaded), encoding="utf-8")
    assert load_recipe(saved, [], {}).recipe == loaded


def test_the_table_of_other_trainers_names_settings_that_there_are() -> None:
    others = other_keys().values()
    assert len(others) > 200
    assert {trainer for other in others for trainer in other.trainers} == set(TRAINERS)
    says = [other.says for other in others] + [other.setting for other in others if other.setting]
    named = [path for name in says for path in re.findall(r"(?:model|parallel|train|data)\.[a-z_.]*[a-z]", name)]
    paths = {dotted_path(path) for path in json_schema.setting_paths()}
    assert named
    assert set(named) <= paths
