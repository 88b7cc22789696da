#!/bin/bash
#SBATCH --job-name=x-y
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=6
#SBATCH --time=30:00
#SBATCH --output="/out/a b/slurm-%j.out"
#SBATCH --open-mode=append
# Requeue the job when a machine fails or another job preempts it:
#SBATCH --requeue
# Two minutes before the limit: stop after a step, and save its weights:
#SBATCH --signal=USR1@120

# One samestep on each machine starts the ranks of that machine.
# When one machine fails, the others end by themselves; after a minute srun ends those that have not.
srun --kill-on-bad-exit=0 --wait=60 PYTHON -m samestep run 'my jobs/x y.py:job' --engine ddp --threads 3 --device cpu --nnodes 1 --nproc 2 \
    --out '/out/a b'
