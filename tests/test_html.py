"""The HTML report: one file, no request, no script, well formed, small, and the same data in every form."""

import json
import re
from html.parser import HTMLParser

import pytest
from loops import case
from reports import sample_report

from tqtool.rendering.report.html import MAP_METRICS, PAGE_CELLS, compact, report_data, report_html
from tqtool.rendering.report.plot import LEFT, TOP, log_ticks, pareto_panel
from tqtool.report.serialize import report_from_json, report_to_json

VOID = {"meta", "input", "br", "path", "circle", "wbr"}
OPTIONAL = {"td", "th", "tr", "thead", "tbody", "li"}  # HTML allows these to stay open until their parent ends


class Page(HTMLParser):
    """Collects elements and text; fails on an end tag that does not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.script = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open[-1] != tag and self.open[-1] in OPTIONAL:
            self.open.pop()
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.script += data


@pytest.fixture(scope="module")
def text() -> str:
    return report_html(sample_report())


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_the_page_is_well_formed(page: Page) -> None:
    assert page.open == []
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_no_request_can_leave_the_page(text: str, page: Page) -> None:
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    assert not {tag for tag, _ in page.elements} & {"link", "img", "iframe", "object", "embed", "form", "base", "a"}
    assert not [
        attrs for _, attrs in page.elements for name in attrs if name in ("src", "href") or name.startswith("on")
    ]
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def test_no_script_runs_and_the_data_is_complete(page: Page) -> None:
    scripts = [attrs for tag, attrs in page.elements if tag == "script"]
    assert [attrs.get("type") for attrs in scripts] == ["application/json"]
    plain = json.loads(page.script)
    assert plain.pop("run") == {}
    assert plain == {k: v for k, v in json.loads(report_to_json(sample_report())).items() if k != "run"}
    # by their text: from Python 3.13 on a NaN makes a dataclass unequal to itself
    assert repr(report_from_json(page.script).rows) == repr(report_from_json(report_to_json(sample_report())).rows)


def test_data_cannot_end_its_element() -> None:
    assert "<" not in report_data(sample_report(name="</script><script>alert(1)</script><!--"))


def test_names_are_escaped_everywhere() -> None:
    name = "<img src=x onerror=alert(1)>\"&'"
    page = Page(report_html(sample_report(name=name)))
    assert "img" not in {tag for tag, _ in page.elements}
    assert page.open == []


def test_every_choice_shows_exactly_one_heat_map(text: str, page: Page) -> None:
    radios = {attrs["id"]: attrs["name"] for tag, attrs in page.elements if tag == "input"}
    configs = [i for i, name in radios.items() if name == "s0c"]
    metrics = [i for i, name in radios.items() if name == "s0m"]
    checked = [attrs["name"] for tag, attrs in page.elements if tag == "input" and "checked" in attrs]
    assert sorted(filter(None, checked)) == ["s0c", "s0m"]
    shown = [
        str(attrs["class"]).split()[1:] for _, attrs in page.elements if str(attrs.get("class")).startswith("map ")
    ]
    assert sorted(shown) == sorted([f"c{c}", f"m{m}"] for c in range(len(configs)) for m in range(len(metrics)))
    for radio in radios:
        with case(radio=radio):
            assert text.count(f":has(#{radio}:checked)") == 1


def test_every_point_of_a_plot_can_be_reached_and_read(page: Page) -> None:
    points = [attrs for tag, attrs in page.elements if tag == "g" and str(attrs.get("class")).startswith("pt")]
    assert len(points) == 2 * 8
    assert all(attrs["tabindex"] == "0" and "bits per value" in str(attrs["aria-label"]) for attrs in points)


def test_a_page_of_the_default_configurations_is_small() -> None:
    assert len(report_html(sample_report(baselines=False)).encode()) < 300_000


def test_many_cells_are_shown_per_layer() -> None:
    few, many = sample_report(baselines=False), sample_report(layers=tuple(range(80)), kv_heads=8, baselines=False)
    assert 80 * 8 * len(MAP_METRICS) * 6 > PAGE_CELLS
    assert len(re.findall("<td class=h", report_html(few))) == 5 * 3 * 5 * 6
    assert len(re.findall("<td class=h", report_html(many))) == 80 * 2 * 5 * 6


def test_small_numbers_of_a_cell() -> None:
    values = (0.0, 0.00021, 0.0273, 0.99, 0.99996, 1.0, 1.234, 12.34)
    assert [compact(x) for x in values] == ["0", "2e-4", ".027", ".990", ">.999", "1.00", "1.23", "12.3"]


def test_points_ticks_and_labels_of_a_plot_stay_inside() -> None:
    rows = [row for row in sample_report().rows if row.kind != "control"]
    panel = pareto_panel(rows, "kl", "attention KL", [("balanced", 0.02), ("far", 1e9)])
    assert panel is not None
    assert [limit.label for limit in panel.limits] == ["balanced 0.02"]
    for point in panel.points:
        with case(point=point):
            assert LEFT <= point.x <= panel.right
            assert TOP <= point.high <= point.y <= point.low <= panel.bottom
    by_name = {point.config: point for point in panel.points}
    assert by_name["K2/V2"].y < by_name["K3/V3"].y < by_name["K4/V4"].y < by_name["q8_0"].y  # up is worse
    assert by_name["K2/V2"].x < by_name["K4/V4"].x < by_name["q8_0"].x
    assert {name for name, point in by_name.items() if point.hollow} == {"K3/V3", "q8_0"}


def test_ticks_are_round_numbers() -> None:
    assert log_ticks(0.015, 0.6) == [0.02, 0.05, 0.1, 0.2, 0.5]
    assert log_ticks(1e-4, 2.0) == [1e-4, 1e-3, 0.01, 0.1, 1.0]


def test_the_shipped_schema_is_that_of_the_dataclasses() -> None:
    from importlib.resources import files

    from tqtool.rendering.report.schema import report_schema

    shipped = json.loads((files("tqtool") / "data" / "report.schema.json").read_text("utf-8"))
    assert shipped == report_schema(), "run: python -m tqtool.rendering.report.schema > tqtool/data/report.schema.json"


def test_the_schema_accepts_a_report_and_refuses_a_damaged_one() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    from tqtool.rendering.report.schema import report_schema

    validator = jsonschema.Draft202012Validator(report_schema())
    validator.check_schema(report_schema())
    plain = json.loads(report_to_json(sample_report()))
    validator.validate(plain | {"added_later": 1})
    for damage in ({"rows": None}, {"schema": "tqtool.validate/2"}, {"gate": {}}, {"run": {"seconds": 8.4}}):
        with case(damage=damage):
            assert not validator.is_valid(plain | damage)
