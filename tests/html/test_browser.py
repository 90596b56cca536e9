"""The page in a real browser: sizes, colours, keyboard, and nothing on the console."""

import itertools
import re
import sys
import textwrap

import pytest

from jfleet import cli
from tests.html import pages
from tests.html.browser import Browser

pytestmark = pytest.mark.slow

SCRIPT = """
import jax, jax.numpy as jnp, optax
NAMES = {names!r}
def init():
    layers = {{f"layers_{{i}}": {{"kernel": jnp.zeros((64, 64))}} for i in range(4)}}
    return layers | {{name: jnp.zeros((8, 16 + i)) for i, name in enumerate(NAMES)}}
def loss_fn(params, x):
    for i in range(4):
        x = jnp.tanh(x @ params[f"layers_{{i}}"]["kernel"])
    return jnp.mean(x) + sum(jnp.sum(params[name]) for name in NAMES)
def problem():
    batch = jax.ShapeDtypeStruct((32, 64), "float32")
    return dict(params=init, tx=optax.adam(1e-3), loss_fn=loss_fn, batch=batch)
"""
SCREENS = {
    "desk, light": {"width": 1100, "scheme": "light"},
    "desk, dark": {"width": 1100, "scheme": "dark"},
    "phone": {"width": 390, "height": 844, "scheme": "light"},
}
# The area of every part that is shown, and what it tells.
PARTS = """
[...document.querySelectorAll("%s [data-info]")].map(part => {
  const box = part.querySelector("rect").getBoundingClientRect();
  return [part.dataset.info, box.width, box.height];
})
"""
# Text, colour of it, and of what lies behind, for contrast.
TEXTS = """
[...document.querySelectorAll("h1, .lead, .legend li, .row .sum, summary, th, .info")]
  .filter(e => e.getClientRects().length)
  .map(e => {
    let behind = e, paint;
    do {
      paint = getComputedStyle(behind).backgroundColor;
      behind = behind.parentElement;
    } while (paint === "rgba(0, 0, 0, 0)" && behind);
    return [e.textContent, getComputedStyle(e).color, paint];
  }).concat([...document.querySelectorAll(".treemap .cell:not(.c8)")]
    .filter(c => c.querySelector("text") && c.getClientRects().length)
    .map(c => [c.dataset.info, getComputedStyle(c.querySelector("text")).fill,
               getComputedStyle(c.querySelector("rect")).fill]))
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of the command itself, for parameters whose names want to break out."""
    folder = tmp_path_factory.mktemp("page")
    script, page = folder / "model.py", folder / "page.html"
    script.write_text(textwrap.dedent(SCRIPT.format(names=pages.HOSTILE)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        words = ["--devices", "8", "--hardware", "v5e", "--memory", "150KiB"]
        assert cli.main(["plan", str(script), *words, "--html", str(page)]) == 0
    return page


def luminance(colour):
    red, green, blue = (int(n) / 255 for n in re.findall(r"\d+", colour)[:3])
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (red, green, blue)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("screen", SCREENS.values(), ids=SCREENS)
class TestEveryScreen:
    def test_nothing_is_wrong_and_nothing_is_loaded(self, browser, page, screen):
        browser.open(page, **screen)
        assert browser.problems == []
        assert browser.requests == [page.resolve().as_uri()]
        assert browser.value("typeof window.pwned") == "undefined"
        assert browser.value("document.getElementById('pwned')") is None
        assert browser.value("document.images.length") == 0

    def test_pictures_have_sizes(self, browser, page, screen):
        browser.open(page, **screen)
        for name, least in (("#memory", 15), ("#traffic", 4), ("section figure", 30)):
            parts = browser.value(PARTS % name)
            assert len(parts) >= least
        shown = [p for p in browser.value(PARTS % "#memory") if p[2]]
        assert all(width > 0 and height >= 20 for _, width, height in shown)
        # Only the page's own frames scroll sideways.
        assert browser.value("document.documentElement.scrollWidth") == screen["width"]

    def test_areas_are_bytes(self, browser, page, screen):
        browser.open(page, **screen)
        name = browser.value("document.querySelector('.treemap').closest('figure').id")
        parts = browser.value(PARTS % f"#{name}")
        areas = {info.partition(":")[0]: w * h for info, w, h in parts}
        kernel, first = areas["layers_0/kernel"], areas[pages.HOSTILE[0]]
        assert kernel / first == pytest.approx(64 * 64 / (8 * 16), rel=0.1)
        picture = "document.querySelector('.treemap').getBoundingClientRect()"
        whole = browser.value(f"{picture}.width * {picture}.height")
        assert sum(areas.values()) == pytest.approx(whole, rel=0.01)

    def test_texts_can_be_read(self, browser, page, screen):
        browser.open(page, **screen)
        found = browser.value(TEXTS)
        assert len(found) > 40
        for text, colour, behind in found:
            assert contrast(colour, behind) >= 4.5, (text, colour, behind)

    def test_the_scheme_is_followed(self, browser, page, screen):
        browser.open(page, **screen)
        behind = browser.value("getComputedStyle(document.body).backgroundColor")
        assert (luminance(behind) < 0.1) == (screen["scheme"] == "dark")


class TestKeyboard:
    def test_a_picture_is_one_stop_and_arrows_walk_through_it(self, browser, page):
        browser.open(page)
        stops = "document.querySelectorAll('#memory [tabindex=\"0\"]').length"
        info = "document.getElementById('memory-info').textContent"
        assert browser.value(stops) == 1
        browser.press("Tab")
        told = [browser.value(info)]
        for key in (
            "ArrowRight",
            "ArrowDown",
            "End",
            "ArrowRight",
            "ArrowLeft",
            "Home",
        ):
            browser.press(key)
            told.append(browser.value(info))
            assert browser.value("document.activeElement.dataset.info") == told[-1]
        assert told[0] == told[-1] == browser.value(PARTS % "#memory")[0][0]
        assert told[0].startswith("no sharding, parameters: ")
        assert told[3] == told[4]  # there is nothing behind the end
        assert all(a != b for a, b in itertools.pairwise(told[:4]))
        assert browser.value(stops) == 1
        stroke = "getComputedStyle(document.activeElement.querySelector('rect')).stroke"
        assert browser.value(stroke) == "rgb(5, 80, 174)"

    def test_the_pointer_tells_too(self, browser, page):
        browser.open(page)
        part = "document.querySelectorAll('#memory [data-info]')[3]"
        box = browser.value(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2])"
            f"({part}.querySelector('rect').getBoundingClientRect())"
        )
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        info = browser.value("document.getElementById('memory-info').textContent")
        assert info == browser.value(f"{part}.dataset.info")


def test_a_policy_stops_what_is_not_its_own(browser, tmp_path):
    """What would get into the page past the escapes still cannot run."""
    text = pages.text_of(pages.page())
    assert "</main>" in text
    path = tmp_path / "page.html"
    path.write_text(text.replace("</main>", "</main><script>window.pwned=1</script>"))
    browser.open(path)
    assert browser.value("typeof window.pwned") == "undefined"
    assert any("Content Security Policy" in problem for problem in browser.problems)


def test_text_that_wants_to_break_out(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(pages.text_of(pages.hostile_page()), "utf-8")
    browser.open(path)
    assert browser.problems == []
    assert browser.value("typeof window.pwned") == "undefined"
    assert browser.value("document.title") == f"Plan of {pages.HOSTILE[0]}0"
