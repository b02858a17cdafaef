"""What programs in documents must not show: idioms that users would copy, and that hang, save nothing or lose it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.cluster import ROOT

# All ranks of a job call these, or those that do wait for one that does not.
COLLECTIVE = {"connect", "save", "load", "preempted", "save_files", "load_files", "find", "async_save",
              "save_checkpoint", "load_checkpoint", "save_state", "load_state"}  # fmt: skip
_OTHERS = {"torch.save", "torch.load", "json.load", "pickle.load", "np.save", "np.load", "numpy.save", "numpy.load"}
_RANK = re.compile(
    r"(.*_)?rank|(.*_)?rank_zero(_only)?|get_(global_|node_local_)?rank|is_(local_)?main_process|is_(global_)?zero|"
    r"is_(world|local)_process_zero|process_index|(LOCAL_|GROUP_|OMPI_COMM_WORLD_|PMI_|SLURM_)?(RANK|PROCID)"
)


def programs() -> dict[str, str]:
    """The Python of all documents, examples and the demo, by file and line."""
    root, found = Path(ROOT), {}
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        for block in re.finditer(r"```(?:python|py)\n(.*?)```", text, re.DOTALL):
            found[f"{path.relative_to(root)}:{text.count(chr(10), 0, block.start()) + 2}"] = block[1]
    for folder in ("examples", "client/ckptd_client/demo"):
        for path in sorted((root / folder).rglob("*.py")):
            found[str(path.relative_to(root))] = path.read_text(encoding="utf-8")
    return found


def wrong(code: str) -> list[str]:
    """What is wrong with a program, each with its line there."""
    tree = ast.parse(code)
    return [f"line {node.lineno}: {text}" for node, text in (*_of_ranks(tree), *_of_steps(tree), *_of_ends(tree))]


def _calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def _name(function: str) -> str:
    return function.rpartition(".")[2]


# --- a part of the ranks


def _of_ranks(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    connects = [node for node, function in _calls(tree) if _name(function) == "connect"]
    if connects and all(map(_is_alone, connects)):
        return
    seen: set[ast.Call] = set()
    for part, condition in _of_a_part(tree):
        for node, function in _calls(part):
            if _name(function) in COLLECTIVE and function not in _OTHERS and "." in function and node not in seen:
                seen.add(node)
                yield node, f"{function} is called by all ranks alike, and stands below {condition!r}"


def _is_alone(node: ast.Call) -> bool:
    return any(word.arg == "alone" and getattr(word.value, "value", None) is True for word in node.keywords)


def _of_a_part(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """What only some ranks execute, and by which condition."""
    for node in ast.walk(tree):
        for body in _bodies(node):
            for i, statement in enumerate(body):  # if rank != 0: return
                if isinstance(statement, ast.If) and _asks(statement.test) and _leaves(statement.body):
                    yield from ((later, ast.unparse(statement.test)) for later in body[i + 1 :])
        match node:
            case ast.If(test=test) | ast.While(test=test) if _asks(test):
                yield from ((one, ast.unparse(test)) for one in (*node.body, *node.orelse))
            case ast.IfExp(test=test) if _asks(test):
                yield from ((one, ast.unparse(test)) for one in (node.body, node.orelse))
            case ast.BoolOp(values=[first, *rest]) if _asks(first):
                yield from ((one, ast.unparse(first)) for one in rest)
            case ast.Match(subject=subject) if _asks(subject):
                yield from ((one, ast.unparse(subject)) for case in node.cases for one in case.body)
            case ast.FunctionDef(decorator_list=decorators) if any(map(_asks, decorators)):
                yield from ((one, ast.unparse(decorators[0])) for one in node.body)


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        body = getattr(node, field, None)
        if isinstance(body, list):
            yield body


def _leaves(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return | ast.Continue | ast.Break | ast.Raise)


def _asks(test: ast.AST) -> bool:
    """Whether the condition is about which rank this is."""
    for node in ast.walk(test):
        name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "value", None)
        if isinstance(name, str) and _RANK.fullmatch(name):
            return True
    return False


# --- steps, and what is saved


def _of_steps(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    for node, function in _calls(tree):
        if _name(function) != "save" or "client" not in function:
            continue
        step = node.args[1] if len(node.args) > 1 else next((w.value for w in node.keywords if w.arg == "step"), None)
        if step is not None and any(_is_fraction(part) for part in ast.walk(step)):
            yield node, "a step is a whole number"
        if any(_name(called) == "state_dict" for argument in node.args for _, called in _calls(argument)):
            yield node, "the objects are passed, not their state_dict()"


def _is_fraction(node: ast.AST) -> bool:
    return isinstance(getattr(node, "op", None), ast.Div) or isinstance(getattr(node, "value", None), float)


# --- the end


def _of_ends(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Of programs that connect by themselves: what they saved last is waited for, and the client is closed."""
    calls = [(node, function) for node, function in _calls(tree) if function == "ckptd_client.connect"]
    names = {_name(function) for _, function in _calls(tree)}
    entered = {id(item.context_expr) for node in ast.walk(tree) if isinstance(node, ast.With) for item in node.items}
    for node, _ in calls:
        if id(node) not in entered and "close" not in names and not _is_returned(tree, node):
            yield node, "the client is never closed"
    saves = {function for _, function in _calls(tree) if function.endswith("client.save")}
    if calls and saves and "wait" not in names:
        yield calls[0][0], "nothing waits for the last save"
    for node, function in _calls(tree):
        if function.endswith("client.load") and _is_taken_apart(tree, node):
            yield node, "load gives None when there is nothing to restore"


def _is_returned(tree: ast.AST, call: ast.Call) -> bool:
    return any(isinstance(node, ast.Return) and node.value is call for node in ast.walk(tree))


def _is_taken_apart(tree: ast.AST, call: ast.Call) -> bool:
    return any(isinstance(node, ast.Attribute) and node.value is call for node in ast.walk(tree))
