"""The command line: misspelt, with the wrong paths, or without the daemon that it asks."""

from tests.mistakes.mistake import Mistake


def _typed(name: str, command: str, *, cause: str, place: str, hint: str, ends: int = 2, **more) -> Mistake:
    return Mistake(name=name, typed=f"$ {command}", cause=cause, place=place, hint=hint, ends=ends, **more)


_SAVED = """(ckptd run >run.log 2>&1 </dev/null &) ; until [ -S $ARENA/ckptd.sock ]; do sleep 0.1; done
cat >save.py <<'END'
import os, torch, ckptd_client
with ckptd_client.connect("first") as client:
    client.save({{"model": torch.ones(3)}}, 1).wait("durable")
    {end}
END
python save.py
"""

MISTAKES = (
    _typed(
        "verb-misspelt",
        "ckptd staus",
        cause="[Nn]o such command",
        place="staus",
        hint="mean ckptd status",
    ),
    _typed("no-verb", "ckptd", cause="Usage", place="ckptd", hint="status", ends=2),
    _typed(
        "status-without-daemon",
        "ckptd status",
        cause="no daemon",
        place="/dev/shm/ckptd-test",
        hint="ckptd run|hint",
        ends=3,
    ),
    _typed(
        "status-of-nowhere",
        "ckptd status --arena /nowhere",
        cause="no daemon|no arena",
        place="/nowhere",
        hint=r"hint: --arena or CKPTD_ARENA names another one; ckptd run starts a daemon in /dev/shm/ckptd-",
        never="ckptd run --arena /nowhere",
        ends=3,
    ),
    _typed(
        "drain-without-daemon",
        "ckptd drain",
        cause="no daemon",
        place="/dev/shm/ckptd-test",
        hint="ckptd run|hint",
        ends=3,
    ),
    _typed(
        "stop-without-daemon",
        "ckptd stop",
        cause="no daemon runs in .*: there is nothing to stop",
        place="/dev/shm/ckptd-test",
        hint="hint: one with another arena: ckptd stop --arena DIR",
        never="ckptd run",
        ends=3,
    ),
    _typed("forget-nothing", "ckptd forget", cause="[Mm]issing argument", place="JOB", hint="Usage|--help"),
    _typed(
        "forget-unknown-job",
        "ckptd forget frist",
        cause="there is no job frist in .*: no job's memory is there, and no daemon runs there",
        place="/dev/shm/ckptd-test",
        hint="hint: .*: ckptd forget JOB --arena DIR",
        never="ckptd run",
        ends=3,
    ),
    _typed(
        "history-without-store",
        "env -u CKPTD_STORE ckptd history first",
        cause="where is the job first",
        place="settings",
        hint="hint: ckptd history first --store DIR",
    ),
    _typed(
        "report-nowhere",
        "ckptd report /nowhere/first -o page.html",
        cause="no such job",
        place="/nowhere/first",
        hint="hint: what is there: ckptd list /nowhere",
    ),
    _typed(
        "advise-without-unit",
        "ckptd advise /nowhere/first --mtbf soon",
        cause="no duration",
        place="--mtbf",
        hint="90m",
    ),
    _typed("list-nowhere", "ckptd list /nowhere", cause="No such file", place="/nowhere", hint="hint", ends=2),
    _typed(
        "list-a-file",
        "ckptd list /etc/hostname",
        cause="Not a directory",
        place="/etc/hostname",
        hint="hint",
        ends=2,
    ),
    _typed(
        "list-an-empty-directory",
        "ckptd list $HOME",
        cause="no checkpoint of any job",
        place="/place/home",
        hint="hint",
        ends=2,
    ),
    _typed("list-without-path", "ckptd list", cause="[Mm]issing argument", place="PATH", hint="--help"),
    _typed(
        "list-s3",
        "ckptd list s3://bucket/ckpt",
        cause="s3://",
        place="s3://",
        hint="hint",
    ),
    _typed(
        "verify-empty", "ckptd verify $HOME", cause="no (store|checkpoint)", place="/place/home", hint="hint", ends=2
    ),
    _typed("export-without-out", "ckptd export $STORE", cause="[Mm]issing argument", place="OUT", hint="--help"),
    _typed(
        "export-nowhere",
        "ckptd export /nowhere out",
        cause="/nowhere does not exist",
        place="/nowhere",
        hint="hint: give the directory of a checkpoint, such as STORE/JOB/latest",
    ),
    _typed(
        "export-a-store",
        "ckptd export $STORE out",
        cause="nothing to export",
        place="/place/store",
        hint="hint",
    ),
    _typed("commit-nothing", "ckptd commit $HOME", cause="no", place="/place/home", hint="hint", ends=2),
    _typed(
        "prune-keeps-nothing",
        "ckptd prune $STORE --keep-last 0",
        cause=r"keep_last='0' \(from --keep-last\) is not allowed: it must be a whole number, at least 1",
        place="--keep-last",
        hint="hint: --keep-last 3",
    ),
    _typed(
        "prune-without-a-rule",
        "ckptd prune $STORE",
        cause="no checkpoint of any job",
        place="--keep-last|/place/store",
        hint="--keep-last|hint",
    ),
    _typed(
        "pin-a-step-as-one-would-name-it",
        _SAVED.format(end="pass") + "ckptd pin $STORE/first/step-1",
        cause="^error: /place/store/first/step-1 does not exist",
        place="/place/store/first",
        hint="hint: ckptd list /place/store/first shows what is there; the newest: /place/store/first/latest",
    ),
    _typed(
        "publish-a-job",
        _SAVED.format(end="pass") + "ckptd publish $STORE/first --to out",
        cause="^error: /place/store/first is no checkpoint's directory",
        place="/place/store/first",
        hint="hint: ckptd list /place/store/first shows what is there; the newest: /place/store/first/latest",
    ),
    _typed(
        "forget-misspelt-job-after-stop",
        _SAVED.format(end="os._exit(0)") + "ckptd stop --wait; ckptd forget frist; ckptd forget first",
        cause="^error: there is no job frist in .*: it has first, and no daemon runs there",
        place=r"stay in /dev/shm/\S+ for the next daemon: ckptd run --arena \S+; that frees them: ckptd forget first$",
        hint=r"hint: ckptd run --arena \S+ in another terminal, then again: ckptd forget first --arena /dev/shm/",
        ends=3,
    ),
    _typed(
        "pin-nothing",
        "ckptd pin $STORE/first/step-1",
        cause="/place/store/first/step-1 does not exist",
        place="/place/store/first",
        hint="hint: give the directory of a checkpoint, such as STORE/JOB/latest",
    ),
    _typed(
        "rebuild-nothing",
        "ckptd rebuild $HOME",
        cause="/place/home is no checkpoint's directory",
        place="/place/home",
        hint="hint: give the directory of a checkpoint, such as STORE/JOB/latest",
    ),
    _typed(
        "keygen-over-another",
        "ckptd keygen key && ckptd keygen key",
        cause="is there already",
        place="key",
        hint="hint|remove|another",
    ),
    _typed(
        "doctor-of-a-missing-store",
        "ckptd doctor --store /nowhere/ckpt",
        cause="/nowhere",
        place="/nowhere",
        hint="mkdir|mount",
        ends=1,
    ),
    _typed(
        "run-flag-misspelt",
        "ckptd run --slots-per-ranks 2",
        cause="[Nn]o such option",
        place="--slots-per-ranks",
        hint="--slots-per-rank",
    ),
    _typed(
        "run-flag-of-text",
        "ckptd run --slots-per-rank many",
        cause=r"slots_per_rank='many' \(from --slots-per-rank\) is not allowed: it must be a whole number, at least 2",
        place="from --slots-per-rank",
        hint="hint: --slots-per-rank 3",
    ),
    _typed("run-config-missing", "ckptd run --config none.toml", cause="none.toml", place="none.toml", hint="--config"),
    _typed(
        "run-config-key-misspelt",
        "echo 'slot_per_rank = 3' > c.toml; ckptd run --config c.toml",
        cause="slot_per_rank",
        place="c.toml",
        hint="slots_per_rank",
    ),
    _typed(
        "run-config-relative",
        "echo 'store = \"ckpt\"' > c.toml; ckptd run --config c.toml",
        cause=r"store='ckpt' \(from c.toml\) is not allowed: it must be an absolute path, or one that begins with ~/",
        place="c.toml",
        hint='hint: store = "/path/of/store" in c.toml',
    ),
    _typed(
        "run-config-not-toml",
        "echo 'slots_per_rank: 3' > c.toml; ckptd run --config c.toml",
        cause="TOML",
        place="c.toml.*line 1",
        hint="hint: ",
    ),
    _typed(
        "run-in-nowhere", "ckptd run --arena /nowhere/arena", cause="/nowhere", place="/nowhere/arena", hint="hint: "
    ),
    _typed("run-peer-address", "ckptd run --peer-address ib9", cause="ib9", place="ib9|peer.address", hint="hint: "),
    _typed("run-port-taken", "ckptd run --peer-port 99999999", cause="99999999", place="peer.port", hint="65535|hint"),
    _typed(
        "variable-misspelt-on-command",
        "CKPTD_ARENNA=/dev/shm/x ckptd run",
        cause="CKPTD_ARENNA",
        place="CKPTD_ARENNA",
        hint="CKPTD_ARENA",
    ),
    _typed(
        "publish-nothing",
        "ckptd publish $STORE/first --to out",
        cause="/place/store/first does not exist",
        place="/place/store/first",
        hint="hint: give the directory of a checkpoint, such as STORE/JOB/latest",
    ),
)
