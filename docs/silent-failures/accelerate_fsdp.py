"""What does Accelerate make of a model on CPUs when it is asked for FSDP?

torchrun --nproc-per-node 2 docs/silent-failures/accelerate_fsdp.py
"""

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn

accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
model = accelerator.prepare(nn.Linear(8, 8))
accelerator.print(f"asked for FSDP 2, got {type(model).__name__}, {accelerator.distributed_type}")
accelerator.end_training()
