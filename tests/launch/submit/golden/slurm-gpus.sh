#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=2:00:00
#SBATCH --output="/out/a b/slurm-%j.out"
#SBATCH --open-mode=append
# Queued again when a machine fails or another job comes first:
#SBATCH --requeue
# Asked two minutes before the limit to stop after a step, and to leave the weights of it:
#SBATCH --signal=USR1@120
#SBATCH --partition=gpu

# The ranks meet on the job's first machine, at a port that follows from the job's number.
master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))

# One samestep on each machine; it starts the ranks of the machine.
# A machine that fails ends the others by itself; srun ends, a minute later, what is left.
srun --kill-on-bad-exit=0 --wait=60 PYTHON -m samestep run digits --engine fsdp --set epochs=2 --set-engine units=root --nnodes 2 --nproc 4 \
    --master-addr "$master" --port "$port" --out '/out/a b'
