"""Long work tells of itself ten times, however many pieces it has."""

from engine.progress import in_tenths


def test_each_tenth_is_told_once() -> None:
    told: list[str] = []
    advance = in_tenths(told.append, "{bar} {done} of {total}")
    for done in range(1, 32):
        advance(done, 31)
    assert len(told) == 10
    assert told[0] == "━╌╌╌╌╌╌╌╌╌ 4 of 31"
    assert told[-1] == "━━━━━━━━━━ 31 of 31"


def test_large_pieces_skip_tenths() -> None:
    told: list[str] = []
    advance = in_tenths(told.append, "{share} % of {mib:,.0f} MiB")
    for done in (1, 2, 3):
        advance(done * 2**30, 3 * 2**30)
    assert told == ["30 % of 3,072 MiB", "60 % of 3,072 MiB", "100 % of 3,072 MiB"]


def test_nothing_to_do_is_no_error() -> None:
    in_tenths(lambda text: None, "{share}")(0, 0)
