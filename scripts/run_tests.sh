#!/usr/bin/env bash
# Every test, on as many workers as $2 says. What fails beside others on busy cores is run once more, alone: thousands of
# real processes with real deadlines share two cores. What fails twice has failed, and more than a few are no accident.
set -uo pipefail

python=$1
workers=$2
most=5
list=.pytest_cache/v/cache/lastfailed

rm -f "$list" # of an earlier run
"$python" -m pytest -n "$workers" --dist loadgroup -q tests
status=$?
[ "$status" -eq 1 ] || exit "$status"

failed=$("$python" -c 'import json; print(*json.load(open("'$list'")), sep="\n")') || exit 1
count=$(wc -l <<<"$failed")
if [ "$count" -gt "$most" ]; then
    printf 'failed:\n%s\n' "$failed"
    exit 1
fi
printf 'run again, alone:\n%s\n' "$failed"
if ! "$python" -m pytest -q --last-failed --last-failed-no-failures none tests; then
    printf 'failed alone too:\n%s\n' "$("$python" -c 'import json; print(*json.load(open("'$list'")), sep="\n")')"
    exit 1
fi
printf 'passed only alone, which is a fault to be found:\n%s\n' "$failed"
