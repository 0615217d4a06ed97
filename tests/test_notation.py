"""Rule sentences: what they say, the rows they stand for, and where they are wrong."""

import pytest

import dtorchjax as dt
from dtorchjax import PlacementError, PlacementSignature, einsum_signature
from dtorchjax.notation import Dims, parse_row, parse_sentence, sentence_rows
from dtorchjax.placements import Optional, Partial, R, Shard


def rows(sentence, **kinds):
    return [str(row) for row in sentence_rows(parse_sentence(sentence), **kinds)]


# ---- sentences -----------------------------------------------------------------------------------


def test_reading_a_sentence():
    said = parse_sentence("b m k!, b 1, [b], - -> b m, b")
    assert [o.factors for o in said.inputs] == [("b", "m", "k"), ("b", None), ("b",), ()]
    assert [o.optional for o in said.inputs] == [False, False, True, False]
    assert [o.factors for o in said.outputs] == [("b", "m"), ("b",)]
    assert said.whole == {"k"} and said.factors() == ["b", "m", "k"]
    assert parse_sentence("-> a b").inputs == ()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("sentence", "at", "says"),
    [
        ("b m, k", 6, "needs `->`"),
        ("b ? -> b", 2, r"unexpected '\?'"),
        ("b m, b m b -> b", 9, "factor 'b' twice in one operand"),
        ("b -> b, [b]", 7, "a result cannot be optional"),
        ("b 2 -> b", 2, "unexpected '2'"),
        ("b -> b (m)", 7, r"unexpected '\('"),
        ("b -> m -> k", 8, "unexpected '>'"),
    ],
)
def test_errors_point_at_the_place(sentence, at, says):
    with pytest.raises(PlacementError, match=says) as caught:
        parse_sentence(sentence)
    _, text, caret = str(caught.value).splitlines()
    assert text == "  " + sentence and caret == "  " + " " * at + "^"


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_the_rows_of_a_matrix_product():
    assert rows("b m k, b k n -> b m n", linear="each") == [
        "R, R -> R",
        "S0, S0 -> S0",
        "S1, R -> S1",
        "R, S2 -> S2",
        "S2, S1 -> P",
        "P, R -> P",
        "R, P -> P",
    ]


@pytest.mark.parametrize(
    ("sentence", "kinds", "expected"),
    [
        ("a 1, a b -> a b", {}, ["R, R -> R", "S0, S0 -> S0", "R, S1 -> S1"]),
        ("a k! -> a k!", {}, ["R -> R", "S0 -> S0"]),
        ("a -> a n", {}, ["R -> R", "S0 -> S0", "R -> S1"]),
        ("-> a", {}, ["-> R", "-> S0"]),
        ("a k -> a", {"partial": "max"}, ["R -> R", "S0 -> S0", "S1 -> P(max)"]),
        ("a -> a", {"linear": "0"}, ["R -> R", "S0 -> S0", "P -> P"]),
        ("a, a -> a", {"linear": "jointly"}, ["R, R -> R", "S0, S0 -> S0", "P, P -> P"]),
        ("-, -, - -> -", {"linear": "1:"}, ["R, R, R -> R", "R, P, P -> P"]),
        ("-, -, - -> -", {"linear": "0 2; 1"}, ["R, R, R -> R", "P, R, P -> P", "R, P, R -> P"]),
        ("a k -> a, k", {}, ["R -> R, R"]),  # each result would lack the other's parts
        ("a b -> a, a", {}, ["R -> R, R", "S0 -> S0, S0", "S1 -> P, P"]),
        ("a -> a", {"monotone": True},
         ["R -> R", "S0 -> S0", "P(max) -> P(max)", "P(min) -> P(min)"]),
        ("-, - -> -", {"monotone": True},
         ["R, R -> R", "P(max), R -> P(max)", "R, P(max) -> P(max)", "P(min), R -> P(min)",
          "R, P(min) -> P(min)"]),
        ("- -> -, -", {"linear": "0", "moves": True},
         ["R -> R, R", "P -> P, P", "P(max) -> P(max), P(max)", "P(min) -> P(min), P(min)",
          "P(prod) -> P(prod), P(prod)"]),
        ("-, - -> -", {"linear": "1", "moves": True},
         ["R, R -> R", "R, P -> P", "R, P(max) -> P(max)", "R, P(min) -> P(min)",
          "R, P(prod) -> P(prod)"]),
    ],
)  # fmt: skip
def test_rows(sentence, kinds, expected):
    assert rows(sentence, **kinds) == expected


def test_a_row_as_text():
    row = parse_row("S0, P(max) -> R, S-1")
    assert row.inputs == (Shard(0), Partial("max")) and row.outputs == (R, Shard(-1))
    assert str(row) == "S0, P(max) -> R, S-1"
    assert str(parse_row("-> S0")) == "-> S0" and parse_row("-> S0").inputs == ()
    with pytest.raises(PlacementError, match="a row is `inputs -> outputs`"):
        parse_row("S0, R")


