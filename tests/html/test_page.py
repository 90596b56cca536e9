"""The page as text: well formed, self-contained, escaped; numbers to scale."""

import base64
import hashlib
import html.parser
import itertools
import math
import re

import pytest

from jfleet._html import arrays, bars, markup, treemap
from jfleet._html.cells import GREY, NUM_COLOURS
from tests.html import pages


class Tree(html.parser.HTMLParser):
    """Elements with attributes and text; every element must be closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        known = dict(attrs)
        assert len(known) == len(attrs), f"an attribute twice: {attrs}"
        self.elements.append((tag, known))
        if tag not in markup.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else None, data))

    def all(self, tag, **attributes):
        names = {k.rstrip("_").replace("_", "-"): v for k, v in attributes.items()}
        return [
            attrs
            for found, attrs in self.elements
            if found == tag and all(attrs.get(k) == v for k, v in names.items())
        ]

    def text(self, tag):
        return "".join(data for inside, data in self.texts if inside == tag)


@pytest.fixture(scope="module")
def tree():
    return Tree(pages.text_of(pages.page()))


class TestPage:
    def test_it_loads_nothing(self, tree):
        for tag, attrs in tree.elements:
            assert tag not in ("img", "iframe", "object", "embed", "base", "form")
            assert "src" not in attrs, tag
            assert attrs.get("href") in (None, "data:,")
            assert not [name for name in attrs if name.startswith("on")]
        assert "http" not in tree.text("style") + tree.text("script")
        assert "url(" not in tree.text("style").replace("url(#hatching)", "")

    def test_its_policy_allows_its_own_code_and_no_other(self, tree):
        [policy] = tree.all("meta", http_equiv="Content-Security-Policy")
        allowed = dict(
            part.strip().split(" ", 1) for part in policy["content"].split(";")
        )
        assert allowed["default-src"] == "'none'"
        for name, tag in (("style-src", "style"), ("script-src", "script")):
            assert len(tree.all(tag)) == 1
            digest = hashlib.sha256(tree.text(tag).encode()).digest()
            hashed = base64.b64encode(digest).decode()
            assert allowed[name] == f"'sha256-{hashed}'"
        assert not [attrs for _, attrs in tree.elements if "style" in attrs]

    def test_names_are_unique_and_references_lead_somewhere(self, tree):
        ids = [attrs["id"] for _, attrs in tree.elements if "id" in attrs]
        assert len(ids) == len(set(ids))
        pictures = [a["data-cells"] for _, a in tree.elements if "data-cells" in a]
        assert len(pictures) == 5  # memory, traffic, three layouts
        assert set(pictures) <= set(ids)

    def test_every_part_has_a_text_alternative(self, tree):
        cells = [a for _, a in tree.elements if "data-info" in a]
        assert len(cells) == 6
        for attrs in cells:
            assert attrs["role"] == "img"
            assert attrs["aria-label"] == attrs["data-info"]
            assert attrs["tabindex"] == "-1"  # the script lets the first one in
        told = [attrs["data-info"] for attrs in cells]
        assert told[0] == "os, parameters: 600 B, 75.0% of 800 B"
        assert any("dim 0 is the largest that 8 divides" in text for text in told)
        for frame in tree.all("div", class_="frame"):
            assert frame["tabindex"] == "0"
            assert frame["aria-label"]

    def test_headings_and_tables(self, tree):
        assert tree.text("h1") == "Plan of a step"
        assert tree.text("caption").endswith("Levels")
        assert "cannot run" in tree.text("span")
        assert "an estimate" in tree.text("li")

    def test_text_of_the_user_stays_text(self):
        tree = Tree(pages.text_of(pages.hostile_page()))
        assert len(tree.all("script")) == 1
        assert len(tree.all("style")) == 1
        assert not tree.all("img")
        assert not tree.all("b")
        assert not [1 for _, attrs in tree.elements if attrs.get("id") == "pwned"]
        shown = tree.text("li") + tree.text("th") + tree.text("td") + tree.text("p")
        for number, name in enumerate(pages.HOSTILE):
            assert f"{name}{number}" in shown


class TestMarkup:
    def test_everything_is_escaped_but_markup(self):
        inner = markup.tag("b", "<")
        made = markup.tag("p", [inner, ["&"]], None, 3, title='"<', hidden=False)
        assert made == '<p title="&quot;&lt;"><b>&lt;</b>&amp;3</p>'


class TestTreemap:
    @pytest.mark.parametrize(
        "sizes", [[1], [6, 6, 4, 3, 2, 2, 1], [1000, 1, 1], [5] * 50, [2**40, 3, 2]]
    )
    @pytest.mark.parametrize("box", [(0, 0, 6, 4), (10, 20, 30, 300)])
    def test_areas_are_to_scale_and_fill_the_box(self, sizes, box):
        boxes = treemap.squarified(sizes, box)
        left, top, width, height = box
        assert len(boxes) == len(sizes)
        for size, (x, y, wide, high) in zip(sizes, boxes, strict=True):
            share = wide * high / (width * height)
            assert share == pytest.approx(size / sum(sizes), rel=1e-6)
            assert x >= left - 1e-6
            assert y >= top - 1e-6
            assert x + wide <= left + width + 1e-6
            assert y + high <= top + height + 1e-6
        for (ax, ay, aw, ah), (bx, by, bw, bh) in itertools.combinations(boxes, 2):
            over_x = min(ax + aw, bx + bw) - max(ax, bx)
            over_y = min(ay + ah, by + bh) - max(ay, by)
            assert over_x <= 1e-6 or over_y <= 1e-6

    def test_the_example_of_the_paper(self):
        boxes = treemap.squarified([6, 6, 4, 3, 2, 2, 1], (0, 0, 6, 4))
        shapes = [(w, h) for _, _, w, h in boxes]
        assert shapes[:2] == [(3, 2), (3, 2)]
        assert shapes[2] == pytest.approx((12 / 7, 7 / 3))
        assert shapes[3] == pytest.approx((9 / 7, 7 / 3))
        worst = max(max(w / h, h / w) for w, h in shapes)
        assert worst < 2.8


def widths(text, name):
    """Left end and width of each segment of a bar, in percent."""
    pattern = rf'data-info="{name}, ([^:]+):[^"]*" x="([\d.]+)%" width="([\d.]+)%"'
    return {n: (float(x), float(w)) for n, x, w in re.findall(pattern, text)}


class TestBars:
    def test_segments_are_to_scale(self):
        rows = {"os": {"a": 600, "b": 200}, "p_g_os": {"a": 100, "c": 100}}
        text = bars.draw(pages.bars(rows))
        assert widths(text, "os") == {"a": (0, 75), "b": (75, 25)}
        assert widths(text, "p_g_os") == {"a": (0, 12.5), "c": (12.5, 12.5)}

    def test_a_limit(self):
        rows = {"os": {"a": 600, "b": 200}}
        text = bars.draw(pages.bars(rows, limit_bytes=1000))
        assert widths(text, "os") == {"a": (0, 60), "b": (60, 20)}
        [line] = Tree(text).all("line")
        assert line["x1"] == "100.0000%"
        text = bars.draw(pages.bars(rows, limit_bytes=10_000))
        assert widths(text, "os") == {"a": (0, 75), "b": (75, 25)}
        assert "beyond the picture" in text
        assert not Tree(text).all("line")

    def test_no_more_classes_than_colours(self):
        rows = {"os": {f"c{i}": 100 + i for i in range(20)}, "p_g_os": None}
        folded = pages.bars(rows).folded()
        assert len(folded.classes) == NUM_COLOURS
        assert folded.rows["p_g_os"] is None
        assert sum(folded.rows["os"].values()) == sum(rows["os"].values())
        assert "c19" in folded.classes
        assert "c0" not in folded.classes

    def test_the_table_has_the_same_numbers(self):
        sheet = bars.as_sheet(pages.bars({"os": {"a": 600, "b": 0}, "none": None}))
        assert sheet.columns == ("", "os", "none")
        assert sheet.rows == (("a", "600 B", ""), ("all", "600 B", ""))


class TestArrays:
    def test_few_are_shown_one_by_one(self):
        found = arrays.gathered([pages.array("a", 8), pages.array("b", 80)])
        assert [a.path for a in found] == ["b", "a"]

    def test_many_that_are_alike_become_one(self):
        layers = [pages.array(f"layers_{i}/mlp/w", 800) for i in range(500)]
        named = [pages.array(f"block/{i}/w2", 80) for i in range(500)]
        found = arrays.gathered([*layers, *named, pages.array("head", 8)])
        assert [(a.path, a.count) for a in found] == [
            ("layers_*/mlp/w", 500),
            ("block/*/w2", 500),
            ("head", 1),
        ]
        assert found[0].total_bytes == 500 * 800
        assert found[0].device_bytes == 500 * 100
        assert found[0].axes == ("data",)

    def test_reasons_that_name_a_layer_are_alike(self):
        """Those of optimizer state name the parameter that it belongs to."""
        many = [
            pages.array(f"0/mu/layers/{i}/w", reason=f"as 'layers/{i}/w': dim 0 is")
            for i in range(500)
        ]
        [found] = arrays.gathered(many)
        assert (found.path, found.count) == ("*/mu/layers/*/w", 500)
        assert found.reason == "as 'layers/*/w': dim 0 is"

    def test_many_that_differ_keep_their_sum(self):
        many = [
            pages.array(f"w{chr(97 + i % 26)}{'x' * (i // 26)}", 8 * (i + 1))
            for i in range(1000)
        ]
        found = arrays.gathered(many)
        assert len(found) == arrays.MAX_CELLS
        assert sum(a.total_bytes for a in found) == sum(a.total_bytes for a in many)
        assert found[-1].path == f"{1001 - arrays.MAX_CELLS} smaller arrays"

    def test_colours(self):
        rows = [
            pages.array("a", axes=("data",)),
            pages.array("b", axes=("data", "model")),
            pages.array("c", axes=()),
        ]
        colours = arrays.axis_colours(rows)
        assert colours[()] == GREY
        assert len(set(colours.values())) == 3
        assert () not in arrays.axis_colours(rows[:2])

    def test_areas_are_bytes(self):
        rows = [pages.array(f"w{i}", 100 * i) for i in (1, 2, 5)]
        text = arrays.draw("params", "Parameters", "", [*rows, pages.array("none", 0)])
        cells = Tree(text).all("svg", role="img")
        areas = {
            a["data-info"].partition(":")[0]: float(a["width"][:-1])
            * float(a["height"][:-1])
            for a in cells
        }
        assert areas.keys() == {"w1", "w2", "w5"}
        assert math.isclose(areas["w5"] / areas["w1"], 5, rel_tol=1e-3)
        assert math.isclose(areas["w2"] / areas["w1"], 2, rel_tol=1e-3)
