"""Tiny random models of all families, the plans they train by, and what `transformers` computes with them.

A new family is one row of `TINY_FAMILIES`; the tests are in `tests/flow/test_pretrained.py`.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import soundfile
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from mmtrain.checkpoint import Checkpoint
from mmtrain.data import DataIndex, build_index, load_tokenizer
from mmtrain.data.formats.sample import Sample
from mmtrain.families import FAMILIES, Family
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.plan import StagePlan, UnitPlan
from mmtrain.recipe import LoadedRecipe, Recipe, load_recipe
from mmtrain.runtime.evaluation.generate import load_generator
from mmtrain.runtime.evaluation.qa_eval import QuestionAnswerer, select_questions
from mmtrain.runtime.world import World
from mmtrain.weights.tiny_model import write_tiny_model
from tests.models.factory import randomize
from tests.weights.test_tiny_model import VARIANTS

NUM_TRAIN, NUM_HELDOUT = 48, 12  # samples
NUM_ANSWER_TOKENS = 12
MESH = "{tp: 2, dp: 1, vpp: 2, sp: true}"  # pp is 2 on four ranks
RECIPE = """
name: sft
model: {{hf: {folder}}}
data:
  sources: [{{path: {folder}/conversations/some.json}}]
  validation: [{{path: {folder}/conversations/others.json}}]
  seq_len: 384
parallel: {parallel}
cluster: {{hardware: cpu-core}}
train:
  steps: 3
  global_batch: 4
  validate_every: 3
  checkpoint: {{every: 3}}
  optimizer: {{lr: 3.0e-4, clip_norm: null}}
"""

Files = Mapping[str, Sequence[Path]]  # the media of a sample, by kind
Arguments = dict[str, Any]  # of a model of `transformers`


def no_media(folder: Path, files: Files, ids: Tensor) -> Arguments:
    """Return what a model takes beside the ids (T,) of a sample: nothing."""
    return {}


def _prepared(folder: Path, pictures: Sequence[Path], **passed: Any) -> Arguments:
    """Return what the picture processor of the folder makes of them by Pillow: torchvision differs at sharp edges."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return dict(processor([Image.open(path) for path in pictures], return_tensors="pt", **passed))


def squared_pictures(folder: Path, files: Files, ids: Tensor) -> Arguments:
    """Return pictures of one size."""
    return {"pixel_values": _prepared(folder, files["image"])["pixel_values"]} if files["image"] else {}


def typed_pictures(folder: Path, files: Files, ids: Tensor) -> Arguments:
    """Return pictures of one size, and which tokens are of images, on which attention of Gemma 3 depends."""
    from transformers import AutoConfig

    types = (ids == AutoConfig.from_pretrained(folder).image_token_id).int()[None]
    return {**squared_pictures(folder, files, ids), "token_type_ids": types}


def tiled_pictures(folder: Path, files: Files, ids: Tensor) -> Arguments:
    """Return the tiles of InternVL."""
    from transformers import GotOcr2ImageProcessorPil

    if not files["image"]:
        return {}
    config = json.loads((folder / "preprocessor_config.json").read_text())
    sized = {key: config[key] for key in ("size", "min_patches", "max_patches", "image_mean", "image_std")}
    processor = GotOcr2ImageProcessorPil(**sized, crop_to_patches=True)
    tiles = [processor(Image.open(path), return_tensors="pt")["pixel_values"] for path in files["image"]]
    return {"pixel_values": torch.cat(tiles)}


def joined_tiles(folder: Path, files: Files, ids: Tensor) -> Arguments:
    """Return the tiles of LLaVA-NeXT, and the sizes of the pictures that they are joined to."""
    return _prepared(folder, files["image"]) if files["image"] else {}


def native_pictures(folder: Path, files: Files, ids: Tensor) -> Arguments:
    """Return pictures of any shape, as models of Qwen-VL's line take them."""
    from transformers import AutoConfig

    if not files["image"]:
        return {}
    types = (ids == AutoConfig.from_pretrained(folder).image_token_id).int()[None]
    return {**_prepared(folder, files["image"]), "mm_token_type_ids": types}


