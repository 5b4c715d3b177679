"""The table, the plot and the JSON of all figures."""

import io
import json
import struct
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from client.bench.compare.floors import Shape, floor
from client.bench.compare.plot import GrowthPlot
from client.bench.compare.report import Results, Session, table
from client.bench.compare.workload import STANDARD, TINY_GROWTH
from client.bench.errors import BenchError
from tests.client.bench.compare.fakes import CEILINGS, fake_measurement


class TestReport:
    RESULTS = Results(
        workloads=STANDARD[:2],
        tridents=["trident", "int8"],
        ceilings=CEILINGS,
        floors={w.name: floor(Shape(900, 100, 10, 10), w, CEILINGS) for w in STANDARD[:2]},
        sessions={
            "trident": [
                Session(2.0, {"W1": fake_measurement(1.0), "W2": fake_measurement(1.0)}),
                Session(4.0, {"W1": fake_measurement(2.0)}),
            ],
            "int8": [Session(3.0, {"W1": fake_measurement(0.5)}), None],
            "a peer with a long name": [
                Session(60.0, {"W1": fake_measurement(4.0, others=0.3)}),
                None,
            ],
        },
        failures={"a peer with a long name": "ended"},
    )

    def test_rows(self) -> None:
        rows = self.RESULTS.rows()
        assert [(row.workload, row.server) for row in rows] == [
            ("W1", "trident"),
            ("W1", "int8"),
            ("W1", "a peer with a long name"),
            ("W2", "trident"),
        ]
        trident, _, peer, last = rows
        assert (trident.speed.median, trident.speed.min, trident.speed.max) == (75, 50, 100)
        assert trident.of_floor == pytest.approx(75 / self.RESULTS.floors["W1"].bf16)
        assert trident.ratios == {"trident": 1.0, "int8": 2.0}
        assert not trident.is_disturbed
        assert trident.start == 3.0
        assert peer.ratios == {"trident": 4.0, "int8": 8.0}  # of the one round that both completed
        assert last.ratios == {"trident": 1.0}
        assert peer.ttft == (pytest.approx(0.2), pytest.approx(0.298))
        assert peer.is_disturbed
        assert self.RESULTS.stolen == 0.04

    def test_the_table_fits_80_columns(self) -> None:
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(table(self.RESULTS))
        text = console.export_text()
        assert "…" not in text
        for cell in (
            "W1 floor bf16",
            "75.0",
            "50.0-100.0",
            "4.00",
            "8.00",
            "200.0",
            "60.0",
            "30.0*",
        ):
            assert cell in text
        assert max(map(len, text.splitlines())) <= 80

    def test_json_has_everything(self) -> None:
        data = json.loads(json.dumps(self.RESULTS.as_json()))
        assert [row["server"] for row in data["summary"]].count("trident") == 2
        assert data["rounds"]["trident"][0]["measurements"]["W2"]["num_tokens"] == 100
        assert data["rounds"]["a peer with a long name"][1] is None
        assert data["ceilings"]["read"] == 1e9
        assert data["floors"]["W1"]["int8"] > 0
        assert data["failures"] == {"a peer with a long name": "ended"}


class TestPlot:
    def _results(self) -> Results:
        peer = Session(1.0, {"S1": fake_measurement(2.0), "C16": fake_measurement(3.0)})
        every = {each.name: fake_measurement(1.0) for each in TINY_GROWTH.workloads}
        shape = Shape(900, 100, 10, 10)
        return Results(
            TINY_GROWTH.workloads,
            ["trident"],
            CEILINGS,
            {each.name: floor(shape, each, CEILINGS) for each in TINY_GROWTH.workloads},
            {"trident": [Session(1.0, every)], "peer": [peer], "gone": [None]},
            {"gone": "not installed"},
        )

    def test_is_a_picture_with_all_that_was_measured(self, tmp_path: Path) -> None:
        path = tmp_path / "growth.png"
        GrowthPlot(path, TINY_GROWTH).draw(self._results())
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", content[16:24])
        assert (width, height) == (1320, 960)

    def test_lines(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn: list[Figure] = []
        monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
        results = self._results()
        GrowthPlot(tmp_path / "growth.png", TINY_GROWTH).draw(results)
        by_streams, by_context, _, first_by_context = drawn[0].axes
        lines = {line.get_label(): line.get_xydata().tolist() for line in by_streams.lines}
        floors = [[n, results.floors[f"S{n}"].bf16] for n in (1, 4)]
        assert lines == {"trident": [[1, 100], [4, 100]], "peer": [[1, 50]], "floor, bf16": floors}
        assert by_context.lines[0].get_xydata().tolist() == [[16, 100], [64, 100]]
        assert first_by_context.lines[1].get_xydata().tolist() == [[16, 0.2]]

    def test_a_file_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(BenchError, match="--growth: cannot write"):
            GrowthPlot(tmp_path / "missing" / "growth.png", TINY_GROWTH)
