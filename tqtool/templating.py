"""The files of `templates/`: one way to read and to fill them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2


def template_text(name: str) -> str:
    """Return a file of `templates/` as it is."""
    return (files("tqtool") / "templates" / name).read_text("utf-8")


def template(
    name: str, filters: Mapping[str, Callable[..., object]] | None = None, *, html: bool = False
) -> Callable[..., str]:
    """Return the function that fills a template with values; a name that it is not given is an error.

    `html`: text is made harmless where it is put in.
    """
    environment = _environment(html).overlay()
    environment.filters = {**environment.filters, **(filters or {})}
    return environment.from_string(template_text(name)).render


@cache
def _environment(html: bool) -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        autoescape=html,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
