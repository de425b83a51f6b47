"""Train without a plan: one process, one sample at a time, plain autograd and torch's own AdamW."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from mmtrain.data.loading.batch_builder import StepData
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.megatron.selection_biases import SelectionBiases
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.models.stage.stage_module import StageSpec
from mmtrain.program import LLM
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.modalities import GENERATOR
from mmtrain.runtime.execution.unit_inputs import unit_inputs

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
        self._adam = _build_adam(recipe, self._units)
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
        self._adam.step()
        if self._biases is not None:
            self._biases.step(torch.zeros((), device=next(self._units.parameters()).device))
        return loss, gradients

    def _loss(self, data: StepData, loss_scale: Mapping[str, float], token_weight: float) -> Tensor:
        """Return a sample's part of the loss of a step; token_weight: of its tokens in the losses of routers."""
        inputs = {mb.unit: unit_input for mb, unit_input in unit_inputs(data, self._stages, self._recipe).items()}
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


def _build_adam(recipe: Recipe, units: nn.ModuleDict) -> torch.optim.AdamW:
    """Build the optimizer: matrices decay, norms and biases do not; units may differ in rate and decay."""
    settings = recipe.train.optimizer
    groups = []
    for unit, module in units.items():
        of_unit = recipe.model.unit(unit)
        trained = [param for param in module.parameters() if param.requires_grad]
        decay = settings.weight_decay if of_unit.weight_decay is None else of_unit.weight_decay
        for params, weight_decay in (
            ([param for param in trained if param.ndim > 1], decay),
            ([param for param in trained if param.ndim <= 1], 0.0),
        ):
            groups.append({"params": params, "weight_decay": weight_decay, "lr": settings.lr * of_unit.lr_scale})
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)
