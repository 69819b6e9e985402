"""The report as JUnit XML: a suite per data source, a case per configuration and gated metric.

A limit that was missed is a `failure`; what could not be judged (nothing was quantized, no queries, too few of them)
is an `error`. Metrics without a limit are properties of their suite.
"""

import math
import re
from xml.etree import ElementTree

from tqtool.report.gates import worst_place
from tqtool.report.model import Check, Report, Row, Source

# XML 1.0 has no way to write these, escaped or not.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def report_junit(report: Report) -> str:
    """Return the XML document; without a gate every configuration is one case that says whether it was quantized."""
    root = ElementTree.Element("testsuites", name=_text(report.tool))
    for source in report.sources:
        root.append(_suite(report, source))
    for key in ("tests", "failures", "errors"):
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in root)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(report: Report, source: Source) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=_text(source.name))
    rows = [row for row in report.rows if row.source == source.name]
    rows = [row for row in rows if row.kind != "control" or row.status == "error"]
    properties = ElementTree.SubElement(suite, "properties")
    for row in rows:
        checks = [check for check in report.gate.checks if (check.source, check.config) == (row.source, row.config)]
        for check in checks:
            suite.append(_case(check))
        if not checks or (row.status == "error" and all(check.status != "error" for check in checks)):
            suite.append(_engaged(row))
        gated = {check.metric for check in checks}
        for metric, summary in row.metrics.items():
            if metric not in gated and not math.isnan(summary.mean):
                ElementTree.SubElement(
                    properties, "property", name=_text(f"{row.config} {metric}"), value=repr(summary.mean)
                )
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    suite.set("errors", str(sum(case.find("error") is not None for case in cases)))
    return suite


def _case(check: Check) -> ElementTree.Element:
    case = ElementTree.Element(
        "testcase",
        classname=_text(f"{check.source}.{check.config}"),
        name=_text(f"{check.metric} {check.relation} {check.limit:g}"),
    )
    missed = "<" if check.relation == ">=" else ">"
    message = f"{check.metric} {check.measured:.4g} {missed} {check.limit:g}"
    place = worst_place(check)
    where = f"{check.config}, {place}" if place else check.config
    if check.status == "fail":
        ElementTree.SubElement(case, "failure", message=_text(message), type="limit").text = _text(
            check.reason or where
        )
    elif check.status in ("error", "unverified"):
        reason = check.reason or f"{check.metric} could not be judged"
        ElementTree.SubElement(case, "error", message=_text(reason), type=check.status).text = _text(where)
    return case


def _engaged(row: Row) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname=_text(f"{row.source}.{row.config}"), name="quantized")
    if row.status == "error":
        ElementTree.SubElement(case, "error", message=_text(row.verdict), type="not-engaged")
    return case


def _text(text: str) -> str:
    return _FORBIDDEN.sub("�", text)
