"""Chromium, windows in it, and what can be asked of a report page there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM = CHROMIUM or shutil.which("google-chrome")
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

# The least contrast of any text on what is behind it, and the element that has it.
CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => { const [r, g, b] = c.map((v) => { v /= 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (node) => { for (; node; node = node.parentElement) {
    const c = parse(getComputedStyle(node).backgroundColor);
    if (c.length < 4 || c[3] === 1) return c; } };
  let least = [99, ""];
  for (const node of document.querySelectorAll("body *:not(svg *):not(option)")) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !node.checkVisibility() || ["SCRIPT", "STYLE"].includes(node.tagName)) continue;
    const ink = parse(getComputedStyle(node).color);
    const [a, b] = [ink, behind(node)].map((c) => light(c.slice(0, 3)));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < least[0]) least = [ratio, node.outerHTML.slice(0, 120)];
  }
  return least;
}"""
NAMELESS = """() => [...document.querySelectorAll(
    "button, input, select, a, summary, [tabindex='0']")]
  .filter((node) => { const by = node.getAttribute("aria-labelledby");
    return !(node.getAttribute("aria-label") || (by && document.getElementById(by)?.textContent)
      || node.textContent.trim() || node.labels?.[0]?.textContent.trim()); })
  .map((node) => node.outerHTML)"""
SMALL = """() => [...document.querySelectorAll("button, input, select, nav a, summary")]
  .filter((node) => node.checkVisibility() && node.getBoundingClientRect().height < 40)
  .map((node) => node.outerHTML)"""
HEADINGS = """() => [...document.querySelectorAll(":is(main, header) :is(h1,h2,h3,h4)")]
  .filter((node) => node.checkVisibility()).map((node) => Number(node.tagName[1]))"""


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser of the system, without a screen."""
    from playwright.sync_api import sync_playwright

    # As root, which CI may be, Chromium does not start with its sandbox.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield found
        found.close()


def open_window(browser: Any, address: str, trouble: list[str], *, scheme="light", viewport=DESK):
    """A page in a new window; what goes wrong there and what goes out of it is put in `trouble`."""

    def requested(request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            trouble.append(f"request: {request.url}")

    page = browser.new_page(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
    page.on("console", lambda said: trouble.append(f"{said.type}: {said.text}"))
    page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
    page.on("request", requested)
    page.goto(address)
    page.wait_for_selector("#scores-plot .main-svg")
    return page


def reset(page: Any) -> None:
    """Close the input, clear the filters, and sort by the score."""
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Clear filters").click()
    score = page.locator("th[data-key=score]")
    while score.get_attribute("aria-sort") != "descending":
        score.get_by_role("button").click()
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")


def column(page, place: int) -> list[str]:
    return page.locator(f"#body tr > :nth-child({place})").all_inner_texts()


def shown(page) -> list[int]:
    indices = "rows => rows.map(row => Number(row.dataset.index))"
    return page.locator("#body tr").evaluate_all(indices)


def opened(page) -> str:
    return page.locator("dialog[open] h2").inner_text()
