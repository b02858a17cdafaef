"""A second run of a job, started by mistake or too early: it hears within seconds which process it waits for."""

import time

from tests.cluster import Node

HOLDS = """
import ckptd_client
client = ckptd_client.connect("job", start=False)
print("in", flush=True)
input()
client.close()
"""
COMES = """
import ckptd_client
client = ckptd_client.connect("job", start=False, connect_timeout_s=40)
print("in", flush=True)
client.close()
"""


def test_a_run_that_waits_for_another_names_it_long_before_it_gives_up(tmp_path):
    with Node(str(tmp_path)) as node:
        node.start("--connect-timeout-s", "30s")
        first = node.run(HOLDS)
        assert first.stdout.readline() == b"in\n"
        began = time.monotonic()
        second = node.run(COMES)
        said = second.stderr.readline().decode()  # the test's deadline is pytest's
        assert f"ckptd: connect waits: job 'job' is still running: rank 0 (pid {first.pid} on " in said
        assert "takeover=True" in said
        assert 3 <= time.monotonic() - began < 12, "a Python process takes seconds to begin"
        first.stdin.write(b"\n")
        first.stdin.flush()
        output, errors = second.communicate(timeout=120)
        assert output == b"in\n"
        assert b"waits" not in errors, "it was said once"
        assert first.wait(60) == second.returncode == 0


def test_a_run_that_is_alone_receives_nothing_of_waiting(tmp_path):
    with Node(str(tmp_path)) as node:
        node.start()
        output, errors = node.run(COMES).communicate(timeout=120)
        assert (output, errors.count(b"waits")) == (b"in\n", 0)
