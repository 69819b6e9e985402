"""Looks at an HTML report in a headless browser: no overflow, no request, no message, a picture of each form.

    python tests/slow/report_screenshots.py REPORT.html FOLDER       (needs `pip install playwright`, and Chromium)

1280 and 400 points wide, light and dark, with scripts enabled and disabled, and as a PDF. Exits 1 on any finding.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
SIZES = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"


def main(page: Path, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    findings = []
    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for width in (1280, 400):
            for scheme in ("light", "dark"):
                context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
                tab = context.new_page()
                requests: list[str] = []
                tab.on("request", lambda request, seen=requests: seen.append(request.url))  # type: ignore[misc]
                tab.on("console", lambda message, seen=findings: seen.append(message.text))
                tab.goto(page.resolve().as_uri())
                needed, there = tab.evaluate(SIZES)
                if needed > there:
                    findings.append(f"{width} {scheme}: {needed} points wide")
                if len(requests) != 1:
                    findings.append(f"{width} {scheme}: requests {requests[1:]}")
                if 2 * tab.locator(".map:visible").count() != tab.locator("fieldset:visible").count():
                    findings.append(f"{width} {scheme}: not one heat map a source is shown")
                tab.screenshot(path=folder / f"{width}-{scheme}.png", full_page=True)
                if (width, scheme) == (1280, "light"):
                    findings += choose_by_keyboard(tab)
                    tab.pdf(path=folder / "print.pdf")
                context.close()
        context = browser.new_context(java_script_enabled=False)
        tab = context.new_page()
        tab.goto(page.resolve().as_uri())
        tab.screenshot(path=folder / "no-scripts.png", full_page=True)
        browser.close()
    print("\n".join(findings) or f"nothing found; pictures in {folder}")
    return bool(findings)


def choose_by_keyboard(tab) -> list[str]:  # type: ignore[no-untyped-def]
    """The arrow keys change the metric of the heat map; Tab reaches a point and shows its numbers."""
    findings = []
    before = tab.locator(".map:visible h4").first.inner_text()
    tab.locator("#s0m0").focus()
    tab.keyboard.press("ArrowRight")
    if tab.locator(".map:visible h4").first.inner_text() == before:
        findings.append("the arrow keys do not change the heat map")
    if not tab.locator("svg .pt").count():
        return findings  # fewer than two configurations have no plot
    tab.locator("svg .pt").first.focus()
    if not tab.locator("svg .pt .tip").first.is_visible():
        findings.append("focus does not show a point's numbers")
    return findings


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), Path(sys.argv[2])))
