"""A generator and its LLM train as a model of `diffusers` behind `transformers`' Llama, put together in plain torch."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, PixArtTransformer2DModel
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
from mmtrain.models.parameter_specs import stage_param_specs
from mmtrain.recipe import Recipe
from mmtrain.recipe.generator_settings import GeneratorSettings
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.flow.cases import Mesh, plan
from tests.flow.drawing import DIT, UNET, recipe, write_samples
from tests.flow.gather import copy, whole
from tests.models.generator.test_unet_layers import reference_model as unet_of
from tests.models.generator.tiny import images_of

SAMPLES = np.array([0, 1, 2, 4, 5, 8], dtype=np.int64)  # of text, that draw an image, that draw two
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

    def losses(self, ids: Tensor, labels: Tensor, query_id: int, images: "NoisyImages") -> tuple[Tensor, Tensor]:
        """Return the sums over a sample's target tokens and over the elements of its images; `labels[i]` follows i."""
        is_query = ids == query_id
        num_images = len(images.pixels)
        embedded = self.llama.get_input_embeddings()(ids)
        embedded = embedded.masked_scatter(is_query[:, None], self.queries.repeat(num_images, 1))
        outputs = self.llama(inputs_embeds=embedded[None], output_hidden_states=True)
        text_loss = nn.functional.cross_entropy(outputs.logits[0], labels, reduction="sum")
        if not num_images:
            return text_loss, text_loss.new_zeros(())
        context = self.projector(outputs.hidden_states[-1][0, is_query]).unflatten(0, (num_images, -1))
        noisy = DDPMScheduler(1000, 1e-4, 0.02, "linear").add_noise(images.pixels, images.noise, images.steps)
        if self.is_unet:
            predicted = self.denoiser(noisy, images.steps, context).sample
        else:
            predicted, _ = self.denoiser(noisy, context, images.steps).sample.chunk(2, dim=1)
        return text_loss, (predicted - images.noise).square().sum()


def pixart_of(generator: GeneratorSettings) -> PixArtTransformer2DModel:
    (width,), (heads,) = generator.widths, generator.heads
    return PixArtTransformer2DModel(
        num_attention_heads=heads, attention_head_dim=width // heads, in_channels=3, out_channels=6,
        num_layers=generator.layers, cross_attention_dim=generator.context_width,
        sample_size=generator.sample_size, patch_size=generator.patch, use_additional_conditions=False,
    )  # fmt: skip


class NoisyImages:
    """The images that a sample draws, their noise and their timesteps in a step."""

    def __init__(self, folder: Path, settings: Recipe, sample: int) -> None:
        generator = generator_of(settings)
        entry = json.loads((folder / "train.json").read_text())[sample]
        opened = [np.asarray(Image.open(folder / name)) for name in entry["images"]]
        side = generator.image_size
        assert side is not None
        pixels = np.array(opened, dtype=np.float32).reshape(-1, side, side, 3)
        self.pixels = torch.from_numpy(pixels).movedim(3, 1) / 127.5 - 1.0
        keys = [ImageKey(settings.train.seed, 0, sample, item) for item in range(len(opened))]
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


def train_one_step(settings: Recipe) -> tuple[dict[str, float], Tensors, Tensors]:
    """Run by a plan on one rank: the losses by unit, the weights before the step, and the gradients."""
    wanted = plan(settings, llm=Mesh((), (0,)), generator=Mesh((), (0,)))
    context = build_rank_context(settings, wanted, World(0, 1, torch.device("cpu")))
    weights = {}
    for stage in [stage for unit in context.units.values() for stage in unit.stages.values()]:
        specs = stage_param_specs(stage, stage.unit, tp=1)
        for name, param in stage.named_parameters():
            weights[specs[name].name] = param.detach().clone().view(specs[name].full_shape)
    index = build_index(settings)
    groups = np.array_split(SAMPLES, settings.train.global_batch)
    meta = assign(0, 0, groups, index.lengths, context.dp, context.num_microbatches)
    builder = BatchBuilder(index, settings, context.needs, context.num_microbatches)
    outcome = context.train(builder.build(meta), 0.01)
    gradients = whole([copy(g) for unit in context.optimizer.units.values() for g in unit.gradients()])
    return dict(outcome.unit_losses), weights, gradients


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


@pytest.mark.parametrize("generator", [DIT, UNET], ids=["transformer", "u-net"])
def test_losses_and_gradients_equal_those_of_diffusers_and_transformers(
    generator: dict[str, Any], tmp_path: Path
) -> None:
    write_samples(tmp_path, shows_images=False)
    settings = recipe(
        tmp_path, model__vision=None, model__generator={**generator, "loss_weight": WEIGHT}, train__global_batch=2,
        train__optimizer={"lr": 0.01, "clip_norm": None},
    )  # fmt: skip
    [(losses, weights, gradients)] = run_ranks(1, train_one_step, settings)
    drawer = Drawer(settings)
    with torch.no_grad():
        for _, ours, theirs in pairs(settings, weights, dict(drawer.named_parameters())):
            theirs.copy_(ours.reshape(theirs.shape))
    parts, num_targets, num_elements = [], 0, 0
    for sample in SAMPLES.tolist():
        images = NoisyImages(tmp_path, settings, sample)
        ids, labels, query_id = encode(tmp_path, sample)
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
