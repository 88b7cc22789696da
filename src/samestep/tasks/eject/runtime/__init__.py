"""What ejected scripts hold in the place of samestep's own run: plain Python, the same for every job.

Of group.py, one.py, horovod.py and ray.py a script has the one whose name is the engine's PROCESSES, with LAUNCH, the
line that starts the script. What these files import from samestep is copied too, so they import little of it.
divided.py and stages.py stand in the script itself, with what samestep has found of the job's model.
"""

from __future__ import annotations

# Names of samestep's -> the file that has another thing of this name, which a script has in its place.
STAND_INS = {
    "Job": "job",
    "Run": "run",
    "World": "world",
    "process_group": "world",
    "UserError": "errors",
    "Refused": "errors",
    "message": "errors",
    "FSDPReads": "absent",
    "losses_in_parallel": "absent",
    "split_output": "absent",
    "split_layers": "divided",
    "ranks_of_stages": "stages",
    "stage_plan": "stages",
    "alike_on_ranks": "absent",
}
IN_SCRIPT = ("divided", "stages")  # these files
