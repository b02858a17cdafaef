#!/bin/sh
# A training with ckptd under mpiexec alone, no scheduler, no root:
#
#   HOSTS=node1,node2 PPN=8 ./train.sh python train.py
#
# One daemon on each host, started by an mpiexec of its own, so that it outlives the training's; at the end, good or bad,
# what the training left becomes durable and the daemons end. Options are those of MPICH's and Intel's mpiexec; Open MPI:
# replace the two functions by mpirun --host "$HOSTS" --map-by ppr:1:node "$@", and ppr:$PPN:node.

: "${HOSTS:?the hosts, as in HOSTS=node1,node2}"
: "${PPN:?ranks on each host, as in PPN=8}"
count=$(printf %s "$HOSTS" | tr , '\n' | grep -c .)
# A daemon that a rank starts would end with the training.
export CKPTD_NO_AUTOSTART=1

on_each_host() {
    mpiexec -hosts "$HOSTS" -ppn 1 -n "$count" "$@" </dev/null
}
train() {
    mpiexec -hosts "$HOSTS" -ppn "$PPN" -n $((count * PPN)) "$@"
}

# Begun again when one dies, but for a setting that is wrong (2): mpiexec would end them all with the first.
# shellcheck disable=SC2016
on_each_host sh -c 'until ckptd run; do [ $? -ne 2 ] || exit 2; sleep 1; done' &
daemons=$!
if ! on_each_host timeout 60 sh -c 'until ckptd status >/dev/null 2>&1; do sleep 0.2; done'; then
    echo "no daemon within a minute" >&2
    kill "$daemons"
    exit 3
fi

train "$@"
status=$?

# What is in memory may stay there for another run: it is found again by the next daemon. `ckptd forget JOB` gives it back.
# Rank 0's daemon alone knows when all is durable: the others end at once, with exit code 4.
on_each_host sh -c 'ckptd drain --wait --timeout 10m || [ $? -eq 4 ]'
on_each_host ckptd stop --wait >/dev/null || kill "$daemons"
wait "$daemons"
exit "$status"
