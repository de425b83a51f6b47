"""The `replicated` placement: every rank runs every unit, sharded, and samples move between phases (OrchMLLM).

It is only predicted, the runtime cannot run it. Start with `replicated_step`, which predicts a step; `phase_dispatch`
balances its samples over the ranks.
"""
