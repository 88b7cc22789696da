"""In which dtype does Lightning compute on a CPU when it is asked for 16-mixed?

python docs/silent-failures/lightning_fp16.py
"""

import torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=1, precision="16-mixed")
fabric.launch()
model = torch.nn.Linear(8, 8)
with fabric.autocast():
    print(f"asked for 16-mixed, computes in {model(torch.ones(1, 8)).dtype}")
