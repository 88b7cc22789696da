"""The command `samestep`, also as python -m samestep, and so torchrun -m samestep."""

import os
import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # `python -m` has put the current folder first: a file there would run in place of a module imported from here on.
    try:  # noqa: SIM105 - contextlib is not imported before
        sys.path[:1] = [] if sys.path[0] == os.getcwd() else sys.path[:1]
    except OSError:
        pass  # the current folder is gone, and Python has put none


def main() -> None:
    """Runs the command. A user's file that hides a module of Python's own is named instead of a traceback."""
    try:
        from samestep.commands import cli

        cli.main()
    except Exception as error:
        hiding = hidden_modules()
        if not hiding:
            raise
        files = " and ".join(hiding)
        sys.stderr.write(
            f"samestep: {type(error).__name__}: {error}; {files} is imported in place of Python's own module of that "
            "name: rename it, or take its folder out of PYTHONPATH\n"
        )
        sys.exit(2)


def hidden_modules() -> list[str]:
    """Returns the files on sys.path that are found before modules of Python's standard library."""
    import sysconfig  # not at the top: it could be one of the hidden ones
    from importlib.machinery import PathFinder

    stdlib = sysconfig.get_path("stdlib")
    before = sys.path[: sys.path.index(stdlib)] if stdlib in sys.path else sys.path
    names = sys.stdlib_module_names - set(sys.builtin_module_names)
    specs = (PathFinder.find_spec(name, before) for name in sorted(names))
    origins = (str(spec.origin) for spec in specs if spec and spec.has_location)
    return [origin for origin in origins if not origin.startswith(stdlib)]


if __name__ == "__main__":
    main()
