"""What settings demand of each other. Each check states its rule and names the setting to change.

Checks also run on recipes with other problems, and then see their valid fields only. Properties that read nothing but
settings work there too; iterating over a section and `isinstance` do not.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from math import isclose
from pathlib import Path
from typing import TypeAlias

from mmtrain.errors import RecipeError
from mmtrain.recipe.checks.context_checks import check_context_parallelism
from mmtrain.recipe.checks.division_checks import check_layers_per_chunk
from mmtrain.recipe.checks.encoder_checks import ENCODER_CHECKS
from mmtrain.recipe.checks.guest_checks import check_guest
from mmtrain.recipe.checks.parallel_checks import (
    NUM_END_LAYERS,
    check_cluster_size,
    check_encoder_parallelism,
    check_expert_parallelism,
    check_llm_data_parallelism,
    check_llm_parallelism,
    check_model_chunks,
    check_num_microbatches,
    check_other_data_parallelism,
    check_parallel_encoders,
    check_placement,
    check_tp,
)
from mmtrain.recipe.raw_tree import KeyPath, Problem
from mmtrain.recipe.settings.data_settings import is_lengths_source, share_schedule
from mmtrain.recipe.settings.generator_settings import NUM_PIXEL_CHANNELS, GeneratorSettings
from mmtrain.recipe.settings.metric_names import shown_metric_name
from mmtrain.recipe.settings.modalities import GENERATOR, dotted_unit, unit_path
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.recipe.settings.train_settings import HELD_OUT_LOSSES, HELD_OUT_PREFIX

Check: TypeAlias = Callable[[Recipe], Iterator[Problem]]
MAX_SUM_ERROR = 1e-3  # of shares: 0.333 three times adds up to 1


def check_rotary_width(recipe: Recipe) -> Iterator[Problem]:
    """Rotary positions rotate pairs of features, so the width of a head is even."""
    llm = recipe.model.llm
    width = llm.head_dim or llm.hidden // llm.heads
    widths: dict[KeyPath, int] = {("model", "llm", "head_dim" if llm.head_dim else "heads"): width}
    if llm.full_attention is not None:
        widths["model", "llm", "full_attention", "head_dim"] = llm.full_attention.head_dim
    for path, of_head in widths.items():
        if of_head % 2:
            yield Problem(path, f"a head is {of_head} wide; allowed: an even width, for rotary positions")


def check_rope_context(recipe: Recipe) -> Iterator[Problem]:
    """Samples are not longer than the context up to which `dynamic` scaling does nothing."""
    scaling = recipe.model.llm.rope_scaling
    if scaling is None or scaling.kind != "dynamic" or scaling.original_positions is None:
        return
    name = "max_sample_tokens" if recipe.data.max_sample_tokens else "seq_len"
    max_tokens = recipe.data.sample_tokens
    if max_tokens > scaling.original_positions:
        text = (
            f"{max_tokens} is above {scaling.original_positions}, the context that model.llm.rope_scaling `dynamic` "
            "can be trained with; set data.max_sample_tokens to at most that"
        )
        yield Problem(("data", name), text)


def check_rope_sections(recipe: Recipe) -> Iterator[Problem]:
    """Sections of rotary positions cover a head, and every item has one place in the text."""
    model = recipe.model
    sections = model.llm.rope_sections
    if sections is None:
        return
    num_pairs = (model.llm.rope_width or model.llm.head_dim or model.llm.hidden // model.llm.heads) // 2
    if sum(sections) != num_pairs:
        text = f"they add up to {sum(sections)}; allowed: {num_pairs}, the pairs of features of a head that turn"
        yield Problem(("model", "llm", "rope_sections"), text)
    encoders = [name for name, encoder in model.all_encoders.items() if encoder.modality == "vision"]
    if len(encoders) > 1:
        text = f"an image has one place in the text, but features of {' and '.join(encoders)}; allowed: one of them"
        yield Problem(("model", "llm", "rope_sections"), text)
    for name in encoders:
        if model.all_encoders[name].extra_features:
            path = f"model.{dotted_unit(name)}"
            text = f"class tokens and newlines ({path}.class_feature, join_tiles) have no rows; set one of the two"
            yield Problem(("model", "llm", "rope_sections"), text)
        if model.all_encoders[name].features_per_item:
            path = f"model.{dotted_unit(name)}.projector.kind"
            text = f"features of a resampler ({path}) have no rows and columns; set one of the two"
            yield Problem(("model", "llm", "rope_sections"), text)
    if encoders and recipe.data.image.scheme in ("tiles", "pinpoints"):
        found = f"found `{recipe.data.image.scheme}`"
        text = f"{found}, allowed with model.llm.rope_sections: native or fixed, since a tile has no rows of its own"
        yield Problem(("data", "image", "scheme"), text)


def check_deepstack(recipe: Recipe) -> Iterator[Problem]:
    """The LLM has a block for each encoder block whose output it adds."""
    model = recipe.model
    for name, encoder in model.all_encoders.items():
        num_added = len(getattr(encoder, "deepstack", ()))
        if num_added > model.llm.layers:
            text = f"{num_added} blocks feed as many blocks of the LLM, which has {model.llm.layers}"
            yield Problem(("model", *unit_path(name), "deepstack"), text)


def check_run_length(recipe: Recipe) -> Iterator[Problem]:
    """A run states its steps or its epochs; epochs do not know when shares of sources change."""
    steps, epochs = recipe.train.steps, recipe.train.epochs
    if steps is None and epochs is None:
        text = "missing; allowed: a number of steps, or train.epochs, passes over the data"
        yield Problem(("train", "steps"), text)
    elif steps is not None and epochs is not None:
        text = f"found {epochs:g} beside train.steps {steps}; allowed: one of both. Set the other to null"
        yield Problem(("train", "epochs"), text)
    if epochs is not None and any(len(source.share or {}) > 1 for source in recipe.data.sources):
        text = f"{epochs:g}, but shares of sources change with steps; set train.steps"
        yield Problem(("train", "epochs"), text)


def check_learning_rates(recipe: Recipe) -> Iterator[Problem]:
    """The learning rate does not end above its peak."""
    optimizer = recipe.train.optimizer
    if optimizer.min_lr > optimizer.lr:
        text = f"{optimizer.min_lr:g} is above train.optimizer.lr {optimizer.lr:g}"
        yield Problem(("train", "optimizer", "min_lr"), text)


def check_muon(recipe: Recipe) -> Iterator[Problem]:
    """Muon has weights of linears to train."""
    if recipe.train.optimizer.kind == "muon" and recipe.train.lora is not None:
        text = (
            "found muon with train.lora, which freezes the linears that it trains; allowed: adamw. Remove one of both"
        )
        yield Problem(("train", "optimizer", "kind"), text)


def check_validation(recipe: Recipe) -> Iterator[Problem]:
    """Validation and evaluation have samples."""
    has_samples = bool(recipe.data.validation) or recipe.data.validation_fraction is not None
    for name in ("validate_every", "evaluate_every"):
        every = getattr(recipe.train, name)
        if every and not has_samples:
            text = f"{every}, but data.validation is empty; add a source, set data.validation_fraction, or set 0"
            yield Problem(("train", name), text)
    fraction = recipe.data.validation_fraction
    if fraction is not None and recipe.data.validation:
        text = f"{fraction:g}, but data.validation names sources of held-out samples; give one of the two"
        yield Problem(("data", "validation_fraction"), text)
    elif fraction is not None and all(_lengths_only(recipe)):
        text = f"{fraction:g}, but sources that state lengths have no samples to hold out; remove it"
        yield Problem(("data", "validation_fraction"), text)


def check_best(recipe: Recipe) -> Iterator[Problem]:
    """The metric of the best checkpoint is measured, and it is known which values are better."""
    best = recipe.train.best
    if best is None:
        return
    measured = _held_out_measures(recipe)
    if best.metric not in measured:
        allowed = ", ".join(measured) or "nothing, since train.validate_every and train.evaluate_every are 0"
        text = (
            f"found {best.metric!r}, allowed with this recipe: {allowed}; train.validate_every measures losses, "
            "train.evaluate_every the scores of train.metrics"
        )
        yield Problem(("train", "best", "metric"), text)
    elif best.rises is None:
        text = f"missing; {best.metric} is a plug-in's, which may be better when it is higher or lower: true or false"
        yield Problem(("train", "best", "higher_is_better"), text)


def _held_out_measures(recipe: Recipe) -> list[str]:
    """Return the names of what a run measures on held-out samples."""
    names: list[str] = []
    if recipe.train.validate_every:
        with_generator = recipe.model.generator is not None
        names += HELD_OUT_LOSSES if with_generator else HELD_OUT_LOSSES[:1]
    if recipe.train.evaluate_every:
        names += [HELD_OUT_PREFIX + shown_metric_name(name) for name in ("exact", *recipe.train.metrics)]
    return list(dict.fromkeys(names))


def check_sources(recipe: Recipe) -> Iterator[Problem]:
    """Sources hold samples or all of them hold lengths only; samples need a tokenizer, drawn ones a generator."""
    data = recipe.data
    lengths_only = _lengths_only(recipe)
    if any(lengths_only) and not all(lengths_only):
        text = "states lengths, other sources hold samples; allowed: either lengths in all sources or samples in all"
        yield Problem(("data", "sources", lengths_only.index(True)), text)
    for i, source in enumerate(data.validation):
        if is_lengths_source(Path(str(source.path)), source.format):
            text = "states lengths, which is nothing to validate on; name a source of samples"
            yield Problem(("data", "validation", i), text)
    for i, (source, has_lengths) in enumerate(zip(data.sources, lengths_only, strict=True)):
        for name in ("max_samples", "columns"):
            if has_lengths and getattr(source, name):
                text = "set for a source that states lengths, which has no samples; remove it"
                yield Problem(("data", "sources", i, name), text)
    for name in ("sources", "validation"):
        for i, source in enumerate(getattr(data, name)):
            if source.captions == "draw" and recipe.model.generator is None:
                text = "draw, but there is no model.generator; allowed: describe, or a generator"
                yield Problem(("data", name, i, "captions"), text)
    if data.tokenizer is None and not all(lengths_only):
        text = (
            "missing; allowed: a folder with tokenizer.json and a chat template, or a `tokenizers` JSON file (only "
            "sources that state lengths need none)"
        )
        yield Problem(("data", "tokenizer"), text)


def check_generator(recipe: Recipe) -> Iterator[Problem]:
    """A generator draws pixels of samples, or is planned on lengths; a U-Net is not split over ranks."""
    model, degrees = recipe.model.generator, recipe.parallel.generator
    if model is None:
        return
    if not all(_lengths_only(recipe)):
        yield from _check_drawn_images(model)
    if degrees.sp is True:
        text = "found true, allowed: false or auto (a generator does not support sequence parallelism)"
        yield Problem(("parallel", "generator", "sp"), text)
    if degrees.tp_overlap is True:
        text = "found true, allowed: false or auto (the linears of a generator do not run in chunks of tokens)"
        yield Problem(("parallel", "generator", "tp_overlap"), text)
    if degrees.recompute_activation_function is True:
        text = "found true, allowed: false or auto (layers of a generator are recomputed whole, by `recompute`)"
        yield Problem(("parallel", "generator", "recompute_activation_function"), text)
    if degrees.recompute == "selective":
        text = "found selective, allowed: auto, none or all (layers of a generator are recomputed whole)"
        yield Problem(("parallel", "generator", "recompute"), text)
    if model.kind == "dit":
        yield from check_tp("generator", degrees, heads=model.heads[0])
        num_layers = model.layers + NUM_END_LAYERS + 1  # and the projector of the context
        if degrees.pp is not None and degrees.pp > num_layers:
            yield Problem(("parallel", "generator", "pp"), f"{degrees.pp} is more than the unit's {num_layers} layers")
        return
    for name in ("pp", "vpp"):
        degree = getattr(degrees, name)
        if degree not in (None, 1):
            text = f"found {degree}, allowed: 1 (skip connections join the ends of a U-Net; use dp)"
            yield Problem(("parallel", "generator", name), text)


def _check_drawn_images(model: GeneratorSettings) -> Iterator[Problem]:
    """Images of samples are drawn in one size: as pixels, or as latents of an autoencoder."""
    if model.image_size is None:
        text = "missing; allowed: the side of the images to draw, in pixels (sources that state lengths need none)"
        yield Problem(("model", "generator", "image_size"), text)
    if model.vae is None and model.channels != NUM_PIXEL_CHANNELS:
        text = (
            f"found {model.channels}; allowed with samples: {NUM_PIXEL_CHANNELS}, the colours of a pixel, or the "
            "latent channels of an autoencoder that model.generator.vae names (sources that state lengths need none)"
        )
        yield Problem(("model", "generator", "channels"), text)


def check_sample_length(recipe: Recipe) -> Iterator[Problem]:
    """Every accepted sample fits into a group."""
    data = recipe.data
    if data.seq_len == "auto":
        if data.max_sample_tokens is None:
            text = "missing; with data.seq_len: auto it says which samples are kept, whatever the planner chooses"
            yield Problem(("data", "max_sample_tokens"), text)
        if isinstance(recipe.train.global_batch, int):
            text = (
                f"found {recipe.train.global_batch} groups; with data.seq_len: auto, which changes what a group is, "
                "allowed: {samples: N} or {tokens: N}"
            )
            yield Problem(("train", "global_batch"), text)
    elif data.max_sample_tokens is not None and data.max_sample_tokens > data.seq_len:
        path: KeyPath = ("data", "max_sample_tokens")
        yield Problem(path, f"{data.max_sample_tokens} is above data.seq_len {data.seq_len}: no group could hold it")


def check_budgets(recipe: Recipe) -> Iterator[Problem]:
    """Budgets belong to encoders of the model and to its generator; the LLM's budget is `seq_len`."""
    units = [*recipe.model.all_encoders]
    if recipe.model.generator is not None:
        units.append(GENERATOR)
    for unit in recipe.data.budgets:
        if unit == "llm":
            yield Problem(("data", "budgets", unit), "the LLM's budget is data.seq_len; remove it here")
        elif unit not in units:
            allowed = f"allowed: {', '.join(units)}" if units else "it has none, and no generator"
            yield Problem(("data", "budgets", unit), f"no encoder of this model is called {unit}; {allowed}")


