"""Decompositions, solvers, Fourier transforms: a matrix or a line is needed whole."""

from __future__ import annotations

from dtorchjax.registry import rule


@rule("cholesky eig eigh hessenberg householder_product lu qr schur svd tridiagonal")
def _(*operands, out, **_):
    """b m! n! -> b ...!: only leading dims may be sharded"""
    batch = operands[0].factors[:-2]

    def words(name, x) -> str:
        own = [f"{name}{d}!" for d in range(len(x) - len(batch))]
        return " ".join([*batch, *own]) or "-"

    left = ", ".join(words(f"in{i}_", x) for i, x in enumerate(operands))
    return f"{left} -> {', '.join(words(f'out{i}_', x) for i, x in enumerate(out))}"


@rule("triangular_solve", linear="1")
def _(a, b, *, left_side, **_):
    """b m! m!, b m! n -> b m! n: right-hand sides are solved each by itself"""
    batch, (rows, columns) = b.factors[:-2], b.factors[-2:]
    matrix = " ".join([*batch, "m!", "l!"])
    sides = ("m!", columns) if left_side else (rows, "m!")
    return f"{matrix}, {' '.join([*batch, *sides])} -> {' '.join([*batch, *sides])}"


@rule("tridiagonal_solve", linear="3")
def _(lower, diagonal, upper, b, **_):
    """b m!, b m!, b m!, b m! n -> b m! n: right-hand sides are solved each by itself"""
    line = " ".join([*b.factors[:-2], "m!"])
    return f"{', '.join([line] * 3)}, {line} {b.factors[-1]} -> {line} {b.factors[-1]}"


@rule("fft", linear="0")
def _(x, *, fft_lengths, **_):
    """b n! -> b k!"""
    dims = list(range(len(x) - len(fft_lengths), len(x)))
    return f"{x.whole(*dims)} -> {x.shared(dims, [f'k{d}!' for d in dims])}"
