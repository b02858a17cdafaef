"""The operating system of the test machines: a small Debian with systemd, GlusterFS and sshd, and ckptd from its wheel.

The base takes minutes and is kept between runs, by what it is made of. What is under test (wheel, units) is a layer of
overlayfs above it that each run makes anew.
"""

import glob
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys

from tests.cluster import ROOT

CACHE = os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "ckptd-machines")
USER = "ann"
PREFIX = "/opt/ckptd"
JOB_DIR = "/opt/job"
_PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "dbus-user-session", "libpam-systemd", "openssh-server"),
    *("glusterfs-server", "glusterfs-client", "attr", "iproute2", "procps", "python3", "python3-venv"),
)
_REQUIREMENTS = ("torch", "mpi4py", "mpich", "numpy", "click", "msgpack", "msgspec", "prometheus-client", "pyzmq")
_REQUIREMENTS += ("rich", "xxhash")
_TOOLS = ("debootstrap", "systemd-nspawn", "ip", "nsenter", "setpriv", "ssh", "ssh-keygen")
_HOSTS = "127.0.0.1 localhost\n"


def obstacle() -> str:
    """What keeps this machine from booting others, empty if nothing does."""
    if os.geteuid() != 0:
        return "booting machines needs root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        packages = "debootstrap systemd-container iproute2 util-linux openssh-client"
        return f"needs {', '.join(missing)}: apt-get install {packages}"
    if not os.path.exists("/dev/fuse"):
        return "needs /dev/fuse, for GlusterFS"
    release = platform.freedesktop_os_release()
    if release.get("ID") != "debian" or not os.path.exists("/usr/bin/python3"):
        return "needs Debian, whose wheels fit the machines' own Python"
    theirs = subprocess.check_output(["/usr/bin/python3", "-c", "import sys; print(*sys.version_info[:2])"], text=True)
    if tuple(map(int, theirs.split())) != sys.version_info[:2]:
        return "the tests' Python must be of the version of /usr/bin/python3, whose wheels go onto the machines"
    return ""


def base() -> str:
    """The directory of the base tree, made if there is none of this content yet."""
    with open(os.path.join(ROOT, "constraints.txt")) as file:
        pins = [line for line in file if line.split("==")[0].replace("_", "-") in _REQUIREMENTS]
    codename = platform.freedesktop_os_release()["VERSION_CODENAME"]
    content = repr((codename, _PACKAGES, _REQUIREMENTS, pins))
    tree = os.path.join(CACHE, hashlib.sha256(content.encode()).hexdigest()[:16])
    if not os.path.exists(tree):
        # Of other content: nobody comes back to them, and each is 2 GB.
        shutil.rmtree(CACHE, ignore_errors=True)
        os.makedirs(CACHE)
        _bootstrap(tree + ".new", codename)
        _install_requirements(tree + ".new")
        os.rename(tree + ".new", tree)
    return tree


def _bootstrap(tree: str, codename: str) -> None:
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", codename, tree]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    _write(tree, "/etc/machine-id", "")  # each machine makes its own at boot
    for unit in ("glusterd", "ssh"):
        subprocess.run(["systemctl", f"--root={tree}", "-q", "disable", unit], check=True)
    subprocess.run(["chroot", tree, "useradd", "-m", "-s", "/bin/bash", USER], check=True)


def _install_requirements(tree: str) -> None:
    """Wheels are fetched out here, where pip knows its way, and installed in there."""
    wheels = os.path.join(tree, "wheels")
    constraints = os.path.join(ROOT, "constraints.txt")
    fetch = [sys.executable, "-m", "pip", "download", "-qqq", "-d", wheels, "--only-binary=:all:", "-c", constraints]
    subprocess.run([*fetch, *_REQUIREMENTS], check=True)
    subprocess.run(["chroot", tree, "/usr/bin/python3", "-m", "venv", PREFIX], check=True)
    pip_install(tree, *_REQUIREMENTS)
    shutil.rmtree(wheels)


def pip_install(tree: str, *what: str) -> None:
    """Into the environment of tree, from its /wheels alone."""
    clean = ["env", "-i", "PATH=/usr/bin:/bin", "HOME=/root"]  # what pip out here is told is not for pip in there
    pip = [f"{PREFIX}/bin/pip", "install", "-q", "--no-index", "--find-links=/wheels", "--root-user-action=ignore"]
    subprocess.run(["chroot", tree, *clean, *pip, *what], check=True)


def build_wheel(directory: str, version: str = "") -> str:
    """A wheel of this checkout in directory, as version if one is given. The file's name."""
    source = ROOT
    if version:
        source = os.path.join(directory, "source")
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "bench", "tests", "dist"))
        module = os.path.join(source, "ckptd", "__init__.py")
        with open(module) as file:
            text = re.sub(r'__version__ = ".*"', f'__version__ = "{version}"', file.read())
        with open(module, "w") as file:
            file.write(text)
    before = set(glob.glob(f"{directory}/*.whl"))
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", directory]
    subprocess.run(build, cwd=source, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return os.path.basename((set(glob.glob(f"{directory}/*.whl")) - before).pop())


def furnish(tree: str, hosts: dict[str, str], settings: dict[str, str]) -> None:
    """Puts what is under test into a writable tree: both wheels, the units, the job's script, a user's keys.

    hosts: address by name. settings: of the user's daemon, for its environment file.
    """
    wheels = os.path.join(tree, "wheels")
    os.makedirs(wheels)
    wheel = build_wheel(wheels)
    build_wheel(wheels, version=upgraded_version())
    shutil.rmtree(os.path.join(wheels, "source"))
    pip_install(tree, f"/wheels/{wheel}", "--no-deps")
    for unit in glob.glob(os.path.join(ROOT, "systemd", "*.service")):
        shutil.copy(unit, os.path.join(tree, "etc/systemd/system"))
    _write(tree, "/etc/hosts", _HOSTS + "".join(f"{address} {name}\n" for name, address in hosts.items()))
    path = f"PATH={PREFIX}/bin:/usr/bin:/bin\n"
    _write(tree, f"/etc/ckptd/{USER}.env", path + "".join(f"{name}={value}\n" for name, value in settings.items()))
    _write(tree, "/etc/profile.d/ckptd.sh", f"export {path}export OMP_NUM_THREADS=1\n")
    os.makedirs(tree + JOB_DIR)
    shutil.copy(os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py"), tree + JOB_DIR)
    _make_keys(tree)


def _make_keys(tree: str) -> None:
    """The user logs in from machine to machine, and from out here, with a key of this run."""
    directory = f"/home/{USER}/.ssh"
    os.makedirs(tree + directory, mode=0o700)
    key = os.path.join(tree + directory, "id_ed25519")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    shutil.copy(f"{key}.pub", os.path.join(tree + directory, "authorized_keys"))
    unknown = "Host *\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
    _write(tree, f"{directory}/config", unknown)
    subprocess.run(["chroot", tree, "chown", "-R", f"{USER}:{USER}", directory], check=True)


def upgraded_version() -> str:
    """Of the second wheel, one above what the checkout says."""
    with open(os.path.join(ROOT, "ckptd", "__init__.py")) as file:
        found = re.search(r'__version__ = "(.*)"', file.read())
    assert found
    return f"{found.group(1)}.post1"


def _write(tree: str, path: str, text: str) -> None:
    os.makedirs(tree + os.path.dirname(path), exist_ok=True)
    with open(tree + path, "w") as file:
        file.write(text)
