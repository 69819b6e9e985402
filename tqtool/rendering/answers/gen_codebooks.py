"""Codebooks as a printed table, as JSON and as npz; the C header has a module of its own."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tqtool import __version__
from tqtool.codec.codebook import Codebook
from tqtool.rendering.tables import Column, table_text


def codebook_table(books: Sequence[Codebook], *, terminal: bool, color: bool = True) -> str:
    """Return one line a book: how it was found and what it costs."""
    columns = [
        Column(title) for title in ("d", "bits", "Lloyd", "Newton", "residual", "relative MSE", "cosine", "entropy")
    ]
    rows = [
        [
            str(book.dim),
            str(book.bits),
            str(book.lloyd_steps),
            str(book.newton_steps),
            f"{book.residual:.1e}",
            f"{book.distortion:.6g}",
            f"{math.sqrt(1 - book.distortion):.6f}",
            f"{book.entropy:.4f}",
        ]
        for book in books
    ]
    return table_text(columns, rows, terminal=terminal, color=color)


def codebook_json(books: Sequence[Codebook]) -> str:
    """Return the tables in float64 and as published in float32, both domains derivable, with their figures."""
    document = {
        "schema": "tqtool.codebooks/1",
        "tool": {"name": "tqtool", "version": __version__},
        "law": books[0].law,
        "domain": "centered",
        "tie_rule": "index = number of boundaries b with b <= value",
        "tables": [_table(book) for book in books],
    }
    return json.dumps(document, indent=1) + "\n"


def _table(book: Codebook) -> dict[str, Any]:
    return {
        "dim": book.dim,
        "bits": book.bits,
        "levels": len(book.centroids),
        "boundaries": book.boundaries.tolist(),
        "centroids": book.centroids.tolist(),
        "mse": book.mse,
        "relative_mse": book.distortion,
        "cosine": math.sqrt(1 - book.distortion),
        "entropy": book.entropy,
        "residual": book.residual,
        "lloyd_steps": book.lloyd_steps,
        "newton_steps": book.newton_steps,
    }


def codebook_npz(books: Sequence[Codebook]) -> bytes:
    """Return an npz of `beta_d128_b4_centroids`, `beta_d128_b4_boundaries` ... in float64, centred."""
    arrays = {
        f"{book.law}_d{book.dim}_b{book.bits}_{kind}": table
        for book in books
        for kind, table in (("boundaries", book.boundaries), ("centroids", book.centroids))
    }
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()
