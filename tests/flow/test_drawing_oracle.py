"""A generator and its LLM train as a model of `diffusers` behind `transformers`' Llama, put together in plain torch."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, PixArtTransformer2DModel
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn

from mmtrain.balance import assign
from mmtrain.data import BatchBuilder, build_index
from mmtrain.families.decoders import decoder_weights
from mmtrain.families.diffusers_pixart import pixart_weights
from mmtrain.families.diffusers_unet import unet_weights
from mmtrain.families.family import FolderSettings
from mmtrain.families.weight_layouts import ParameterSource
from mmtrain.models.generator.keyed_noise import ImageKey, draw_noise, draw_steps
from mmtrain.models.optim.parameter_specs import stage_param_specs
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from mmtrain.runtime.evaluation.score_drawings import DrawingRequest
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.flow.cases import Mesh, plan
from tests.flow.drawing import DIT, NUM_SAMPLES, UNET, recipe, write_samples
from tests.flow.gather import copy, whole
from tests.models.generator.test_unet_layers import reference_model as unet_of
from tests.models.generator.tiny import images_of
from tests.pixels import undecodable_png
from tests.runtime.models import evaluated, randomize, run_folder
from tests.runtime.models import whole as whole_units

SAMPLES = np.array([0, 1, 2, 4, 5, 8], dtype=np.int64)  # of text, that draw an image, that draw two
NUM_SAMPLING_STEPS, GUIDANCE = 5, 1.5
WEIGHT = 0.7  # of the generator's loss
Tensors = dict[str, Tensor]


class Drawer(nn.Module):
    """Llama with learned queries in its input, whose outputs there are the context of a PixArt or a U-Net."""

    def __init__(self, settings: Recipe) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        llm, generator = settings.model.llm, generator_of(settings)
        config = LlamaConfig(
            hidden_size=llm.hidden, intermediate_size=llm.ffn, num_hidden_layers=llm.layers,
            num_attention_heads=llm.heads, num_key_value_heads=llm.kv_heads, vocab_size=llm.vocab,
            rms_norm_eps=llm.norm_eps, rope_parameters={"rope_type": "default", "rope_theta": llm.rope_base},
        )  # fmt: skip
        self.llama = LlamaForCausalLM(config)
        self.queries = nn.Parameter(torch.empty(generator.context_tokens, llm.hidden))
        self.projector = nn.Linear(llm.hidden, generator.context_width)
        self.is_unet = generator.kind == "unet"
        self.denoiser = unet_of(generator) if self.is_unet else pixart_of(generator)

    def read(self, ids: Tensor, query_id: int, num_images: int) -> tuple[Tensor, Tensor]:
        """Return the logits of a sample (T, vocabulary), and the LLM's outputs at the queries of its images."""
        is_query = ids == query_id
        embedded = self.llama.get_input_embeddings()(ids)
        embedded = embedded.masked_scatter(is_query[:, None], self.queries.repeat(num_images, 1))
        outputs = self.llama(inputs_embeds=embedded[None], output_hidden_states=True)
        return outputs.logits[0], outputs.hidden_states[-1][0, is_query]

    @torch.no_grad()
    def sample(self, ids: Tensor, query_id: int, noise: Tensor, num_steps: int, guidance: float) -> Tensor:
        """Draw the images of a sample from noise (images, 3, side, side) by DDIM on velocities, with guidance."""
        _, hidden = self.read(ids, query_id, len(noise))
        contexts = [self.projector(outputs).unflatten(0, (len(noise), -1)) for outputs in (hidden, hidden * 0)]
        scheduler = DDIMScheduler(1000, 1e-4, 0.02, "linear", clip_sample=False, prediction_type="v_prediction")
        scheduler.set_timesteps(num_steps)
        image = noise
        for timestep in scheduler.timesteps:
            steps = timestep.expand(len(noise))
            with_context, without = (self.predict(image, context, steps) for context in contexts)
            prediction = without + guidance * (with_context - without)
            image = scheduler.step(prediction, timestep, image).prev_sample
        return image

    def losses(self, ids: Tensor, labels: Tensor, query_id: int, images: "NoisyImages") -> tuple[Tensor, Tensor]:
        """Return the sums over a sample's target tokens and over the elements of its images; `labels[i]` follows i."""
        num_images = len(images.pixels)
        logits, hidden = self.read(ids, query_id, num_images)
        text_loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        if not num_images:
            return text_loss, text_loss.new_zeros(())
        context = self.projector(hidden).unflatten(0, (num_images, -1))
        noisy = DDPMScheduler(1000, 1e-4, 0.02, "linear").add_noise(images.pixels, images.noise, images.steps)
        errors = self.predict(noisy, context, images.steps) - images.noise
        return text_loss, (errors.square() * images.counted[:, None, None, None]).sum()

    def predict(self, noisy: Tensor, context: Tensor, steps: Tensor) -> Tensor:
        """Return what the generator says of noisy images (images, 3, side, side), without variances."""
        if self.is_unet:
            predicted: Tensor = self.denoiser(noisy, steps, context).sample
            return predicted
        without_variance: Tensor = self.denoiser(noisy, context, steps).sample.chunk(2, dim=1)[0]
        return without_variance


