"""`mmtrain convert-config`: configurations as each trainer's documentation has them become recipes that load."""

from pathlib import Path
from typing import Any

import pytest

from mmtrain.api.converted_config import convert_config
from mmtrain.api.foreign_config import read_arguments
from mmtrain.errors import UserError
from mmtrain.families import FAMILIES
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.recipe.loading.other_trainers import other_keys
from mmtrain.weights.tiny_model import write_tiny_model

LLAMA_FACTORY = """
model_name_or_path: {model}
image_max_pixels: 262144
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
use_rslora: true
lora_target: all
dataset: {data}
template: qwen2_vl
cutoff_len: 1024
max_samples: 1000
overwrite_cache: true
output_dir: saves/qwen2_vl
logging_steps: 10
save_steps: 500
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
val_size: 0.1
eval_strategy: steps
eval_steps: 500
"""
AXOLOTL = """
base_model: {model}
datasets:
  - path: {data}
    type: chat_template
val_set_size: 0.05
sequence_len: 1024
sample_packing: true
adapter: lora
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [q_proj, k_proj, v_proj, down_proj]
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
warmup_ratio: 0.1
weight_decay: 0.0
saves_per_epoch: 1
flash_attention: true
"""
TRANSFORMERS = """
model_name_or_path: {model}
train_file: {data}
output_dir: out
num_train_epochs: 2
per_device_train_batch_size: 4
warmup_steps: 10
adam_beta2: 0.95
max_grad_norm: 0
report_to: none
label_smoothing_factor: 0.1
"""
MS_SWIFT = """
#!/bin/bash
MODEL={model}
# 2 GPUs
NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1 \\
swift sft \\
    --model $MODEL \\
    --train_type full \\
    --dataset '{data}#500' \\
    --torch_dtype bfloat16 \\
    --num_train_epochs 1 --per_device_train_batch_size 1 \\
    --gradient_accumulation_steps 16 \\
    --freeze_vit true \\
    --max_length 2048 \\
    --lora_rank 8 \\
    --warmup_ratio 0.05 --learning_rate=1e-5 && echo done --not_an_argument
"""
MEGATRON = """
GPUS=8
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 16
    --group-query-attention --num-query-groups 8
    --ffn-hidden-size 5504
    --vocab-size 32000
    --seq-length 4096
    --swiglu
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-iters 5000
    --lr 3.0e-4 --min-lr 3.0e-5
    --lr-decay-style WSD --lr-wsd-decay-style minus_sqrt
    --lr-warmup-iters 100
    --clip-grad 1.0
    --adam-beta1 0.9 --adam-beta2 0.95
    --bf16
)
torchrun --nproc_per_node ${{GPUS}} pretrain_gpt.py ${{MODEL_ARGS[@]}} ${{TRAINING_ARGS[@]}} \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --data-path {data} --attention-dropout 0.1
"""
CONFIGS = {
    "lf.yaml": (LLAMA_FACTORY, "lf"),
    "ax.yml": (AXOLOTL, "ax"),
    "hf.yaml": (TRANSFORMERS, "hf"),
    "sw.sh": (MS_SWIFT, "sw"),
    "mg.sh": (MEGATRON, "mg"),
}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Recipe]]:
    """Convert each configuration; return the text and the recipe by trainer."""
    folder = tmp_path_factory.mktemp("configs")
    write_tiny_model(FAMILIES["llava"], folder / "model", seed=0, num_train=4)
    (folder / "mine.json").write_text("[]")
    (folder / "tokenizer.json").write_text("{}")
    converted = {}
    for name, (config, trainer) in CONFIGS.items():
        file = folder / name
        file.write_text(config.format(model=folder / "model", data=folder / "mine.json"))
        result = convert_config(file)
        assert result.trainer == trainer
        recipe = folder / f"{trainer}-recipe.yaml"
        recipe.write_text(result.text(name))
        converted[trainer] = recipe.read_text(), load_recipe(recipe).recipe
    return converted


