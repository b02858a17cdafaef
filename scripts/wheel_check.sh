#!/usr/bin/env bash
# Builds the wheel, installs it into a fresh environment without torch, and asks it for its version.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-$root/.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cd "$root"
"$python" -m hatchling build -t wheel -d "$work"
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet -c constraints.txt "$work"/*.whl

cd "$work" # away from the source tree, which would be imported instead
venv/bin/ckptd --version
venv/bin/python - <<'CHECK'
import importlib
import importlib.util
import pathlib
import pkgutil

import ckptd.shared.protocol

assert "site-packages" in ckptd.shared.protocol.__file__, ckptd.shared.protocol.__file__
assert importlib.util.find_spec("torch") is None, "this check is about an environment without torch"
for module in pkgutil.walk_packages(ckptd.__path__, "ckptd."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
client = pathlib.Path(importlib.util.find_spec("ckptd_client").submodule_search_locations[0])
for package in (pathlib.Path(ckptd.__file__).parent, client):
    assert (package / "py.typed").is_file(), f"{package} lacks py.typed"
CHECK
echo "wheel: ok"
