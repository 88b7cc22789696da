"""Writes a text with the weights of a run, as nanoGPT's sample.py does: one process, no samestep needed for the model.

python examples/nanogpt/sample.py runs/gpt/weights.safetensors --n-head 6
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from gpt import GPT, GPTConfig
from safetensors.torch import load_file

from job import SONNETS, read

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
parser.add_argument("weights", type=Path)
parser.add_argument("--data", type=Path, default=SONNETS)
parser.add_argument("--n-head", type=int, default=6)
parser.add_argument("--characters", type=int, default=300)
options = parser.parse_args()

weights = load_file(options.weights)
_, characters = read(options.data)
layers = len({name.split(".")[2] for name in weights if name.startswith("transformer.h.")})
places, width = weights["transformer.wpe.weight"].shape
gpt = GPT(GPTConfig(len(characters), places, layers, options.n_head, width)).eval()
gpt.load_state_dict(weights, strict=False)  # a tied weight may stand there once
tokens = gpt.generate(torch.zeros(1, 1, dtype=torch.int64), options.characters, temperature=0.8)
print("".join(characters[token] for token in tokens[0].tolist()))
