#!/bin/bash
# Epilog= of slurm.conf, as root on each node after a job. What the job left staged becomes durable; its memory stays for
# its return (a requeue, the next job of a chain) while that is little, and for orphan_ttl_s at most; else it is freed.
# It must never fail, and end in time: slurmd would drain the node, or hold it for the next job.

export PATH=/opt/ckptd/bin:/usr/sbin:/usr/bin:/sbin:/bin
SETTINGS=/etc/ckptd/$SLURM_JOB_USER.env
DRAIN_TIMEOUT=60s
KEEP_PERCENT=10 # of the node's memory may stay with a user who has no rank here

# The user, with ckptd's settings out of the environment file, which is systemd's and no shell's.
mapfile -t settings < <(grep -s '^CKPTD_' "$SETTINGS")
[ ! -d "/run/ckptd/$SLURM_JOB_USER" ] || settings+=("CKPTD_ARENA=/run/ckptd/$SLURM_JOB_USER")
home=$(getent passwd "$SLURM_JOB_USER" | cut -d : -f 6)
as_user=(runuser -u "$SLURM_JOB_USER" -- env "PATH=$PATH" "HOME=$home" "${settings[@]}")
cd / || exit 0

status=$("${as_user[@]}" ckptd status --json 2>/dev/null) || exit 0 # no daemon, nothing held
"${as_user[@]}" ckptd drain --wait --timeout "$DRAIN_TIMEOUT" >/dev/null 2>&1

used=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["used_nbytes"] >> 10)' <<<"$status")
total=$(awk '/^MemTotal:/ { print $2 }' /proc/meminfo) # kB, as used
if [ "$((used * 100))" -gt "$((total * KEEP_PERCENT))" ]; then
    # Refused for a job whose ranks live, for what is not durable, and where only another node's daemon knows whether it
    # is: nothing is lost by asking. What is refused stays for orphan_ttl_s: CKPTD_ORPHAN_TTL_S=1h in the settings.
    python3 -c 'import json, sys; print(*{job["job"] for job in json.load(sys.stdin)["jobs"]}, sep="\n")' <<<"$status" |
        while read -r job; do "${as_user[@]}" ckptd forget "$job" </dev/null >/dev/null 2>&1; done
fi
exit 0
