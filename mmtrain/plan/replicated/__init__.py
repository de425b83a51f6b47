"""The `replicated` placement: every rank runs every unit, sharded, and samples move between phases (OrchMLLM).

The runtime runs it without moving samples: start with `replicated_search`. `replicated_step` predicts a step whose
samples `phase_dispatch` balances over the ranks, which cannot be run yet.
"""
