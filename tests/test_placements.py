"""Placements and layouts: reading, printing, axis order, and what is refused."""

import pytest

from dtorchjax import Layout, Optional, Partial, PlacementError, Replicate, Shard
from dtorchjax.placements import (
    R,
    dims_to_placements,
    divides,
    joint,
    layout_from_dict,
    local_shape,
    parse_placement,
    parse_placements,
)


class Axes:
    """Layouts ask a mesh for its axes only."""

    axis_names = ("dp", "tp")
    shape = {"dp": 2, "tp": 4}  # noqa: RUF012


MESH = Axes()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("R", Replicate()),
        ("S0", Shard(0)),
        (" S12 ", Shard(12)),
        ("S-1", Shard(-1)),
        ("S0/2", Shard(0, blocks=2)),
        ("P", Partial()),
        ("P(sum)", Partial("sum")),
        ("P(max)", Partial("max")),
        ("P(prod)", Partial("prod")),
        ("-", Optional()),
    ],
)
def test_reading_and_printing(text, placement):
    assert parse_placement(text) == placement == parse_placement(placement)
    assert parse_placement(str(placement)) == placement
    assert eval(repr(placement)) == placement
    assert len({placement, parse_placement(text)}) == 1


@pytest.mark.parametrize(
    "text", ["", "r", "S", "S0/", "S0/0", "P(mean)", "P()", "R0", "S0 S1", 0, None]
)
def test_what_is_no_placement(text):
    with pytest.raises(PlacementError):
        parse_placement(text)


def test_the_forms_are_named():
    with pytest.raises(PlacementError, match=r"'X' is not a placement; write R, S<dim>, .*P\(max"):
        parse_placement("X")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Shard("0"), "integer dim, not '0'"),
        (lambda: Shard(True), "integer dim, not True"),
        (lambda: Shard(0, blocks=0), "blocks >= 1, not 0"),
        (lambda: Partial("mean"), "one of sum, max, min, prod, not 'mean'"),
    ],
)
def test_wrong_placements(make, says):
    with pytest.raises(PlacementError, match=says):
        make()


def test_one_placement_per_axis():
    assert parse_placements("S0, P(max)") == (Shard(0), Partial("max"))
    assert parse_placements(["S0", R]) == (Shard(0), R)


# ---- axis order ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placements", "order", "canonical"),
    [
        ("S0,R", (1, 0), (0, 1)),  # order means nothing where no dim is shared
        ("S0,S1", (1, 0), (0, 1)),
        ("P,P", (1, 0), (0, 1)),
        ("S0,S0", (1, 0), (1, 0)),
        ("S0,R,S0", (2, 1, 0), (2, 1, 0)),
        ("S0,R,S0", (1, 2, 0), (2, 1, 0)),
        ("S0,S1,S0,S1", (2, 3, 0, 1), (2, 3, 0, 1)),
        ("S0,S1,S0,S1", (0, 3, 2, 1), (0, 3, 2, 1)),
        ("S0,S1,S0,S1", (3, 1, 2, 0), (2, 3, 0, 1)),
    ],
)
def test_equal_layouts_have_equal_orders(placements, order, canonical):
    where = joint(parse_placements(placements), order)
    assert where.order == canonical
    for dim in (0, 1):  # the order says which of the axes on a dim is major
        on = [a for a in order if where.placements[a] == Shard(dim)]
        assert list(where.axes_on(dim)) == on


def test_order_is_a_permutation():
    for order in [(0,), (0, 0), (1, 2)]:
        with pytest.raises(PlacementError, match="permutation"):
            joint(parse_placements("S0,S0"), order)


def test_printing_an_order():
    assert str(joint(parse_placements("S0,S0"))) == "S0,S0"
    assert str(joint(parse_placements("S0,S0"), (1, 0))) == "S0,S0 order 1,0"
    assert str(Layout(MESH, "S0,S0", ("tp", "dp"))) == "[dp=S0, tp=S0; major first: tp, dp]"
    assert str(Layout(MESH, "S0,P(max)")) == "[dp=S0, tp=P(max)]"


def test_axis_names_per_dim():
    assert dims_to_placements([("tp", "dp"), ()], MESH.axis_names) == ((Shard(0), Shard(0)), (1, 0))
    assert dims_to_placements([(), ("tp",)], MESH.axis_names) == ((R, Shard(1)), (0, 1))
    layout = Layout(MESH, *dims_to_placements([("tp", "dp")], MESH.axis_names))
    assert layout == Layout(MESH, "S0,S0", (1, 0)) == Layout(MESH, "S0,S0", ("tp", "dp"))
    assert layout != Layout(MESH, "S0,S0") and hash(layout) != hash(Layout(MESH, "S0,S0"))


# ---- layouts -------------------------------------------------------------------------------------


def test_local_shapes():
    assert Layout(MESH, "S0,S1").local_shape((8, 12)) == (4, 3)
    assert Layout(MESH, "S0,S0").local_shape((8, 12)) == (1, 12)
    assert Layout(MESH, "P,S1").local_shape((8, 12)) == (8, 3)
    assert local_shape((8, 12), joint(parse_placements("R,S0")), (2, 4)) == (2, 12)


@pytest.mark.parametrize(
    ("shape", "placements", "fits"),
    [
        ((8,), "S0,S0", True),
        ((4,), "S0,S0", False),
        ((4,), "R,S0", True),
        ((0, 4), "S0,R", False),  # nothing to cut
        ((4,), "S1,R", False),
        ((), "P,R", True),
    ],
)
def test_what_divides(shape, placements, fits):
    assert divides(shape, parse_placements(placements), (2, 4)) is fits


def test_dims_from_the_back():
    assert Layout(MESH, "S-1,S-2").resolve((4, 8)) == Layout(MESH, "S1,S0")
    both = Layout(MESH, "S-1,S1", ("tp", "dp")).resolve((4, 8))
    assert both.placements == (Shard(1), Shard(1)) and both.order == (1, 0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Layout(MESH, "S0"), r"1 placements \(S0\) for a mesh with 2 axes .*'dp', 'tp'"),
        (lambda: Layout(MESH, "S0,-"), "signatures only"),
        (lambda: Layout(MESH, "P,P(max)"), "one kind of partial"),
        (lambda: Layout(MESH, "S0,S0", (0, 2)), "permutation"),
        (lambda: Layout(MESH, "S2,R").resolve((4, 4), "w"), r"w of shape \(4, 4\) has no dim 2"),
        (lambda: Layout(MESH, "S-3,R").resolve((4, 4)), "no dim -3 to shard on 'dp'"),
        (lambda: Layout(MESH, "S0/2,R").resolve((7, 4), "w"), "w .* 7 rows are not 2 equal blocks"),
        (lambda: layout_from_dict(MESH, {"dq": "S0"}), "no mesh axis 'dq'; the axes are .*dp"),
    ],
)
def test_wrong_layouts(make, says):
    with pytest.raises(PlacementError, match=says):
        make()


def test_by_axis_name():
    assert layout_from_dict(MESH, {"tp": "S1"}) == Layout(MESH, "R,S1")
    assert layout_from_dict(MESH, {}).named() == {"dp": "R", "tp": "R"}
