"""deploy/helm: the chart renders what deploy/kubernetes has, by Helm's own engine, and the API would take it.

That engine is the program `helm`, or else the library of `pip install 'ckptd[helm]'`, which is built from Helm's code.
"""

import functools
import importlib
import json
import pathlib
import re
import shutil
import subprocess

import pytest

import ckptd
from ckptd.system.config import load_config
from ckptd.system.units import parse_duration_s
from tests.cluster import ROOT
from tests.deploy.test_kubernetes import RELEASES, documents

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (pip: kubernetes-validate)")
CHART = pathlib.Path(ROOT) / "deploy" / "helm" / "ckptd"
HELM = shutil.which("helm")
NAMED = re.compile(r"\.Values\.([\w.]+)|index \.Values\.(\w+)")
VARIANTS = {
    "as it is": {},
    "a claim that exists": {"store": {"existingClaim": "scratch"}},
    "no metrics, no limit": {"metrics": {"enabled": False}, "resources": {"memory": None}},
    "all else": {
        "image": {"tag": "1", "pullSecrets": [{"name": "regcred"}]},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "nodeSelector": {"accelerator": None},
        "priorityClassName": "system-node-critical",
        "podAnnotations": {"a": "b"},
        "settings": {"CKPTD_ARENA": "/run/ckptd/me", "CKPTD_KEEP_LAST": 5},
        "arena": {"hostPath": "/run/ckptd"},
    },
}  # fmt: skip


class RefusedError(Exception):
    """Helm does not render it."""


def by_program(values, name):
    command = [HELM, "template", name, str(CHART), "--namespace", "ml", "--values", "-"]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RefusedError(done.stderr)
    return done.stdout


def by_library(values, name):
    helm = importlib.import_module("helm_python")
    try:
        with helm.Chart.load(str(CHART)) as chart:
            chart.validate_schema(values)
            found = chart.render(values, name=name, namespace="ml")
    except helm.HelmError as error:
        raise RefusedError(str(error)) from error
    return "\n---\n".join(text for path, text in found.items() if path.endswith(".yaml"))


@pytest.fixture(scope="module")
def render():
    """render(values, name) -> documents by kind."""
    if not HELM:
        pytest.importorskip("helm_python", reason="neither helm nor pip install 'ckptd[helm]'")
    engine = by_program if HELM else by_library

    @functools.cache
    def rendered(values, name):
        found = yaml.safe_load_all(engine(json.loads(values), name))
        return {one["kind"]: one for one in found if one is not None}

    return lambda values, name="ckptd": rendered(json.dumps(values), name)


def leaves(values, prefix=""):
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in {"settings", "nodeSelector"}:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def values():
    return yaml.safe_load((CHART / "values.yaml").read_text())


def test_the_chart_is_of_this_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["apiVersion"], chart["version"], chart["appVersion"]) == ("v2", ckptd.__version__, ckptd.__version__)


def test_each_value_is_used_and_documented_and_none_is_missing():
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    used = {one or other for one, other in NAMED.findall(text)}
    assert used == set(leaves(values()))
    page = (pathlib.Path(ROOT) / "deploy" / "README.md").read_text()
    assert [name for name in leaves(values()) if f"`{name}`" not in page] == []


def test_the_schema_knows_each_value():
    schema = json.loads((CHART / "values.schema.json").read_text())
    for name in leaves(values()):
        found = schema
        for key in name.split("."):
            found = found["properties"][key]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("release", RELEASES)
def test_the_api_would_take_what_it_renders(render, variant, release):
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    found = render(VARIANTS[variant], "a-release")
    assert ("PersistentVolumeClaim" in found) == (variant != "a claim that exists")
    for document in found.values():
        validator.validate(document, release, strict=True)


def test_by_itself_it_is_what_lies_in_kubernetes(render):
    """But for labels, names and the policy to pull: two ways to start the same daemon."""
    found, plain = render({}), documents("daemonset.yaml")
    ours, theirs = (one["DaemonSet"]["spec"] for one in (found, plain))
    for spec in (ours, theirs):
        spec = spec["template"]["spec"]  # noqa: PLW2901
        for container in spec["containers"]:
            container.pop("imagePullPolicy", None)
            container.get("env", []).sort(key=lambda one: one["name"])
        spec["volumes"][1]["persistentVolumeClaim"].pop("claimName")
    assert ours["template"]["spec"] == theirs["template"]["spec"]
    assert ours["updateStrategy"] == theirs["updateStrategy"]
    assert found["PersistentVolumeClaim"]["spec"] == plain["PersistentVolumeClaim"]["spec"]
    assert ours["selector"]["matchLabels"].items() <= ours["template"]["metadata"]["labels"].items()


def test_settings_are_settings_and_the_grace_period_holds_what_a_stop_does(render):
    pod = render({})["DaemonSet"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    config, _ = load_config({}, {one["name"]: one.get("value", "") for one in container["env"]}, "/dev/null")
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    drains_s = parse_duration_s(command[command.index("--timeout") + 1])
    assert drains_s + config.stop_drain_s < pod["terminationGracePeriodSeconds"]


def test_values_reach_what_they_are_for(render):
    found = render(VARIANTS["all else"])
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    daemon, metrics = pod["containers"]
    assert daemon["image"] == "registry.example.com/ckptd:1"
    given = {one["name"]: one.get("value") for one in daemon["env"]}
    assert (given["CKPTD_ARENA"], given["CKPTD_KEEP_LAST"]) == ("/run/ckptd/me", "5")
    assert metrics["env"] == [{"name": "CKPTD_ARENA", "value": "/run/ckptd/me"}]
    assert pod["volumes"][0]["hostPath"]["path"] == daemon["volumeMounts"][0]["mountPath"] == "/run/ckptd"
    assert "nodeSelector" not in pod
    large = {"user": {"uid": 2000000, "gid": 3000000}, "settings": {"CKPTD_SCRUB_STORE": 4194304, "CKPTD_A": 0.5}}
    pod = render(large)["DaemonSet"]["spec"]["template"]["spec"]
    given = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert (given["CKPTD_SCRUB_STORE"], given["CKPTD_A"]) == ("4194304", "0.5")
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["fsGroup"]) == (2000000, 3000000)
    bare = render(VARIANTS["no metrics, no limit"])["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert [one["name"] for one in bare] == ["ckptd"]
    assert bare[0]["resources"] == {"requests": {"cpu": "1"}}
    monitor = render({"metrics": {"podMonitor": True}})["PodMonitor"]
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == metrics["ports"][0]["name"]
    claim = render({"store": {"existingClaim": "scratch"}})["DaemonSet"]["spec"]["template"]["spec"]["volumes"][1]
    assert claim["persistentVolumeClaim"] == {"claimName": "scratch"}


@pytest.mark.parametrize(
    "wrong", [{"imagee": {}}, {"user": {"uid": 0}}, {"store": {"path": "relative"}}, {"settings": {"KEEP_LAST": 3}}]
)
def test_a_mistake_in_the_values_is_refused(render, wrong):
    with pytest.raises(RefusedError):
        render(wrong)


def linted_by_program():
    done = subprocess.run([HELM, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode else ""


def linted_by_library():
    helm = pytest.importorskip("helm_python", reason="neither helm nor pip install 'ckptd[helm]'")
    report = helm.chart.lint(str(CHART), strict=True)
    assert report["total_charts_linted"] == 1
    worse_than_a_hint = [one["error"] for one in report["messages"] if one["severity"] > 1]
    return "\n".join([*report["errors"], *worse_than_a_hint])


def test_helm_lint_finds_nothing():
    assert (linted_by_program() if HELM else linted_by_library()) == ""