def pixart_of(generator: GeneratorSettings) -> PixArtTransformer2DModel:
    (width,), (heads,) = generator.widths, generator.heads
    return PixArtTransformer2DModel(
        num_attention_heads=heads, attention_head_dim=width // heads, in_channels=3, out_channels=6,
        num_layers=generator.layers, cross_attention_dim=generator.context_width,
        sample_size=generator.sample_size, patch_size=generator.patch, use_additional_conditions=False,
    )  # fmt: skip


class NoisyImages:
    """The images that a sample draws, their noise and their timesteps in a step; those called `broken` do not count."""

    def __init__(
        self, folder: Path, settings: Recipe, sample: int, seed: int | None = None, broken: str | None = None
    ) -> None:
        generator = generator_of(settings)
        entry = json.loads((folder / "train.json").read_text())[sample]
        opened = [np.asarray(Image.open(folder / name)) for name in entry["images"]]
        side = generator.image_size
        assert side is not None
        pixels = np.array(opened, dtype=np.float32).reshape(-1, side, side, 3)
        self.pixels = torch.from_numpy(pixels).movedim(3, 1) / 127.5 - 1.0
        self.counted = torch.tensor([float(name != broken) for name in entry["images"]])
        seed = settings.train.seed if seed is None else seed
        keys = [ImageKey(seed, 0, sample, item) for item in range(len(opened))]
        sides = side // generator.patch, side // generator.patch
        noise = torch.from_numpy(draw_noise(keys, [sides[0] * sides[1]] * len(keys), 3 * generator.patch**2))
        images = images_of(noise, [sides] * len(keys), generator.patch) if keys else []
        self.noise = torch.stack(images) if keys else self.pixels
        self.steps = torch.from_numpy(draw_steps(keys, 1000))


def generator_of(settings: Recipe) -> GeneratorSettings:
    generator = settings.model.generator
    assert generator is not None
    return generator


