"""Stores that are missing, full, not to be written, another's, or altered by hand."""

from tests.mistakes.mistake import Mistake

_SAVED = """
with connect("first") as client:
    client.save(state, 1).wait("durable")
"""
_FORGOTTEN = _SAVED + 'elsewhere("ckptd stop --wait >/dev/null; rm -rf $ARENA/jobs")\n'
"""Then only the store has it."""


_PRIVATE = r"no node that answers has what|, save \d+\)"
_DAMAGED = (
    r"hint: ckptd verify /place/store/first shows all .*ckptd rebuild /place/store/first/step-000000001.i0001; "
    r"to start from nothing: mv /place/store/first /place/store/first~$"
)


def _altered(name: str, command: str, **more) -> Mistake:
    """A checkpoint that only the store has is altered by hand, then loaded."""
    typed = (
        _FORGOTTEN.lstrip()
        + f"elsewhere({command!r})\n"
        + 'with connect("first") as client:\n    print("restored", client.load(state))\n'
    )
    return Mistake(name=name, typed=typed, **{"never": _PRIVATE, **more})


MISTAKES = (
    Mistake(
        name="store-parent-missing",
        typed='connect("first", store="/scratchh/me/ckpt")\n',
        cause="ConfigError: .*there is no /scratchh: ",
        place="store '/scratchh/me/ckpt'",
        hint="hint: is its file system mounted, and is it spelt right. else: mkdir -p /scratchh/me$",
    ),
    Mistake(
        name="store-is-a-file",
        before="echo > ckpt",
        typed='connect("first", store="$HOME/ckpt")\n',
        cause="ConfigError: .*(directory)",
        place="/place/home/ckpt",
        hint="hint: ",
    ),
    Mistake(
        name="store-not-writable",
        before="chmod 500 $STORE",
        user=True,
        typed=_SAVED,
        cause=r"ConfigError: .*Permission denied: /place/store has owner uid \d+ and mode 0500, the daemon is uid \d+",
        place="/place/store",
        hint=r"hint: chmod u\+rwx /place/store$",
    ),
    Mistake(
        name="store-not-readable",
        before="chmod 000 $STORE",
        user=True,
        typed=_SAVED,
        cause=r"ConfigError: .*Permission denied: /place/store has owner uid \d+ and mode 0000, the daemon is uid \d+",
        place="/place/store",
        hint=r"hint: chmod u\+rwx /place/store$",
    ),
    Mistake(
        name="store-read-only",
        before="mount -t tmpfs -o ro,mode=0755 tmpfs $STORE",
        needs_root=True,
        typed=_SAVED,
        cause="ConfigError: .*[Rr]ead-only",
        place="/place/store",
        hint="hint: ",
    ),
    Mistake(
        name="store-full",
        before="mount -t tmpfs -o size=512k,mode=0755 tmpfs $STORE",
        needs_root=True,
        typed="""
with connect("first") as client:
    client.save({"big": torch.ones(1_000_000)}, 1)
    client.wait("durable", 8)
""",
        cause="No space left",
        place="/place/store",
        hint=r"ckptd prune STORE/JOB --keep-last 1; .*CKPTD_KEEP_LAST=1.*it stands: ckptd status --arena /dev/shm/",
    ),
    Mistake(
        name="store-slow",
        environ={"CKPTD_DRAIN_BANDWIDTH": "200K"},
        typed="""
with connect("first") as client:
    client.save({"big": torch.ones(1_000_000)}, 1)
    client.wait("durable", 4)
""",
        cause=r"WaitTimeoutError: step 1 is staged after 4 s: its drain to /place/store has written \S+ of 4\S* MB in",
        place="/place/store",
        hint=r"hint: wait longer, or see how it goes on: ckptd status --watch --arena /dev/shm/",
        within_s=60,
    ),
    Mistake(
        name="store-full-and-nobody-waits",
        before="mount -t tmpfs -o size=512k,mode=0755 tmpfs $STORE",
        needs_root=True,
        typed="""
with connect("first") as client:
    for step in range(5):
        print(client.save({"big": torch.ones(1_000_000)}, step))
        time.sleep(1)
""",
        cause="job first closed: step 4, the newest complete save, is only in memory, .*No space left",
        place="newest durable step of this run: none; drains to /place/store fail",
        hint="hint: mend that, then: ckptd drain --wait --arena /dev/shm/",
        never="(?s)job first closed.*job first closed",
        ends=0,
    ),
    Mistake(
        name="store-full-and-never-closed",
        before="mount -t tmpfs -o size=512k,mode=0755 tmpfs $STORE",
        needs_root=True,
        typed="""$ cat > train.py <<'END'
import time, torch, ckptd_client
client = ckptd_client.connect("first")
for step in range(2):
    client.save({"big": torch.ones(1_000_000)}, step)
    time.sleep(2)
END
python train.py""",
        cause="job first ended without close.*: step 1, the newest complete save, is only in memory, .*No space left",
        place="newest durable step of this run: none; drains to /place/store fail",
        hint="hint: mend that, then: ckptd drain --wait --arena /dev/shm/",
        never="(?s)ended without.*ended without",
        ends=0,
    ),
    Mistake(
        name="file-size-limit",
        typed="""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
with connect("first") as client:
    client.save({"big": torch.ones(1_000_000)}, 1).wait("durable", 10)
""",
        cause="[Ff]ile (size|too large)|RLIMIT_FSIZE",
        place="step 1|rank 0",
        hint="ulimit -f|limit",
        own_processes=True,
    ),
    Mistake(
        name="store-removed-while-training",
        typed="""
with connect("first") as client:
    client.save(state, 1).wait("durable")
    elsewhere("rm -rf $STORE")
    client.save(state, 2)
    client.wait("durable", 8)
""",
        cause="WaitTimeoutError: .*/place/store is gone: there is no such directory",
        place="/place/store",
        hint=r"mount its file system again: .*if the store was deleted for good: .*connect\(store_id='any'\)",
        never="now none|mend that",
    ),
    Mistake(
        name="store-emptied-between-runs",
        typed=_SAVED
        + """
elsewhere("rm -rf $STORE/*  $STORE/.[a-z]*")
with connect("first") as client:
    print(client.load(state))
""",
        cause="ConfigError: .*is not the store that job 'first' is saved to: store id",
        place="/place/store",
        hint="mount its file system; .*connect\\(store_id='any'\\); .*ckptd forget first --store",
    ),
    Mistake(
        name="another-store-at-the-path",
        typed=_SAVED
        + """
elsewhere("mv $STORE $STORE.old; mkdir $STORE")
with connect("first") as client:
    print(client.load(state))
""",
        cause="ConfigError: .*is not the store that job 'first' is saved to: store id",
        place="/place/store",
        hint="mount its file system; .*connect\\(store_id='any'\\); .*ckptd forget first --store",
    ),
    Mistake(
        name="another-store-of-another-job-at-the-path",
        typed="""
elsewhere("ckptd run >/dev/null 2>&1 & sleep 2")
"""
        + _SAVED
        + """
elsewhere("mv $STORE $STORE.old; mkdir $STORE")
with connect("second") as client:
    client.save(state, 5).wait("durable")
with connect("first") as client:
    print("restored", client.load(state))
""",
        cause="^ckptd: nothing was restored: checkpoints in the store with id \\w+, to which job 'first' was saved",
        place="/place/store is now the store with id",
        hint="mount the file system",
        ends=0,
        never=r"job='second'|which has second",
    ),
    Mistake(
        name="job-is-a-file-there",
        before="echo > $STORE/first",
        typed=_SAVED,
        cause="ConfigError: store '/place/store' cannot be used: /place/store/first is no directory, and the job",
        place="/place/store/first is no directory",
        hint="hint: mv /place/store/first /place/store/first~, or connect with another job name",
        never="set store to another path",
    ),
    Mistake(
        name="store-has-other-things",
        before="touch $STORE/thesis.tex; mkdir $STORE/first; touch $STORE/first/model.pt",
        typed=_SAVED,
        cause="ckptd: warning: the new store /place/store lies (on this node's own disk|in this node's memory)",
        place="mounted at ",
        hint="is the parallel file system mounted",
        ends=0,
    ),
    Mistake(
        name="store-is-a-loop",
        before="rmdir $STORE; ln -s store $STORE",
        typed=_SAVED,
        cause="ConfigError: .*(symbolic links|loop)",
        place="/place/store",
        hint="hint: ",
    ),
    _altered(
        "image-altered",
        "cd $STORE/first/step-*; printf xxxx | dd of=r00000-p00.safetensors bs=1 seek=5000 conv=notrunc status=none",
        cause="RestoreError: .*|DamagedError: ",
        place="r00000-p00.safetensors",
        hint=_DAMAGED,
    ),
    _altered(
        "image-removed",
        "rm $STORE/first/step-*/r00000-p00.safetensors",
        cause="RestoreError: ",
        place="r00000-p00.safetensors",
        hint=_DAMAGED,
    ),
    _altered(
        "image-cut-off",
        "truncate -s 100 $STORE/first/step-*/r00000-p00.safetensors",
        cause="RestoreError: ",
        place="r00000-p00.safetensors",
        hint=_DAMAGED,
    ),
    _altered(
        "manifest-removed",
        "rm $STORE/first/step-*/ckptd.*.manifest",
        cause="RestoreError: ",
        place="step-",
        hint="hint: .*is made again by: ckptd commit /place/store/first/step-000000001.i0001$",
    ),
    _altered(
        "committed-removed",
        "rm $STORE/first/step-*/COMMITTED",
        cause="RestoreError: ",
        place="step-",
        hint="hint: .*is committed again by: ckptd commit /place/store/first/step-000000001.i0001$",
    ),
    _altered(
        "directory-renamed",
        "mv $STORE/first/step-* $STORE/first/best",
        cause="first/best",
        place="best|first",
        hint="hint: mv /place/store/first/best /place/store/first/step-.*ckptd pin /place/store/first/step-",
        never="ckptd verify",
    ),
    _altered(
        "files-unreadable",
        "chmod 000 $STORE/first/step-*/r00000-p00.safetensors",
        user=True,
        cause=r"RestoreError: \S+: Permission denied: \S+ has owner uid \d+ and mode 0000, this process is uid \d+",
        place=r"/place/store/first/step-\S+/r00000-p00.safetensors has owner",
        hint=r"hint: chmod u\+r /place/store/first/step-\S+/r00000-p00.safetensors; the checkpoint need not be damaged",
        never="is damaged|no node has|ckptd verify",
    ),
    Mistake(
        name="load-from-the-job",
        typed=_SAVED
        + """
with connect("first") as client:
    client.load_from("$STORE/first", state)
""",
        cause="UsageError: /place/store/first is the directory of a job, not of one checkpoint",
        place="/place/store/first",
        hint=r"hint: client.load_from\('/place/store/first/latest', state\)$",
    ),
    Mistake(
        name="load-from-a-pickle",
        typed="""
os.mkdir("old")
torch.save(model, "old/model.pt")
with connect("first") as client:
    client.load_from(os.path.abspath("old"), state)
""",
        cause="UsageError: /place/home/old holds no checkpoint that load_from reads; model.pt there is a torch.save",
        place="/place/home/old",
        hint=r"hint: torch.load\('/place/home/old/model.pt'",
    ),
    Mistake(
        name="load-from-a-broken-safetensors",
        typed="""
open("model.safetensors", "wb").write(b"<html>404</html>" * 10)
with connect("first") as client:
    client.load_from(os.path.abspath("model.safetensors"), state)
""",
        cause="(Damaged|Restore|Usage)Error: ",
        place="model.safetensors",
        hint="hint: |not a safetensors",
    ),
    Mistake(
        name="keyed-then-without-key",
        before="ckptd keygen --integrity $HOME/key",
        typed="""
with connect("first", integrity_key_file="$HOME/key") as client:
    client.save(state, 1).wait("durable")
elsewhere("ckptd stop --wait >/dev/null; rm -rf $ARENA/jobs")
with connect("first") as client:
    print("restored", client.load(state))
""",
        cause="(Integrity|Restore)Error: .*key",
        place="step",
        hint=r"hint: connect\(integrity_key_file=FILE\); ckptd verify --key FILE /place/store/first",
    ),
)
