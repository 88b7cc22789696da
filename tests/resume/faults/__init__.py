"""The faults of a resume: each a patch of a real file of samestep, what rightly names it, and the ids of its cause.

`first` begins the training and `then` continues it, both with the patch: (engine, ranks). `settings`: of the job.
`trainparity`: the component of TrainParity 0.1.0's reference faults that it is.
"""

from __future__ import annotations

from resume.faults import files, model, optimizer, rows
from resume.faults.fault import ResumeFault

__all__ = ["FAULTS", "ResumeFault"]
FAULTS = (*rows.FAULTS, *optimizer.FAULTS, *model.FAULTS, *files.FAULTS)
