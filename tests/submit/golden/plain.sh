#!/bin/bash
# Trains the run demo; written by stormo submit.
#SBATCH --job-name=demo
#SBATCH --chdir=/home/ada/work
#SBATCH --output=/home/ada/work/runs/demo/slurm.log
#SBATCH --open-mode=append
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=02:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@120

# Slurm sends USR1 120 s before the time limit: the training ends its step, saves, and ends with 75.
step= warnings=0
trap 'warnings=$((warnings + 1)); [ -z "$step" ] || warn' USR1

set -u

run=demo
folder=/home/ada/work/runs/demo

note() { printf '%s %s %s\n' "$SLURM_JOB_ID" "$(date +%s)" "$*" >> "$folder/slurm-attempts.txt"; }

warn() { while kill -USR1 "$step" 2> /dev/null; do sleep 5; done & }  # until it listens

saved=$(ls "$folder/checkpoints" 2> /dev/null)
note start "$SLURM_JOB_NODELIST"
(
    trap '' USR1  # what comes before anyone listens ends nothing
    exec srun bash -c 'trap "" USR1; exec "$@"' - /home/ada/venv/bin/python -P -m stormo train my_task.py \
        --num-gpus 8 \
        --num-nodes 4 \
        --epochs 90 \
        --run-name "$run" --resume
) &
step=$!
# A process that has just begun does not ignore it yet.
[ "$warnings" = 0 ] || { sleep 1; warn; }
seen=-1
while [ "$seen" != "$warnings" ]; do  # a warning ends `wait`, not the training
    seen=$warnings
    wait "$step"
    code=$?
done
# srun may end with 0 where it has lost a node.
if [ "$code" = 0 ] && ! grep -qs '"stopped_by": "\(target\|epochs\)"' "$folder/summary.json"; then
    echo "stormo: srun ended, but the training has not" >&2
    code=1
fi
note end "$code"

# Only after the warning: a cancelled job stays cancelled, and Slurm itself requeues one that it preempts.
if [ "$code" = 75 ] && [ "$warnings" != 0 ]; then
    if [ "$saved" = "$(ls "$folder/checkpoints" 2> /dev/null)" ]; then
        echo "stormo: no step was done within the time limit, nor would be the next time; set a longer --time" >&2
        exit 75
    fi
    note requeue
    scontrol requeue "$SLURM_JOB_ID" ||
        echo "stormo: Slurm does not requeue this job; submit it again with --run-name $run --resume" >&2
fi
exit "$code"
