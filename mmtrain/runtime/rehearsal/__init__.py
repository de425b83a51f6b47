"""A plan's program runs without its model: stand-ins take the predicted time and send small real messages.

Executor, broker, process groups, watchdog and launcher are those of training. Start with `rehearse.rehearse`.
"""
