"""The help of a command on one screen: its common options explained, the others listed by group."""

from __future__ import annotations

import textwrap
from typing import Any

from typer.core import TyperCommand

from samestep.message import message

FLAGS = ["--help", "--help-all"]  # the first explains the common options, the second every one
GROUPS = {
    "Training": "--init --evaluate-every --evaluate-steps --best --patience --on-nan --keep",
    "Machines": "--mesh --nnodes --node-rank --master-addr --port --hosts --interface --max-restarts --timeout "
    "--threads --to --image --claim --gpus-per-node --sbatch",
    "Results": "--log --export --predictions",
    "Rare": "--set-engine --launcher --launchers --deadline --stall --check-replicas --spot-check "
    "--resume-changed-data --resume-nproc --resume-engine --profile --quick --explain --rounds "
    "--warmup-steps --dry-run --against-nproc --against-command",
}
GROUP_OF_FLAG = {flag: group for group, flags in GROUPS.items() for flag in flags.split()}


class GroupedHelp(TyperCommand):
    """A command whose `--help` is one screen: of the options of GROUPS it shows only the flags."""

    _explains_every_option = False

    def get_help_option_names(self, ctx: Any) -> list[str]:
        """Returns the names of the help, in the order in which it shows them."""
        return FLAGS

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the words of the command line."""
        self._explains_every_option = FLAGS[1] in args
        remaining = super().parse_args(ctx, args)
        for parameter in self.get_params(ctx):
            given, source = ctx.params.get(parameter.name), ctx.get_parameter_source(parameter.name)
            # A default may be ''. Who reads a path says what is wrong with an empty one.
            is_typed = parameter.param_type_name == "option" and source and source.name == "COMMANDLINE"
            if is_typed and parameter.metavar != "PATH" and (given == "" or (isinstance(given, list) and "" in given)):
                from samestep.report import language

                ctx.fail(language.text(message("option_names_none", flag=parameter.opts[0], value="")))
        return remaining

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments, and the options group by group."""
        explained: dict[str, list[tuple[str, str]]] = {}
        listed: dict[str, list[str]] = {}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            group = GROUP_OF_FLAG.get(parameter.opts[0])
            if row and group and not self._explains_every_option:
                listed.setdefault(group, []).append(parameter.opts[0])
            elif row:
                title = "Arguments" if parameter.param_type_name == "argument" else group or "Options"
                explained.setdefault(title, []).append(row)
        for title in ("Arguments", "Options", *GROUPS):
            if rows := explained.get(title):
                with formatter.section(title):
                    formatter.write_dl(rows)
        if listed:
            with formatter.section(f"More options, which {FLAGS[1]} explains"):
                formatter.write_dl(
                    [row for group in GROUPS if group in listed for row in _wrapped(group, listed[group])]
                )


def _wrapped(group: str, flags: list[str]) -> list[tuple[str, str]]:
    """Returns rows of a group's flags; click would break a line inside of a flag."""
    lines = textwrap.wrap(" ".join(flags), width=64, break_on_hyphens=False, break_long_words=False)
    return [(group if line == lines[0] else "", line) for line in lines]
