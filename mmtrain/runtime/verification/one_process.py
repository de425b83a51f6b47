"""Train without a plan: one process, one sample at a time, plain autograd, and optimizers of whole tensors."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from mmtrain.data.loading.batch_builder import StepData
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.megatron.selection_biases import SelectionBiases
from mmtrain.models.optim.muon import AdamWBesideMuon
from mmtrain.models.optim.orthogonal_update import orthogonal_update
from mmtrain.models.optim.parameter_specs import UnitRates
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.models.stage.stage_module import StageModule, StageSpec
from mmtrain.program import LLM
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.modalities import GENERATOR
from mmtrain.runtime.execution.unit_inputs import unit_inputs
from mmtrain.runtime.execution.unit_rates import unit_rates

LoadSample = Callable[[int], StepData]  # sample id -> the input of all units, with the sample as the only microbatch


class OneProcess:
    """The whole model on one device, each unit as one module."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        """Build the model with the same initial weights as under any plan, in fp32."""
        self._recipe = recipe
        shape, groups = build_model_shape(recipe), ParallelGroups.single()
        options = StageOptions(torch.float32, device, recipe.train.seed, "sdpa")
        stages = {
            unit.name: build_stage(recipe.model, shape, StageSpec(unit.name, (0, len(unit.layers))), groups, options)
            for unit in shape.units
        }
        self._stages = {name: [stage] for name, stage in stages.items()}
        self._units = nn.ModuleDict(stages)
        self._optimizers = _build_optimizers(recipe, stages)
        moe = recipe.model.llm.moe
        self._biases: SelectionBiases | None = None
        if moe is not None and moe.selection_bias_rate:
            self._biases = SelectionBiases(self._stages[LLM], groups.dp, moe.selection_bias_rate)

    def step(
        self, samples: Sequence[int], loss_scale: Mapping[str, float], num_tokens: int, load: LoadSample
    ) -> tuple[float, dict[str, Tensor]]:
        """Train one step on the samples, some of which may occur several times; return the loss and all gradients.

        Parameters that no sample reaches have a gradient of zero, as under a plan, and so their weights decay.
        loss_scale: by unit with a loss, what the sum over its targets is multiplied by (`loss_scales`).
        num_tokens: of the LLM in all samples.
        """
        for param in self._units.parameters():
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        counts = list(Counter(samples).items())
        if self._biases is not None:  # a backward counts the tokens of experts once
            self._biases.reset()
            counts = [(sample, 1) for sample in samples]
        loss = 0.0
        for sample, count in counts:
            part = self._loss(load(sample), loss_scale, count / num_tokens) * count
            loss += float(part.detach())
            if part.requires_grad:  # not for text alone through a frozen LLM
                torch.autograd.backward(part)
        gradients = {
            name: param.grad.clone().cpu() for name, param in self._units.named_parameters() if param.grad is not None
        }
        for step in self._optimizers:
            step()
        if self._biases is not None:
            self._biases.step(torch.zeros((), device=next(self._units.parameters()).device))
        return loss, gradients

    def _loss(self, data: StepData, loss_scale: Mapping[str, float], token_weight: float) -> Tensor:
        """Return a sample's part of the loss of a step; token_weight: of its tokens in the losses of routers."""
        of_step = unit_inputs(data, self._stages, self._recipe, trains=True)
        inputs = {mb.unit: unit_input for mb, unit_input in of_step.items()}
        text, images = inputs.pop(LLM), inputs.pop(GENERATOR, None)
        assert isinstance(text, TextInput)
        text = replace(text, token_weight=token_weight)
        features = {unit: self._stages[unit][0](None, unit_input) for unit, unit_input in inputs.items()}
        [llm] = self._stages[LLM]
        if images is None:
            loss: Tensor = llm(None, text, features) * loss_scale[LLM]
            return loss
        queries, llm_loss = llm.run_to_queries(llm.context(text, features), None, llm.indices)
        [generator] = self._stages[GENERATOR]
        drawing_loss: Tensor = generator(None, images, {LLM: queries})
        return llm_loss * loss_scale[LLM] + drawing_loss * loss_scale[GENERATOR]


def _build_optimizers(recipe: Recipe, stages: Mapping[str, StageModule]) -> list[Callable[[], object]]:
    """Return the steps of the optimizers: of AdamW, and of the Muon of each unit where it trains linears.

    Matrices decay, norms and biases do not; units and layers may differ in rate and decay.
    """
    settings = recipe.train.optimizer
    groups = []
    steps: list[Callable[[], object]] = []
    for unit, stage in stages.items():
        rates = unit_rates(recipe, stage.shape, torch.float32)
        names = {param: f"{unit}.{name}" for name, param in stage.named_parameters() if param.requires_grad}
        groups += [{**group, "lr": settings.lr * group["lr_scale"]} for group in rates.groups(names)]
        muon = [_WholeWeight(param, name, rates) for param, name in names.items() if name in rates.matrices]
        steps += [partial(weight.step, settings.lr, settings.muon_momentum) for weight in muon]
    adam = AdamWBesideMuon(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)
    return [adam.step, *steps]


class _WholeWeight:
    """A weight of a linear that one process trains by Muon."""

    def __init__(self, weight: nn.Parameter, name: str, rates: UnitRates) -> None:
        self._weight, self._matrices = weight, rates.matrices[name]
        self._lr_scale, self._weight_decay = rates.lr_scale_of(name), rates.weight_decay
        self._momentum = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self, lr: float, decay_rate: float) -> None:
        """Update the weight by its gradient."""
        gradient = self._weight.grad
        assert gradient is not None, "parameters that no sample reaches have a gradient of zero"
        self._momentum.lerp_(gradient, 1 - decay_rate)
        update = orthogonal_update(gradient.lerp(self._momentum, decay_rate), self._matrices)
        rate = lr * self._lr_scale
        self._weight.mul_(1 - rate * self._weight_decay).sub_(rate * update)
