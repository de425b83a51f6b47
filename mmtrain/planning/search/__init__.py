"""How each placement is searched for its fastest plan.

Start with `strategies`, which names a search for each placement. In `pipelined`, `mesh_enumeration` lists candidates
and `best_first_search` decides among them. In `replicated` every rank runs every unit and any rank may compute an item
(OrchMLLM).
"""
