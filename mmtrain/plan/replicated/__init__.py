"""The `replicated` placement: every rank runs every unit, sharded, and samples move between phases (OrchMLLM).

Predicted only, not yet run. Start with `replicated_step`, which predicts a step; `phase_dispatch` balances its samples.
"""
