"""Which rows each device holds: spreading and joining dims, by every cut of every small size."""

import itertools

import numpy as np
import pytest

from dtorchjax.parts import Cut, is_even, join, lengths, rows_of, spread, stored_length

CUTS = [
    [Cut(2)],
    [Cut(4)],
    [Cut(3), Cut(2)],
    [Cut(2), Cut(4)],
    [Cut(2, 2)],
    [Cut(3, 2), Cut(2)],
    [Cut(2), Cut(2, 3)],
    [Cut(2, 3), Cut(2, 2)],
    [Cut(2), Cut(2), Cut(2)],
]


def cases():
    for n, cuts in itertools.product(range(26), CUTS):
        try:
            lengths(n, cuts)
        except ValueError:
            continue
        yield n, cuts


def test_a_part_is_what_the_definition_says():
    for n, k in itertools.product(range(1, 20), range(1, 6)):
        c = -(-n // k)
        parts = spread(np.arange(1, n + 1), 0, [Cut(k)], np).reshape(k, c)
        for i in range(k):
            rows = [r + 1 for r in range(i * c, min((i + 1) * c, n))]
            assert parts[i].tolist() == rows + [0] * (c - len(rows))


def test_two_axes_pad_at_the_end_of_each_major_part():
    parts = spread(np.arange(1, 11), 0, [Cut(2), Cut(4)], np).reshape(2, 4, 2)
    assert parts[0].tolist() == [[1, 2], [3, 4], [5, 0], [0, 0]]
    assert parts[1].tolist() == [[6, 7], [8, 9], [10, 0], [0, 0]]


def test_each_block_is_cut_by_itself():
    parts = spread(np.arange(1, 11), 0, [Cut(2, blocks=2)], np).reshape(2, 6)
    assert parts.tolist() == [[1, 2, 3, 6, 7, 8], [4, 5, 0, 9, 10, 0]]


def test_joining_undoes_spreading_in_every_dim():
    for n, cuts in cases():
        x = np.arange(1, 2 * n + 1).reshape(2, n)
        stored = spread(x, 1, cuts, np)
        assert stored.shape == (2, stored_length(n, cuts))
        assert (join(stored, 1, n, cuts, np) == x).all()
        assert (join(spread(x.T, 0, cuts, np), 0, n, cuts, np) == x.T).all()
        assert is_even(n, cuts) == (stored.shape == x.shape)


def test_each_device_knows_its_rows():
    for n, cuts in cases():
        places = itertools.product(*(range(cut.count) for cut in cuts))
        parts = np.split(spread(np.arange(1, n + 1), 0, cuts, np), stored_length(n, cuts) or 1)
        held = np.array([p[0] for p in parts if len(p)]).reshape(-1, max(lengths(n, cuts)[-1], 1))
        for place, part in zip(places, held, strict=False):
            index, real = rows_of(n, cuts, place, np)
            assert (np.where(real, index + 1, 0) == part).all(), (n, cuts, place)


def test_blocks_that_are_not_equal():
    with pytest.raises(ValueError, match="7 rows are not 2 equal blocks"):
        lengths(7, [Cut(2, blocks=2)])