def check_isf(recipe: Recipe) -> Iterator[Problem]:
    """ISF's encoder budgets count what `data.budgets` counts, and sources with shares have passes of their own."""
    data = recipe.data
    if data.grouping != "isf":
        return
    if data.isf.encoder_budget == "items" and data.budgets:
        text = "found `items`, but data.budgets are in tokens: remove data.budgets, or use `tokens`"
        yield Problem(("data", "isf", "encoder_budget"), text)
    if data.isf.remainder == "next_epoch" and any(source.share is not None for source in data.sources):
        text = "found `next_epoch`; sources with shares have no common epochs: use `keep`, or weights instead of shares"
        yield Problem(("data", "isf", "remainder"), text)


def check_padding(recipe: Recipe) -> Iterator[Problem]:
    """Only the baselines that count samples are padded."""
    if recipe.data.pad and recipe.data.grouping in ("matched", "isf"):
        text = (
            f"found true with data.grouping: {recipe.data.grouping}, which packs; allowed with random, length, device"
        )
        yield Problem(("data", "pad"), text)


def _if_samples(check: Check) -> Check:
    """Restrict a check to recipes whose sources hold samples."""

    @wraps(check)
    def check_if_samples(recipe: Recipe) -> Iterator[Problem]:
        if not all(_lengths_only(recipe)):
            yield from check(recipe)

    return check_if_samples


