#!/bin/bash
# Trains the runs of rates; written by stormo submit.
#SBATCH --array=0-1%4
#SBATCH --job-name=rates
#SBATCH --chdir=/home/ada/work
#SBATCH --output=/home/ada/work/runs/rates-%a/slurm.log
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --signal=B:USR1@120

# Slurm sends USR1 120 s before the time limit: the training ends its step, saves, and ends with 75.
step= warnings=0
trap 'warnings=$((warnings + 1)); [ -z "$step" ] || warn' USR1

set -u

job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
case $SLURM_ARRAY_TASK_ID in
0) run=rates-0 settings=(--base-lr 0.01 --task.note 'it'"'"'s 5 o'"'"'clock') ;;
1) run=rates-1 settings=(--base-lr 0.02 --task.note '50 % «ß»') ;;
esac
folder=/home/ada/work/runs/$run

note() { printf '%s %s %s\n' "$job" "$(date +%s)" "$*" >> "$folder/slurm-attempts.txt"; }

warn() { while kill -USR1 "$step" 2> /dev/null; do sleep 5; done & }  # until it listens

saved=$(ls "$folder/checkpoints" 2> /dev/null)
note start "$SLURM_JOB_NODELIST"
(
    trap '' USR1  # what comes before anyone listens ends nothing
    exec srun bash -c 'trap "" USR1; exec "$@"' - /home/ada/venv/bin/python -P -m stormo train my_task.py \
        --num-gpus 8 \
        --num-nodes 4 \
        --epochs 90 \
        "${settings[@]}" \
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

# Only after the warning: a job that was cancelled stays so, and Slurm itself requeues one that it preempts.
if [ "$code" = 75 ] && [ "$warnings" != 0 ]; then
    if [ "$saved" = "$(ls "$folder/checkpoints" 2> /dev/null)" ]; then
        echo "stormo: no step was done within the time limit, nor would be the next time; set a longer --time" >&2
        exit 75
    fi
    note requeue
    if ! scontrol requeue "$SLURM_JOB_ID"; then
        echo "stormo: Slurm does not queue this job again; another one goes on"
        if next=$(sbatch --parsable --dependency="afterany:$SLURM_ARRAY_JOB_ID,singleton" --job-name=rates-lane$((SLURM_ARRAY_TASK_ID % 4)) --array="$SLURM_ARRAY_TASK_ID" "$folder/job.sh"); then
            note chain "${next%%;*}_$SLURM_ARRAY_TASK_ID"
        fi
    fi
fi
exit "$code"
