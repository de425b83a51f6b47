"""The `replicated` placement: every rank runs every unit, sharded, and any rank may compute an item (OrchMLLM).

Read `replicated_search`. What the passes of sharded units take is in `program/simulation/timing.py`; which rank
computes what is decided in `balance`, for predictions and for training alike.
"""