def pixtral_pictures(folder: Path, files: Files, ids: Tensor) -> Arguments:
    """Return pictures of any shape, padded to one, and their sizes."""
    from transformers import AutoConfig

    if not files["image"]:
        return {}
    config = AutoConfig.from_pretrained(folder)
    passed = {"patch_size": config.vision_config.patch_size * config.spatial_merge_size}  # by Pixtral's processor
    return _prepared(folder, files["image"], **passed)


def pooled_pictures(folder: Path, files: Files, ids: Tensor) -> Arguments:
    """Return the patches of pictures of any shape, where these lie, and which tokens are of pictures."""
    from transformers import AutoConfig
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    types = {"mm_token_type_ids": (ids == AutoConfig.from_pretrained(folder).image_token_id).int()[None]}
    if not files["image"]:
        return types
    pictures = [Image.open(path).convert("RGB") for path in files["image"]]
    pixels = Gemma4ImageProcessorPil.from_pretrained(folder)(pictures, return_tensors="pt")
    return {name: pixels[name] for name in ("pixel_values", "image_position_ids")} | types


def whisper_clips(folder: Path, files: Files, ids: Tensor) -> Arguments:
    """Return the log-mel frames of clips."""
    from transformers import AutoFeatureExtractor

    if not files["audio"]:
        return {}
    waves = [soundfile.read(path, dtype="float32")[0] for path in files["audio"]]
    clips = AutoFeatureExtractor.from_pretrained(folder)(
        waves, sampling_rate=16000, padding="max_length", return_attention_mask=True, return_tensors="pt"
    )
    return {"input_features": clips.input_features, "feature_attention_mask": clips.attention_mask}


def pictures_and_clips(folder: Path, files: Files, ids: Tensor) -> Arguments:
    """Return pictures of any shape, and the log-mel frames of clips, each of which is prepared by itself."""
    from transformers import AutoFeatureExtractor

    arguments: Arguments = _prepared(folder, files["image"]) if files["image"] else {}
    if files["audio"]:
        extract = AutoFeatureExtractor.from_pretrained(folder)
        options = {"sampling_rate": 16000, "padding": True, "truncation": False, "return_tensors": "pt"}
        waves = [soundfile.read(path, dtype="float32")[0] for path in files["audio"]]
        mels = [extract(wave, **options).input_features[0].T for wave in waves]
        lengths = torch.tensor([len(of_clip) for of_clip in mels])
        padded = torch.nn.utils.rnn.pad_sequence(mels, batch_first=True)
        is_frame = torch.arange(padded.shape[1]) < lengths[:, None]
        arguments |= {"input_features": padded.transpose(1, 2), "feature_attention_mask": is_frame.long()}
    return arguments


def one_clip_at_a_time(model: Any) -> None:
    """Let Qwen3-Omni encode each clip by itself: it pads short ones where a longer one is in the same call."""
    encoder = next(module for name, module in model.named_modules() if name.endswith("audio_tower"))  # 5.24 moved it
    encode = encoder.forward

    def encode_apart(input_features: Tensor, feature_lens: Tensor, **options: Any) -> Any:
        clips = zip(input_features.split(feature_lens.tolist(), dim=1), feature_lens.split(1), strict=True)
        outputs = [encode(mels, feature_lens=frames, **options) for mels, frames in clips]
        outputs[0].last_hidden_state = torch.cat([output.last_hidden_state for output in outputs])
        return outputs[0]

    encoder.forward = encode_apart


