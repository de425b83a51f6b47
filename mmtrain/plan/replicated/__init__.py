"""The `replicated` placement: every rank runs every unit, sharded, and items move between phases (OrchMLLM).

Start with `replicated_search`: what the runtime runs. `replicated_step` predicts a step with mini-batches of any size,
whose samples `phase_dispatch` balances over the ranks.
"""
