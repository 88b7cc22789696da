"""Describes what a command was asked, so that the machines of a training can compare it with what they were asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from samestep.commands.results_folder import package_digest
from samestep.commands.study import Study
from samestep.errors import UserError
from samestep.records.files import as_json
from samestep.records.plan import Asked, Score, Train
from samestep.version import __version__


def asked_of(study: Study, training: Train | Score | None = None) -> Asked:
    """Returns what a study was asked. training: of `run` and `evaluate`."""
    setup = study.setup
    return Asked(
        job=setup.job.rpartition("/")[2],
        source=study.job.source,
        settings=_words(setup.settings),
        engine=",".join(setup.engines),
        engine_settings=_words(setup.engine_settings),
        training=f"continued {setup.resume}" if setup.resume else options_of(training),
        samestep=f"{__version__} {package_digest()}",
        torch=study.inspection.machine.torch,
    )


def digest_of(asked: Asked) -> str:
    """Returns a digest of what was asked, for a rendezvous that other machines may join later."""
    return hashlib.blake2b(json.dumps(as_json(asked)).encode(), digest_size=8).hexdigest()


def check_agreement(mine: Asked, theirs: Asked, who: str) -> None:
    """Raises UserError where this machine was asked something else than `who`."""
    if different := mine.difference(theirs):
        what, here, there = different
        raise UserError(
            f"this machine was asked something else than {who}: {what}: {here} here, {there} there; type the same line "
            "on each machine, with the same files"
        )


def _words(values: Mapping[str, str]) -> str:
    """Returns 'a=1 b=2'. The path of a file that is here may be another on each machine: check_same_data reads it."""
    paths = {name for name, text in values.items() if "/" in text and Path(text).exists()}
    return " ".join(f"{name}={'(a path)' if name in paths else values[name]}" for name in sorted(values))


def options_of(training: Train | Score | None) -> str:
    """Returns the options that decide what is trained or evaluated, in words."""
    if training is None:
        return ""
    weights = f"weights {training.init_sha256[:12]}" if training.init_sha256 else "no weights to start from"
    if isinstance(training, Score):
        return weights
    best = " ".join(training.best) if training.best else "the last"
    every = f"{training.every} epochs and {training.every_steps} steps"
    return (
        f"{weights}, evaluation every {every}, keep {best}, patience {training.patience}, on NaN "
        f"{training.on_nan}, replicas compared every {training.check_replicas}"
    )
