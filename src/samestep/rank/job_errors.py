"""What the functions of a job raise before a launch, as messages with the line in the job's code."""

from __future__ import annotations

import re
import traceback
from typing import Any

from samestep.errors import UserError
from samestep.message import Message, message
from samestep.world.foreign_code import as_exceptions, error_line
from samestep.world.imports import is_users_code

HINTS = {  # words of an error of the job's functions -> the message with the line to write
    r"\bBatch\b": message("criterion_is_given_the_batch"),
    r"must be Tensor, not (dict|BatchEncoding)|^'dict' object has no attribute": message("rows_are_dicts"),
    r"must be Tensor, not NoneType|^'NoneType' object has no attribute": message("rows_have_no_targets"),
}


def raising(what: str, do: Any, rows: int | None) -> Any:
    """Calls `do`. Turns its exception into a UserError with the line in the job's code that raised it."""
    try:
        with as_exceptions():
            return do()
    except UserError:
        raise
    except Exception as error:
        job_frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users_code(f.filename)]
        place = f"{job_frames[-1].filename}, line {job_frames[-1].lineno}" if job_frames else None
        hint = next((hint for pattern, hint in HINTS.items() if re.search(pattern, str(error))), None)
        raise UserError(
            message(
                "function_of_the_job_raised",
                function=what,
                rows=rows,
                error=error_line(error),
                at=place,
                hint=hint,
            )
        ) from error


def raised_on_rows(said: Message) -> bool:
    """Returns whether a message is about a function of the job's that raised on some rows."""
    why = said.fields.get("why")
    return bool(said.id == "function_of_the_job_raised" and said.fields["rows"]) or (
        isinstance(why, Message) and raised_on_rows(why)
    )
