"""From a stage graph to a program: the order of compute, and the communication that it needs.

Read `assemble.build_program` first. `builder` orders compute with `pipeline_positions` (where a rank stands in the
pipeline) and `unit_pacing` (units with different numbers of microbatches); `lower` adds communication.
"""
