"""Which images were right, as text and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepsquare.results import pack_bits, unpack_bits


@given(st.lists(st.booleans(), max_size=70))
def test_bits_come_back(values: list[bool]) -> None:
    text = pack_bits(torch.tensor(values, dtype=torch.bool))
    assert unpack_bits(text, len(values)).tolist() == values


def test_ten_thousand_images_take_1668_characters() -> None:
    assert len(pack_bits(torch.ones(10_000, dtype=torch.bool))) == 1668


def test_more_bits_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="count is 9; expected at most the 8 bits"):
        unpack_bits(pack_bits(torch.ones(3, dtype=torch.bool)), 9)
