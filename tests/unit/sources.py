"""The source files of ckptd and of its client as syntax trees, for tests of their structure."""

import ast
import functools
import gc
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = {"ckptd": ROOT / "ckptd", "ckptd_client": ROOT / "client" / "ckptd_client"}


def module_name(package, relative):
    parts = [package, *relative.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(package):
    base = PACKAGES[package]
    return {module_name(package, path.relative_to(base)): path for path in sorted(base.rglob("*.py"))}


CKPTD = sources("ckptd")
CLIENT = sources("ckptd_client")
EVERYTHING = CKPTD | CLIENT


@functools.cache
def trees():
    """The tree of each module. Not when this is imported: every worker collects all tests.

    No garbage collection meanwhile: a finalizer whose traceback is printed parses, too, and Python 3.11 counts the
    depth of both in one place ("AST constructor recursion depth mismatch"). What is here stays: none looks at it later.
    """
    gc.disable()
    try:
        return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in EVERYTHING.items()}
    finally:
        gc.freeze()
        gc.enable()


@functools.cache
def imports():
    """The statements of each module that import, inside functions too."""
    kinds = (ast.Import, ast.ImportFrom)
    return {name: [node for node in ast.walk(tree) if isinstance(node, kinds)] for name, tree in trees().items()}


def imported(nodes):
    """Modules that these statements name. ``from ckptd import x`` counts as ckptd.x."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"line {node.lineno}: relative import"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in EVERYTHING else node.module for name in names)


def within(name, *packages):
    return any(name == package or name.startswith(package + ".") for package in packages)
