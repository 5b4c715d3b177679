"""No source of ours can run code that comes with data."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for package in ("engine", "kernels", "client", "model_repository")
    for path in (ROOT / package).rglob("*.py")
)

MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load"),
    *("os.system", "os.popen"),
}
KEYWORDS = {"trust_remote_code", "allow_pickle", "shell"}  # anything but a literal False


def offences(source: str) -> Iterator[str]:
    """Yield what in `source` could run code of others."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                yield from (n.name for n in names if n.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                if module.partition(".")[0] in MODULES:
                    yield module
                yield from (each for n in names if (each := f"{module}.{n.name}") in CALLS)
            case ast.Attribute():
                if (name := ast.unparse(node)) in CALLS:
                    yield name
            case ast.Call(func=ast.Name(name)) if name in BUILTINS:
                yield name
            case ast.keyword(arg=str(name), value=value) if name in KEYWORDS:
                if not (isinstance(value, ast.Constant) and value.value is False):
                    yield name
            case ast.List(elts=words) | ast.Tuple(elts=words):  # of a command
                flags = {word.value for word in words if isinstance(word, ast.Constant)}
                program = ast.unparse(words[0]) if words else ""
                is_python = program == "sys.executable" or "python" in program
                if is_python and flags & {"-m", "-c"} and not flags & {"-P", "-I"}:
                    yield "Python that imports files of the working directory"
            case ast.Dict(keys=keys):  # of keyword arguments
                constants = (key.value for key in keys if isinstance(key, ast.Constant))
                yield from (name for name in constants if name in KEYWORDS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_runs_code_of_others(path: Path) -> None:
    assert list(offences(path.read_text(encoding="utf-8"))) == []


STAGES = sorted((ROOT / "model_repository").glob("*/*/model.py"))


@pytest.mark.parametrize("path", STAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_stage_imports_files_of_the_working_directory(path: Path) -> None:
    first, *_ = (
        ast.unparse(node)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    )
    assert first == "sys.path[:] = filter(None, sys.path)"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import torch, pickle as p",
        "from pickle import loads",
        "from torch import load",
        "import torch\ntorch.load('m.bin')",
        "load = torch.load",
        "yaml.load(text)",
        "eval(text)",
        "numpy.load(f, allow_pickle=True)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "AutoModel.from_pretrained(p, trust_remote_code=config.trust)",
        "AutoModel.from_pretrained(p, **{'trust_remote_code': True})",
        "subprocess.run(line, shell=True)",
        "subprocess.run([sys.executable, '-m', 'engine'])",
        "command = (python, '-c', 'import torch')",
    ],
)
def test_it_would_be_seen(source: str) -> None:
    assert list(offences(source))


def test_harmless_is_left_alone() -> None:
    source = (
        "model.eval()\nAutoModel.from_pretrained(p, trust_remote_code=False)\nre.compile('a')\n"
        "run([sys.executable, '-P', '-m', 'engine'])\nrun(['c++', '-c', source])"
    )
    assert list(offences(source)) == []
