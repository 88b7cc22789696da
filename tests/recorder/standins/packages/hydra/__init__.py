"""A stand-in for hydra: main() reads the script's own YAML file, and KEY.KEY=VALUE of the command line."""

import sys
from pathlib import Path

import yaml


def main(version_base=None, config_path=".", config_name="config"):
    def decorated(function):
        def called():
            cfg = yaml.safe_load(Path(config_path, f"{config_name}.yaml").read_text())
            for word in sys.argv[1:]:
                keys, _, value = word.partition("=")
                *path, last = keys.split(".")
                of = cfg
                for key in path:
                    of = of[key]
                of[last] = yaml.safe_load(value)
            return function(cfg)

        return called

    return decorated
