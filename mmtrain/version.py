"""The version of mmtrain, which builds and files read from here alone."""

__version__ = "0.1.0"
