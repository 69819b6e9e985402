"""Texts through a model with every cache at once: the same tokens in the same chunks, the predictions compared.

Each chunk runs through all caches before the next, so only a chunk's logits are ever held, and never two texts' caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tqtool.dtypes import Float64Array
from tqtool.errors import BugError, InputError
from tqtool.hf.candidates import Candidate
from tqtool.hf.capture_texts import Text, token_ids
from tqtool.hf.models import LoadedModel
from tqtool.hf.needles import Haystack, haystack
from tqtool.hf.steps import step
from tqtool.report.evaluation import QUARTERS, EvalRow, EvalText, Needle

BLOCK_VALUES = 1 << 23  # logits compared at once, in float64
Advance = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class TokenText:
    """A text as token ids."""

    facts: EvalText
    ids: list[int]


@dataclass(slots=True)
class _Gathered:
    """What one cache did, over all texts so far."""

    nll: list[Float64Array] = field(default_factory=list)  # of the next token, by position
    kl: list[Float64Array] = field(default_factory=list)
    quarter: list[Float64Array] = field(default_factory=list)
    same: list[Float64Array] = field(default_factory=list)
    greedy: list[list[int]] = field(default_factory=list)
    needles: list[Needle] = field(default_factory=list)
    bits: float = 0


def tokens_of(loaded: LoadedModel, text: Text, *, max_tokens: int, chunk: int) -> TokenText:
    """Return a text as token ids, the first `max_tokens`.

    Raises: `InputError` ("text") for a text that ends within the first chunk: nothing is predicted from codes there.
    """
    ids, _ = token_ids(loaded.tokenizer, text, max_tokens)
    if len(ids) <= chunk:
        raise InputError(
            f"{text.source}: {len(ids)} tokens end within the first chunk of {chunk}: none is predicted from codes",
            code="text",
            hint="give a longer text, or a smaller --chunk",
            path=text.source,
        )
    return TokenText(EvalText(text.source, text.sha256, len(ids)), ids)


@torch.no_grad()
def evaluate(
    loaded: LoadedModel,
    texts: list[TokenText],
    caches: list[Candidate],
    *,
    chunk: int,
    greedy: int,
    needles: int,
    advance: Advance = lambda amount: None,
) -> tuple[EvalRow, ...]:
    """Return a row for each cache; the first must be exact. Raises: `BugError` ("control") if its row is not zero."""
    gathered = [_Gathered() for _ in caches]
    for text in texts:
        _predict(loaded, text.ids, caches, gathered, chunk, greedy, advance)
        if needles:
            _search(loaded, haystack(loaded.tokenizer, text.ids, needles), caches, gathered, chunk, advance)
    rows = tuple(_row(each, found, gathered[0]) for each, found in zip(caches, gathered, strict=True))
    control = rows[0]
    if control.kl or control.change or control.same_top != 1:
        raise _uncontrolled(loaded, f"divergence {control.kl:.3g}")
    return rows


def _uncontrolled(loaded: LoadedModel, what: str) -> BugError:
    hint = "a model that draws random numbers cannot be evaluated"
    return BugError(f"{loaded.name}: two runs with an exact cache differ: {what}", code="control", hint=hint)


def steps_of(text: TokenText, caches: int, *, greedy: int, needles: int) -> int:
    """Return how many tokens run through the model for a text, for a progress bar."""
    return (caches + 1) * (len(text.ids) * (1 + bool(needles)) + greedy)


def _predict(
    loaded: LoadedModel,
    ids: list[int],
    caches: list[Candidate],
    gathered: list[_Gathered],
    chunk: int,
    greedy: int,
    advance: Advance,
) -> None:
    """Predict every next token of a text and go on greedily at its end."""
    reference, running = caches[0].make(), [each.make() for each in caches]
    quarter = np.minimum(np.arange(len(ids)) * QUARTERS // len(ids), QUARTERS - 1).astype(np.float64)
    last = []
    for start in range(0, len(ids), chunk):
        part = torch.tensor([ids[start : start + chunk]])
        targets = torch.tensor(ids[start + 1 : start + 1 + part.shape[1]])
        exact = step(loaded, part, reference)[0].cpu()
        advance(part.shape[1])
        last = [exact[-1]]
        for cache, found in zip(running, gathered, strict=True):
            logits = step(loaded, part, cache)[0].cpu()
            nll, kl, same = _compared(exact, logits, targets)
            found.nll.append(nll)
            found.kl.append(kl)
            found.same.append(same)
            found.quarter.append(quarter[start : start + chunk])
            last.append(logits[-1])
            advance(part.shape[1])
    for each, cache, found in zip(caches, running, gathered, strict=True):
        found.bits = each.bits_per_value(cache)
    # the reference goes on as well: the control is held against it
    told = [_continued(loaded, *each, greedy, advance) for each in zip([reference, *running], last, strict=True)]
    if told[0] != told[1]:
        raise _uncontrolled(loaded, "in greedy decoding")
    for found, tokens in zip(gathered, told[1:], strict=True):
        found.greedy.append(tokens)


def _compared(exact: Any, logits: Any, targets: Any) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Return negative log-likelihoods (with targets), divergences and whether the likeliest token is the same."""
    nll, kl, same = [], [], []
    rows = max(BLOCK_VALUES // exact.shape[1], 1)
    for start in range(0, len(exact), rows):
        p, q = (torch.log_softmax(x[start : start + rows].double(), -1) for x in (exact, logits))
        wanted = targets[start : start + rows]
        nll.append(-q[: len(wanted)].gather(1, wanted[:, None])[:, 0].numpy())
        # a token that both rule out adds nothing; its difference would be NaN
        kl.append((p.exp() * (p - q)).nan_to_num(0).sum(-1).clamp(min=0).numpy())
        same.append((p.argmax(-1) == q.argmax(-1)).double().numpy())
    return np.concatenate(nll), np.concatenate(kl), np.concatenate(same)


def _continued(loaded: LoadedModel, cache: Any, logits: Any, count: int, advance: Advance) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = step(loaded, torch.tensor([tokens[-1:]]), cache)[0, -1]
        advance(1)
    return tokens


def _search(
    loaded: LoadedModel,
    hay: Haystack,
    caches: list[Candidate],
    gathered: list[_Gathered],
    chunk: int,
    advance: Advance,
) -> None:
    """Ask for the hidden facts; an answer is found if each of its tokens is the likeliest after those before it."""
    wanted = {position for answer in hay.answers for position in answer}
    for each, found in zip(caches, gathered, strict=True):
        cache, seen = each.make(), {}
        for start in range(0, len(hay.ids), chunk):
            part = hay.ids[start : start + chunk]
            logits = step(loaded, torch.tensor([part]), cache)[0].cpu()
            for position in wanted & set(range(start + 1, start + 1 + len(part))):
                row = torch.log_softmax(logits[position - start - 1].double(), -1)
                seen[position] = float(row[hay.ids[position]]), int(row.argmax()) == hay.ids[position]
            advance(len(part))
        for depth, answer in zip(hay.depths, hay.answers, strict=True):
            values = [seen[position] for position in answer]
            mean = math.fsum(value for value, _ in values) / len(values)
            found.needles.append(Needle(depth, all(top for _, top in values), mean))


def _row(candidate: Candidate, found: _Gathered, exact: _Gathered) -> EvalRow:
    nll, reference = np.concatenate(found.nll), np.concatenate(exact.nll)
    kl, quarter = np.concatenate(found.kl), np.concatenate(found.quarter)
    change = nll - reference
    tokens = [
        pair for mine, theirs in zip(found.greedy, exact.greedy, strict=True) for pair in zip(mine, theirs, strict=True)
    ]
    alike = [a == b for a, b in tokens]
    return EvalRow(
        config=candidate.config,
        setting=candidate.setting,
        bits_per_value=found.bits,
        nll=float(nll.mean()),
        nll_error=_error(nll),
        change=float(change.mean()),
        change_error=_error(change),
        kl=float(kl.mean()),
        kl_p99=float(np.quantile(kl, 0.99)),
        kl_quarters=tuple(float(kl[quarter == i].mean()) for i in range(QUARTERS)),
        same_top=float(np.concatenate(found.same).mean()),
        greedy_alike=alike.index(False) if False in alike else len(alike),
        greedy_share=sum(alike) / len(alike) if alike else 1.0,
        needles=tuple(found.needles),
    )


def _error(values: Float64Array) -> float:
    """Return the standard error of a mean; 0 of a single value."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0
