"""Arguments of connect, variables and configuration files that cannot be meant."""

from tests.mistakes.mistake import Mistake


def _connect(name: str, arguments: str, *, cause: str, place: str, hint: str, **more) -> Mistake:
    """A call of connect that is refused; nothing comes after it."""
    typed = f"client = connect({arguments})\nprint('connected')\n"
    return Mistake(name=name, typed=typed, cause=cause, place=place, hint=hint, **{"never": "^connected", **more})


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
        hint="letters, digits|store=",
    ),
    _connect(
        "store-relative",
        '"first", store="ckpt"',
        cause="ConfigError: store 'ckpt' is not an absolute path",
        place="store 'ckpt'",
        hint="from here it would be '/place/home/ckpt'",
    ),
    _connect(
        "store-tilde",
        '"first", store="~/ckpt"',
        cause="ConfigError: .*~/ckpt",
        place="store",
        hint="/place/home/ckpt",
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
    _connect(
        "drain-every-0",
        '"first", drain_every=0',
        cause="ConfigError: drain_every=0",
        place="drain_every",
        hint="number of steps such as 10",
    ),
    _connect(
        "drain-every-without-unit",
        '"first", drain_every="300"',
        cause="ConfigError: drain_every='300'",
        place="drain_every",
        hint='"300s"',
    ),
    _connect(
        "drain-every-minutes",
        '"first", drain_every="5m"',
        cause="ConfigError: drain_every='5m'",
        place="drain_every",
        hint='"300s"',
    ),
    _connect(
        "drain-every-float",
        '"first", drain_every=1e3',
        cause="ConfigError: drain_every=1000.0",
        place="drain_every",
        hint="number of steps such as 10",
    ),
    _connect(
        "drain-every-none",
        '"first", drain_every=None',
        cause="ConfigError: drain_every=None",
        place="drain_every",
        hint="number of steps such as 10",
    ),
    _connect(
        "drain-every-nan",
        '"first", drain_every="nans"',
        cause="ConfigError: drain_every='nans'",
        place="drain_every",
        hint='"300s"',
    ),
    _connect(
        "drain-every-true",
        '"first", drain_every=True',
        cause="ConfigError: drain_every=True",
        place="drain_every",
        hint='"300s"',
    ),
    _connect(
        "drain-every-huge",
        '"first", drain_every=10**30',
        cause="ConfigError: drain_every=1000000",
        place="drain_every",
        hint='"300s"',
    ),
    _connect(
        "layout-of-another",
        '"first", layout="dcp"',
        cause="ConfigError: layout='dcp'",
        place="layout",
        hint='"dual", or "plain"',
    ),
    _connect(
        "redundancy-raid",
        '"first", redundancy="raid5"',
        cause="ConfigError: redundancy='raid5'",
        place="redundancy",
        hint='"xor" survives',
    ),
    _connect(
        "redundancy-false",
        '"first", redundancy=False',
        cause="ConfigError: redundancy=False",
        place="redundancy",
        hint='"none"',
    ),
    _connect(
        "set-size-1", '"first", set_size=1', cause="ConfigError: set_size=1", place="set_size", hint="from 2 to 64"
    ),
    _connect(
        "balance-misspelt", '"first", balance="row"', cause="ConfigError: balance='row'", place="balance", hint='"rows"'
    ),
    _connect(
        "verify-replicas-word",
        '"first", verify_replicas="always"',
        cause="ConfigError: verify_replicas='always'",
        place="verify_replicas",
        hint="a number n",
    ),
    _connect(
        "per-rank-is-text",
        '"first", per_rank="rng"',
        cause="ConfigError: per_rank is 'rng'",
        place="per_rank",
        hint=r'a list of keys, such as \["rng"',
    ),
    _connect(
        "allow-pickle-true",
        '"first", allow_pickle=True',
        cause="(Config|Usage)Error: allow_pickle",
        place="allow_pickle",
        hint=r"hooks|\[\"",
    ),
    _connect(
        "save-timeout-0",
        '"first", save_timeout_s=0',
        cause="ConfigError: save_timeout_s=0",
        place="save_timeout_s",
        hint="such as 10",
    ),
    _connect(
        "save-timeout-text",
        '"first", save_timeout_s="ten"',
        cause="ConfigError: save_timeout_s='ten'",
        place="save_timeout_s",
        hint="such as 10",
    ),
    _connect(
        "save-timeout-nan",
        '"first", save_timeout_s=float("nan")',
        cause="ConfigError: save_timeout_s=nan",
        place="save_timeout_s",
        hint="such as 10",
    ),
    _connect(
        "connect-timeout-negative",
        '"first", connect_timeout_s=-1',
        cause="ConfigError: connect_timeout_s=-1",
        place="connect_timeout_s",
        hint="such as",
    ),
    _connect(
        "connect-timeout-text",
        '"first", connect_timeout_s="60"',
        cause="ConfigError: connect_timeout_s='60'",
        place="connect_timeout_s",
        hint="such as",
    ),
    _connect(
        "store-id-of-another",
        '"first", store_id="0" * 32',
        cause="ConfigError: store .* is not the store that job",
        place="/place/store",
        hint=r"connect\(store_id='any'\)",
    ),
    _connect(
        "store-id-short",
        '"first", store_id="ab12"',
        cause="ConfigError: store_id='ab12'",
        place="store_id",
        hint="ckptd list",
    ),
    _connect(
        "integrity-sha", '"first", integrity="sha256"', cause="ConfigError: .*sha256", place="integrity", hint="keyed"
    ),
    _connect(
        "keyed-without-key",
        '"first", integrity="keyed"',
        cause="ConfigError: ",
        place="key",
        hint="ckptd keygen --integrity",
    ),
    _connect(
        "key-file-missing",
        '"first", integrity_key_file="/nowhere/key"',
        cause="ConfigError: ",
        place="/nowhere/key",
        hint="ckptd keygen --integrity",
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
        cause="many",
        place="CKPTD_SLOTS_PER_RANK",
        hint="hint: .*(number|int)|from 1",
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
        cause="three|int",
        place="slots_per_rank",
        hint="hint: |from 1",
    ),
    _connect(
        "config-impossible-value",
        '"first"',
        before="echo 'slots_per_rank = 0' > c.toml",
        environ={"CKPTD_CONFIG": "$HOME/c.toml"},
        cause="slots_per_rank",
        place="c.toml|slots_per_rank",
        hint="hint: |at least 1|>= 1",
    ),
    _connect(
        "budget-too-small",
        '"first"',
        environ={"CKPTD_BUDGET_NBYTES": "-5"},
        cause="budget|BUDGET",
        place="CKPTD_BUDGET_NBYTES|budget_nbytes",
        hint="hint: |>= 0",
    ),
    _connect(
        "no-daemon-and-none-started",
        '"first", connect_timeout_s=3',
        environ={"CKPTD_NO_AUTOSTART": "1"},
        cause="ConnectError: no daemon listens",
        place="/dev/shm/ckptd-test",
        hint="ckptd run",
    ),
)
