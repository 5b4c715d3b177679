"""Letters beyond ASCII in the interpreter of a stub, tried in one that is as isolated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.service import interpreter

NAME = "模型-ü"

# As `PyConfig_InitIsolatedConfig` has it: no UTF-8 mode and the locale C.
ISOLATED = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "FOLDER": NAME, NAME: "1"}


def run(code: str, folder: Path, **environ: str) -> str:
    """Run `code` after `adapt` in such an interpreter, a child of this process."""
    (folder / NAME).mkdir(exist_ok=True)
    (folder / NAME / "text").write_text(NAME, encoding="utf-8")
    begin = (
        "import os, sys\n"
        "assert sys.getfilesystemencoding() == 'ascii'\n"
        f"sys.path.insert(0, {str(Path(interpreter.__file__).parents[2])!r})\n"
        "from engine.service.interpreter import adapt\n"
        f"os.getppid = lambda: 0\nos.chdir({str(folder)!r})\n"
        "sys.path.insert(0, os.getcwd() + '/' + os.environ['FOLDER'])\n"
        "adapt()\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", f"exec({begin + code!a})"],
        env={**os.environ, **ISOLATED, **environ},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode("utf-8")


@pytest.mark.parametrize(
    "code",
    [
        "print(os.environ['FOLDER'])",
        "print([name for name in os.environ if not name.isascii()][0])",
        "print(open(os.environ['FOLDER'] + '/text').read())",
        "os.chdir(os.environ['FOLDER']); print(open('text', encoding='utf-8').read())",
        "os.chdir(os.environ['FOLDER']); print(os.path.basename(os.path.abspath('.')))",
        "print(sys.path[0][-len(os.environ['FOLDER']):])",
        "[name] = os.listdir(); print(open(name + '/text').read())",
        "[name] = os.listdir(); print(open(os.path.realpath(name) + '/text').read())",
        "print(open(os.fsencode(os.environ['FOLDER'] + '/text')).read())",
        "import subprocess\n"
        "subprocess.run(['sh', '-c', 'echo $NEW'], env={**os.environ, 'NEW': '模型-ü'})",
    ],
)
def test_names_beyond_ascii_are_utf8(code: str, tmp_path: Path) -> None:
    assert run(code, tmp_path) == f"{NAME}\n"


def test_bytes_that_are_no_utf8_stay_as_they_are(tmp_path: Path) -> None:
    broken = os.fsdecode(b"\xff\xe6\xa8\xa1")
    code = "print(os.environ['X'].encode('utf-8', 'surrogateescape'), os.fsencode(os.environ['X']))"
    assert run(code, tmp_path, X=broken) == f"{os.fsencode(broken)!r} {os.fsencode(broken)!r}\n"


def test_lone_surrogates_are_no_names(tmp_path: Path) -> None:
    code = (
        "for text in ('a\\ud800', 'ü\\ud800\\udcff'):\n"
        "    try:\n        open(text)\n"
        "    except UnicodeEncodeError as error:\n        print(error.reason)\n"
    )
    assert run(code, tmp_path) == "surrogates not allowed\n" * 2


def test_other_codecs_keep_the_handler_of_python(tmp_path: Path) -> None:
    code = (
        "print(ascii(b'a\\xff'.decode('gbk', 'surrogateescape')))\n"
        "try:\n    'ü型'.encode('cp437', 'surrogateescape')\n"
        "except UnicodeEncodeError:\n    print('refused')\n"
    )
    assert run(code, tmp_path) == "'a\\udcff'\nrefused\n"


def test_the_log_is_utf8(tmp_path: Path) -> None:
    code = "print(os.environ['FOLDER'], file=sys.stderr); os.dup2(2, 1)"
    begin = "os.dup2(1, 2); "
    assert run(begin + code, tmp_path) == f"{NAME}\n"
