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
# Two minutes before the limit, signal this script:
#SBATCH --signal=B:USR1@120

# The ranks stop after a step and write a checkpoint; then the job goes back into the queue, and continues from it.
limit_is_near=
trap 'limit_is_near=yes; kill -USR1 "$step"' USR1
trap : TERM  # the ranks get it too, where the job is requeued by hand or cancelled: wait for their checkpoint

# One samestep on each machine starts the ranks of that machine.
# When one machine fails, the others end by themselves; after a minute srun ends those that have not.
srun --kill-on-bad-exit=0 --wait=60 PYTHON -P -m samestep run 'my jobs/x y.py:job' --engine ddp --threads 3 --device cpu --nnodes 1 --nproc 2 \
    --out '/out/a b' &
step=$!
wait "$step"
code=$?
while kill -0 "$step" 2> /dev/null; do  # a signal has ended the wait, not the training
    wait "$step"
    code=$?
done

# 130: stopped before its end
if [ "$limit_is_near" ] && [ "$code" = 130 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
