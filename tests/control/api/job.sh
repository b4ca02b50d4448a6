#!/bin/bash
#SBATCH --job-name=made
#SBATCH --nodes=1024
#SBATCH --ntasks-per-node=8
#SBATCH --partition=gpu
#SBATCH --account=me
#SBATCH --time=4:00:00
#SBATCH --cpus-per-task=12
#SBATCH --mail-user=me@example.org
#SBATCH --mail-type=END,FAIL
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=/runs/x/logs/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH --switches=1

# 8,192 ranks of run made; `ortlaunch status /runs/x` shows its state.
cd /here || exit
export ORTLAUNCH_MODULES=/here
export ORTLAUNCH_JOB=slurm:$SLURM_JOB_ID
touch /runs/x/job.sh  # what is older in the run folder is of an earlier turn
began=$(stat -c %Y /runs/x/job.sh)
rm -f /runs/x/requests/requeue
echo "ortlaunch: the job begins on $(hostname), turn $((${SLURM_RESTART_COUNT:-0} + 1))"
module load cuda/12.4

status=0
srun --export=ALL --kill-on-bad-exit=1 --distribution=block --mpi=none --cpus-per-task=12 \
    python start.py ortlaunch.cli train /runs/x/submitted.yaml --run-dir /runs/x || status=$?

# Which rank failed and why; the status is that rank's, where srun's may be an echo.
python start.py ortlaunch.started_runs.ended /runs/x 0 "$status" "$began"
status=$?
# The command above leaves this file where the run continues in another turn.
if test -e /runs/x/requests/requeue && test "$(stat -c %Y /runs/x/job.sh)" = "$began"; then
    # A controller that is started again, or replaced, answers after some minutes.
    for _ in $(seq 30); do
        said=$(scontrol requeue "$SLURM_JOB_ID" 2>&1) && rm /runs/x/requests/requeue && exit "$status"
        echo "$said" >&2
        case "$said" in *disabled*|*denied*|*nvalid*) break ;; esac
        sleep 10
    done
    echo "ortlaunch: the job was not requeued: $said" | tee /runs/x/requests/requeue >&2
fi
exit "$status"
