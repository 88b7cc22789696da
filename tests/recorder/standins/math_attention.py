"""Lets attention be computed by torch's plain operations: DTensor has no rule for the CPU's own kernel."""

import torch

torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)