@dataclass(frozen=True)
class TinyFamily:
    """A family, or one of its variants, that is proved equal to `transformers`."""

    family: Family
    encoders: tuple[str, ...] = ()
    arguments: Callable[[Path, Files, Tensor], Arguments] = no_media  # (folder, media, ids) -> of the model beside ids
    untrained: frozenset[str] = field(default_factory=frozenset)  # our parameters that never train
    more_plans: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # as in `parallel`
    adapt: Callable[[Any], None] = lambda _: None  # what `transformers` must do otherwise

    @property
    def parallel(self) -> dict[str, tuple[int, str]]:
        """Return by name the plans that it trains by: the number of ranks, and `parallel` of a recipe.

        Disaggregated, an encoder has one replica and the LLM two.
        """
        if not self.encoders:
            return {"unified": (4, f"{{llm: {MESH}}}")}
        apart = "".join(f"{unit}: {{tp: {2 if i == 0 else 1}, pp: 1, dp: 1}}, " for i, unit in enumerate(self.encoders))
        on_top = "".join(f"{unit}: {{tp: 2, pp: 1}}, " for unit in self.encoders)
        num_apart = len(self.encoders) + 3
        return {
            "unified": (4, f"{{placement: unified, llm: {MESH}}}"),
            "disaggregated": (num_apart, f"{{placement: disaggregated, {apart}llm: {{tp: 1, pp: 1, dp: 2}}}}"),
            "colocated": (4, f"{{placement: colocated, {on_top}llm: {{tp: 2, pp: 2, vpp: 2}}}}"),
            "replicated": (4, "{placement: replicated}"),
            **self.more_plans,
        }

    def write(self, folder: Path) -> None:
        """Write a tiny model, whose norms and biases are random too, and its conversations."""
        write_tiny_model(self.family, folder, seed=0)
        model = self.open(folder)
        randomize(model)
        model.save_pretrained(folder)
        conversations = folder / "conversations"
        for source, target, count in (("train", "some", NUM_TRAIN), ("heldout", "others", NUM_HELDOUT)):
            rows = json.loads((conversations / f"{source}.json").read_text(encoding="utf-8"))
            (conversations / f"{target}.json").write_text(json.dumps(rows[:count]), encoding="utf-8")

    def open(self, folder: Path) -> nn.Module:
        """Open a folder as `transformers` does."""
        import transformers

        model: nn.Module = getattr(transformers, self.family.architectures[0]).from_pretrained(folder)
        self.adapt(model)
        return model.eval()

    def loss(self, model: nn.Module, folder: Path, recipe: Recipe) -> Tensor:
        """Return the mean loss per target of the held-out samples, one after another.

        Media are prepared by the processors of the folder, and texts by our tokenizer.
        """
        index, tokenizer = build_index(recipe, "validation"), load_tokenizer(recipe.data.tokenizer_path)
        assert len(index.samples) == NUM_HELDOUT
        total, num_targets = torch.zeros(()), 0
        for number, sample in enumerate(index.samples):
            encoded = tokenizer.encode(sample, index.media_features(number, tokenizer.writes_rows_apart))
            ids, labels = torch.from_numpy(encoded.ids), torch.from_numpy(encoded.labels)
            arguments = self.arguments(folder, files_of(sample), ids)
            logits = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], **arguments).logits[0]
            total = total + F.cross_entropy(logits, labels, reduction="sum")
            num_targets += int((labels >= 0).sum())
        return total / num_targets

    def assert_same_answers(self, recipe: Recipe, checkpoint: Checkpoint, folder: Path) -> None:
        """Let our model and that of the folder answer the held-out questions, greedily."""
        index, tokenizer = build_index(recipe, "validation"), load_tokenizer(recipe.data.tokenizer_path)
        model: Any = self.open(folder)
        padding = list(range(tokenizer.vocab_size, recipe.model.llm.vocab))  # ids that no text has
        answers = answers_of(recipe, checkpoint, index)
        for number, ours in answers.items():
            sample = index.samples[number]
            features = index.media_features(number, tokenizer.writes_rows_apart)
            prompt = torch.from_numpy(tokenizer.prompt_ids(sample, features))
            tokens = model.generate(
                input_ids=prompt[None], attention_mask=torch.ones_like(prompt)[None],
                max_new_tokens=NUM_ANSWER_TOKENS, do_sample=False, eos_token_id=sorted(tokenizer.end_ids),
                pad_token_id=0, suppress_tokens=padding, **self.arguments(folder, files_of(sample), prompt),
            )[0, len(prompt) :].tolist()  # fmt: skip
            assert ours == list(itertools.takewhile(lambda token: token not in tokenizer.end_ids, tokens))
        assert len({tuple(answer) for answer in answers.values()}) > 1, "one answer to every question proves little"


