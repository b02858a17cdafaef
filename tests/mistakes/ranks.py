"""Jobs of several ranks: one that does what all must do, ranks that do not fit, two runs of one job."""

from tests.mistakes.mistake import Mistake

_ALL = """
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
"""


def _ranks(name: str, typed: str, **more) -> Mistake:
    return Mistake(name=name, typed=_ALL + typed.lstrip("\n"), **{"ranks": 2, "within_s": 60.0, **more})


MISTAKES = (
    _ranks(
        "rank-0-saves",
        """
client = connect("first")
for step in range(6):
    if rank == 0:
        client.save(state, step)
    time.sleep(0.5)
client.close()
""",
        cause="step 0 waits for rank 1",
        place=r"job first closed: 6 saves \(steps 0 to 5\) are not complete and cannot be restored: .*rank 1",
        hint=r"every rank must call save \(one rank alone: connect\(alone=True\)\)",
        never="drains are slow",
        ends=0,
    ),
    _ranks(
        "rank-0-saves-once-and-trains-on",
        """
client = connect("first")
if rank == 0:
    client.save(state, 10)
time.sleep(9)
client.close()
""",
        cause="step 10 waits for rank 1",
        place=r"job first closed: step 10 is not complete and cannot be restored: it .*rank 1",
        hint=r"every rank must call save \(one rank alone: connect\(alone=True\)\)",
        ends=0,
    ),
    _ranks(
        "rank-0-saves-at-the-end",
        """
client = connect("first")
if rank == 0:
    client.save(state, 10)
    client.close()
dist.barrier()
client.close()
""",
        cause="job first closed: step 10 is not complete and cannot be restored: rank 0 saved it, and rank 1 has not",
        place=r"\[rank 1\] ckptd: job first closed|job first closed",
        hint=r"hint: call client.save\(state, step\) on every rank",
        ends=0,
    ),
    _ranks(
        "rank-0-connects",
        """
if rank == 0:
    connect("first", connect_timeout_s=4)
else:
    time.sleep(8)
""",
        cause="ConnectError: ",
        place="rank 1",
        hint=r"every rank must call connect|connect\(alone=True\)",
        ends=(1, 0),
    ),
    _ranks(
        "rank-0-loads",
        """
client = connect("first")
client.save(state, 1).wait("staged", 10)
if rank == 0:
    client.load(state)
else:
    time.sleep(12)
client.close()
""",
        cause="ckptd: load of job first waits for rank 1: ",
        place=r"rank 1 is pid \d+ on node0",
        hint=r"Error: rank 1 \(pid \d+\) has closed its client without calling load\n.*hint: every rank must call load",
        ends=(1, 0),
    ),
    _ranks(
        "rank-0-prepares",
        """
client = connect("first")
if rank == 0:
    client.prepare(state)
client.save(state, 1).wait("staged", 10)
print("staged")
client.close()
""",
        cause="staged",
        place="staged",
        hint="staged",
        ends=0,
    ),
    _ranks(
        "job-per-rank",
        """
client = connect(f"first-{rank}", connect_timeout_s=5)
client.save(state, 1).wait("staged", 5)
""",
        cause="UsageError: ranks disagree: rank 0 connects with job='first-0', rank 1 with job='first-1'",
        place="rank [01]",
        hint=r"same job= on all ranks.*connect\(job=..., alone=True\)",
    ),
    _ranks(
        "store-per-rank",
        """
client = connect("first", store=f"$STORE/{rank}", connect_timeout_s=5)
client.save(state, 1).wait("staged", 5)
""",
        cause="UsageError: ranks disagree",
        place="/place/store/[01]",
        hint="same store= on all ranks",
    ),
    _ranks(
        "step-per-rank",
        """
client = connect("first")
handle = client.save(state, 10 + rank)
handle.wait("staged", 8)
""",
        cause="SaveFailedError: .*ranks disagree about the step of one save: rank . saved step 1., rank . saved",
        place="step 1[01]",
        hint=r"hint: call save\(state, step\) with the same step on all ranks",
    ),
    _ranks(
        "drain-every-per-rank",
        """
client = connect("first", drain_every=1 + rank)
client.save(state, 3).wait("staged", 8)
client.close()
""",
        cause="UsageError: ranks disagree: .*drain_every='1'|drain_every=1",
        place="rank 1",
        hint="same drain_every= on all ranks",
        ends=1,
    ),
    _ranks(
        "redundancy-per-rank",
        """
client = connect("first", redundancy="xor" if rank else "none")
""",
        cause="Error: .*redundancy",
        place="rank [01]",
        hint="hint: .*(same|alike)",
    ),
    _ranks(
        "gather-otherwise",
        """
client = connect("first")
client.gather(model.state_dict(), to=rank).wait()
""",
        cause="UsageError: ",
        place="rank [01]",
        hint="hint: |same",
    ),
    _ranks(
        "rank-1-dies-before-save",
        """
client = connect("first")
if rank == 1:
    os.kill(os.getpid(), 9)
time.sleep(1)
client.save(state, 1).wait("staged", 15)
""",
        cause=r"SaveFailedError: .*abandoned' \(rank 1 \(pid \d+\) has ended and has not saved this step\)",
        place="rank 1",
        hint="hint: no save or load succeeds without it: see why it ended, and start the job again",
        ends=(1, -9),
    ),
    _ranks(
        "rank-1-closes-early",
        """
client = connect("first")
client.save(state, 1).wait("staged", 10)
if rank == 1:
    client.close()
    time.sleep(6)
else:
    time.sleep(1)
    client.save(state, 2).wait("staged", 10)
""",
        cause=r"SaveFailedError: .*abandoned' \(rank 1 \(pid \d+\) has closed its client and has not saved this step\)",
        place="rank 1",
        hint="hint: every rank closes only after the last save and load of all",
        ends=(1, 0),
    ),
    _ranks(
        "xor-on-one-node",
        """
client = connect("first", redundancy="xor")
client.save(state, 1)
time.sleep(2)
client.close()
""",
        cause="redundancy|xor",
        place="node",
        hint="two nodes|several nodes|redundancy=",
        ends=0,
    ),
    Mistake(
        name="no-init-process-group",
        typed='connect("first")\n',
        cause="UsageError: WORLD_SIZE is 8, but the ranks cannot find each other: there is no process group",
        place="WORLD_SIZE",
        hint=r"init_process_group before connect, .*unset WORLD_SIZE, or connect\(alone=True\)",
        environ={"WORLD_SIZE": "8", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    ),
    Mistake(
        name="world-size-is-text",
        typed='connect("first")\n',
        cause="(Usage|Config)Error: WORLD_SIZE",
        place="WORLD_SIZE is 'two'|WORLD_SIZE='two'",
        hint="hint: ",
        environ={"WORLD_SIZE": "two", "RANK": "0"},
    ),
    Mistake(
        name="world-size-is-empty",
        typed="""
with connect("first") as client:
    client.save(state, 1).wait("durable")
    print("durable")
""",
        cause="durable",
        place="durable",
        hint="durable",
        environ={"WORLD_SIZE": "", "RANK": ""},
        ends=0,
    ),
    Mistake(
        name="rank-is-missing",
        typed='connect("first")\n',
        cause="UsageError: WORLD_SIZE is 2, but RANK, MASTER_ADDR and MASTER_PORT are not set",
        place="WORLD_SIZE",
        hint=r"start with torchrun or mpiexec; for a job of this process: unset WORLD_SIZE, or connect\(alone=True\)",
        never="init_process_group",
        environ={"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
    ),
    Mistake(
        name="rank-beyond-world",
        typed='connect("first", connect_timeout_s=5)\n',
        cause="(Usage|Config|Connect)Error: .*RANK",
        place="RANK",
        hint="hint: ",
        environ={"WORLD_SIZE": "2", "RANK": "2", "TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "1"},
    ),
    Mistake(
        name="launcher-is-gone",
        typed='connect("first", connect_timeout_s=5)\n',
        cause="ConnectError: nothing answers at MASTER_ADDR=127.0.0.1, MASTER_PORT=1 within 5 s",
        place="MASTER_ADDR=127.0.0.1, MASTER_PORT=1",
        hint=r"unset MASTER_ADDR MASTER_PORT RANK WORLD_SIZE; for a job of this process alone: connect\(alone=True\)",
        never="init_process_group|c10d|frame #",
        within_s=9.0,
        environ={
            "WORLD_SIZE": "2",
            "RANK": "0",
            "TORCHELASTIC_RUN_ID": "x",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        },
    ),
    Mistake(
        name="two-runs-of-one-job",
        typed="""
pid = os.fork()
if pid == 0:
    client = connect("first")
    client.save(state, 1)
    time.sleep(30)
    os._exit(0)
time.sleep(2)
connect("first", connect_timeout_s=3)
""",
        cause="ConnectError: job 'first' is still running",
        place=r"pid \d+|process \d+",
        hint="takeover=True",
    ),
    Mistake(
        name="two-runs-told-early",
        typed="""
pid = os.fork()
if pid == 0:
    client = connect("first")
    client.save(state, 1)
    time.sleep(30)
    os._exit(0)
time.sleep(2)
import threading
threading.Timer(7, os._exit, (7,)).start()
connect("first")
""",
        cause="waits",
        place=r"pid \d+|process \d+",
        hint="takeover=True",
        ends=7,
    ),
    Mistake(
        name="taken-over",
        typed="""
client = connect("first")
client.save(state, 1).wait("staged")
pid = os.fork()
if pid == 0:
    connect("first", takeover=True).save(state, 1).wait("staged")
    os._exit(0)
print("other run", os.waitpid(pid, 0)[1])
client.save(state, 2).wait("staged", 5)
""",
        cause="(SaveFailed|StaleIncarnation)Error: ",
        place="incarnation 1|step 2",
        hint="hint: a newer start of the job .*end this process",
        never=r"end this process\)$",
    ),
    Mistake(
        name="fewer-ranks-than-saved",
        typed="""
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
client = connect("first")
client.save({"model": model, "mine": 100 + rank}, 1).wait("durable", 20)
client.close()
dist.destroy_process_group()
if rank == 0:
    client = connect("first", alone=True)
    print("notes:", client.load({"model": model, "mine": 0}).notes)
    client.close()
""",
        cause="notes: .*rank",
        place="state.*mine",
        hint=r"warning: restored step 1, .*; to have each rank only ever get its own: connect\(per_rank=\['mine'\]\)",
        ranks=2,
        ends=0,
        within_s=60.0,
    ),
    Mistake(
        name="follower-asks-for-steps",
        typed=_ALL
        + """
client = connect("first")
client.save(state, 10).wait("durable", 20)
print(f"rank {rank} has steps {client.steps()} latest {client.latest()}")
client.close()
""",
        cause=r"rank 0 has steps \[10\] latest 10",
        place=r"rank 1 has steps \[10\] latest 10",
        hint="steps",
        ranks=2,
        nodes=2,
        ends=0,
        within_s=60.0,
    ),
)
