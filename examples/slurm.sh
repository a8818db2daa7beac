#!/bin/bash
# A run on the nodes of a Slurm job: Redis, orchestrator and trainer on the first, rollout workers on all.
#SBATCH --job-name=headpond
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@120      # two minutes to drain before the time limit; the next job resumes the run
#SBATCH --open-mode=append

set -euo pipefail
CONFIG=${1:?usage: sbatch slurm.sh run.toml}
FIRST=$(hostname)
PORT=$((20000 + SLURM_JOB_ID % 10000))

# Passwords are in the environment: no command line shows them.
REDIS_PASSWORD=$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n')
export REDIS_PASSWORD
umask 002

headpond redis "${TMPDIR:-/tmp}/headpond-redis-$SLURM_JOB_ID" --host 0.0.0.0 --port "$PORT" &
REDIS=$!
export HEADPOND_REDIS_URL="redis://:$REDIS_PASSWORD@$FIRST:$PORT/0"

# Workers on the other nodes, which end when the job does.
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    srun --nodes="$((SLURM_JOB_NUM_NODES - 1))" --exclude="$FIRST" \
        headpond up "$CONFIG" --join "redis://$FIRST:$PORT/0" --run-dir "${TMPDIR:-/tmp}/headpond-$SLURM_JOB_ID" &
fi

# Slurm's signal reaches this shell: pass it on, and wait for the end of the drain.
headpond up "$CONFIG" &
UP=$!
trap 'kill -TERM $UP' TERM
STATUS=0
wait $UP || STATUS=$?
while kill -0 $UP 2>/dev/null; do
    STATUS=0
    wait $UP || STATUS=$?
done
kill $REDIS
exit $STATUS
