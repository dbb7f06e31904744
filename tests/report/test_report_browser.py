"""The report page in a real browser: Chromium loads it from disk, and a user goes about it."""

from __future__ import annotations

import csv
import os
from functools import partial
from itertools import pairwise

import pytest

from tests import browsing
from tests.browsing import opened, shown
from tests.pages import COUNT, HOSTILE, data_of, digits

if browsing.CHROMIUM is None and os.environ.get("CI") != "true":
    pytest.skip("no Chromium here: apt-get install chromium", allow_module_level=True)


TROUBLE: list[str] = []  # what went wrong in the browser, and what went out of it


@pytest.fixture(autouse=True)
def no_trouble():
    yield
    assert TROUBLE == []


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return digits().save(tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def data(report):
    return data_of(report)


@pytest.fixture(scope="module")
def visit(report):
    """Open the page in a new window."""
    with browsing.chromium() as browser:

        def open_page(path=report, hash_="", **options):
            return browsing.open_window(browser, path.as_uri() + hash_, TROUBLE, **options)

        yield open_page


@pytest.fixture(scope="module")
def window(visit):
    return visit()


@pytest.fixture
def page(window):
    """The window as it was when it was opened: loading takes longer than all that is done there."""
    yield window
    browsing.reset(window)


def test_all_parts_are_drawn(page):
    for plot in ("spectrum", "uncertainty", "risk"):
        assert page.locator(f"#{plot}-plot .scatterlayer .trace").count() >= 3
    assert page.locator(".shelf").count() == 10
    assert page.locator("#shelves img").evaluate_all("all => all.every(i => i.naturalWidth === 8)")
    assert page.locator("#scores-plot .barlayer .point").count() > 5
    assert page.locator("#calibration-plot .scatterlayer .trace").count() == 2
    assert page.locator("#classes tbody tr").count() == 20  # by class, and the confusion


def test_the_verdict_comes_first_and_the_spread_is_said(page, data):
    verdict, reason, kind = data["notices"][0]
    first = page.locator("#main p, #main dl").first
    assert first.inner_text() == f"{verdict} {reason}".strip()
    assert kind in first.get_attribute("class").split()
    assert "An error bar says how far data and prior leave a predicted probability open." in (
        page.locator(".meaning").inner_text()
    )


def test_sorting_by_every_column(page, data):
    rows = data["rows"]
    assert shown(page)[0] == max(range(COUNT), key=lambda i: rows["score"][i])
    for place, one in enumerate(data["columns"], 1):
        key, numeric = one["key"], one["kind"] in ("number", "percent")
        orders = ("descending", "ascending") if numeric else ("ascending", "descending")
        for order in orders:
            page.locator("#head th").nth(place - 1).get_by_role("button").press("Enter")
            assert page.locator(f"th[data-key={key}]").get_attribute("aria-sort") == order
            if key != "name":
                values = [rows[key][i] for i in shown(page)]
                assert values == sorted(rows[key], reverse=order == "descending")[:50]
        assert page.locator("th[aria-sort]").count() == 1


def test_filters_search_and_pages(page, data):
    rows, status = data["rows"], page.locator("#shown")
    clear = page.get_by_role("button", name="Clear filters")
    assert status.inner_text() == "Showing 1 to 50 of 300 inputs"
    page.get_by_label("Predicted class").select_option("3")
    page.get_by_label("Target class").select_option("3")
    both = [i for i in range(COUNT) if rows["label"][i] == 3 and rows["right"][i]]
    assert sorted(shown(page)) == both
    clear.click()
    page.wait_for_selector("#body tr:nth-child(50)")
    page.get_by_label("Search names").fill("SCAN-12")
    assert sorted(shown(page)) == list(range(120, 130))
    clear.click()
    page.wait_for_selector("#body tr:nth-child(50)")
    before, after = (page.get_by_role("button", name=f"{n} page") for n in ("Previous", "Next"))
    assert before.is_disabled()
    first = shown(page)
    for _ in range(5):
        after.click()
    assert after.is_disabled()
    assert status.inner_text() == "Showing 251 to 300 of 300 inputs"
    assert not set(first) & set(shown(page))


def saved(page):
    """The rows of the CSV that the page saves."""
    with page.expect_download() as begun:
        page.get_by_role("button", name="Save these as CSV").click()
    with open(begun.value.path(), newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def test_what_the_filters_leave_can_be_saved(page, data):
    rows = data["rows"]
    page.get_by_role("combobox", name="Prediction", exact=True).select_option("Wrong")
    found = saved(page)
    assert [int(row["index"]) for row in found] == shown(page)
    assert sorted(shown(page)) == [i for i in range(COUNT) if not rows["right"][i]]
    for row in found:
        assert float(row["score"]) == rows["score"][int(row["index"])]
    assert list(found[0])[1:] == [one["key"] for one in data["columns"]] + ["note"]


def test_an_input_opens_by_click_and_arrows_move(page, data):
    order = shown(page)
    name = data["rows"]["name"]
    button = page.locator("#body tr").nth(1).get_by_role("button")
    button.click()
    assert opened(page) == name[order[1]]
    assert page.evaluate("location.hash") == f"#input-{order[1]}"
    dialog = page.locator("dialog")
    assert dialog.locator("#bars-plot .barlayer .trace").count() == 2
    assert dialog.locator("#settling-plot .scatterlayer .trace").count() == 3
    top = data["rows"]["outputs"]["mean"][order[1]]
    assert f"{max(top):.4f} ±" in dialog.locator("#bars-summary").inner_text()
    page.keyboard.press("ArrowRight")
    assert opened(page) == name[order[2]]
    assert f"{data['rows']['score'][order[2]]:.4f}" in dialog.locator("#detail-side").inner_text()
    page.keyboard.press("Escape")
    page.wait_for_url(lambda address: "#" not in address)
    assert not dialog.is_visible()
    assert button.evaluate("node => node === document.activeElement")


def test_by_keyboard_alone(visit, data):
    page = visit()
    focused = partial(page.evaluate, "document.activeElement.id")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert focused() == "main"
    page.locator("#body button").first.press("Enter")
    assert opened(page) == data["rows"]["name"][shown(page)[0]]
    assert focused() == "detail-title"


def test_hostile_names_run_nothing_and_are_no_formulas(visit, tmp_path):
    label = '<img src=x onerror="document.title=1">'
    classes = [label, *(f"the_name_of_class_{c}_is_long_and_has_no_spaces" for c in range(9))]
    odd = ["=cmd()", "+1", "-1+2", "@x", "\ty", 'a,"b"', "two\nlines", HOSTILE]
    names = [*odd, *(f"n{k}" for k in range(COUNT - len(odd)))]
    options = {"classes": classes, "names": names, "title": f"T {HOSTILE}", "ranks": [40]}
    path = digits().save(tmp_path / "x.html", **options)
    page = visit(path, hash_="#input-7", viewport=browsing.PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") == browsing.PHONE["width"]
    assert opened(page) == HOSTILE
    assert page.title() == f"T {HOSTILE}"
    assert page.locator("img[src=x]").count() == 0
    assert label in page.locator("#detail-table").text_content()
    page.keyboard.press("Escape")
    found = {int(row["index"]): row["name"] for row in saved(page)}
    for place, name in enumerate(odd):
        assert found[place] == ("'" + name if name[0] in "=+-@\t" else name)
    assert len(found) == COUNT


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read(page, scheme):
    page.emulate_media(color_scheme=scheme)
    page.wait_for_selector(f":root[data-theme={scheme}]")
    ratio, where = page.evaluate(browsing.CONTRAST)
    assert 4.5 <= ratio < 99, where
    page.locator("#body button").first.click()
    ratio, where = page.evaluate(browsing.CONTRAST)
    assert ratio >= 4.5, where
    assert page.evaluate(browsing.NAMELESS) == []
    assert page.locator("img:not([alt]), img[alt='']").count() == 0
    assert page.locator("h1").count() == 1
    levels = page.evaluate(browsing.HEADINGS)
    assert all(b <= a + 1 for a, b in pairwise(levels))
    assert page.locator("table:not(:has(caption))").count() == 0
    page.emulate_media(color_scheme="light")


def test_the_theme_follows_the_system_until_it_is_chosen(visit):
    page = visit()
    colour = partial(page.evaluate, "getComputedStyle(document.body).backgroundColor")
    tick = partial(page.evaluate, "document.querySelector('#spectrum-plot .xtick text').style.fill")
    light, black = colour(), tick()
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector(":root[data-theme=dark]")
    assert colour() != light
    assert tick() != black
    page.get_by_role("button", name="Switch to light").click()
    page.emulate_media(color_scheme="light")
    page.emulate_media(color_scheme="dark")
    assert (colour(), tick()) == (light, black)


def test_on_a_phone(visit):
    page = visit(viewport=browsing.PHONE)
    width = "document.documentElement.scrollWidth"
    assert page.evaluate(width) == browsing.PHONE["width"]
    assert page.evaluate(browsing.SMALL) == []
    page.locator("#body button").first.click()
    assert page.locator("dialog").bounding_box()["width"] == browsing.PHONE["width"]
    assert page.locator("dialog").evaluate("node => node.scrollWidth <= node.clientWidth")
    assert page.evaluate(browsing.SMALL) == []
