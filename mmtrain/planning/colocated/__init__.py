"""The `colocated` placement: encoder layers run in the bubbles of the LLM's pipeline (Optimus, arXiv 2408.03505).

Start with `colocated_search`, which chooses meshes. `encoder_order` writes the order of one layout's program from the
bubbles that `llm_alone` finds; `bubble_schedule` decides which encoder kernel runs in which bubble, and `tp_bubbles`
adds those inside the LLM's layers.
"""
