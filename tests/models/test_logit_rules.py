import torch
from transformers import RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor

from mmtrain.models.kernels.vocab_loss import LogitRules


def test_rules_change_logits_as_transformers_does_whole_or_in_slices() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 12, generator=generator)
    seen = torch.tensor([[1, 5, 5, 11], [0, 2, 2, 2], [7, 8, 9, 10]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(seen, logits.clone())
    expected = SuppressTokensLogitsProcessor([3, 11], device="cpu")(seen, expected)
    pairs = torch.tensor(sorted({(row, int(token)) for row, tokens in enumerate(seen) for token in tokens}))
    rules = LogitRules(pairs[:, 0], pairs[:, 1], 1.7, torch.tensor([3, 11]))
    assert torch.equal(rules.apply(logits, 0), expected)
    halves = [rules.apply(half, first) for half, first in zip(torch.split(logits, 6, dim=1), (0, 6), strict=True)]
    assert torch.equal(torch.cat(halves, dim=1), expected)
