"""Which checkpoint is loaded, what its file holds, and its position."""

from __future__ import annotations

from resume.faults.fault import FILES, SAVING, ResumeFault

FAULTS = (
    ResumeFault(
        "weights rounded to float32 in the file",
        FILES,
        "    save_file({key: piece.block for key, piece in nonempty.items()}, tensors)\n",
        "    lower = {k: p.block.float() if k.startswith('model') else p.block for k, p in nonempty.items()}\n"
        "    save_file(lower, tensors)\n",
        ("resumed state",),
        "weights_not_those_of_checkpoint",
        trainparity="model",
    ),
    ResumeFault(
        "the checkpoint before the last loaded",
        FILES,
        "    for step in steps_in(folder):\n        try:\n            checked(",
        "    for step in steps_in(folder)[1:] or steps_in(folder):\n        try:\n            checked(",
        ("resumed step",),
        "older_checkpoint_loaded",
        trainparity="model",
    ),
    ResumeFault(
        "no checkpoint loaded",
        SAVING,
        "        if saved is None:\n",
        "        if True:\n",
        ("resumed step",),
        "training_began_anew",
    ),
    ResumeFault(
        "the step count off by one",
        SAVING,
        "        return position\n",
        "        return Position(position.done - 1, position.skipped, position.last)\n",
        ("resumed step",),
        "position_restored_wrongly",
        trainparity="logical step",
    ),
)
