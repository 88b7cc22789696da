#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=2:00:00
#SBATCH --output="/out/a b/slurm-%j.out"
#SBATCH --open-mode=append
# Requeue the job when a machine fails or another job preempts it:
#SBATCH --requeue
# Two minutes before the limit: stop after a step, and save its weights:
#SBATCH --signal=USR1@120
#SBATCH --partition=gpu

# The rendezvous is on the job's first machine, at a port derived from the job's number.
master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))

# One samestep on each machine starts the ranks of that machine.
# When one machine fails, the others end by themselves; after a minute srun ends those that have not.
srun --kill-on-bad-exit=0 --wait=60 PYTHON -m samestep run digits --engine fsdp --set epochs=2 --set-engine wrap=root --nnodes 2 --nproc 4 \
    --master-addr "$master" --port "$port" --out '/out/a b'