def check_offload(recipe: Recipe) -> Iterator[Problem]:
    """Something of the unit can go to host memory."""
    for name in (*recipe.model.all_encoders, "llm"):
        degrees = recipe.parallel.of(name)
        if degrees.offload in ("inputs", "all") and degrees.recompute in ("none", "selective"):
            text = (
                f"found {degrees.offload} with recompute {degrees.recompute}, which keeps all activations on the "
                "device; allowed: none, or recompute auto (as few blocks as memory demands) or all"
            )
            yield Problem(("parallel", *unit_path(name), "offload"), text)
    if recipe.model.generator is not None and recipe.parallel.generator.offload in ("inputs", "all"):
        text = f"found {recipe.parallel.generator.offload}, allowed: none or auto (layers of a generator keep theirs)"
        yield Problem(("parallel", "generator", "offload"), text)


def check_selective_recompute(recipe: Recipe) -> Iterator[Problem]:
    """Selective recomputation is that of activation functions, which another setting must not exclude."""
    for name in (*recipe.model.all_encoders, "llm"):
        degrees = recipe.parallel.of(name)
        if degrees.recompute == "selective" and degrees.recompute_activation_function is False:
            text = (
                "found false with recompute selective, which computes activation functions again; leave one of the two "
                "out (`recompute: none` keeps all but attention's scores)"
            )
            yield Problem(("parallel", *unit_path(name), "recompute_activation_function"), text)


