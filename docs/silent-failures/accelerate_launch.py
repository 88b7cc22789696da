"""How many processes does Accelerate's own launcher start on CPUs? Prints what each process sees.

accelerate launch --cpu --num_processes 2 docs/silent-failures/accelerate_launch.py
torchrun --nproc-per-node 2 docs/silent-failures/accelerate_launch.py
"""

from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
print(f"process {accelerator.process_index} of {accelerator.num_processes}")
accelerator.end_training()
