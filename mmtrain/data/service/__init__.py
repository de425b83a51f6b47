"""The data service: producers on other machines that build steps for trainers, over ZeroMQ.

`protocol` holds the messages, `producer` the serving end (`mmtrain data serve`), and `remote_steps` the trainer's end.

Read `protocol` first, then `producer.Producer.serve`.
"""
