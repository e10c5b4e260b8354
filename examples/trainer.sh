#!/usr/bin/env bash
# A trainer in bash and mv:  trainer.sh RUN_DIR COMMAND [ARGUMENT…]
#
# Moves the oldest batch from pending/ into inflight/, runs COMMAND … FILE on it, and when that
# succeeds moves it into acked/. When COMMAND fails the script ends with its exit code; the batch
# stays in inflight/ and comes first at the next start: what lies directly in inflight/ was claimed
# and not acked. So start one of these a run directory; any number of spoold.Consumer beside it is
# fine. (A folder of its own, inflight/NAME/, would need a lock on the .lock in it: without one the
# daemon gives its batches back to pending/ after a minute.)
#
# Nothing is synced: a power cut may undo the last acks, then those batches are trained on again.
set -euo pipefail
shopt -s nullglob
LC_ALL=C # oldest first: * sorts by bytes

if (($# < 2)); then
    echo "usage: trainer.sh RUN_DIR COMMAND [ARGUMENT…]" >&2
    exit 2
fi
run=$1
shift

# `mv -n` says success when it skipped a name that was taken: moved means that the old name is gone.
move() { mv -nT -- "$1" "$2" 2>/dev/null && [[ ! -e $1 ]]; }

train() {
    local claimed=$1
    shift
    "$@" "$claimed"
    move "$claimed" "$run/acked/${claimed##*/}" || echo "lost: $claimed" >&2
}

for left_over in "$run"/inflight/*.jsonl; do
    train "$left_over" "$@"
done

while true; do
    for batch in "$run"/pending/*.jsonl; do
        claimed=$run/inflight/${batch##*/}
        move "$batch" "$claimed" || continue # another consumer won: the next one
        train "$claimed" "$@"
        continue 2 # look again: an older one may have come back
    done
    sleep 1
done
