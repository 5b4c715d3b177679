"""The table, the plot and the JSON of all figures."""

import io
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from client.bench.errors import BenchError
from client.bench.load.workload import STANDARD
from client.bench.report.html import draw, prepare, write_report
from client.bench.report.results import Bounds, Results, Run, as_json
from client.bench.report.tables import differences, tables, verdict
from tests.client.bench.fakes import fake_measurement


class TestReport:
    RESULTS = Results(
        workloads=STANDARD[:2],
        tridents=["trident", "int8"],
        runs=[
            Run("trident", "W1", 0, 2.0, fake_measurement(1.0)),
            Run("trident", "W2", 0, 2.0, fake_measurement(1.0)),
            Run("int8", "W1", 0, 3.0, fake_measurement(0.5)),
            Run("a peer with a long name", "W1", 0, 60.0, fake_measurement(4.0, others=0.3)),
            Run("trident", "W1", 1, 4.0, fake_measurement(2.0)),
        ],
        failures={"a peer with a long name": "ended"},
    )

    def test_rows(self) -> None:
        rows = as_json(self.RESULTS, Bounds())["summary"]
        assert [(row["workload"], row["server"]) for row in rows] == [
            ("W1", "trident"),
            ("W1", "int8"),
            ("W1", "a peer with a long name"),
            ("W2", "trident"),
        ]
        trident, _, peer, last = rows
        assert trident["speed"] == {"median": 75, "min": 50, "max": 100}
        assert trident["cpu"] == {"server": 5.0}
        assert trident["tokens_per_response"] == 5
        assert trident["kv_waste"] == pytest.approx(0.02)  # servers that count nothing do not count
        assert trident["ratios"] == {"trident": 1.0, "int8": 2.0}
        assert not trident["is_disturbed"]
        assert trident["start"] == 3.0
        assert peer["ratios"] == {"trident": 4.0, "int8": 8.0}  # of the round both completed
        assert last["ratios"] == {"trident": 1.0}
        assert peer["ttft"] == pytest.approx([0.2, 0.28, 0.298])
        assert peer["is_disturbed"]

    def test_the_table_fits_80_columns(self) -> None:
        console = Console(width=80, record=True, file=io.StringIO())
        for each in tables(as_json(self.RESULTS, Bounds()), 2)[:3]:
            console.print(each)
        text = console.export_text()
        assert "…" not in text
        cells = ("W1", "75.0", "50.0-100.0", "4.00", "8.00", " 200", "2.0, -", "server 5.000")
        assert all(cell in text for cell in cells)
        assert max(map(len, text.splitlines())) <= 80

    def test_json_has_everything(self) -> None:
        data = json.loads(json.dumps(as_json(self.RESULTS, Bounds())))
        assert [row["server"] for row in data["summary"]].count("trident") == 2
        assert [run["round"] for run in data["runs"]] == [0, 0, 0, 0, 1]
        assert data["runs"][1]["measurement"]["num_tokens"] == 100
        assert data["failures"] == {"a peer with a long name": "ended"}


class TestFiles:
    def test_report_has_the_table_and_pictures(self, tmp_path: Path) -> None:
        prepare(tmp_path / "report")
        found = as_json(TestReport.RESULTS, Bounds())
        write_report(found, [*tables(found, 2), "a <note> [with] marks"], tmp_path / "report")
        page = (tmp_path / "report" / "index.html").read_text()
        assert "a peer with a" in page
        assert "a &lt;note&gt; [with] marks" in page
        images = sorted(path.name for path in (tmp_path / "report").glob("*.png"))
        assert images == ["kv.png", "load.png", "throughput.png", "users.png"]
        assert page.count("data:image/png;base64,") == 4
        for name in images:
            assert (tmp_path / "report" / name).read_bytes().startswith(b"\x89PNG")

    def test_lines(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn: list[Figure] = []
        monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
        draw(as_json(TestReport.RESULTS, Bounds()), tmp_path)
        bars, load, *_ = (figure.axes[0] for figure in drawn)
        widths = [bar.get_width() for bar in bars.patches]
        assert widths == [100, 25, 200, 75]  # from below
        assert load.lines[0].get_xydata().tolist() == [[75, pytest.approx(0.7)], [100, 0.7]]

    def test_a_folder_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(BenchError, match="--report: cannot write"):
            prepare(tmp_path / "file")


class TestDiff:
    def test_only_rounds_apart_differ(self) -> None:
        assert verdict([1.0, 2.0], [3.0, 4.0]) == "differs"
        assert verdict([3.0, 4.0], [1.0, 2.0]) == "differs"
        assert verdict([1.0, 3.0], [2.0, 4.0]) == "noise"
        assert "unknown" in verdict([1.0], [3.0, 4.0])

    def test_table(self, tmp_path: Path) -> None:
        before, after = tmp_path / "a.json", tmp_path / "b.json"
        found = as_json(TestReport.RESULTS, Bounds())
        before.write_text(json.dumps(found))
        for row in found["summary"]:
            row["rounds"]["tok/s"] = [3 * value for value in row["rounds"]["tok/s"]]
        after.write_text(json.dumps(found))
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(differences(before, after))
        lines = [line.split() for line in console.export_text().splitlines()]
        assert ["tok/s", "75", "225", "3.00", "differs"] in lines
        assert ["TTFT", "p50,", "s", "0.2", "0.2", "1.00", "noise"] in lines

    def test_another_file_is_named(self, tmp_path: Path) -> None:
        other = tmp_path / "other"
        other.write_text("[]")
        with pytest.raises(BenchError, match="is not a results file"):
            differences(other, other)
        with pytest.raises(BenchError, match="cannot read"):
            differences(tmp_path / "missing", other)
