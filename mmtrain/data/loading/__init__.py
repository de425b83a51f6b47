"""Building the steps of one rank ahead of training, in a thread or in worker processes.

`batch_builder` turns a step's samples into arrays (`payload`), `prefetch_window` holds the steps that are being built,
`step_builders` fills it, and `worker_pool`, `worker_process`, `ipc` and `step_format` are the worker processes.

Read `batch_builder.StepBuilder.build` first; `mmtrain.data.loader` puts the parts together.
"""
