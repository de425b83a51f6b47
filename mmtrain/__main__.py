"""Entry of `python -m mmtrain` and `torchrun -m mmtrain`."""

from mmtrain.cli import main

main()
