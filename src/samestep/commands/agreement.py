"""Compares the commands of a training's machines, and of a training and the checkpoint that it continues."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from samestep.commands.results_folder import package_digest
from samestep.commands.study import Study
from samestep.errors import UserError
from samestep.records.files import as_json
from samestep.records.plan import EvaluateTask, LaunchRequest, RunTask
from samestep.records.redaction import redacted_values
from samestep.version import __version__

# The fields of a planned training or evaluation that may differ between machines and when a training is continued:
MAY_DIFFER = {
    *("weights", "init", "export", "predictions"),  # paths; init_sha256 compares the weights that init names
    *("log", "profile", "checkpoint_every", "keep"),  # what is written beside the weights
    *("resume", "resume_changed_data", "stop_after"),  # where this launch begins and ends
    *("name", "kind"),  # of the plan
}


def launch_request(study: Study, training: RunTask | EvaluateTask | None = None) -> LaunchRequest:
    """Returns what a study is to launch. training: of `run` and `evaluate`."""
    setup = study.setup
    return LaunchRequest(
        job=setup.job.rpartition("/")[2],
        source=study.job.source,
        settings=_words(redacted_values(setup.settings)),
        engine=",".join(setup.engines),
        engine_settings=_words(redacted_values(setup.engine_settings)),
        training=f"continued {setup.resume}" if setup.resume else options_of(training),
        samestep=f"{__version__} {package_digest()}",
        torch=study.inspection.machine.torch,
    )


def digest_of(request: LaunchRequest) -> str:
    """Returns a digest of a request, for a rendezvous that other machines may join later."""
    return hashlib.blake2b(json.dumps(as_json(request)).encode(), digest_size=8).hexdigest()


def check_agreement(mine: LaunchRequest, theirs: LaunchRequest, who: str) -> None:
    """Raises UserError where this machine's command differs from that of `who`."""
    if different := mine.difference(theirs):
        what, here, there = different
        raise UserError(
            f"this machine's command differs from that of {who}: {what}: {here} here, {there} there; run the same "
            "command on every machine, with the same files"
        )


def _words(values: Mapping[str, str]) -> str:
    """Returns 'a=1 b=2'. The path of a file that is here may be another on each machine: check_same_data reads it."""
    paths = {name for name, text in values.items() if "/" in text and Path(text).exists()}
    return " ".join(f"{name}={'(a path)' if name in paths else values[name]}" for name in sorted(values))


def options_of(training: RunTask | EvaluateTask | None) -> str:
    """Returns the options that decide what is trained or evaluated, 'every=2 patience=3', without those at defaults."""
    if training is None:
        return ""
    decisive = [field for field in fields(training) if field.name not in MAY_DIFFER]
    values = ((field, getattr(training, field.name)) for field in decisive)
    return " ".join(f"{field.name}={_word(value)}" for field, value in values if value != field.default)


def _word(value: object) -> str:
    return ":".join(value) if isinstance(value, tuple) else str(value)
