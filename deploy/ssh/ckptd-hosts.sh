#!/bin/sh
# Daemons on hosts that ssh reaches without a password, for the user who types it:
#
#   ./ckptd-hosts.sh start node1 node2      # one on each, unless it runs; it outlives the session
#   ./ckptd-hosts.sh status node1 node2     # also: doctor, drain
#   ./ckptd-hosts.sh stop node1 node2       # what is staged stays in memory for the next start
#
# All hosts at once, each line with its host in front; the exit status is 0 if it was on all of them.
# ckptd must be in the PATH of a command over ssh, or REMOTE_PATH=/opt/ckptd/bin. Settings: ~/.config/ckptd/config.toml there.

verb=$1
[ $# -ge 2 ] || verb=help
case $verb in
    start | status | doctor | drain | stop) shift ;;
    *)
        sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac

# What runs on the host, as the text of a script: nothing is quoted twice.
remote() {
    echo "PATH=${REMOTE_PATH:-\$HOME/.local/bin}:\$PATH"
    case $verb in
        start)
            cat <<'END'
ckptd status >/dev/null 2>&1 && echo "runs already" && exit
log=$HOME/.ckptd.log
# Lingering keeps logind from deleting /dev/shm/ckptd-* with the user's last session; ckptd doctor says if it must be root's.
loginctl enable-linger 2>/dev/null
( umask 077; setsid nohup ckptd run </dev/null >>"$log" 2>&1 & )
if timeout 10 sh -c 'until ckptd status >/dev/null 2>&1; do sleep 0.2; done'; then
    echo started
else
    tail -n 5 "$log"
    exit 1
fi
END
            ;;
        drain | stop) echo "ckptd $verb --wait" ;;
        *) echo "ckptd $verb" ;;
    esac
}

# shellcheck disable=SC2086 # SSH_OPTIONS are several words
one() {
    said=$(remote | ssh -o BatchMode=yes $SSH_OPTIONS "$1" sh -s 2>&1)
    code=$?
    printf '%s\n' "$said" | sed "s/^/$1: /"
    return $code
}

for host in "$@"; do
    one "$host" &
    jobs="$jobs $!"
done
failed=0
for job in $jobs; do
    wait "$job" || failed=1
done
exit $failed
