"""What ejected scripts hold in the place of samestep's own run: plain Python, copied into each of them as it stands.

run.py and evaluation.py are in every script, whole_run.py where the job needs it; of one.py, group.py, horovod.py and
ray.py the one whose name is the engine's PROCESSES; its LAUNCH is the line that starts the script. What these files
import from samestep is copied too, so they import little of it.
"""
