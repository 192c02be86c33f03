"""Token ids become bytes once, exactly, whatever form they come in."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcustody.errors import ConfigError
from kvcustody.governance.request import read_prompt

LENGTHS = (1, 16, 17, 4095, 4096, 4097, 6144, 6145, 10_000)


@pytest.mark.parametrize("count", LENGTHS)
def test_lists_arrays_and_tuples_give_the_same_bytes(count: int) -> None:
    ids = [(7 * n) % 150_000 for n in range(count)]
    expected = np.array(ids, dtype="<i4").tobytes()
    for form in (ids, tuple(ids), np.array(ids, dtype=np.int32), np.array(ids * 2, dtype=np.int32)[:count]):
        prompt = read_prompt(form, 16, None, keep_last=True)
        assert prompt.data == expected
        assert (prompt.tokens, prompt.whole, prompt.limit) == (count, count // 16, (count - 1) // 16)
    assert read_prompt(ids, 16, None, keep_last=False).limit == count // 16


@given(
    st.sampled_from([1, 600, 5001]),
    st.integers(0, 5000),
    st.sampled_from([-1, 1 << 31, -(1 << 31), 1.5, "7", None]),
)
def test_an_id_that_is_no_integer_of_31_bits_is_refused_wherever_it_stands(count: int, at: int, bad: object) -> None:
    ids: list[object] = [(1 << 31) - 1] * count
    ids[at % count] = bad
    with pytest.raises(ConfigError, match="31 bits"):
        read_prompt(ids, 16, None, keep_last=True)  # type: ignore[arg-type]
