"""What stands in the way of a process that may not read a path."""

import os
import subprocess
import sys

import pytest

from ckptd.shared.files.refused import why_refused

AS_NOBODY = """
import os, sys
from ckptd.shared.files.refused import why_refused
os.setresuid(65534, 65534, 65534)
print(*why_refused(sys.argv[1]), sep="\\n")
"""


def test_of_a_file_of_this_user(tmp_path):
    path = tmp_path / "image"
    path.touch()
    path.chmod(0o000)
    text, hint = why_refused(str(path))
    assert text == f"{path} has owner uid {os.geteuid()} and mode 0000, this process is uid {os.geteuid()}"
    assert hint == f"chmod u+r {path}"


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_of_a_directory_on_the_way_that_another_user_owns():
    top = "/dev/shm/ckptd-test-refused"
    os.makedirs(f"{top}/closed/below", exist_ok=True)
    try:
        os.chmod(top, 0o711)  # noqa: S103 - others are to pass it
        os.chmod(f"{top}/closed", 0o700)
        command = [sys.executable, "-c", AS_NOBODY, f"{top}/closed/below/image"]
        text, hint = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
        assert text == f"{top}/closed has owner uid 0 and mode 0700, this process is uid 65534"
        assert hint == f"as its owner (uid 0) or root: chmod o+rx {top}/closed, or chown 65534 {top}/closed"
    finally:
        os.removedirs(f"{top}/closed/below")


def test_of_nothing(tmp_path):
    text, hint = why_refused(str(tmp_path / "none"))
    assert "No such file" in text
    assert hint == f"ls -ld {tmp_path}/none"
