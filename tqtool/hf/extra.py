"""Whether the extra `hf` is installed. The one module of this room that can be imported without it."""

from __future__ import annotations

import os
from importlib import metadata

from tqtool.errors import SetupError

INSTALL = "pip install 'tqtool[hf]'"
NEEDED = ("torch", "transformers", "tokenizers")
FIRST_TRANSFORMERS = 5  # major version; caches and attention functions of earlier ones have other signatures


def require_extra() -> None:
    """Raise `SetupError`, code `extra`, with the line that installs what is missing."""
    missing = [name for name in NEEDED if version_of(name) is None]
    if missing:
        raise SetupError(f"this needs {' and '.join(missing)}, not installed here", code="extra", hint=INSTALL)
    found = version_of("transformers") or ""
    if int(found.partition(".")[0]) < FIRST_TRANSFORMERS:
        text = f"transformers {found} is installed, {FIRST_TRANSFORMERS}.0 or later is needed"
        raise SetupError(text, code="extra", hint=f"{INSTALL} --upgrade")


def require(purpose: str, *packages: str) -> None:
    """Raise `SetupError`, code `extra`, unless these packages, which only `purpose` needs, are installed."""
    missing = [name for name in packages if version_of(name) is None]
    if missing:
        text = f"{purpose} needs {' and '.join(missing)}, not installed here"
        raise SetupError(text, code="extra", hint=f"pip install {' '.join(missing)}")


def quiet_libraries() -> None:
    """Keep the bars of the libraries off the terminal; heeded where they are not loaded yet."""
    for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")


def version_of(package: str) -> str | None:
    """Return the installed version of a package, None where it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
