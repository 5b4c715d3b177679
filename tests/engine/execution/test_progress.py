"""Progress is reported at most ten times, however many pieces there are."""

from engine.execution.progress import in_tenths


def test_each_tenth_is_reported_once() -> None:
    reported: list[str] = []
    advance = in_tenths(reported.append, "{done} of {total}")
    for done in range(1, 32):
        advance(done, 31)
    assert len(reported) == 10
    assert reported[0] == "4 of 31"
    assert reported[-1] == "31 of 31"


def test_large_pieces_skip_tenths() -> None:
    reported: list[str] = []
    advance = in_tenths(reported.append, "{share} % of {mib:,.0f} MiB")
    for done in (1, 2, 3):
        advance(done * 2**30, 3 * 2**30)
    assert reported == ["30 % of 3,072 MiB", "60 % of 3,072 MiB", "100 % of 3,072 MiB"]


def test_nothing_to_do_is_no_error() -> None:
    in_tenths(lambda text: None, "{share}")(0, 0)
