"""Arguments of connect, variables and configuration files that cannot be meant."""

from tests.mistakes.mistake import Mistake


def _connect(name: str, arguments: str, *, cause: str, place: str, hint: str, **more) -> Mistake:
    """A call of connect that is refused; nothing comes after it."""
    typed = f"client = connect({arguments})\nprint('connected')\n"
    return Mistake(name=name, typed=typed, cause=cause, place=place, hint=hint, **{"never": "^connected", **more})


def _not_allowed(name: str, option: str, value: str, *, must: str, hint: str) -> Mistake:
    """A value that an option of connect does not take: the one sentence for it."""
    shown = value if value != 'float("nan")' else "nan"
    cause = rf"ConfigError: {option}={shown} \(from connect\) is not allowed: it must be {must}"
    return _connect(
        name,
        f'"first", {option}={value}',
        cause=cause,
        place=r"\(from connect\)",
        hint=rf"hint: connect\({option}={hint}",
    )


MISTAKES = (
    _connect(
        "no-job", "", cause="ConfigError: the job has no name", place="job", hint=r"connect\(job=...\) or CKPTD_JOB"
    ),
    _connect("empty-job", '""', cause="ConfigError: the job has no name", place="job", hint=r"connect\(job=...\)"),
    _connect(
        "job-with-slash", '"llama/7b"', cause="ConfigError: 'llama/7b' is no name", place="job", hint="letters, digits"
    ),
    _connect(
        "job-with-space", '"my run"', cause="ConfigError: 'my run' is no name", place="job", hint="letters, digits"
    ),
    _connect("job-too-long", '"x" * 100', cause="ConfigError: 'xxx", place="job", hint="at most 64"),
    _connect(
        "job-is-a-number",
        "3",
        cause="ConfigError: 3 is no name|ConfigError: .*not int",
        place="job",
        hint='job="|letters',
    ),
    _connect(
        "job-is-a-path",
        '"/tmp/ckpt"',
        cause="ConfigError: '/tmp/ckpt' is no name",
        place="job",
        hint=r"hint: a name without a slash; a path is the store: connect\('llama-7b', store='/tmp/ckpt'\)",
    ),
    _connect(
        "store-relative",
        '"first", store="not/there"',
        cause="ConfigError: store '/place/home/not/there' cannot be used",
        place="/place/home/not",
        hint="hint: .*mount",
    ),
    _connect(
        "store-tilde",
        '"first", store="~nobody-here/ckpt"',
        cause="ConfigError: '~nobody-here/ckpt': there is no home directory ~nobody-here",
        place="~nobody-here/ckpt",
        hint="hint: .*'./~nobody-here/ckpt'",
    ),
    Mistake(
        name="store-s3",
        typed='connect("first", store="s3://bucket/ckpt")',
        cause="ConfigError: .*s3://",
        place="store",
        hint="hint: .*(directory|mount)",
        never="/place/home/s3:",
    ),
    _connect(
        "no-store",
        '"first"',
        cause="ConfigError: no store is set",
        place="store",
        hint=r"connect\(store=...\), CKPTD_STORE",
        environ={"CKPTD_STORE": None},
    ),
    _connect(
        "store-is-a-number",
        '"first", store=3',
        cause="ConfigError: store",
        place="store",
        hint="hint: ",
    ),
    _connect(
        "option-misspelt",
        '"first", drain_evry=10',
        cause="drain_evry",
        place="connect",
        hint="drain_every",
    ),
    _connect(
        "store-as-second",
        '"first", "/tmp/ckpt"',
        cause="UsageError: connect: too many positional arguments",
        place="connect",
        hint="given by name, such as store=",
    ),
    _not_allowed("drain-every-0", "drain_every", "0", must="a number of steps", hint="10"),
    _not_allowed("drain-every-without-unit", "drain_every", "'300'", must='.*seconds such as "300s"', hint="10"),
    _not_allowed("drain-every-minutes", "drain_every", "'5m'", must='.*seconds such as "300s"', hint="10"),
    _connect(
        "drain-every-float",
        '"first", drain_every=1e3',
        cause=r"ConfigError: drain_every=1000.0 \(from connect\) is not allowed: it must be a number of steps",
        place="drain_every",
        hint=r"hint: connect\(drain_every=10\)",
    ),
    _not_allowed("drain-every-none", "drain_every", "None", must="a number of steps", hint="10"),
    _not_allowed("drain-every-nan", "drain_every", "'nans'", must='.*seconds such as "300s"', hint="10"),
    _not_allowed("drain-every-true", "drain_every", "True", must="a number of steps", hint="10"),
    _connect(
        "drain-every-huge",
        '"first", drain_every=10**30',
        cause=r"ConfigError: drain_every=1000000.* is not allowed: it must be a number of steps from 1 to ",
        place="drain_every",
        hint=r"hint: connect\(drain_every=10\)",
    ),
    _not_allowed("layout-of-another", "layout", "'dcp'", must='"dual", or "plain"', hint="'dual'"),
    _not_allowed("redundancy-raid", "redundancy", "'raid5'", must='"xor", .*"double".* or "none"', hint="'xor'"),
    _not_allowed("redundancy-false", "redundancy", "False", must='"xor", .*"double".* or "none"', hint="'none'"),
    _not_allowed("set-size-1", "set_size", "1", must="a number of nodes from 2 to 64", hint="8"),
    _not_allowed("balance-misspelt", "balance", "'row'", must='"rows", .*or "off"', hint="'rows'"),
    _not_allowed("verify-replicas-word", "verify_replicas", "'always'", must='"drained".*"off"', hint="1"),
    _not_allowed("per-rank-is-text", "per_rank", "'rng'", must="a list of keys", hint=r"\['rng'\]"),
    _not_allowed("allow-pickle-true", "allow_pickle", "True", must="a list of keys", hint=r"\['hooks"),
    _not_allowed("save-timeout-0", "save_timeout_s", "0", must="a number of seconds above 0", hint="10"),
    _not_allowed("save-timeout-text", "save_timeout_s", "'ten'", must="a number of seconds above 0", hint="10"),
    _not_allowed("save-timeout-nan", "save_timeout_s", 'float("nan")', must="a number of seconds above 0", hint="10"),
    _not_allowed("connect-timeout-negative", "connect_timeout_s", "-1", must="a number of seconds above 0", hint="60"),
    _not_allowed("connect-timeout-text", "connect_timeout_s", "'60'", must="a number of seconds above 0", hint="60"),
    _connect(
        "store-id-of-another",
        '"first", store_id="0" * 32',
        cause=r"ConfigError: .*asks for the store with id 0{32} \(connect\(store_id=...\) or CKPTD_STORE_ID\)",
        place="/place/store is no store yet",
        hint="hint: mount the file system of the store with that id; for a new store give no store_id",
        never="^connected|ckptd forget",
    ),
    _not_allowed(
        "store-id-short", "store_id", "'ab12'", must="32 hex digits", hint="'any'\\), or ckptd list /place/store shows"
    ),
    _not_allowed("integrity-sha", "integrity", "'sha256'", must='"keyed".*or "xxh3"', hint="'xxh3'"),
    _connect(
        "keyed-without-key",
        '"first", integrity="keyed"',
        cause="ConfigError: integrity='keyed' needs a key, and no file of one is set",
        place="key",
        hint="ckptd keygen --integrity",
    ),
    _connect(
        "key-file-missing",
        '"first", integrity_key_file="/nowhere/key"',
        cause="ConfigError: ",
        place="/nowhere/key",
        hint="hint: is the path right, .*mounted. only for a job that has no keyed .*: ckptd keygen --integrity FILE",
    ),
    _connect(
        "arena-is-a-file",
        '"first", arena="/etc/hostname"',
        cause="ConfigError: .*is (a|no) (file|directory)",
        place="/etc/hostname",
        hint="hint: ",
        never="remove it",
    ),
    _connect(
        "arena-parent-missing", '"first", arena="/dev/shmm/me"', cause="ConfigError: ", place="/dev/shmm", hint="hint: "
    ),
    _connect(
        "arena-too-long",
        '"first", arena="/dev/shm/" + "x" * 100',
        cause="ConfigError: arena",
        place="/dev/shm/xxx",
        hint="shorter arena",
    ),
    _connect(
        "arena-of-everybody",
        '"first"',
        before="chmod 777 $ARENA",
        cause="ConfigError: .*(0?777|others|mode)",
        place="/dev/shm/ckptd-test",
        hint="chmod 0?700",
    ),
    _connect(
        "arena-of-another",
        '"first"',
        before="chown 12345 $ARENA; chmod 755 $ARENA",
        needs_root=True,
        user=True,
        cause="ConfigError: .*of uid 12345",
        place="/dev/shm/ckptd-test",
        hint="hint: ",
    ),
    _connect(
        "arena-unwritable-parent", '"first", arena="/proc/me"', cause="ConfigError: ", place="/proc/me", hint="hint: "
    ),
    _connect(
        "variable-misspelt",
        '"first"',
        environ={"CKPTD_SLOTS_PER_RANKS": "2"},
        cause="CKPTD_SLOTS_PER_RANKS",
        place="CKPTD_SLOTS_PER_RANKS",
        hint="CKPTD_SLOTS_PER_RANK",
    ),
    _connect(
        "variable-of-text",
        '"first"',
        environ={"CKPTD_SLOTS_PER_RANK": "many"},
        cause=r"slots_per_rank='many' \(from CKPTD_SLOTS_PER_RANK\) is not allowed: it must be a whole number, at",
        place="from CKPTD_SLOTS_PER_RANK",
        hint="hint: CKPTD_SLOTS_PER_RANK=3",
    ),
    _connect(
        "config-missing",
        '"first"',
        environ={"CKPTD_CONFIG": "$HOME/none.toml"},
        cause="none.toml",
        place="CKPTD_CONFIG|none.toml",
        hint="hint: ",
    ),
    _connect(
        "config-not-toml",
        '"first"',
        before="echo 'slots_per_rank: 3' > c.toml",
        environ={"CKPTD_CONFIG": "$HOME/c.toml"},
        cause="TOML|toml",
        place="c.toml.*line 1|line 1",
        hint="slots_per_rank = 3|hint: ",
    ),
    _connect(
        "config-key-misspelt",
        '"first"',
        before="echo 'slot_per_rank = 3' > c.toml",
        environ={"CKPTD_CONFIG": "$HOME/c.toml"},
        cause="slot_per_rank",
        place="c.toml",
        hint="slots_per_rank",
    ),
    _connect(
        "config-wrong-type",
        '"first"',
        before="echo 'slots_per_rank = \"three\"' > c.toml",
        environ={"CKPTD_CONFIG": "$HOME/c.toml"},
        cause=r"slots_per_rank='three' \(from /place/home/c.toml\) is not allowed: it must be a whole number, at",
        place="c.toml",
        hint="hint: slots_per_rank = 3 in /place/home/c.toml",
    ),
    _connect(
        "config-impossible-value",
        '"first"',
        before="echo 'slots_per_rank = 0' > c.toml",
        environ={"CKPTD_CONFIG": "$HOME/c.toml"},
        cause=r"slots_per_rank=0 \(from /place/home/c.toml\) is not allowed: it must be a whole number, at",
        place="c.toml",
        hint="hint: slots_per_rank = 3 in /place/home/c.toml",
    ),
    _connect(
        "budget-too-small",
        '"first"',
        environ={"CKPTD_BUDGET_NBYTES": "-5"},
        cause=r"budget_nbytes='-5' \(from CKPTD_BUDGET_NBYTES\) is not allowed: it must be bytes, or .*, at least 0",
        place="CKPTD_BUDGET_NBYTES",
        hint="hint: CKPTD_BUDGET_NBYTES=64G",
    ),
    _connect(
        "no-daemon-and-none-started",
        '"first", connect_timeout_s=3',
        environ={"CKPTD_NO_AUTOSTART": "1"},
        cause="ConnectError: no daemon listens .*; CKPTD_NO_AUTOSTART is set: connect starts none",
        place="/dev/shm/ckptd-test",
        hint="hint: if yours runs with another arena: .*: ckptd run --arena .*unset CKPTD_NO_AUTOSTART",
        never="it is waited for",
    ),
)
