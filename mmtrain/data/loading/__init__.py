"""Building the steps of one rank ahead of training, in a thread or in worker processes.

`batch_builder` turns a step's samples into arrays (`payload`). `prefetch_window` holds the steps that are being built;
`mmtrain.data.loader` fills it. `worker_pool`, `worker_process`, `ipc` and `step_format` are the worker processes.

Read `batch_builder.StepBuilder.build` first.
"""
