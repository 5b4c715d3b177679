"""What the READMEs say about settings, folders and lengths is so."""

import re
import subprocess
from pathlib import Path

from engine.config import EngineConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SETTINGS = (ROOT / "model_repository" / "README.md").read_text(encoding="utf-8")


def test_every_setting_is_in_the_table_and_nothing_else() -> None:
    table = SETTINGS.split("## Settings")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(EngineConfig.model_fields)


def test_the_defaults_in_the_table_are_those_of_the_code() -> None:
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs", "block_size"):
        assert re.search(rf"\| `{name}` \| {EngineConfig.model_fields[name].default} \|", SETTINGS)


def test_every_link_leads_somewhere() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_the_first_page_is_short() -> None:
    assert len(README.splitlines()) <= 150


def pages() -> list[Path]:
    """Return the READMEs, but that of the demo model, which is its model card."""
    listed = subprocess.run(
        ["git", "ls-files", "*README.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split() if "checkpoint" not in name]