# ---- signatures ----------------------------------------------------------------------------------


def linear_signature():
    return (
        PlacementSignature.builder(3, 1)
        .add_input("S0").add_input("R").add_optional_input("R").add_output("S0")
        .add_input("R").add_input("S1").add_optional_input("S0").add_output("S1")
        .add_input("S1").add_input("S0").add_optional_input("P").add_output("P")
        .build().finish()
    )  # fmt: skip


@pytest.mark.smoke
def test_building_a_signature():
    assert str(linear_signature()).splitlines() == [
        "R, R, R -> R",
        "R, R, - -> R",
        "S0, R, R -> S0",
        "S0, R, - -> S0",
        "R, S1, S0 -> S1",
        "R, S1, - -> S1",
        "S1, S0, - -> P",
        "S1, S0, P -> P",
    ]


def test_finish_adds_one_row_for_each_pattern_of_absence_and_nothing_twice():
    table = linear_signature()
    assert table.finish() == table
    plain = (
        PlacementSignature.builder(1, 2).add_input("S0").add_output("S0").add_output("R").build()
    )
    assert [str(row) for row in plain.finish().rows] == ["R -> R, R", "S0 -> S0, R"]


def test_matching_is_per_mesh_axis():
    table = linear_signature()
    assert table.match([["S0", "R"], ["R", "S1"], ["R", "S0"]]) == [[Shard(0), Shard(1)]]
    assert table.match([["S0", "S1"], ["R", "S0"], None]) == [[Shard(0), Partial()]]
    assert table.match([["S1"], ["S0"], ["P"]]) == [[Partial()]]
    assert table.match([["S1"], ["S0"], ["R"]]) is None  # the bias would be added on each device
    assert table.match([["S0", "S0"], ["R", "S0"], None]) is None
    assert table.match([(R,), (Shard(1),), None]) == [[Shard(1)]]
    two = einsum_signature("a b -> a, a")
    assert two.match([["S0", "S1"]]) == [[Shard(0), Partial()], [Shard(0), Partial()]]


@pytest.mark.parametrize(
    ("operands", "says"),
    [
        ([["R"], ["R"]], "3 operands in the signature, 2 given"),
        ([["R"], ["R", "R"], None], r"one placement per mesh axis, got \[1, 2\]"),
        ([["R"], ["X"], None], "'X' is not a placement"),
    ],
)
def test_matching_what_cannot_be(operands, says):
    with pytest.raises(PlacementError, match=says):
        linear_signature().match(operands)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda b: b.add_input("R").add_input("R").add_input("R"), "its 2 inputs already"),
        (lambda b: b.add_input("R").add_output("R"), "2 inputs come first; this row has 1"),
        (lambda b: b.add_input("R").build(), "not complete: 1 of 2 inputs, 0 of 1 outputs"),
        (lambda b: b.add_input("Q"), "'Q' is not a placement"),
    ],
)
def test_building_what_cannot_be(build, says):
    with pytest.raises(PlacementError, match=says):
        build(PlacementSignature.builder(2, 1))


def test_a_bias_beside_a_partial_result_is_partial_or_absent():
    table = einsum_signature("b i, i o, [o] -> b o", linear="each")
    texts = str(table).splitlines()
    assert "R, S1, S0 -> S1" in texts and "R, S1, - -> S1" in texts and "S1, S0, - -> P" in texts
    assert not any(text.endswith("R -> P") for text in texts), texts
    assert {row.inputs[2] for row in table.rows} >= {R, Optional(), Shard(0)}


def test_the_table_is_printed_replicated_first_partial_last():
    kinds = [
        "P" in t.partition("->")[0]
        for t in str(einsum_signature("a b -> a b", linear="0")).splitlines()
    ]
    assert kinds == sorted(kinds)
    assert str(einsum_signature("a b -> b a", linear="0")) == "R -> R\nS1 -> S0\nS0 -> S1\nP -> P"


# ---- dims ----------------------------------------------------------------------------------------


def test_dims_write_sentences():
    x = Dims(("a", "b", "c"), (2, 3, 4), "float32")
    assert str(x) == "a b c" and len(x) == 3 and list(x) == ["a", "b", "c"]
    assert (
        str(x[0]) == "a" and str(x[[2, 0]]) == "c a" and str(x[1:]) == "b c" and str(x[-1]) == "c"
    )
    assert x[[2, 0]].shape == (4, 2)
    assert str(x.drop((0,), [2])) == "b" and x.drop((0,)).shape == (3, 4)
    assert str(x.whole(1)) == "a b! c" and str(x.whole(1).whole(1, 2)) == "a b! c!"
    assert str(x.shared([0, 2], ["k", "l"])) == "k b l"
    assert str(x.drop((0, 1, 2))) == "-" and dt.notation.Dims(()).shape == ()
