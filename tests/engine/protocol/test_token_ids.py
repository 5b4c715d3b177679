import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.protocol.token_ids import pack_token_ids, token_array, unpack_token_ids
from engine.validation.checks import check_token_ids

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(INT32))
def test_packed_ids_are_four_little_endian_bytes_each(ids: list[int]) -> None:
    data = pack_token_ids(ids)
    assert data == b"".join(each.to_bytes(4, "little", signed=True) for each in ids)
    assert unpack_token_ids(data).tolist() == ids
    assert pack_token_ids(unpack_token_ids(data)) == data


@given(st.lists(INT32, max_size=3), st.integers() | st.just(2**31) | st.just(2**70))
def test_an_id_beyond_32_bits_is_refused_by_the_name_of_its_field(
    ids: list[int], last: int
) -> None:
    if -(2**31) <= last < 2**31:
        assert token_array("input_ids", [*ids, last]).tolist() == [*ids, last]
        return
    with pytest.raises(RequestError, match=r"^input_ids: a token id does not fit into 32 bits$"):
        token_array("input_ids", [*ids, last])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 4_001])
def test_bytes_that_are_no_whole_number_of_ids_are_refused(size: int) -> None:
    with pytest.raises(RequestError, match=rf"^input_ids: {size} bytes are not a whole number"):
        unpack_token_ids(bytes(size), "input_ids")


def test_the_first_id_outside_the_vocabulary_is_named() -> None:
    check_token_ids("input_ids", np.array([0, 9], dtype=np.int32), 10)
    for ids in ([3, -7, 10], np.array([3, -7, 10], dtype=np.int32)):
        with pytest.raises(
            RequestError, match=r"^input_ids\[1\]: token id -7 is outside .* \(0 to 9\)"
        ):
            check_token_ids("input_ids", ids, 10)
