"""python -m samestep, and so torchrun -m samestep: the command `samestep`."""

from samestep.cli import main

main()