def test_llama_factory(recipes: dict[str, tuple[str, Recipe]]) -> None:
    text, recipe = recipes["lf"]
    train, optimizer, data = recipe.train, recipe.train.optimizer, recipe.data
    assert (train.epochs, train.steps, train.global_batch) == (3.0, None, {"samples": 8})
    assert (optimizer.lr, optimizer.schedule, optimizer.warmup_ratio) == (1e-4, "cosine", 0.1)
    assert optimizer.betas == (0.9, 0.999)
    assert (data.seq_len, data.validation_fraction, data.sources[0].max_samples) == (1024, 0.1, 1000)
    assert (train.checkpoint.every, train.validate_every, train.precision) == (500, 500, "bf16")
    assert train.lora is not None
    assert (train.lora.rank, train.lora.targets) == (8, ("llm.*.linear_*",))
    assert train.lora.scaling == "rslora"
    assert "template: qwen2_vl: has no setting: the chat template is that of model.hf" in text
    assert "train.optimizer.betas: not stated; [0.9, 0.999] is the default there" in text


def test_axolotl(recipes: dict[str, tuple[str, Recipe]]) -> None:
    text, recipe = recipes["ax"]
    assert recipe.train.global_batch == {"samples": 8}
    assert recipe.train.lora is not None
    assert recipe.train.lora.targets == (*(f"llm.*.linear_{part}" for part in "qkv"), "llm.*.linear_fc2")
    assert recipe.train.lora.dropout == 0.05
    assert "#   * optimizer: adamw_bnb_8bit: is a section, train.optimizer" in text


def test_transformers(recipes: dict[str, tuple[str, Recipe]]) -> None:
    text, recipe = recipes["hf"]
    optimizer = recipe.train.optimizer
    assert (optimizer.lr, optimizer.schedule, optimizer.warmup_steps) == (5e-5, "linear", 10)
    assert (optimizer.betas, optimizer.clip_norm, recipe.train.loggers) == ((0.9, 0.95), None, ())
    assert "label_smoothing_factor: 0.1: has no setting" in text


def test_ms_swift(recipes: dict[str, tuple[str, Recipe]]) -> None:
    text, recipe = recipes["sw"]
    assert recipe.train.lora is None, "the whole model trains"
    assert recipe.model.vision is not None
    assert recipe.model.vision.freeze
    assert (recipe.train.optimizer.weight_decay, recipe.data.sources[0].max_samples) == (0.1, 500)
    assert "not_an_argument" not in text


def test_megatron(recipes: dict[str, tuple[str, Recipe]]) -> None:
    text, recipe = recipes["mg"]
    llm, optimizer = recipe.model.llm, recipe.train.optimizer
    assert (llm.layers, llm.hidden, llm.heads, llm.kv_heads, llm.ffn, llm.vocab) == (24, 2048, 16, 8, 5504, 32000)
    assert (recipe.train.steps, recipe.train.global_batch, recipe.data.seq_len) == (5000, {"samples": 128}, 4096)
    assert (optimizer.schedule, optimizer.cooldown, optimizer.min_lr) == ("wsd", "sqrt", 3e-5)
    assert (recipe.parallel.llm.tp, recipe.parallel.llm.pp, recipe.cluster.ranks) == (2, 2, 8)
    assert "attention-dropout: 0.1: has no setting: no activations are dropped" in text


def test_every_key_of_the_table_is_converted_or_told() -> None:
    """No rule of the table is unknown, whatever value a key has."""
    for other in other_keys().values():
        for value in (True, "text", 3, "0.5", ["a", "b"], None):
            settings = _settings_of(other.key, value)
            assert set(settings) <= {*_always(other.key), other.setting} or other.setting is None


def _settings_of(key: str, value: Any) -> dict[str, Any]:
    from mmtrain.api.converted_config import _Converter

    known = {key: other_keys()[key.replace("_", "").lower()]}
    return _Converter({key: value}, known, "hf").convert(Path("x.yaml")).settings


def _always(key: str) -> set[str]:
    return (
        set(_settings_of("hub_token", "x"))
        | {"train.lora.rank", "train.optimizer.min_lr"}
        | set(_settings_of("num_layers", 2))
    )


def test_arguments_of_scripts() -> None:
    text = "A=(\n  --x 1\n  --flag\n)\nB=/models/${NAME:-m}\nrun --path $B/x --list a b c --eq=3 --open $HOME2; ls --l"
    assert read_arguments(text) == {
        "x": "1", "flag": True, "path": "/models/m/x", "list": ["a", "b", "c"], "eq": "3", "open": "$HOME2"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "a: [1", "cannot read the configuration"),
        ("a.yaml", "just text", "found no keys; allowed: a mapping in YAML or JSON"),
        ("a.json", '{"foo": 1}', "no key of another trainer in it; found: foo"),
        ("a.sh", "echo hello", "found no keys"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        convert_config(tmp_path / name)
