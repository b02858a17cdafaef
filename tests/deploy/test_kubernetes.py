"""deploy/kubernetes: what the API's schema says of it, whether its files fit each other, and their commands, run."""

import importlib
import os
import pathlib
import re
import shutil
import signal
import subprocess

import pytest

import ckptd
from ckptd.arena.ask import ask_status
from ckptd.system.config import FOREIGN_VARIABLES, Config, default_arena, load_config
from ckptd.system.units import parse_duration_s
from tests.cluster import ROOT, wait_for
from tests.deploy.homes import Homes

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (pip: kubernetes-validate)")
DEPLOY = pathlib.Path(ROOT) / "deploy"
UID = 1000
FILES = ("daemonset.yaml", "job.yaml")
RELEASES = ("1.29", "1.34")


def documents(name):
    return {found["kind"]: found for found in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())}


def pod(name):
    kind = "DaemonSet" if name == "daemonset.yaml" else "Job"
    return documents(name)[kind]["spec"]["template"]["spec"]


def environment(container):
    return {one["name"]: one.get("value", "") for one in container.get("env", [])}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", FILES)
def test_the_api_would_take_it(name, release):
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in documents(name).values():
        validator.validate(document, release, strict=True)


def test_the_schema_can_say_no():
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    document = documents("job.yaml")["Job"]
    document["spec"]["completionsMode"] = document["spec"].pop("completionMode")
    errors = importlib.import_module("kubernetes_validate.utils")
    with pytest.raises(errors.ValidationError):
        validator.validate(document, RELEASES[0], strict=True)


def test_daemon_ranks_and_image_are_of_one_user_and_version():
    image = (DEPLOY / "Containerfile").read_text()
    assert f"USER {UID}:{UID}" in image
    assert f"ckptd:{ckptd.__version__}" in image
    for name in FILES:
        security = pod(name)["securityContext"]
        assert (security["runAsUser"], security["runAsGroup"], security["runAsNonRoot"]) == (UID, UID, True)
    images = {container["image"] for container in pod("daemonset.yaml")["containers"]}
    assert [image.rpartition("/")[2] for image in images] == [f"ckptd:{ckptd.__version__}"]


def test_daemon_and_ranks_see_the_same_memory_and_the_same_store():
    daemon, rank = pod("daemonset.yaml"), pod("job.yaml")
    assert daemon["volumes"] == rank["volumes"]
    volumes = {volume["name"]: volume for volume in daemon["volumes"]}
    claim = documents("daemonset.yaml")["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["checkpoints"]["persistentVolumeClaim"]["claimName"] == claim
    mounts = [container["volumeMounts"] for container in daemon["containers"] + rank["containers"]]
    assert mounts == [mounts[0]] * len(mounts)
    places = {mount["name"]: mount["mountPath"] for mount in mounts[0]}
    assert volumes["shm"]["hostPath"]["path"] == places["shm"] == os.path.dirname(default_arena())
    for container in (daemon["containers"][0], rank["containers"][0]):
        assert environment(container)["CKPTD_STORE"] == places["checkpoints"]


def test_settings_are_settings_and_the_grace_period_holds_what_a_stop_does():
    given = environment(pod("daemonset.yaml")["containers"][0])
    config, _ = load_config({}, given, "/dev/null")
    assert config.stop_drain_s != Config().stop_drain_s
    rank = environment(pod("job.yaml")["containers"][0])
    ours = {name: value for name, value in rank.items() if name not in FOREIGN_VARIABLES}
    load_config({}, ours, "/dev/null")
    for name, after_s in {"daemonset.yaml": config.stop_drain_s, "job.yaml": 0}.items():
        command = pod(name)["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        drains_s = parse_duration_s(command[command.index("--timeout") + 1])
        assert drains_s + after_s < pod(name)["terminationGracePeriodSeconds"]


def test_as_many_pods_as_torchrun_waits_for_at_the_name_that_the_service_gives():
    found = documents("job.yaml")
    job, service = found["Job"]["spec"], found["Service"]
    command = " ".join(job["template"]["spec"]["containers"][0]["args"])
    assert f"--nnodes={job['completions']} " in command
    assert job["parallelism"] == job["completions"]
    assert job["completionMode"] == "Indexed"
    assert service["metadata"]["name"] == job["template"]["spec"]["subdomain"]
    assert service["spec"]["selector"] == job["template"]["metadata"]["labels"]
    assert f"--rdzv-endpoint={found['Job']['metadata']['name']}-0.{service['metadata']['name']}:" in command
    assert re.search(r'--node-rank="\$JOB_COMPLETION_INDEX"', command)


@pytest.fixture
def homes():
    with Homes("node") as homes:
        yield homes


def test_its_commands_where_daemon_and_rank_do_not_see_each_others_processes(homes):
    """What kubelet would run in the containers, each with a pid namespace of its own, for root."""
    container = pod("daemonset.yaml")["containers"][0]
    places = {"CKPTD_STORE": str(homes.store), "CKPTD_NODE": "node", "CKPTD_PEER_ADDRESS": "127.0.0.1"}
    environ = homes.environ(**(environment(container) | places))
    away = ["unshare", "--pid", "--fork"] if os.geteuid() == 0 and shutil.which("unshare") else []

    def kubelet(*command):
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)

    probes = {tuple(container[f"{name}Probe"]["exec"]["command"]) for name in ("readiness", "liveness")}
    assert [kubelet(*probe).returncode for probe in probes] == [3] * len(probes), "no daemon yet"
    with open(homes.where / "log", "wb") as log:
        daemon = subprocess.Popen([*away, "ckptd", *container["args"]], env=environ, stdout=log, stderr=log)
    try:
        wait_for(lambda: all(kubelet(*probe).returncode == 0 for probe in probes))
        done = kubelet(*away, "env", "CKPTD_JOB=train", "CKPTD_NO_AUTOSTART=1", "train", "2")
        assert done.stdout == "from step 0, anew\nsaved 0\nsaved 1\n", done.stderr
        wait_for(lambda: not any(rank.alive for rank in ask_status(str(homes.shm / "node"), 5.0).jobs[0].ranks))
        stop = kubelet(*container["lifecycle"]["preStop"]["exec"]["command"])
        assert stop.returncode == 0, stop.stderr
        assert stop.stdout.startswith("train: step 1 is durable")
        os.kill(homes.arenas()["node"], signal.SIGTERM)
        assert daemon.wait(30) == 0
    finally:
        daemon.kill()
        daemon.wait()
