"""``python -m deepsquare``: the command line, as torchrun starts it."""

from deepsquare.cli import main

main()
