"""Installs the pinned packages of the exhibits that need old versions, each set in a folder of its own in museum/.pins.

    python museum/install.py [--only WORDS]

The only part of the museum that uses the package index. torch and all else are those of the environment that runs it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from museum.exhibit import PINS, exhibits, pins_folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="exhibits with these words in their name")
    options = parser.parse_args()
    for exhibit in exhibits():
        for version, packages in exhibit.pins.items():
            folder = PINS / pins_folder(exhibit, version)
            if options.only not in exhibit.name or not packages or folder.is_dir():
                continue
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(unfinished)]
            print(f"{exhibit.name}: {', '.join(packages)}", flush=True)
            subprocess.run([*command, *packages], check=True)
            unfinished.rename(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
