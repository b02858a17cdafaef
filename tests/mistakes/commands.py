"""The command line: misspelt, with the wrong paths, or without the daemon that it asks."""

from tests.mistakes.mistake import Mistake


def _typed(name: str, command: str, *, cause: str, place: str, hint: str, ends: int = 2, **more) -> Mistake:
    return Mistake(name=name, typed=f"$ {command}", cause=cause, place=place, hint=hint, ends=ends, **more)


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
        hint="hint|--arena",
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
    _typed("stop-without-daemon", "ckptd stop", cause="no daemon", place="/dev/shm/ckptd-test", hint="", ends=3),
    _typed("forget-nothing", "ckptd forget", cause="[Mm]issing argument", place="JOB", hint="Usage|--help"),
    _typed(
        "forget-unknown-job",
        "ckptd forget frist",
        cause="no daemon",
        place="frist|/dev/shm/ckptd-test",
        hint="ckptd status|hint",
        ends=3,
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
        "export-nowhere", "ckptd export /nowhere out", cause="does not exist|no such", place="/nowhere", hint="hint"
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
        "pin-nothing",
        "ckptd pin $STORE/first/step-1",
        cause="does not exist|no checkpoint",
        place="/place/store/first",
        hint="hint",
    ),
    _typed(
        "rebuild-nothing",
        "ckptd rebuild $HOME",
        cause="no (checkpoint|manifest|parity)",
        place="/place/home",
        hint="hint",
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
        cause="does not exist|no",
        place="/place/store/first",
        hint="hint",
    ),
)
