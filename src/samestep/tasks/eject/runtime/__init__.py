"""What ejected scripts hold in the place of samestep's own run: plain Python, copied into each of them as it stands.

run.py and evaluation.py are in every script; of one.py, group.py and horovod.py the one that starts the engine's
processes. What these files import from samestep is copied too, so they import little of it.
"""
