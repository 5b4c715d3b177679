"""The list of packages is complete: whoever installs these can run the benchmark."""

import ast
import sys
from pathlib import Path

from engine.bench.requirements import PACKAGES

ROOT = Path(__file__).parents[3]
OURS = {"engine", "kernels", "tests"}
# Downloads checkpoints; exists inside Triton alone; trains the bundled model: nothing done here.
ELSEWHERE = {"huggingface_hub", "triton_python_backend_utils", "typer"}


def imported(file: Path) -> set[str]:
    """Return the top-level packages that a file imports, wherever in it."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.append(node.module)
    return {name.partition(".")[0] for name in names}


def test_what_is_imported_is_listed_and_nothing_else() -> None:
    files = [*ROOT.glob("engine/**/*.py"), *ROOT.glob("kernels/**/*.py")]
    files += [*ROOT.glob("tests/gpu/*.py"), ROOT / "tests" / "factories" / "greedy.py"]
    found = set().union(*map(imported, files)) - sys.stdlib_module_names - OURS - ELSEWHERE
    # transformers renders chat templates with jinja2, which it does not require itself.
    assert found | {"jinja2"} == set(PACKAGES)
