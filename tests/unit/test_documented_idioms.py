"""Programs in documents show no idiom that hangs, saves nothing or loses what was saved: users copy them."""

import pytest

from tests.idioms import programs, wrong

PROGRAMS = programs()
CONNECT = "client = ckptd_client.connect(job='x')\n"
END = "client.wait('durable')\nclient.close()\n"
BELOW = "is called by all ranks alike"


@pytest.mark.parametrize("place", PROGRAMS)
def test_programs_in_documents_are_right(place):
    assert wrong(PROGRAMS[place]) == []


def test_programs_are_found():
    assert len(PROGRAMS) > 15
    assert any("client.save(state, step)" in code for place, code in PROGRAMS.items() if place.startswith("README"))


@pytest.mark.parametrize(
    "line",
    [
        "if rank == 0:\n    client.save(state, 1)",
        "if rank == 0 and step % 10 == 0:\n    handle = client.save(state, 1)",
        "if dist.get_rank() == 0:\n    client.load(state)",
        "if step:\n    if local_rank == 0:\n        for _ in range(3):\n            client.save(state, 1)",
        "if rank:\n    pass\nelse:\n    client.save(state, 1)",
        "def save(state):\n    if rank != 0:\n        return\n    client.save(state, 1)",
        "for step in range(9):\n    if dist.get_rank():\n        continue\n    client.save(state, step)",
        "handle = client.save(state, 1) if rank == 0 else None",
        "rank == 0 and client.save(state, 1)",
        "if accelerator.is_main_process:\n    accelerator.save_state()",
        "if trainer.is_world_process_zero():\n    client.save(state, 1)",
        "if os.environ['RANK'] == '0':\n    client.save(state, 1)",
        "if int(os.environ.get('LOCAL_RANK', 0)) == 0:\n    client.save(state, 1)",
        "if self.rank == 0:\n    dcp.save(state, storage_writer=writer)",
        "@rank_zero_only\ndef save(state):\n    client.save(state, 1)",
        "if rank == 0 and client.preempted(step):\n    stop = True",
        "match rank:\n    case 0:\n        client.save(state, 1)",
        "if rank == 0:\n    with ckptd_client.connect(job='y') as other:\n        pass",
    ],
)
def test_what_only_some_ranks_call_is_found(line):
    (text,) = wrong(CONNECT + line + "\n" + END)
    assert BELOW in text


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("client.save(state, step / 2)", "whole number"),
        ("client.save(state, step=1.0)", "whole number"),
        ("client.save({'model': model.state_dict()}, 1)", "the objects are passed"),
        ("first = client.load(state).step + 1", "gives None"),
    ],
)
def test_misuse_of_a_call_is_found(line, text):
    (found,) = wrong(CONNECT + line + "\n" + END)
    assert text in found


def test_programs_without_an_end_are_found():
    (text,) = wrong(CONNECT + "client.load(state)\n")
    assert "never closed" in text
    (text,) = wrong("with ckptd_client.connect(job='x') as client:\n    client.save(state, 1)\n")
    assert "nothing waits" in text


@pytest.mark.parametrize(
    "code",
    [
        CONNECT + "client.save(state, 1)\nif rank == 0:\n    print(client.latest())\n" + END,
        CONNECT + "if rank == 0:\n    torch.save(state, 'x.pt')\n    client.wait('durable')\n" + END,
        "if rank == 0:\n    with ckptd_client.connect(job='x', alone=True) as client:\n        client.load(state)\n",
        CONNECT + "for rank in range(3):\n    client.save(state, step // 2)\n" + END,
        CONNECT + "if step % 10 == 0:\n    client.save(state, step)\n" + END,
    ],
)
def test_what_is_right_is_let_be(code):
    assert wrong(code) == []