def files_of(sample: Sample) -> Files:
    """Return the files of a sample's media."""
    return {kind: [Path(medium.path) for medium in media] for kind, media in sample.media.items()}  # type: ignore[union-attr]


def answers_of(recipe: Recipe, checkpoint: Checkpoint, index: DataIndex) -> dict[int, list[int]]:
    """Return the greedy answers of our model to all questions of the index, by the number of the sample."""
    ParallelGroups.single()
    world = World(0, 1, torch.device("cpu"))
    layout = {
        unit.name: UnitPlan(tp=1, pp=1, dp=1, ranks=(0,), stages=(StagePlan(stage=0, layers=(0, len(unit.layers))),))
        for unit in build_model_shape(recipe).units
    }
    tokenizer = load_tokenizer(recipe.data.tokenizer_path)
    generator = load_generator(recipe, layout, world, checkpoint, tokenizer)
    answerer = QuestionAnswerer(generator, recipe, tokenizer, index, world, NUM_ANSWER_TOKENS)
    answers, _ = answerer.generate(select_questions(index, None), blank=False)
    return {question.number: answer for question, answer in answers.items()}


def load_tiny_recipe(folder: Path, parallel: str, *overrides: str) -> LoadedRecipe:
    """Load a recipe that starts from the folder, beside which it is written."""
    path = folder.parent / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder, parallel=parallel), encoding="utf-8")
    return load_recipe(path, overrides, env={})


TINY_FAMILIES: dict[str, TinyFamily] = {
    **{name: TinyFamily(FAMILIES[name]) for name in ("gemma3_text", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")},
    **{
        name: TinyFamily(FAMILIES[name])
        for name in ("gemma4_text", "glm4_moe", "mixtral", "qwen2_moe", "qwen3_5_text", "qwen3_5_moe_text")
    },
    "smolvlm": TinyFamily(FAMILIES["smolvlm"]),
    "gemma3": TinyFamily(FAMILIES["gemma3"], ("vision",), typed_pictures),
    "gemma4": TinyFamily(
        FAMILIES["gemma4"],
        ("vision",),
        pooled_pictures,
        untrained=frozenset(f"vision.layers.4.average_{part}" for part in ("shift", "scale")),
    ),
    "glm4v_moe": TinyFamily(FAMILIES["glm4v_moe"], ("vision",), native_pictures),
    "internvl": TinyFamily(FAMILIES["internvl"], ("vision",), tiled_pictures),
    "llava": TinyFamily(FAMILIES["llava"], ("vision",), squared_pictures),
    "llava_next": TinyFamily(FAMILIES["llava_next"], ("vision",), joined_tiles),
    "llava with class features": TinyFamily(VARIANTS["llava with class features"], ("vision",), squared_pictures),
    "llava with siglip": TinyFamily(VARIANTS["llava with siglip"], ("vision",), squared_pictures),
    "mistral3": TinyFamily(FAMILIES["mistral3"], ("vision",), pixtral_pictures),
    "qwen2_audio": TinyFamily(
        FAMILIES["qwen2_audio"], ("audio",), whisper_clips, frozenset({"audio.layers.0.positions"})
    ),
    "qwen2_vl": TinyFamily(FAMILIES["qwen2_vl"], ("vision",), native_pictures),
    "qwen2_5_vl": TinyFamily(FAMILIES["qwen2_5_vl"], ("vision",), native_pictures),
    "qwen3_5": TinyFamily(FAMILIES["qwen3_5"], ("vision",), native_pictures),
    "qwen3_5_moe": TinyFamily(FAMILIES["qwen3_5_moe"], ("vision",), native_pictures),
    "qwen3_omni_moe": TinyFamily(
        FAMILIES["qwen3_omni_moe"],
        ("vision", "audio"),
        pictures_and_clips,
        more_plans={"experts": (4, "{placement: unified, llm: {tp: 1, pp: 2, dp: 2, ep: 2}}")},
        adapt=one_clip_at_a_time,
    ),
    "qwen3_vl": TinyFamily(FAMILIES["qwen3_vl"], ("vision",), native_pictures),
    "qwen3_vl_moe": TinyFamily(FAMILIES["qwen3_vl_moe"], ("vision",), native_pictures),
}
