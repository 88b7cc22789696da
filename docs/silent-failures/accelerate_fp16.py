"""In which dtype does Accelerate compute on a CPU when it is asked for fp16?

python docs/silent-failures/accelerate_fp16.py
"""

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, mixed_precision="fp16")
model = accelerator.prepare(torch.nn.Linear(8, 8))
with accelerator.autocast():
    product = torch.ones(8, 8) @ torch.ones(8, 8)
print(f"asked for {accelerator.mixed_precision}, computes in {product.dtype}, scaler: {accelerator.scaler}")
