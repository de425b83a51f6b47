"""In which order a pipeline runs its microbatches, and when their actions end.

Start with `microbatch_order`; `pipeline_recurrence` is the recurrence that all of them share.
"""
