"""What ejected scripts hold in the place of samestep's own run: plain Python, of which each script has what it needs.

plain_run.py is in every script; plain_rows.py where the data are plain tensors, else loaded_rows.py;
plain_evaluation.py for plain metrics, else whole_evaluation.py; plain_schedule.py where an epoch's order is a plain
permutation; whole_run.py where a step takes more than a forward, a backward and an update; of one.py, group.py,
horovod.py and ray.py the one whose name is the engine's PROCESSES, with LAUNCH, the line that starts the script. What
these files import from samestep is copied too, so they import little of it. The names in capitals that they test are
constants which eject/reach.py sets for a script, as it sets what it knows of the job: the branches that cannot be
reached are left out.
"""
