#!/bin/bash
# Prolog= of slurm.conf, as root on each node before a job: a daemon for its user, outside of the job, so that the arena
# outlives its steps and a requeue. PrologFlags=Alloc runs it when nodes are given, not at the first step only.
# It must never fail: slurmd would drain the node. Without a daemon saves fail, and training goes on.

export PATH=/opt/ckptd/bin:/usr/sbin:/usr/bin:/sbin:/bin
SETTINGS=/etc/ckptd/$SLURM_JOB_USER.env
LOGS=/var/log

if [ -d /run/systemd/system ]; then
    systemctl start "ckptd@$SLURM_JOB_USER" || logger -t ckptd "no daemon for $SLURM_JOB_USER"
    exit 0
fi

# The user, with ckptd's settings out of the environment file, which is systemd's and no shell's.
mapfile -t settings < <(grep -s '^CKPTD_' "$SETTINGS")
[ ! -d "/run/ckptd/$SLURM_JOB_USER" ] || settings+=("CKPTD_ARENA=/run/ckptd/$SLURM_JOB_USER")
home=$(getent passwd "$SLURM_JOB_USER" | cut -d : -f 6)
as_user=(runuser -u "$SLURM_JOB_USER" -- env "PATH=$PATH" "HOME=$home" "${settings[@]}")

# No systemd here, as in a container: a session of its own, which slurmd does not end with the job.
cd / || exit 0
if ! "${as_user[@]}" ckptd status >/dev/null 2>&1; then
    setsid "${as_user[@]}" ckptd run </dev/null >>"$LOGS/ckptd-$SLURM_JOB_USER.log" 2>&1 &
    "${as_user[@]}" timeout 10 sh -c 'until ckptd status >/dev/null 2>&1; do sleep 0.1; done'
fi
exit 0
