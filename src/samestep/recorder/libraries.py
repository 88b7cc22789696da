"""Which libraries train in this process, of those that change what a step is."""

from __future__ import annotations

import sys

IMPORTED = ("lightning", "transformers", "deepspeed", "horovod")


def libraries_that_train() -> list[str]:
    """Returns their names. Accelerate counts where the script has made an Accelerator: others import it, too."""
    accelerate = sys.modules.get("accelerate.state")
    made = ["accelerate"] if accelerate and accelerate.is_initialized() else []
    return [*made, *(name for name in IMPORTED if name in sys.modules)]