def check_shares(recipe: Recipe) -> Iterator[Problem]:
    """All sources have shares or none has; at every step they add up to 1."""
    data = recipe.data
    for i, source in enumerate(data.validation):
        if source.share is not None:
            text = "validation uses every sample once; remove the share"
            yield Problem(("data", "validation", i, "share"), text)
    # In a recipe with other problems, shares are as they were written.
    schedules = [share_schedule(source.share) for source in data.sources]
    if all(schedule is None for schedule in schedules):
        return
    problems = list(_check_each_share(recipe, schedules))
    yield from problems
    if not problems:
        yield from _check_sums_of_shares([schedule or {} for schedule in schedules])
    if data.long_sample_tokens is not None:
        text = f"found {data.long_sample_tokens}; long samples have no steps of their own where sources have shares"
        yield Problem(("data", "long_sample_tokens"), f"{text}: remove it, or use weights instead of shares")


def _check_each_share(recipe: Recipe, schedules: list[dict[int, float] | None]) -> Iterator[Problem]:
    """Yield what is wrong with the share of a single source."""
    for i, (source, schedule) in enumerate(zip(recipe.data.sources, schedules, strict=True)):
        path: KeyPath = ("data", "sources", i)
        if schedule is None:
            text = "missing, while other sources have shares; allowed: a share for every source, or for none"
            yield Problem((*path, "share"), text)
            continue
        if source.weight != 1:
            text = (
                f"found {source.weight:g} beside a share; allowed: a share or a weight. Remove one of them everywhere"
            )
            yield Problem((*path, "weight"), text)
        if 0 not in schedule:
            steps = ", ".join(map(str, sorted(schedule))) or "none"
            text = f"the schedule has the steps {steps}; allowed: one that starts at step 0 (`0: ...`)"
            yield Problem((*path, "share"), text)


