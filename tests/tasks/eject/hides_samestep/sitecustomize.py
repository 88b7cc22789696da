"""Python imports this when it starts, with this folder in PYTHONPATH: samestep is then nowhere to be found."""

import sys


class Hidden:
    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "samestep":
            raise ImportError("there is no samestep here")


sys.meta_path.insert(0, Hidden())  # type: ignore[arg-type]
