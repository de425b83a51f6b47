"""What `bench_gpu.py` and `first_gpu.py` share: models and steps to measure, checks, limits of time, tables.

Read `cases.py` first, then `measure_case.py`.
"""
