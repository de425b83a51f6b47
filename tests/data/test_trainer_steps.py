"""The Trainer of transformers judges how many steps epochs are, and the learning rate of each step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmtrain.data import build_index
from mmtrain.data.stream.count_groups import count_groups
from mmtrain.data.stream.count_steps import with_counted_steps
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.runtime.training.hooks.learning_rate import learning_rate
from tests.data.rows import row

NUM_SAMPLES = 60
BATCH = 6  # divides the samples; else each epoch of the Trainer ends with a smaller step, where ours goes on


class _Squares(torch.nn.Module):
    """A model of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.weight - x) ** 2).mean()}


def _rates_of_trainer(folder: Path, epochs: float, warmup_ratio: float, schedule: str) -> list[float]:
    """Train one weight on as many samples; return the learning rate of each step."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    rates: list[float] = []

    class Recorder(transformers.TrainerCallback):  # type: ignore[misc]  # its types are not read here
        def on_pre_optimizer_step(self, *_: object, optimizer: Any, **__: object) -> None:
            rates.append(float(optimizer.param_groups[0]["lr"]))

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        num_train_epochs=epochs,
        learning_rate=1.0,
        warmup_steps=warmup_ratio,  # below 1: a share of all steps
        lr_scheduler_type=schedule,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    samples = [{"x": torch.tensor([float(i)])} for i in range(NUM_SAMPLES)]
    trainer = transformers.Trainer(_Squares(), arguments, train_dataset=samples, callbacks=[Recorder()])
    trainer.train()
    assert len(rates) == trainer.state.max_steps
    return rates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epochs", "warmup_ratio", "schedule"), [(1, 0.0, "linear"), (2, 0.1, "cosine"), (3, 0.25, "linear")]
)
def test_epochs_are_the_steps_and_learning_rates_of_the_trainer(
    recipe: Callable[..., Recipe], tmp_path: Path, epochs: float, warmup_ratio: float, schedule: str
) -> None:
    """With one sample in each group, as the Trainer has it. In the warm-up we are one step ahead: it starts from 0."""
    made = recipe([row("why?", f"answer {number}", name=str(number)) for number in range(NUM_SAMPLES)])
    longest = int(build_index(made).lengths.tokens.max())
    optimizer = {"lr": 1.0, "warmup_ratio": warmup_ratio, "schedule": schedule}
    content = made.model_dump()
    content["data"] |= {"seq_len": longest, "max_sample_tokens": longest}
    content["train"] = {"optimizer": optimizer, "epochs": epochs, "global_batch": {"samples": BATCH}}
    settings = Recipe.model_validate(content)
    index = build_index(settings)
    counted = with_counted_steps(count_groups(settings, index.lengths), index).train
    rates = _rates_of_trainer(tmp_path, epochs, warmup_ratio, schedule)
    assert counted.num_steps == len(rates)
    warmup = counted.optimizer.num_warmup_steps(len(rates))
    expected = [*rates[1 : warmup + 1], *rates[warmup:]]
    ours = [learning_rate(counted.optimizer, step, len(rates)) for step in range(len(rates))]
    assert ours == pytest.approx(expected, abs=1e-9)
