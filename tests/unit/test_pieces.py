"""How prompts are cut for replayed forwards."""

from __future__ import annotations

import pytest

from hf_psd.graphs import piece_width


@pytest.mark.parametrize(
    ("rows", "columns", "width"),
    [
        (1, 5, 16),
        (1, 17, 64),
        (1, 127, 128),
        (1, 300, 512),
        (1, 4000, 512),
        (8, 127, 128),
        (32, 127, 64),
        (512, 9, 16),
    ],
)
def test_pieces_have_few_widths_and_never_many_tokens(rows, columns, width):
    assert piece_width(rows, columns) == width
