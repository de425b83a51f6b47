"""Which rank computes which item or sample of a step that is already grouped (OrchMLLM).

Start with `post_balancing.rebalance`; `dispatch_items` and `dispatch_samples` apply it to encoders and to samples.
"""