def sources_of(settings: Recipe) -> dict[str, ParameterSource]:
    """Return which tensors of `Drawer.llama` and `Drawer.denoiser` our parameters are, by name."""
    llm = settings.model.llm.model_dump() | {"head_dim": settings.model.llm.hidden // settings.model.llm.heads}
    of_llama = decoder_weights(FolderSettings({"llm": llm}))
    generator = generator_of(settings)
    weights = {"dit": pixart_weights, "unet": unet_weights}[generator.kind]
    return {source.name: source for source in (*of_llama, *weights(generator.model_dump()))}


OWN = {
    "llm.layers.0.queries": "queries",
    "generator.layers.0.linear.weight": "projector.weight",
    "generator.layers.0.linear.bias": "projector.bias",
}


def pairs(settings: Recipe, ours: Tensors, theirs: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor, Tensor]]:
    """Yield every piece of our tensors, by name, and the piece of theirs that it equals, as views of one shape."""
    for name, source in sources_of(settings).items():
        prefix = "denoiser." if name.startswith("generator.") else "llama."
        for block in source.blocks:
            part = ours[name][tuple(slice(lo, hi) for lo, hi in block.view_box)]
            wanted = theirs[prefix + block.tensor][tuple(slice(lo, hi) for lo, hi in block.tensor_box)]
            yield name, part, wanted
    for name, their_name in OWN.items():
        yield name, ours[name], theirs[their_name]


def weights_of(stages: Iterable[StageModule]) -> Tensors:
    """Return the whole weights of stages that no rank shares."""
    weights = {}
    for stage in stages:
        specs = stage_param_specs(stage, stage.unit, tp=1)
        for name, param in stage.named_parameters():
            weights[specs[name].name] = param.detach().clone().view(specs[name].full_shape)
    return weights


def train_one_step(settings: Recipe) -> tuple[dict[str, float], Tensors, Tensors]:
    """Run by a plan on one rank: the losses by unit, the weights before the step, and the gradients."""
    wanted = plan(settings, llm=Mesh((), (0,)), generator=Mesh((), (0,)))
    context = build_rank_context(settings, wanted, World(0, 1, torch.device("cpu")))
    weights = weights_of(stage for unit in context.units.values() for stage in unit.stages.values())
    index = build_index(settings)
    groups = np.array_split(SAMPLES, settings.train.global_batch)
    meta = assign(0, 0, groups, index.lengths, context.dp, context.num_microbatches)
    builder = BatchBuilder(index, settings, context.needs, context.num_microbatches)
    outcome = context.train(builder.build(meta), 0.01)
    gradients = whole([copy(g) for unit in context.optimizer.units.values() for g in unit.gradients()])
    return dict(outcome.unit_losses), weights, gradients


def drawer_with(settings: Recipe, weights: Tensors) -> Drawer:
    drawer = Drawer(settings)
    with torch.no_grad():
        for _, ours, theirs in pairs(settings, weights, dict(drawer.named_parameters())):
            theirs.copy_(ours.reshape(theirs.shape))
    return drawer


