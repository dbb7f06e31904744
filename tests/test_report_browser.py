"""The report page in a real browser: Chromium loads it from disk, and a user goes about it."""

from __future__ import annotations

import os
import shutil
from functools import partial
from itertools import pairwise

import pytest

from tests.pages import COUNT, HOSTILE, data_of, digits

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
if CHROMIUM is None and os.environ.get("CI") != "true":
    pytest.skip("no Chromium here: apt-get install chromium", allow_module_level=True)

LIGHT_AND_DARK = pytest.mark.parametrize("scheme", ["light", "dark"])
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
HEADINGS = (
    """() => [...document.querySelectorAll("main :is(h1,h2,h3,h4), header :is(h1,h2,h3,h4)")]"""
    """.filter((node) => node.checkVisibility()).map((node) => Number(node.tagName[1]))"""
)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As root, which CI may be, Chromium does not start with its sandbox.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield found
        found.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return digits().save(tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def data(report):
    return data_of(report)


@pytest.fixture(scope="module")
def trouble():
    """What went wrong in the browser, and what went out of it."""
    return []


@pytest.fixture(autouse=True)
def no_trouble(trouble):
    yield
    assert trouble == []


@pytest.fixture(scope="module")
def visit(browser, report, trouble):
    """Open the page in a new window."""

    def requested(request):
        if not request.url.startswith(("file:", "data:")):
            trouble.append(f"request: {request.url}")

    def open_page(path=report, hash_="", scheme="light", viewport=DESK):
        page = browser.new_page(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
        page.on("console", lambda said: trouble.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        page.on("request", requested)
        page.goto(path.as_uri() + hash_)
        page.wait_for_selector("#ranking-plot .main-svg")
        return page

    return open_page


@pytest.fixture(scope="module")
def window(visit):
    return visit()


@pytest.fixture
def page(window):
    """The window as it was when it was opened: loading takes longer than all that is done there."""
    yield window
    window.keyboard.press("Escape")
    window.get_by_role("button", name="Clear filters").click()
    score = window.locator("th[data-key=score]")
    while score.get_attribute("aria-sort") != "descending":
        score.get_by_role("button").click()
    window.evaluate("document.activeElement.blur(); scrollTo(0, 0)")


def column(page, place: int) -> list[str]:
    return page.locator(f"#body tr > :nth-child({place})").all_inner_texts()


def shown(page) -> list[int]:
    return [int(place) for place in page.locator("#body tr").evaluate_all(
        "rows => rows.map(row => row.dataset.index)")]  # fmt: skip


def opened(page) -> str:
    return page.locator("dialog[open] h2").inner_text()


def test_all_parts_are_drawn(page):
    for plot in ("spectrum", "uncertainty", "ranking"):
        assert page.locator(f"#{plot}-plot .scatterlayer .trace").count() >= 3
        assert len(page.locator(f"#{plot}-summary").inner_text()) > 60
    assert page.locator("#areas tbody tr").count() == 4
    assert page.locator(".shelf").count() == 10
    assert page.locator(".fact").count() == 8
    drawn = page.locator("#shelves img").evaluate_all("all => all.every(i => i.naturalWidth === 8)")
    assert drawn


def test_sorting_by_every_column(page, data):
    rows = data["rows"]
    assert shown(page)[0] == max(range(COUNT), key=lambda i: rows["score"][i])
    for place, one in enumerate(data["columns"], 1):
        key = one["key"]
        button = page.locator("#head th").nth(place - 1).get_by_role("button")
        button.click()
        head = page.locator(f"th[data-key={key}]")
        numeric = one["kind"] in ("number", "percent")
        first = "descending" if numeric else "ascending"
        assert head.get_attribute("aria-sort") == first
        assert page.locator("th[aria-sort]").count() == 1
        values = [rows[key][i] for i in shown(page)]
        if key != "name":
            assert values == sorted(rows[key], reverse=first == "descending")[:50]
        button.press("Enter")
        assert head.get_attribute("aria-sort") != first
        if key != "name":
            values = [rows[key][i] for i in shown(page)]
            assert values == sorted(rows[key], reverse=first == "ascending")[:50]


def test_filters_and_search(page, data):
    rows = data["rows"]
    status = page.locator("#shown")
    assert status.inner_text() == "Showing 1 to 50 of 300 inputs"
    page.get_by_role("combobox", name="Prediction", exact=True).select_option("Wrong")
    wrong = [i for i in range(COUNT) if not rows["right"][i]]
    assert sorted(shown(page)) == wrong
    assert (
        status.inner_text()
        == f"Showing 1 to {len(wrong)} of {len(wrong)} inputs (filtered from 300)"
    )
    page.get_by_role("button", name="Clear filters").click()
    page.wait_for_selector("#body tr:nth-child(50)")
    page.get_by_label("Predicted class").select_option("3")
    assert set(column(page, 2)) == {"3"}
    page.get_by_label("Target class").select_option("3")
    both = [i for i in range(COUNT) if rows["label"][i] == 3 and rows["right"][i]]
    assert sorted(shown(page)) == both
    page.get_by_role("button", name="Clear filters").click()
    page.get_by_label("Score from").fill("0.1")
    page.get_by_label("Score to").fill("0.15")
    inside = [i for i in range(COUNT) if 0.1 <= rows["score"][i] <= 0.15]
    assert sorted(shown(page)) == inside[:50] if len(inside) <= 50 else len(shown(page)) == 50
    assert f"of {len(inside)} inputs" in status.inner_text()
    page.get_by_role("button", name="Clear filters").click()
    page.get_by_label("Search names").fill("SCAN-12")
    assert sorted(shown(page)) == list(range(120, 130))
    page.get_by_label("Search names").fill("nowhere")
    assert status.inner_text() == "No inputs (filtered from 300)"


def test_pages_of_fifty(page):
    before, after = (page.get_by_role("button", name=f"{n} page") for n in ("Previous", "Next"))
    assert before.is_disabled()
    first = shown(page)
    for _ in range(5):
        after.click()
    assert after.is_disabled()
    assert page.locator("#shown").inner_text() == "Showing 251 to 300 of 300 inputs"
    assert not set(first) & set(shown(page))


def test_an_input_opens_by_click_and_arrows_move(page, data):
    order = shown(page)
    name = data["rows"]["name"]
    button = page.locator("#body tr").nth(1).get_by_role("button")
    button.click()
    assert opened(page) == name[order[1]]
    assert page.url.endswith(f"#input-{order[1]}")
    dialog = page.locator("dialog")
    assert dialog.locator("#bars-plot .barlayer .trace").count() == 2
    assert dialog.locator("#settling-plot .scatterlayer .trace").count() == 3
    top = data["rows"]["outputs"]["mean"][order[1]]
    assert f"{max(top):.4f} ±" in dialog.locator("#bars-summary").inner_text()
    page.keyboard.press("ArrowRight")
    assert opened(page) == name[order[2]]
    assert f"{data['rows']['score'][order[2]]:.4f}" in dialog.locator("#detail-side").inner_text()
    page.keyboard.press("ArrowLeft")
    page.get_by_role("button", name="Previous input").click()
    assert opened(page) == name[order[0]]
    assert page.get_by_role("button", name="Previous input").is_disabled()
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    assert "#" not in page.url
    assert button.evaluate("node => node === document.activeElement")


def test_by_keyboard_alone(visit, data):
    page = visit()
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the content")
    assert skip.evaluate("node => node === document.activeElement")
    assert skip.bounding_box()["y"] >= 0
    assert skip.evaluate("node => getComputedStyle(node).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.locator("#body button").first.focus()
    page.keyboard.press("Enter")
    assert opened(page) == data["rows"]["name"][shown(page)[0]]
    assert page.evaluate("document.activeElement.id") == "detail-title"
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Previous input").focus()
    page.keyboard.press("Enter")  # at the first input the button is off, and the focus stays inside
    assert page.evaluate("document.activeElement.id") == "detail-title"
    page.keyboard.press("ArrowRight")
    assert opened(page) == data["rows"]["name"][shown(page)[1]]


def test_the_gallery_and_the_plot_open_inputs(page, data):
    shelf = data["shelves"][0]
    page.locator(".shelf").first.get_by_role("button").last.click()
    assert opened(page) == data["rows"]["name"][shelf["least"][-1]]
    page.keyboard.press("Escape")
    page.locator("#uncertainty-plot .scatterlayer .point").last.scroll_into_view_if_needed()
    box = page.locator("#uncertainty-plot .scatterlayer .trace").nth(1).locator(".point").first
    place = box.bounding_box()
    page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    page.wait_for_selector("#uncertainty-plot .hoverlayer .hovertext")
    page.mouse.down()
    page.mouse.up()
    page.wait_for_selector("dialog[open]")
    assert opened(page) in data["rows"]["name"]


def test_an_address_opens_its_input(visit, data):
    page = visit(hash_="#input-17")
    assert opened(page) == "scan-017.png"
    page.keyboard.press("Escape")
    page.evaluate("location.hash = '#input-23'")
    page.wait_for_selector("dialog[open]")
    assert opened(page) == "scan-023.png"
    page.keyboard.press("Escape")
    page.evaluate("location.hash = '#input-999'")
    page.get_by_text("Input 999 is not in this page").wait_for()
    assert not page.locator("dialog").is_visible()


def test_hostile_names_run_nothing(visit, tmp_path):
    label = '<img src=x onerror="document.title=1">'
    classes = [label, *"123456789"]
    path = digits().save(tmp_path / "x.html", classes=classes, title=f"T {HOSTILE}", ranks=[40])
    page = visit(path, hash_="#input-7")
    assert opened(page) == HOSTILE
    assert page.title() == f"T {HOSTILE}"
    assert page.locator("img[src=x]").count() == 0
    assert label in page.locator("#detail-table").text_content()


@LIGHT_AND_DARK
def test_everything_can_be_read(page, scheme):
    page.emulate_media(color_scheme=scheme)
    page.wait_for_selector(f":root[data-theme={scheme}]")
    ratio, where = page.evaluate(CONTRAST)
    assert 4.5 <= ratio < 99, where
    page.locator("#body button").first.click()
    ratio, where = page.evaluate(CONTRAST)
    assert ratio >= 4.5, where
    assert page.evaluate(NAMELESS) == []
    assert page.locator("img:not([alt]), img[alt='']").count() == 0
    assert page.locator("h1").count() == 1
    levels = page.evaluate(HEADINGS)
    assert all(b <= a + 1 for a, b in pairwise(levels))
    assert page.locator("table:not(:has(caption))").count() == 0
    for landmark in ("main", "header", "nav", "footer"):
        assert page.locator(landmark).count() == 1
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
    button = page.get_by_role("button", name="Dark mode")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert (colour(), tick()) == (light, black)
    page.emulate_media(color_scheme="light")
    page.emulate_media(color_scheme="dark")
    assert colour() == light


def test_on_a_phone(visit):
    page = visit(viewport=PHONE)
    width = "document.documentElement.scrollWidth"
    assert page.evaluate(width) == PHONE["width"]
    assert page.evaluate(SMALL) == []
    for plot in page.locator(".plot .main-svg").all():
        box = plot.bounding_box()
        assert box is None or box["x"] + box["width"] <= PHONE["width"]
    page.locator("#body button").first.click()
    assert page.locator("dialog").bounding_box()["width"] == PHONE["width"]
    assert page.locator("dialog").evaluate("node => node.scrollWidth <= node.clientWidth")
    assert page.evaluate(SMALL) == []


def test_on_paper(page):
    plot = page.locator("#spectrum-plot .main-svg").first
    before = plot.bounding_box()["width"]
    assert page.pdf(format="A4").startswith(b"%PDF")
    assert plot.bounding_box()["width"] == before
    page.emulate_media(media="print")
    assert not page.locator("#filters").is_visible()
    assert page.locator("#glance").is_visible()
    page.emulate_media(media="screen")
