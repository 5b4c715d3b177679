"""What the README says about settings is what the code does."""

import re
from pathlib import Path

from engine.config import EngineConfig

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_every_setting_is_in_the_table_and_nothing_else() -> None:
    table = README.split("## Settings")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(EngineConfig.model_fields)


def test_the_defaults_in_the_table_are_those_of_the_code() -> None:
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs", "block_size"):
        assert re.search(rf"\| `{name}` \| {EngineConfig.model_fields[name].default} \|", README)


def test_every_folder_that_is_named_exists() -> None:
    root = Path(__file__).parents[1]
    for folder in re.findall(r"^\| `(\w+/)` \|", README, flags=re.MULTILINE):
        assert (root / folder).is_dir(), folder
    assert (root / "tests/engine/test_parity.py").is_file()