def encode(folder: Path, sample: int) -> tuple[Tensor, Tensor, int]:
    """Return ids and labels of a sample, and the id of a query; the format of chats has tests of its own."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = False
    entry = json.loads((folder / "train.json").read_text())[sample]
    drawn = "<|gen|>" + 3 * "<|query|>" + "<|/gen|>"
    question, answer = (turn["content"] for turn in entry["messages"])
    asked = tokenizer.encode(f"<|user|>{question}<|end|><|assistant|>").ids
    ids = asked + tokenizer.encode(answer.replace("<image>", drawn) + "<|end|>").ids
    hidden = {tokenizer.token_to_id(token) for token in ("<|query|>", "<|/gen|>")}
    labels = [token if i >= len(asked) and token not in hidden else -100 for i, token in enumerate(ids)]
    return torch.tensor(ids), torch.tensor([*labels[1:], -100]), tokenizer.token_to_id("<|query|>")


@pytest.mark.parametrize("broken", [None, "lime.png"], ids=["all images", "one that cannot be decoded"])
@pytest.mark.parametrize("generator", [DIT, UNET], ids=["transformer", "u-net"])
def test_losses_and_gradients_equal_those_of_diffusers_and_transformers(
    generator: dict[str, Any], broken: str | None, tmp_path: Path
) -> None:
    """Compare one step; where an image cannot be decoded, only its part of the loss is missing."""
    intact, damaged = tmp_path / "intact", tmp_path / "damaged"
    intact.mkdir()
    write_samples(intact, shows_images=False)
    shutil.copytree(intact, damaged)
    if broken is not None:
        (damaged / broken).write_bytes(undecodable_png((intact / broken).read_bytes()))
    settings = recipe(
        damaged, model__vision=None, model__generator={**generator, "loss_weight": WEIGHT}, train__global_batch=2,
        train__optimizer={"lr": 0.01, "clip_norm": None},
    )  # fmt: skip
    [(losses, weights, gradients)] = run_ranks(1, train_one_step, settings)
    drawer = drawer_with(settings, weights)
    parts, num_targets, num_elements = [], 0, 0
    for sample in SAMPLES.tolist():
        images = NoisyImages(intact, settings, sample, broken=broken)
        ids, labels, query_id = encode(intact, sample)
        parts.append(drawer.losses(ids, labels, query_id, images))
        num_targets += int((labels >= 0).sum())
        num_elements += images.pixels.numel()
    text_loss, drawing_loss = (torch.stack(part).sum() for part in zip(*parts, strict=True))
    text_loss, drawing_loss = text_loss / num_targets, WEIGHT * drawing_loss / num_elements
    (text_loss + drawing_loss).backward()  # type: ignore[no-untyped-call]
    assert losses["llm"] == pytest.approx(text_loss.item(), rel=1e-5)
    assert losses["generator"] == pytest.approx(drawing_loss.item(), rel=1e-5)
    expected = {name: param.grad for name, param in drawer.named_parameters() if param.grad is not None}
    compared = list(pairs(settings, gradients, expected))
    assert {name for name, _, _ in compared} == gradients.keys()
    largest = max(float(theirs.norm()) for _, _, theirs in compared)
    for name, ours, theirs in compared:
        assert (ours - theirs.reshape(ours.shape)).norm() <= 1e-4 * max(float(theirs.norm()), 1e-3 * largest), name
    assert expected["queries"].norm() > 1e-3 * largest  # the generator's gradient reaches the LLM's input


@pytest.mark.parametrize("generator", [DIT, UNET], ids=["dit", "unet"])
def test_drawn_images_equal_those_of_diffusers(generator: dict[str, Any], tmp_path: Path) -> None:
    write_samples(tmp_path, shows_images=False)
    settings = recipe(
        tmp_path, model__vision=None, data__validation=[{"path": tmp_path / "train.json"}],
        model__generator=generator | {"context_dropout": 0.1, "prediction": "velocity"},
    )  # fmt: skip
    units = whole_units(settings)
    randomize(units.values())
    *_, last_layer = units["generator"].layers.values()
    with torch.no_grad():
        for param in last_layer.parameters():  # so that pixels are in their range
            param.mul_(0.2)
    drawer = drawer_with(settings, weights_of(units.values()))
    run = run_folder(tmp_path / "run", settings, units)
    drawing = evaluated(run, drawing=DrawingRequest(steps=NUM_SAMPLING_STEPS, guidance=GUIDANCE, seed=3)).drawings
    assert drawing is not None
    rows = json.loads((run / "samples" / "samples.json").read_text())
    assert len(rows) == drawing.images == 3 * NUM_SAMPLES // 5
    for row in rows:
        number, place = map(int, row["file"].split("-")[:2])
        ids, _, query_id = encode(tmp_path, number)
        images = NoisyImages(tmp_path, settings, number, seed=3)
        drawn = np.asarray(Image.open(run / "samples" / "drawn" / row["file"]), dtype=np.float32)
        expected = drawer.sample(ids, query_id, images.noise, NUM_SAMPLING_STEPS, GUIDANCE)[place]
        expected = (expected.clamp(-1, 1) + 1) * 127.5
        assert np.abs(drawn - expected.movedim(0, 2).numpy()).max() < 0.6  # rounded to a byte
        assert np.mean((drawn > 0) & (drawn < 255)) > 0.1, "not all is clamped"
