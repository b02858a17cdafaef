"""What the tests of Trainer and of Accelerate share; imports no framework."""

import ast
import itertools
import os
import re

from tests.cluster import ROOT


def cases_of(path, decorator="case"):
    """The names of the cases in a script."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [node.name for node in functions if any(ast.unparse(each) == decorator for each in node.decorator_list)]


def names_of(path, kinds):
    """What a script calls its cases, each of them for the kinds of its decorator."""
    return [f"{kind}-{name}" for each in kinds for kind, name in itertools.product(kinds[each], cases_of(path, each))]


def same(one, other, ranks=2):
    """Asserts that the states that ranks saved at these two paths are equal to the bit."""
    import torch  # noqa: PLC0415

    from tests.frameworks.hf_training import difference  # noqa: PLC0415

    for rank in range(ranks):
        left, right = (torch.load(f"{path}.{rank}", weights_only=False) for path in (one, other))
        assert difference(left, right) == [], rank


def program(heading, node):
    """The first Python block after the heading in docs/huggingface.md, with its directories below the node's; its path.

    What follows the last line ends the process: gloo's threads may abort an interpreter that ends.
    """
    with open(os.path.join(ROOT, "docs", "huggingface.md"), encoding="utf-8") as file:
        text = file.read().partition(f"\n## {heading}\n")[2]
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert '"/tmp/' in code
    path = os.path.join(node.temporary, f"{heading}.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(code.replace('"/tmp/', f'"{node.temporary}/'))
        file.write("\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n")
    return path
