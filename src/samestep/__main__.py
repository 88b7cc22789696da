"""python -m samestep, and so torchrun -m samestep: the command `samestep`."""

from samestep.commands.cli import main

main()
