"""Public scripts that nobody here wrote, by repository. Of their text there is only what a patch needs."""

from recorder.public_scripts import gpt, huggingface, libraries, pytorch, tutorials

CASES = (*pytorch.CASES, *gpt.CASES, *huggingface.CASES, *tutorials.CASES, *libraries.CASES)
