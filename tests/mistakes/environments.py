"""Interpreters, notebooks and environments that are not as ckptd needs them."""

from tests.mistakes.mistake import Mistake

_OLD_TORCH = """
mkdir -p old/torch && cat > old/torch/__init__.py <<'END'
__version__ = "1.13.1"
class Tensor: pass
END
"""

_CELLS = """
cat > cells.py <<'END'
import code
code.interact(banner="", local=globals(), exitmsg="")
END
"""  # a notebook's kernel: an error ends its cell, not the process

MISTAKES = (
    Mistake(
        name="no-torch",
        typed="""$ python - <<'END'
import sys
sys.modules["torch"] = None  # as where it is not installed
import ckptd_client
END""",
        cause="No module named 'torch'|torch",
        place="ckptd_client",
        hint=r"pip install .*torch",
        raises=("ImportError",),
    ),
    Mistake(
        name="torch-of-another-age",
        before=_OLD_TORCH,
        typed="""$ PYTHONPATH=$PWD/old:$PYTHONPATH python -c 'import ckptd_client'""",
        cause="torch 1.13.1",
        place="ckptd_client",
        hint=r"2.6|pip install",
        raises=("ImportError",),
    ),
    Mistake(
        name="cell-run-twice",
        before=_CELLS,
        typed="""$ python cells.py <<'END'
import torch, ckptd_client
state = {"model": torch.nn.Linear(4, 4)}
client = ckptd_client.connect("first")
client = ckptd_client.connect("first")
END""",
        cause="ConnectError: this process holds rank 0 of job 'first'",
        place="job 'first'",
        hint=r"client.close\(\) first",
        ends=0,
    ),
    Mistake(
        name="loop-cell-run-twice",
        before=_CELLS,
        typed="""$ python cells.py <<'END'
import torch, ckptd_client
state = {"model": torch.nn.Linear(4, 4)}
client = ckptd_client.connect("first")
for step in range(2): _ = client.save(state, step)

for step in range(2): _ = client.save(state, step)

END""",
        cause="UsageError: step 0 was already saved",
        place="step 0",
        hint="save each step once; to go back to an older step, load it first",
        ends=0,
    ),
    Mistake(
        name="class-of-the-notebook",
        before=_CELLS,
        typed="""$ python cells.py <<'END'
import torch, ckptd_client
class Hooks: pass

client = ckptd_client.connect("first", allow_pickle=["hooks"])
client.save({"hooks": Hooks()}, 1).wait("durable")
client.close()
client = ckptd_client.connect("first", allow_pickle=["hooks"])
del Hooks
client.load({"hooks": None})
END""",
        cause="(Restore|Mismatch|Usage)Error: ",
        place="hooks",
        hint="Hooks",
        ends=0,
    ),
    Mistake(
        name="no-guard-around-spawn",
        typed="""$ cat > spawn.py <<'END'
import torch, ckptd_client
import torch.multiprocessing as mp

def work(rank):
    client = ckptd_client.connect("first", connect_timeout_s=5)
    client.save({"model": torch.nn.Linear(4, 4)}, 1).wait("staged", 5)

mp.spawn(work, nprocs=2)
END
python spawn.py""",
        cause="freeze_support|bootstrapping",
        place="spawn.py",
        hint="__main__",
        raises=(
            "RuntimeError",
            "torch.multiprocessing.spawn.ProcessExitedException",
            "torch.multiprocessing.spawn.ProcessRaisedException",
        ),
        within_s=60.0,
    ),
    Mistake(
        name="spawned-ranks-without-a-group",
        typed="""$ cat > spawn.py <<'END'
import time, torch, ckptd_client
import torch.multiprocessing as mp

def work(rank):
    client = ckptd_client.connect("first", connect_timeout_s=5)
    client.save({"model": torch.nn.Linear(4, 4)}, 1).wait("staged", 5)
    time.sleep(30)  # trains on, until the other one fails

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
END
python spawn.py""",
        cause=r"ConnectError: job 'first' is held by pid \d+, a process of the same parent \(pid \d+\): two ranks of",
        place=r"connect waits: job 'first' is held by pid \d+, a process of the same parent",
        hint=r"hint: torch.distributed.init_process_group\(...\) before connect, or start with torchrun",
        never="takeover",
        raises=(
            "torch.multiprocessing.spawn.ProcessExitedException",
            "torch.multiprocessing.spawn.ProcessRaisedException",
        ),
        own_processes=True,
        within_s=60.0,
    ),
    Mistake(
        name="saved-by-a-loader-worker",
        typed="""$ cat > worker.py <<'END'
import torch, ckptd_client

class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        client.save({"i": i}, i)
        return i

client = ckptd_client.connect("first")
client.save({"i": 0}, 100).wait("staged")
for batch in torch.utils.data.DataLoader(Data(), num_workers=1, timeout=15): pass
END
python worker.py""",
        cause="UsageError: ",
        place=r"pid \d+|process \d+",
        hint="connect",
        raises=("RuntimeError",),
        within_s=60.0,
    ),
    Mistake(
        name="optimised-away",
        typed="""$ python -OO - <<'END'
import torch, ckptd_client
state = {"model": torch.nn.Linear(4, 4)}
with ckptd_client.connect("first") as client:
    client.save(state, 1).wait("durable")
    print("durable")
END""",
        cause="durable",
        place="durable",
        hint="durable",
        ends=0,
        within_s=240.0,  # a fresh clone has all of torch compiled for it
    ),
)
