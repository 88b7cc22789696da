"""Starts programs of several ranks, each forked from this process, which has torch already: a start takes no seconds.
Its arguments are what else it imports.

It reads a launch a line from stdin, as JSON, and answers with the ranks' exit codes when all of them have ended:
'program' and its 'arguments', 'size', the 'environment' of a rank ('{rank}' stands for its number), its 'folder', its
'log', and whether samestep is 'hidden' from it: to import it is then an error.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import random
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PRELOADED = ("numpy", "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict")
HANGS_S = 600  # a rank that lives longer prints its stack and ends


class Hidden:
    """Makes an import of samestep an error."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "samestep":
            raise ImportError("there is no samestep here")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library may print while it is imported
    for name in (*PRELOADED, *sys.argv[1:]):
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "samestep"]:
        del sys.modules[name]  # torch has loaded the rendezvous of the installed samestep
    while line := sys.stdin.readline():
        launch = json.loads(line)
        running = [_forked(launch, rank) for rank in range(launch["size"])]
        codes = dict.fromkeys(running)
        while None in codes.values():
            pid, status = os.wait()
            codes[pid] = os.waitstatus_to_exitcode(status)
            for other in [pid for pid, code in codes.items() if code is None] if codes[pid] else []:
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
        print(json.dumps(list(codes.values())), file=answers, flush=True)


def _forked(launch: Mapping[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(launch["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        os.environ.clear()
        os.environ |= {key: text.replace("{rank}", str(rank)) for key, text in launch["environment"].items()}
        os.chdir(launch["folder"])
        import numpy

        random.seed()
        numpy.random.seed()
        sys.argv = [launch["program"], *launch["arguments"]]
        sys.path[0] = str(Path(launch["program"]).parent)
        if launch["hidden"]:
            sys.meta_path.insert(0, Hidden())  # type: ignore[arg-type]
        else:
            sys.path[1:1] = os.environ["PYTHONPATH"].split(os.pathsep)
        runpy.run_path(launch["program"], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