def _check_sums_of_shares(schedules: list[dict[int, float]]) -> Iterator[Problem]:
    """Yield the first step from which the shares do not add up to 1."""
    for step in sorted({step for schedule in schedules for step in schedule}):
        shares = [schedule[max(first for first in schedule if first <= step)] for schedule in schedules]
        if not isclose(sum(shares), 1, abs_tol=MAX_SUM_ERROR):
            terms = " + ".join(f"{share:g}" for share in shares)
            text = f"shares of step {step} add up to {terms} = {sum(shares):g}; allowed: 1"
            yield Problem(("data", "sources"), text)
            return


CHECKS: tuple[Check, ...] = (
    check_guest,
    check_parallel_encoders,
    check_encoder_parallelism,
    check_expert_parallelism,
    check_llm_parallelism,
    check_other_data_parallelism,
    check_llm_data_parallelism,
    check_num_microbatches,
    check_placement,
    check_model_chunks,
    check_layers_per_chunk,
    check_cluster_size,
    check_context_parallelism,
    check_offload,
    check_selective_recompute,
    check_rotary_width,
    check_rope_context,
    check_rope_sections,
    check_deepstack,
    check_run_length,
    check_learning_rates,
    check_muon,
    check_validation,
    check_best,
    check_sources,
    check_shares,
    check_generator,
    check_sample_length,
    check_budgets,
    check_isf,
    check_padding,
    *(_if_samples(check) for checks in ENCODER_CHECKS.values() for check in checks),
)


def _lengths_only(recipe: Recipe) -> list[bool]:
    """Return for each source whether it holds lengths only, without samples."""
    return [is_lengths_source(Path(str(source.path)), source.format) for source in recipe.data.sources]


def require_runnable(recipe: Recipe, command: str) -> None:
    """Raise RecipeError if `command` cannot run this recipe; the message names every setting that prevents it."""
    reasons = list(_plan_only_settings(recipe))
    if reasons:
        raise RecipeError(
            f"{command} cannot run this recipe, which is for `mmtrain plan`, `simulate` and `report` only:\n  "
            + "\n  ".join(reasons)
        )


def is_runnable(recipe: Recipe) -> bool:
    """Return whether this recipe can be run; if not, it can only be planned for."""
    return not any(_plan_only_settings(recipe))


def _plan_only_settings(recipe: Recipe) -> Iterator[str]:
    for i, source in enumerate(recipe.data.sources):
        if source.states_lengths:
            yield f"data.sources.{i}: {source.path} holds lengths only; name a file of samples, and set data.tokenizer"
