"""A model and its tokenizer, from a folder, a GGUF file or a hub; refused in one line where they are not whole.

The hub is contacted only for a name that is no folder, and code that came with a model runs only when asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.utils import logging as transformers_logging

from tqtool.errors import InputError, TqError, UsageError
from tqtool.hf.extra import require

TorchDtype = Literal["auto", "f32", "f16", "bf16"]
TORCH_DTYPES = {"auto": "auto", "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_HUB_NAME = re.compile(r"[\w.\-]+(/[\w.\-]+)?")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from and how it is to be loaded."""

    name: str  # a folder, a GGUF file or a name on the hub
    revision: str | None = None  # branch, tag or commit on the hub
    gguf_file: str | None = None  # a file of the folder or repository
    offline: bool = False
    trust_remote_code: bool = False
    device: str = "auto"  # the first GPU, else the CPU
    torch_dtype: TorchDtype = "auto"  # as the weights say
    device_map: str | None = None  # of accelerate; excludes `device`


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to run, and what a report says of it."""

    model: Any  # transformers.PreTrainedModel, in evaluation mode
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    name: str  # a folder's or file's own name, without the way to it; on the hub owner/name
    revision: str | None  # the commit on the hub; None for a folder
    architecture: str  # the class: LlamaForCausalLM

    @property
    def text_config(self) -> Any:
        """The configuration of the decoder, which may be a part of the model's."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def layers(self) -> int:
        """How many decoder layers there are, attention or not."""
        return int(self.text_config.num_hidden_layers)

    @property
    def device(self) -> torch.device:
        """Where token ids must lie."""
        return self.model.get_input_embeddings().weight.device


def load_model(source: ModelSource) -> LoadedModel:
    """Load a decoder and its tokenizer, in evaluation mode.

    Raises: `InputError` ("not-found", "model", "tokenizer", "remote-code"), `SetupError` ("extra"), `UsageError`.
    """
    where, gguf = _place(source)
    if gguf is not None:
        require(f"{gguf}: reading GGUF", "gguf", "accelerate")
    if source.device_map is not None:
        require("--device-map", "accelerate")
    device = _device(source)
    common: dict[str, Any] = {
        "revision": source.revision or "main",
        "local_files_only": source.offline or Path(where).is_dir(),
        "trust_remote_code": source.trust_remote_code,
        **({} if gguf is None else {"gguf_file": gguf}),
    }
    with _naming(source, "model"), _quiet():
        config = AutoConfig.from_pretrained(where, **common)
        auto = _class_for(config, source)
        placed = {} if source.device_map is None else {"device_map": source.device_map}
        dtype = TORCH_DTYPES[source.torch_dtype]
        model, info = auto.from_pretrained(where, dtype=dtype, output_loading_info=True, **placed, **common)
    if info["missing_keys"]:
        absent = sorted(info["missing_keys"])
        text = f"{source.name}: the weights lack {len(absent)} tensors of the model: {', '.join(absent[:3])}"
        raise InputError(text + " …" * (len(absent) > 3), code="model", path=source.name)
    with _naming(source, "tokenizer"), _quiet():
        tokenizer = AutoTokenizer.from_pretrained(where, **common)
    if source.device_map is None:
        model = model.to(device)
    return LoadedModel(
        model=model.eval(),
        tokenizer=tokenizer,
        name=_shown_name(source, where, gguf),
        revision=getattr(model.config, "_commit_hash", None),
        architecture=type(model).__name__,
    )


def _place(source: ModelSource) -> tuple[str, str | None]:
    """Return the folder or hub name, and the GGUF file in it."""
    path = Path(source.name)
    if not source.name:
        raise UsageError("MODEL is empty: no folder and no name", code="usage")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            hint = "give the folder that holds config.json, or a .gguf file"
            raise InputError(f"{source.name}: is a file, not a model's folder", code="model", hint=hint, path=str(path))
        if source.gguf_file is not None:
            raise UsageError("MODEL is a GGUF file already: leave --gguf-file out", code="usage")
        return str(path.parent), path.name
    if path.is_dir():
        if source.revision is not None:
            raise UsageError(f"{source.name} is a folder: --revision is for the hub", code="usage")
        if source.gguf_file is not None:
            if not (path / source.gguf_file).is_file():
                missing = path / source.gguf_file
                raise InputError(f"{missing}: no such file", code="not-found", hint=_ggufs(path), path=str(missing))
        elif not (path / "config.json").is_file():
            text = f"{source.name}: no config.json in this folder"
            raise InputError(text, code="model", hint=_ggufs(path) or "is it a model's folder?", path=str(path))
        return source.name, source.gguf_file
    if not _HUB_NAME.fullmatch(source.name) or source.name.startswith("."):
        raise InputError(f"{source.name}: no such folder", code="not-found", path=source.name)
    return source.name, source.gguf_file


def _ggufs(folder: Path) -> str | None:
    names = sorted(path.name for path in folder.glob("*.gguf"))
    return f"there is --gguf-file {', '.join(names[:4])}" if names else None


def _class_for(config: Any, source: ModelSource) -> Any:
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    for mapping, auto in (
        (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
        (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
    ):
        if type(config) in mapping:
            return auto
    text = f"{source.name}: model type {config.model_type!r} is no decoder that transformers can load"
    raise InputError(text, code="model", path=source.name)


def _device(source: ModelSource) -> torch.device:
    if source.device_map is not None and source.device != "auto":
        raise UsageError("--device and --device-map exclude each other", code="usage")
    if source.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(source.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = _one_line(error)
        raise UsageError(
            f"--device {source.device}: {reason}", code="usage", hint="for instance cpu or cuda:0"
        ) from error
    return device


def _shown_name(source: ModelSource, where: str, gguf: str | None) -> str:
    if not Path(where).is_dir():
        return source.name
    return Path(where).resolve().name if gguf is None else Path(gguf).stem


@contextmanager
def _naming(source: ModelSource, part: Literal["model", "tokenizer"]) -> Iterator[None]:
    """Turn what transformers raises while it loads into one line that names the model."""
    try:
        yield
    except (TqError, MemoryError):
        raise
    except Exception as error:  # its own, its parsers' and whatever a config of the wrong types leads to
        raise _refusal(source, part, error) from error


def _refusal(source: ModelSource, part: str, error: Exception) -> TqError:
    said = _one_line(error)
    if "trust_remote_code" in str(error):
        text = f"{source.name}: needs code of its own, which is run only when asked for"
        hint = "read that code, then add --trust-remote-code"
        return InputError(text, code="remote-code", hint=hint, path=source.name)
    if not Path(source.name).exists() and ("connect" in said or "offline" in said.lower() or "cached" in said):
        reach = "--offline: it is not in the local cache" if source.offline else "the hub cannot be reached"
        text = f"{source.name}: no folder of this name, and {reach}"
        return InputError(text, code="not-found", hint="give the model's folder", path=source.name)
    if part == "tokenizer":
        hint = "a GGUF file carries one, a folder has tokenizer.json"
        return InputError(f"{source.name}: no tokenizer: {said}", code="tokenizer", hint=hint, path=source.name)
    return InputError(f"{source.name}: cannot be loaded: {said}", code="model", path=source.name)


def _one_line(error: Exception) -> str:
    """Return the first sentence of an error: transformers writes pages."""
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return first if len(first) <= 240 else first[:239] + "…"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' own bars and advice off the terminal while it loads."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
