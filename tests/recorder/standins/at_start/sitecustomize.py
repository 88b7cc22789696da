"""Run by Python before a rank's script: the stand-ins of a case, and the end after so many optimizer steps."""

import os

if "RANK" in os.environ and "STANDINS" in os.environ:
    import sys

    folder = os.path.dirname(os.path.dirname(__file__))
    sys.path.insert(0, folder)
    sys.path.append(os.path.join(folder, "packages"))
    for name in os.environ["STANDINS"].split():
        __import__(name)
    if last := int(os.environ.get("ENDED_AFTER", "0")):
        from torch.optim.optimizer import register_optimizer_step_post_hook

        taken = iter(range(1, last + 1))

        def end(*_):
            if next(taken) == last:
                sys.stdout.flush()
                os._exit(0)

        register_optimizer_step_post_hook(end)
