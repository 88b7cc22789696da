"""Public scripts that nobody here wrote, by repository. Of their text there is only what a patch needs."""

from recorder.public_scripts import gpt, huggingface, language, libraries, pytorch, research, tutorials, vision

KNOWN = (*pytorch.CASES, *gpt.CASES, *huggingface.CASES, *tutorials.CASES, *libraries.CASES)
CASES = (*KNOWN, *vision.CASES, *language.CASES, *research.CASES)
