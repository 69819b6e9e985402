"""`tqtool eval` on tiny models: its figures against plain sums over whole runs, its settings, its refusals."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loops import case

torch = pytest.importorskip("torch", reason="needs the extra tqtool[hf]")

from tiny import TEXT, byte_tokenizer, save_tiny, tiny_model  # noqa: E402

from tqtool.codec.sizes import KVConfig  # noqa: E402
from tqtool.errors import TqError  # noqa: E402
from tqtool.hf import turboquant_cache  # noqa: E402
from tqtool.hf.cache import Coding  # noqa: E402
from tqtool.hf.candidates import candidates, replaced  # noqa: E402
from tqtool.hf.evaluate import TokenText, evaluate  # noqa: E402
from tqtool.hf.models import ModelSource, load_model  # noqa: E402
from tqtool.hf.needles import CODES, PLACES, haystack  # noqa: E402
from tqtool.rendering.answers.eval import evaluation_html, evaluation_markdown, evaluation_text  # noqa: E402
from tqtool.report.evaluation import EvalText, read_evaluation  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    (place / "text.txt").write_text(TEXT)
    save_tiny(place / "tiny-llama", head_dim=32)
    return place


def tqtool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tqtool", "--threads", "1", "eval", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


SHORT = ("--text", "text.txt", "--max-tokens", "96", "--chunk", "24", "--greedy", "6", "--needles", "2")


@pytest.fixture(scope="module")
def answered(folder: Path) -> dict[str, Any]:
    done = tqtool(
        folder, "tiny-llama", *SHORT, "--json", "--baselines", "fp8", "--json-out", "e.json", "-c", "K4/V4,K2/V2"
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert document == json.loads((folder / "e.json").read_text())
    return document


def test_every_cache_is_in_both_settings_and_the_control_is_zero(answered: dict[str, Any]) -> None:
    assert answered["schema"] == "tqtool.eval/1"
    kinds = [(row["config"], row["setting"]) for row in answered["rows"]]
    caches = ["K4/V4", "K2/V2", "fp8"]
    assert kinds == [
        ("exact", "exact"),
        *((c, s) for s in ("every-token", "past-only") for c in sorted(caches, key=caches.index)),
    ]
    control = answered["rows"][0]
    assert (control["kl"], control["kl_p99"], control["change"], control["same_top"]) == (0, 0, 0, 1)
    assert (control["greedy_alike"], control["greedy_share"]) == (6, 1)
    assert answered["settings"] == {
        "exact": "nothing quantized: the control",
        "every-token": "every token quantized, its own key and value too",
        "past-only": "the current chunk of 24 tokens exact, the past quantized: what engines do",
    }


def test_the_first_chunk_is_exact_where_only_the_past_is_quantized(answered: dict[str, Any]) -> None:
    for row in answered["rows"][1:]:
        first, *rest = row["kl_quarters"]  # the first quarter is the first chunk
        with case(config=row["config"], setting=row["setting"]):
            assert (first == 0) == (row["setting"] == "past-only")
            assert all(value > 0 for value in rest)


def row_of(document: dict[str, Any], config: str, setting: str) -> dict[str, Any]:
    return next(row for row in document["rows"] if (row["config"], row["setting"]) == (config, setting))


def test_fewer_bits_and_more_quantized_tokens_diverge_further(answered: dict[str, Any]) -> None:
    order = [("K2/V2", "every-token"), ("K4/V4", "every-token"), ("K4/V4", "past-only")]
    values = [row_of(answered, *each)["kl"] for each in order]
    assert values == sorted(values, reverse=True)
    assert row_of(answered, "K4/V4", "every-token")["bits_per_value"] == 4 + 16 / 32
    assert row_of(answered, "fp8", "past-only")["bits_per_value"] == 8


@pytest.mark.parametrize("setting", ["every-token", "past-only"])
def test_figures_are_plain_sums_over_the_text(folder: Path, answered: dict[str, Any], setting: str) -> None:
    loaded = load_model(ModelSource(str(folder / "tiny-llama")))
    ids = loaded.tokenizer(TEXT)["input_ids"][:96]
    logits = []
    for cache in (None, turboquant_cache(loaded.model.config, "K2/V2", exact_chunk=setting == "past-only")):
        with torch.no_grad():
            if cache is None:
                logits.append(loaded.model(torch.tensor([ids])).logits[0])
            else:
                parts = torch.tensor([ids]).split(24, 1)
                logits.append(torch.cat([loaded.model(part, cache=cache).logits[0] for part in parts]))
    p, q = (torch.log_softmax(x.double(), -1).numpy() for x in logits)
    row = row_of(answered, "K2/V2", setting)
    losses = [[-x[i, ids[i + 1]] for i in range(95)] for x in (p, q)]
    kl = [math.fsum(np.exp(p[i]) * (p[i] - q[i])) for i in range(96)]
    assert row["nll"] == pytest.approx(np.mean(losses[1]), rel=1e-5)
    differences = np.subtract(losses[1], losses[0])
    assert row["change"] == pytest.approx(differences.mean(), abs=1e-6)
    assert row["change_error"] == pytest.approx(differences.std(ddof=1) / math.sqrt(95), rel=1e-3)
    assert row["kl"] == pytest.approx(np.mean(kl), rel=1e-3)
    assert row["kl_p99"] == pytest.approx(np.quantile(kl, 0.99), rel=1e-2)
    assert row["kl_quarters"] == pytest.approx(
        [np.mean(kl[24 * i : 24 * i + 24]) for i in range(4)], rel=1e-3, abs=1e-7
    )
    assert row["same_top"] == pytest.approx(np.mean(p.argmax(1) == q.argmax(1)), abs=1 / 96)


def test_an_evaluation_comes_back_from_its_file(folder: Path, answered: dict[str, Any], tmp_path: Path) -> None:
    evaluation = read_evaluation(folder / "e.json")
    assert evaluation.positions == 95
    text, page = evaluation_text(evaluation, terminal=False), evaluation_html(evaluation)
    markdown = evaluation_markdown(evaluation)
    for setting in answered["settings"].values():
        with case(setting=setting):
            assert setting in text
            assert setting[1:] in page
            assert setting[1:] in markdown
    assert "://" not in page
    assert "<script" not in page
    for row in answered["rows"]:
        cell = f"{row['kl']:.4f}" if 0 < row["kl"] < 0.1 else "0" if row["kl"] == 0 else f"{row['kl']:.3f}"
        with case(cell=cell):
            assert all(cell in rendering for rendering in (text, page, markdown))


BAD_FILES = {
    "not JSON": ("{", "not JSON"),
    "another schema": ('{"schema": "tqtool.report/1"}', "need schema tqtool.eval/1"),
    "no object": ("[1]", "no evaluation that this version can read"),
    "fields missing": ('{"schema": "tqtool.eval/1", "settings": {}, "rows": [], "texts": []}', "no evaluation"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_other_files_are_no_evaluation(case: str, tmp_path: Path) -> None:
    content, text = BAD_FILES[case]
    (tmp_path / "e.json").write_text(content)
    with pytest.raises(TqError, match=text) as caught:
        read_evaluation(tmp_path / "e.json")
    assert caught.value.code == "report"


REFUSALS: list[tuple[tuple[str, ...], int, str]] = [
    (("tiny-llama",), 2, "no text given"),
    (("tiny-llama", "text.txt"), 2, "text.txt: is this a text? say --text text.txt"),
    (("tiny-llama", "--text", "absent.txt"), 3, "absent.txt: no such file"),
    (("tiny-llama", "--text", "text.txt", "--chunk", "4000"), 3, "end within the first chunk of 4000"),
    (("tiny-llama", "--text", "text.txt", "-c", "K4"), 2, "K4"),
    (("tiny-llama", "--text", "text.txt", "-c", "K16/V4"), 2, "a compressed cache has 1 to 8 bits a side"),
    (("tiny-llama", "--text", "text.txt", "--baselines", "int8"), 2, "there are fp8, quanto, installed and none"),
    (("tiny-llama", "--text", "text.txt", "--json-out", "text.txt"), 2, "text.txt"),
    (("absent", "--text", "text.txt", "--offline"), 3, "absent"),
]


@pytest.mark.parametrize(("arguments", "status", "text"), REFUSALS)
def test_what_cannot_be_evaluated_is_refused_in_one_line(
    folder: Path, arguments: tuple[str, ...], status: int, text: str
) -> None:
    done = tqtool(folder, *arguments)
    assert done.returncode == status, done.stderr
    error = [line for line in done.stderr.splitlines() if not line.startswith("  hint")]
    assert len(error) == 1
    assert text in error[0]
    assert done.stdout == ""


def test_a_baseline_that_is_not_installed_names_its_package(folder: Path) -> None:
    pytest.importorskip("torch")
    if "quanto" in installed():
        pytest.skip("optimum-quanto is installed here")
    done = tqtool(folder, "tiny-llama", "--text", "text.txt", "--baselines", "quanto")
    assert done.returncode == 6
    assert "pip install optimum-quanto" in done.stderr


def installed() -> list[str]:
    from tqtool.hf.candidates import installed_baselines

    return installed_baselines()


def test_a_model_that_draws_random_numbers_is_found_out() -> None:
    model = tiny_model("LlamaConfig")
    source = load_stub(model)

    def add_noise(module: Any, arguments: Any, found: Any) -> None:
        found.logits = found.logits + torch.randn_like(found.logits)

    model.register_forward_hook(add_noise)
    ids = byte_tokenizer()(TEXT)["input_ids"][:40]
    text = TokenText(EvalText("x", "0", 40), ids)
    caches = candidates(model.config, [Coding(KVConfig(4, 4))], [])
    with pytest.raises(TqError, match="two runs with an exact cache differ") as caught:
        evaluate(source, [text], caches, chunk=8, greedy=0, needles=0)
    assert caught.value.status == 70


def load_stub(model: Any) -> Any:
    from tqtool.hf.models import LoadedModel

    return LoadedModel(model, byte_tokenizer(), "noisy", None, "LlamaForCausalLM")


def test_needles_lie_evenly_and_their_answers_stand_where_they_are_said_to() -> None:
    tokenizer = byte_tokenizer()
    filler = tokenizer(TEXT)["input_ids"][:600]
    hay = haystack(tokenizer, filler, 3)
    text = tokenizer.decode(hay.ids)
    assert hay.depths == (1 / 6, 0.5, 5 / 6)
    for place, code, answer in zip(PLACES, CODES, hay.answers, strict=False):
        with case(place=place):
            assert text.count(f"The secret number of {place} is {code}") == 2
            assert tokenizer.decode([hay.ids[i] for i in answer]).strip() == str(code)
    places = [text.index(place) for place in PLACES[:3]]
    assert places == sorted(places)
    assert [hay.ids.count(token) >= filler.count(token) for token in set(filler)] == [True] * len(set(filler))


def test_caches_without_full_attention_are_refused() -> None:
    config = tiny_model("Gemma3TextConfig", sliding_window=16, layer_types=["sliding_attention"] * 3).config
    with pytest.raises(TqError, match="no full-attention layer"):
        replaced(config, lambda: None)
