"""Calls in the wrong order, with the wrong things, or of what is over."""

from tests.mistakes.mistake import Mistake

MISTAKES = (
    Mistake(
        name="save-after-close",
        typed="""
client = connect("first")
client.save(state, 1)
client.close()
client.save(state, 2)
""",
        cause="UsageError: this client is closed",
        place="train.py",
        hint="hint: connect again",
    ),
    Mistake(
        name="load-after-with",
        typed="""
with connect("first") as client:
    client.save(state, 1)
client.load(state)
""",
        cause="UsageError: this client is closed",
        place="train.py",
        hint="hint: connect again",
    ),
    Mistake(
        name="wait-after-close",
        typed="""
with connect("first") as client:
    handle = client.save(state, 1)
handle.wait("durable")
""",
        cause="SaveFailedError: the client was closed and hears no more of its saves",
        place="train.py",
        hint="wait before close",
    ),
    Mistake(
        name="connect-twice",
        typed="""
client = connect("first")
client = connect("first")
""",
        cause="ConnectError: this process holds rank 0 .*: an earlier client of it is open",
        place="job 'first'",
        hint=r"client.close\(\) first",
    ),
    Mistake(
        name="metadata-is-a-tensor",
        typed="""
with connect("first") as client:
    client.save(state, 1, metadata={"loss": model.weight.sum()})
""",
        cause=r"UsageError: metadata\['loss'\] is tensor\(.*\(Tensor\): it must be an int, float, str or bool",
        place="train.py",
        hint=r"hint: metadata=\{'loss': float\(value\)\}",
    ),
    Mistake(
        name="step-twice",
        typed="""
with connect("first") as client:
    client.save(state, 7)
    client.save(state, 7)
""",
        cause="UsageError: step 7 was already saved",
        place="step 7 was already saved by this run",
        never="in incarnation",
        hint="save each step once",
    ),
    Mistake(
        name="step-forgotten-and-state-second",
        typed="""
with connect("first") as client:
    client.save(100, state)
""",
        cause="UsageError",
        place="save was given 100 as the state",
        hint=r"save\(state, step\)",
    ),
    Mistake(
        name="model-instead-of-dict",
        typed="""
with connect("first") as client:
    client.save(model, 1)
""",
        cause="UsageError: the state must be a dict, not Linear",
        place="train.py",
        hint='"model": model',
    ),
    Mistake(
        name="load-model-instead-of-dict",
        typed="""
with connect("first") as client:
    client.load(model)
""",
        cause="UsageError: the state must be a dict, not Linear",
        place="train.py",
        hint='"model": model',
    ),
    Mistake(
        name="step-nan",
        typed="""
with connect("first") as client:
    client.save(state, float("nan"))
""",
        cause="UsageError: step must be an int",
        place="nan",
        hint="0 to|hint:",
    ),
    Mistake(
        name="step-float",
        typed="""
with connect("first") as client:
    client.save(state, 1e3)
""",
        cause="UsageError: step must be an int",
        place="1000.0",
        hint="an int from 0 to",
    ),
    Mistake(
        name="step-negative",
        typed="""
with connect("first") as client:
    client.save(state, -1)
""",
        cause="UsageError: step must be an int from 0",
        place="-1",
        hint="from 0 to",
    ),
    Mistake(
        name="step-text",
        typed="""
with connect("first") as client:
    client.save(state, "epoch-3")
""",
        cause="UsageError: step must be an int from 0",
        place="epoch-3",
        hint="from 0 to",
    ),
    Mistake(
        name="step-is-a-path",
        typed="""
with connect("first") as client:
    client.save(state, "/tmp/model.pt")
""",
        cause="UsageError: step must be an int from 0",
        place="/tmp/model.pt",
        hint=r"hint: save\(state, 100\): ckptd names the files itself; their directory is connect\(store=",
    ),
    Mistake(
        name="lambda-in-state",
        typed="""
with connect("first") as client:
    client.save({**state, "schedule": {"warmup": lambda step: step / 10}}, 1)
""",
        cause="UsageError: .*(function|lambda)",
        place="schedule.*warmup",
        hint="hint: save plain values .*or take it out of the state: no pickle can hold it either",
        never="allow_pickle",
    ),
    Mistake(
        name="open-file-in-state",
        typed="""
with connect("first") as client:
    client.save({**state, "log": open("log.txt", "w")}, 1)
""",
        cause="UsageError: .*TextIOWrapper",
        place="log",
        hint="hint: save plain values .*or take it out of the state: no pickle can hold it either",
        never="allow_pickle",
    ),
    Mistake(
        name="own-class-in-state",
        typed="""
class Progress:
    epoch = 3

with connect("first") as client:
    client.save({**state, "progress": Progress()}, 1)
""",
        cause="UsageError: .*Progress",
        place="progress",
        hint=r"or let it be pickled: connect\(allow_pickle=\['progress'\]\)",
    ),
    Mistake(
        name="sparse-tensor",
        typed="""
with connect("first") as client:
    client.save({**state, "graph": torch.eye(4).to_sparse()}, 1)
""",
        cause="UsageError: .*sparse",
        place="graph",
        hint="to_dense",
    ),
    Mistake(
        name="meta-tensor",
        typed="""
with torch.device("meta"):
    model = torch.nn.Linear(8, 8)
with connect("first") as client:
    client.save({"model": model}, 1)
""",
        cause="UsageError: .*meta",
        place=r"state\['model'\]\['weight'\]",
        hint=r"model.to_empty\(device=",
    ),
    Mistake(
        name="nested-tensor",
        typed="""
ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
with connect("first") as client:
    client.save({**state, "ragged": ragged}, 1)
""",
        cause="UsageError: .*nested",
        place="ragged",
        hint="hint: ",
    ),
    Mistake(
        name="quantized-tensor",
        typed="""
import warnings; warnings.simplefilter("ignore")
small = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
with connect("first") as client:
    client.save({**state, "small": small}, 1)
""",
        cause="UsageError: .*(quantized|qint8)",
        place="small",
        hint="hint: ",
    ),
    Mistake(
        name="generator-in-state",
        typed="""
with connect("first") as client:
    client.save({**state, "parameters": model.parameters()}, 1)
""",
        cause="UsageError: .*generator",
        place="parameters",
        hint="hint: save plain values .*or take it out of the state: no pickle can hold it either",
        never="allow_pickle",
    ),
    Mistake(
        name="state-in-itself",
        typed="""
state["all"] = state
with connect("first") as client:
    client.save(state, 1)
""",
        cause=r"UsageError: state\['all'\] contains itself$",
        place="all",
        hint=r"hint: leave state\['all'\] out of the state",
    ),
    Mistake(
        name="tuple-as-key",
        typed="""
with connect("first") as client:
    client.save({**state, ("layer", 1): torch.ones(3)}, 1)
""",
        cause="UsageError: .*key",
        place=r"layer",
        hint="hint: a str as the key, such as 'layer.1', or leave this key out",
    ),
    Mistake(
        name="other-shape",
        typed="""
with connect("first") as client:
    client.save(state, 1).wait("staged")
    client.load({"model": torch.nn.Linear(8, 16), "optimizer": optimizer})
""",
        cause="MismatchError: ",
        place=r"state\['model'\]",
        hint=r"or leave state\['model'\] out of the state, with strict=False; until a load succeeds, do not train on",
    ),
    Mistake(
        name="other-dtype",
        typed="""
with connect("first") as client:
    client.save({"model": model}, 1).wait("staged")
    client.load({"model": model.bfloat16()})
""",
        cause="MismatchError: the state does not fit",
        place=r"state\['model'\]\['weight'\]: F32",
        hint=r"hint: .*model.float\(\)",
    ),
    Mistake(
        name="key-renamed",
        typed="""
with connect("first") as client:
    client.save({"model": model}, 1).wait("staged")
    client.load({"net": model})
""",
        cause="MismatchError: ",
        place=r"state\['net'\]",
        hint="hint: .*'model'",
    ),
    Mistake(
        name="new-layer",
        typed="""
with connect("first") as client:
    client.save({"model": torch.nn.Sequential(model)}, 1).wait("staged")
    client.load({"model": torch.nn.Sequential(model, torch.nn.Linear(8, 2))})
""",
        cause="MismatchError: ",
        place=r"state\['model'\]",
        hint="strict=False.*; until a load succeeds, do not train on",
    ),
    Mistake(
        name="strict-is-said-to-save",
        typed="""
with connect("first") as client:
    client.save(state, 1, strict=False)
""",
        cause="TypeError: .*unexpected keyword argument 'strict'",
        place="save",
        hint="strict",
        raises=("TypeError",),
    ),
    Mistake(
        name="optimizer-left-out",
        typed="""
with connect("first") as client:
    client.save(state, 1).wait("staged")
    client.load({"model": model})
""",
        cause="MismatchError: ",
        place="optimizer",
        hint="strict=False",
    ),
    Mistake(
        name="another-kind-of-optimizer",
        typed="""
model(torch.ones(8)).sum().backward()
optimizer.step()
with connect("first") as client:
    client.save(state, 1).wait("staged")
    client.load({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)})
""",
        cause="MismatchError: .*SGD",
        place=r"state\['optimizer'\]",
        hint="hint: .*the kind that was saved",
    ),
    Mistake(
        name="state-dicts-instead-of-objects",
        typed="""
with connect("first") as client:
    client.save({"optimizer": optimizer.state_dict()}, 1).wait("staged")
    optimizer.param_groups[0]["lr"] = 1.0
    restored = client.load({"optimizer": optimizer.state_dict()})
    print("notes:", restored.notes)
""",
        cause="^ckptd: warning: restored step 1, but your optimizer was not changed: .*state_dict",
        place=r"state\['optimizer'\]\['param_groups'\]\[0\]\['lr'\]",
        hint="pass the objects?|load_state_dict",
        ends=0,
    ),
    Mistake(
        name="job-misspelt",
        typed="""
with connect("demo") as client:
    client.save(state, 900).wait("durable")
with connect("dmeo") as client:
    print("restored", client.load(state))
""",
        cause="^ckptd: .*no checkpoint of job 'dmeo' lies in /place/store, which has demo \\(step 900\\)",
        place="/place/store",
        hint=r"if 'demo' is meant, connect\(job='demo'\)",
        ends=0,
    ),
    Mistake(
        name="step-that-is-not-there",
        typed="""
with connect("first") as client:
    client.save(state, 10).wait("durable")
    client.load(state, step=11)
""",
        cause="RestoreError: ",
        place="step 11",
        hint=r"hint: ckptd list /place/store/first, or client\.steps\(\)",
    ),
    Mistake(
        name="milestone-misspelt",
        typed="""
with connect("first") as client:
    client.save(state, 1).wait("saved")
""",
        cause="UsageError: no milestone is called 'saved'",
        place="'saved'",
        hint="staged, protected or durable",
    ),
    Mistake(
        name="protected-on-one-node",
        typed="""
with connect("first", drain_every=100) as client:
    client.save(state, 1)
    client.save(state, 2).wait("protected")
""",
        cause="SaveFailedError: step 2 will not become protected",
        place="step 2",
        hint=r"client.wait\('durable'\)",
    ),
    Mistake(
        name="durable-of-what-is-not-due",
        typed="""
with connect("first", drain_every=100) as client:
    client.save(state, 1).wait("durable")
    client.save(state, 2).wait("durable")
""",
        cause="SaveFailedError: step 2 will not become durable: it ended as 'kept' .drain_every did not choose it",
        place="step 2",
        hint=r"client.wait\('durable'\) forces",
    ),
    Mistake(
        name="path-to-load",
        typed="""
with connect("first") as client:
    client.load("/tmp/model.pt")
""",
        cause="UsageError: the state must be a dict, not str",
        place="train.py",
        hint=r"""load\(\{"model": model.* from a path: load_from\('/tmp/model.pt', \{"model": model""",
    ),
    Mistake(
        name="load-from-torch-file",
        typed="""
torch.save(model.state_dict(), "model.pt")
with connect("first") as client:
    client.load_from(os.path.abspath("model.pt"), state)
""",
        cause="UsageError: .*is a torch.save file",
        place="model.pt",
        hint=r"torch.load\(",
    ),
    Mistake(
        name="load-from-nowhere",
        typed="""
with connect("first") as client:
    client.load_from("/scratch/me/ckpt/step-1", state)
""",
        cause="UsageError: .*does not exist",
        place="/scratch/me",
        hint="directory of a checkpoint",
    ),
    Mistake(
        name="attach-model",
        typed="""
with connect("first") as client:
    client.attach(model)
""",
        cause="UsageError: .*Linear",
        place="attach|optimizer",
        hint=r"attach\(optimizer\)|hint: ",
    ),
    Mistake(
        name="save-awaited",
        typed="""
import asyncio

async def main():
    with connect("first") as client:
        await client.save(state, 1)

asyncio.run(main())
""",
        cause="TypeError: .*(SaveHandle|await)",
        place="train.py",
        hint="await",
        raises=("TypeError",),
    ),
    Mistake(
        name="save-in-forked-child",
        typed="""
client = connect("first")
client.save(state, 1).wait("staged")
pid = os.fork()
if pid == 0:
    client.save(state, 2)
    os._exit(0)
print("child ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
client.save(state, 3).wait("durable")
client.close()
""",
        cause="UsageError: ",
        place=r"process \d+|pid \d+",
        hint="connect",
        ends=0,
    ),
    Mistake(
        name="save-in-two-threads",
        typed="""
import threading
client = connect("first")

def work():
    try:
        client.save(state, 5)
    except Exception as error:
        print(type(error).__name__, error)

threads = [threading.Thread(target=work) for _ in range(2)]
[t.start() for t in threads], [t.join() for t in threads]
client.wait("durable")
client.close()
""",
        cause="UsageError step 5 was already saved",
        place="step 5",
        hint="save each step once",
        ends=0,
    ),
    Mistake(
        name="save-on-an-older-step",
        typed="""
with connect("first") as client:
    for step in (10, 20, 5):
        client.save(state, step)
    client.wait("durable")
""",
        cause="load takes the newest save",
        place="step 5 is saved after step 20",
        hint=r"load\(state, step=",
        ends=0,
    ),
    Mistake(
        name="too-large-a-state",
        before="mkdir shm && mount -t tmpfs -o size=16m,mode=0755 tmpfs shm",
        needs_root=True,
        environ={"CKPTD_ARENA": "$HOME/shm/arena"},
        typed="""
with connect("first") as client:
    client.save({"big": torch.ones(2_000_000)}, 1).wait("staged", 10)
""",
        cause=r"SaveFailedError: .*needs 3 slots of .* \(a slot for each save in memory: slots_per_rank\)",
        place="step 1 .*rank 0",
        hint="as root: mount -o remount,size=.*; without root: another tmpfs with room, such as CKPTD_ARENA=/dev/shm/",
        never="Docker|Kubernetes",
    ),
    Mistake(
        name="prepare-too-large-a-state",
        before="mkdir shm && mount -t tmpfs -o size=16m,mode=0755 tmpfs shm",
        needs_root=True,
        environ={"CKPTD_ARENA": "$HOME/shm/arena"},
        typed="""
with connect("first") as client:
    client.prepare({"big": torch.ones(2_000_000)})
""",
        cause="BudgetError: .*needs 3 slots",
        place="rank 0",
        hint="as root: mount -o remount,size=.*; without root: another tmpfs with room, such as CKPTD_ARENA=/dev/shm/",
        never="Docker|Kubernetes",
    ),
    Mistake(
        name="gather-of-nothing",
        typed="""
with connect("first") as client:
    client.gather(model, to=5).wait()
""",
        cause="UsageError: ",
        place="rank 5|to=5|the state",
        hint="hint: ",
    ),
)
