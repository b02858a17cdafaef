"""Daemons that are dead, stopped, frozen or cannot start, and what happens to arenas."""

from tests.mistakes.mistake import Mistake

_RUNNING = "(ckptd run >run.log 2>&1 </dev/null &) ; until [ -S $ARENA/ckptd.sock ]; do sleep 0.1; done"
_SMALL = "mkdir shm; mount -t tmpfs -o size={},mode=0755 tmpfs shm; mkdir -m 700 shm/arena"

MISTAKES = (
    Mistake(
        name="daemon-killed",
        typed="""
with connect("first") as client:
    client.save(state, 1).wait("staged")
    elsewhere("kill -9 $(daemon-pid)")
    client.save(state, 2).wait("durable", 15)
    print("durable")
""",
        cause=r"ckptd: job first: the daemon of this node had ended; daemon pid \d+ started, log /dev/shm/",
        place=r"ckptd: job first, rank 0 of 1, store /place/store: daemon pid \d+ started, log /dev/shm/\S+/ckptd.log$",
        hint="^durable",
        never="sealed|heard of it",
        ends=0,
    ),
    Mistake(
        name="daemon-killed-and-none-started",
        before=_RUNNING,
        environ={"CKPTD_NO_AUTOSTART": "1"},
        typed="""
with connect("first") as client:
    client.save(state, 1).wait("staged")
    elsewhere("kill -9 $(daemon-pid)")
    handle = client.save(state, 2)
    handle.wait("staged", 5)
""",
        cause=r"(ConnectError: |SaveFailedError: .*\()no daemon .*; CKPTD_NO_AUTOSTART is set",
        place="step 2",
        hint=r"hint: start it as it was started before, such as ckptd run --arena \S+ in another terminal",
        never=r"connect\(start=True\)",
    ),
    Mistake(
        name="daemon-frozen",
        typed="""
with connect("first", save_timeout_s=2, connect_timeout_s=5) as client:
    client.save(state, 1).wait("durable")
    elsewhere("kill -STOP $(daemon-pid)")
    handle = client.save(state, 2)
    print(handle)
    handle.wait("staged", 3)
""",
        cause=r"SaveFailedError: .*state T: stopped\) did not answer in the last [12](\.\d+)? s of save_timeout_s",
        place="step 2",
        hint=r"hint: kill -CONT \d+; or kill -KILL \d+: what is staged outlives it",
    ),
    Mistake(
        name="connect-to-frozen-daemon",
        before=_RUNNING + "; kill -STOP $(daemon-pid)",
        typed="""
connect("first", connect_timeout_s=4)
""",
        cause=r"ConnectError: .*pid \d+, state T: stopped\) did not answer in the last \S+ s of connect_timeout_s",
        place="ckptd.sock",
        hint=r"hint: kill -CONT \d+; or kill -KILL \d+: what is staged outlives it",
    ),
    Mistake(
        name="daemon-stopped-while-training",
        typed="""
with connect("first") as client:
    client.save(state, 1).wait("durable")
    elsewhere("ckptd stop --wait")
    client.save(state, 2).wait("durable", 15)
    print("durable")
""",
        cause=r"ckptd: job first: the daemon of this node had ended; daemon pid \d+ started, log /dev/shm/",
        place=r"ckptd: job first, rank 0 of 1, store /place/store: daemon pid \d+ started, log /dev/shm/\S+/ckptd.log$",
        hint="^durable",
        ends=0,
    ),
    Mistake(
        name="arena-removed",
        typed="""
with connect("first") as client:
    client.save(state, 1).wait("durable")
    elsewhere("rm -rf $ARENA")
    for step in range(2, 7):
        print(client.save(state, step))
        time.sleep(2)
    print(client.wait("durable", 10))
""",
        cause="step 2 was not saved: .*(removed|is gone)",
        place="/dev/shm/ckptd-test",
        hint="starts another(.|\n)*^<SaveHandle step 6 durable>",
        ends=0,
        within_s=60.0,
    ),
    Mistake(
        name="no-daemon-and-start-false",
        typed="""
connect("first", start=False, connect_timeout_s=3)
""",
        cause=r"ConnectError: no daemon listens .*; start=False \(from connect\)",
        place="ckptd.sock",
        hint=r"ckptd run --arena .*connect\(start=True\)",
    ),
    Mistake(
        name="daemon-of-other-arena",
        before="(ckptd run --arena $PLACE/other >run.log 2>&1 </dev/null &) ; sleep 1",
        typed="""
connect("first", start=False, connect_timeout_s=3)
""",
        cause=r"ConnectError: no daemon listens .*; start=False \(from connect\)",
        place="/dev/shm/ckptd-test-.*ckptd.sock",
        hint=r"hint: if yours runs with another arena: connect\(arena=...\) as its --arena",
    ),
    Mistake(
        name="two-daemons",
        before=_RUNNING,
        typed="$ ckptd run",
        cause="another daemon|already",
        place="/dev/shm/ckptd-test",
        hint="hint: ckptd status --arena /dev/shm/ckptd-test",
        ends=2,
    ),
    Mistake(
        name="shm-full-at-connect",
        before=_SMALL.format("1m") + "; head -c 2M /dev/zero > shm/full || true",
        needs_root=True,
        environ={"CKPTD_ARENA": "$HOME/shm/arena"},
        typed="""
connect("first")
""",
        cause="BudgetError: there is no room for a small file of rank 0 in .* is full",
        place="/place/home/shm",
        hint="hint: .*rm what nobody needs, or, as root, mount -o remount,size=75% /place/home/shm$",
    ),
    Mistake(
        name="shm-full-at-restart",
        before=_SMALL.format("24m"),
        needs_root=True,
        environ={"CKPTD_ARENA": "$HOME/shm/arena"},
        typed="""
with connect("first", drain_every=1000) as client:
    client.save(state, 0).wait("durable")
    client.save(state, 1).wait("staged")
    elsewhere("kill -9 $(daemon-pid); head -c 30M /dev/zero > shm/full 2>/dev/null")
    with open("again.py", "w") as file:
        file.write('''
import torch, ckptd_client
model = torch.nn.Linear(8, 8)
client = ckptd_client.connect("first", takeover=True)
print(client.load({"model": model, "optimizer": torch.optim.AdamW(model.parameters())}))
''')
    os._exit(os.waitstatus_to_exitcode(os.spawnvp(os.P_WAIT, "python", ["python", "again.py"])))
""",
        cause="Restored.step=1",
        place="tier='arena'",
        hint="Restored",
        ends=0,
        within_s=60.0,
    ),
    Mistake(
        name="control-c-in-the-loop",
        typed="""
import signal, threading
with connect("first") as client:
    for step in range(100):
        client.save(state, step)
        if step == 3:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(0.1)
""",
        cause="KeyboardInterrupt",
        place="train.py",
        hint="KeyboardInterrupt",
        raises=("KeyboardInterrupt",),
        never="closed: ",
    ),
    Mistake(
        name="exit-without-close",
        typed="""
client = connect("first")
client.save(state, 1)
print("latest", client.latest())
""",
        cause="latest (1|None)",
        place="latest",
        hint="latest",
        never="without close",
        ends=0,
    ),
    Mistake(
        name="client-dropped-and-made-anew",
        typed="""
def train():
    client = connect("first")
    client.save(state, 1)

train()
train()
""",
        cause="ConnectError: this process holds rank 0 of job 'first'",
        place="job 'first'",
        hint=r"client.close\(\) first",
    ),
    Mistake(
        name="executable-is-gone",
        typed="""
import sys
sys.executable = "/nowhere/python"
connect("first")
""",
        cause="ConnectError: the daemon .*not",
        place="/nowhere/python",
        hint="see /dev/shm",
    ),
)
