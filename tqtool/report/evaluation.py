"""What a compressed cache changes in a model's own predictions: values of `tqtool eval`, and their JSON.

Figures are of the model's next-token distributions, against the same model with an uncompressed cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tqtool.errors import InputError

EVAL_SCHEMA = "tqtool.eval/1"
Setting = Literal["exact", "every-token", "past-only"]
SETTINGS: tuple[Setting, ...] = get_args(Setting)
QUARTERS = 4


@dataclass(frozen=True, slots=True)
class Needle:
    """One fact hidden in the text: where, and whether the model gives it back."""

    depth: float  # 0 at the start, 1 at the end
    found: bool
    log_prob: float  # natural logarithm of the answer's probability, a mean over its tokens


@dataclass(frozen=True, slots=True)
class EvalRow:
    """One cache in one setting."""

    config: str
    setting: Setting
    bits_per_value: float  # stored, metadata counted, exact tokens not
    nll: float  # mean negative log-likelihood of the next token, nats; perplexity is its exponential
    nll_error: float  # standard error of that mean over the positions
    change: float  # mean of the paired differences of it to the exact cache, nats
    change_error: float  # standard error of that mean; positions are taken as independent
    kl: float  # mean divergence of the next-token distribution from the exact cache's, nats
    kl_p99: float
    kl_quarters: tuple[float, ...]  # means by quarter of the text
    same_top: float  # share of positions whose likeliest next token is the same
    greedy_alike: int  # leading tokens of greedy decoding that are the same
    greedy_share: float  # share alike by position
    needles: tuple[Needle, ...]


@dataclass(frozen=True, slots=True)
class EvalText:
    """A text that was read: its file, what it hashes to, its length."""

    source: str
    sha256: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model, texts, and what each cache changed; the first row is the exact control."""

    model: str
    revision: str | None
    architecture: str
    layers: int
    compressed_layers: int  # the others are windows, linear or shared, and stay as they are
    texts: tuple[EvalText, ...]
    chunk: int  # tokens of a forward pass
    residual_window: int  # newest tokens before the chunk that stay exact, setting past-only
    sink_tokens: int
    greedy_tokens: int
    options: Mapping[str, str]  # of the codec
    rows: tuple[EvalRow, ...]
    tool: str

    @property
    def positions(self) -> int:
        """How many next tokens were predicted."""
        return sum(text.tokens - 1 for text in self.texts)

    def sentence(self, setting: Setting) -> str:
        """Return in words what was exact in a setting."""
        if setting == "exact":
            return "nothing quantized: the control"
        sinks = f"the first {self.sink_tokens} tokens exact, " if self.sink_tokens else ""
        if setting == "every-token":
            return f"{sinks}every {'other ' if sinks else ''}token quantized, its own key and value too"
        window = f" and the newest {self.residual_window} tokens before it" if self.residual_window else ""
        return f"{sinks}the current chunk of {self.chunk} tokens{window} exact, the past quantized: what engines do"


def evaluation_json(evaluation: Evaluation) -> dict[str, Any]:
    """Return the JSON document, schema tqtool.eval/1."""
    document = asdict(evaluation)
    settings = {row.setting: evaluation.sentence(row.setting) for row in evaluation.rows}
    return {"schema": EVAL_SCHEMA, "settings": settings, **document}


def read_evaluation(path: Path) -> Evaluation:
    """Return an evaluation from its file. Raises: `InputError` ("not-found", "report")."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file", code="not-found", path=str(path)) from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not JSON: {error}", code="report", path=str(path)) from error
    try:
        if document.pop("schema") != EVAL_SCHEMA:
            raise ValueError(f"need schema {EVAL_SCHEMA}")
        document.pop("settings")
        rows = [
            EvalRow(
                **row
                | {
                    "needles": tuple(Needle(**each) for each in row["needles"]),
                    "kl_quarters": tuple(row["kl_quarters"]),
                }
            )
            for row in document.pop("rows")
        ]
        if not all(row.setting in SETTINGS for row in rows):
            raise ValueError("a setting that this version does not know")
        texts = tuple(EvalText(**text) for text in document.pop("texts"))
        return Evaluation(**document, rows=tuple(rows), texts=texts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = f"{path}: no evaluation that this version can read: {' '.join(str(error).split())[:120]}"
        raise InputError(text, code="report", hint="tqtool eval --json-out writes one", path=str(path)) from error
