"""The report as a reader meets it: in a browser, on a phone, with sections missing and with hostile text."""

import base64
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from PIL import Image

from foveate.generation.film import about
from foveate.report import ClipPanel, ReportData, Speed, charts, render, write_report
from foveate.report.charts import Line, heat_map, line_chart, smooth
from foveate.report.film import film
from foveate.run_report import report
from foveate.video import write_mp4

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")


def rows(late: float, seconds: float) -> list[dict]:
    draw = np.random.default_rng(0)
    return [
        {
            "step": step,
            "kept": 1.0 if step <= 10 else 0.1,
            "loss": float(draw.lognormal(-1.5, 0.3)) * (late if step > 10 else 1),
            "seconds": seconds if step > 10 else 3.0,
            "gap": late - 1 if step % 5 == 0 else None,
        }
        for step in range(1, 41)
    ]


def moving(shade: int = 0) -> np.ndarray:
    y, x, t = np.ogrid[:24, :40, :8]
    levels = np.minimum((4 * x + 3 * y + 9 * t) % 200 + shade, 255)
    return np.repeat(levels.transpose(2, 0, 1)[..., None], 3, -1).astype(np.uint8)


def full(**change) -> ReportData:
    draw = np.random.default_rng(1)
    pairs = [(level, draw.normal(0.003, 0.002)) for level in (0.125, 0.375, 0.625, 0.875) for _ in range(3)]
    fields = {
        "title": "Sparse against dense",
        "summary": "A small model.",
        "made": "3 December 2026, revision 1a2b3c4",
        "figures": [("Sparse step", "1.9 x faster", "3.0 s to 1.6 s"), ("Validation loss", "+0.3 %", "dense twin")],
        "clips": [
            ClipPanel("Held out", moving(), reference=True),
            ClipPanel("Sparse", moving(5), "PSNR 34 dB"),
            ClipPanel("Error", moving(), derived=True),
        ],
        "clips_text": "Look.",
        "speeds": [Speed(5120, 1.4, 2.1), Speed(20480, 9.0, 22.0)],
        "speed_limit": 1.8,
        "runs": {"sparse": rows(1.003, 1.6), "dense": rows(1.0, 3.0), "random": rows(1.9, 1.4)},
        "allowed": 0.01,
        "tolerance": 0.007,
        "held_out": {"sparse": pairs, "random": [(level, 0.8) for level, _ in pairs]},
        "kept": [(10, draw.random((4, 6))), (40, draw.random((4, 6)))],
        "checks": [("faster", True, "1.9 x"), ("loss kept", False, "+2 %")],
        "tables": {"Machine": {"cores": 2}, "Versions": {"torch": "2.13"}},
        "notes": ["A note."],
    }
    return ReportData(**{**fields, **change})


@cache
def page_of_full() -> str:
    return render(full())


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(tmp_path: Path) -> Path:
    file = tmp_path / "report.html"
    file.write_text(page_of_full())
    return file


SHADE = (
    "[...document.querySelector('.clips figure:nth-child({}) canvas').getContext('2d').getImageData(3, 2, 1, 1).data]"
)


@needs_browser
def test_a_browser_shows_everything_without_complaint(browser: Browser, page: Path) -> None:
    seen = set()
    for width in (1280, 400):
        for scheme in ("light", "dark"):
            browser.resize(width, 900)
            browser.prefer(prefers_color_scheme=scheme)
            browser.open(page)
            assert browser.run("document.body.dataset.media") == "3 ok"
            root = "document.documentElement"
            assert browser.run(f"{root}.scrollWidth - {root}.clientWidth") == 0, "nothing spills over the edge"
            seen.add(browser.run("getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2, "light and dark differ"
    assert browser.console == []


@needs_browser
def test_one_scrubber_and_keys_move_all_clips(browser: Browser, page: Path) -> None:
    browser.prefer(prefers_reduced_motion="reduce")
    browser.open(page)
    state = "[document.body.dataset.playing, +document.body.dataset.frame]"
    assert browser.run(state) == ["false", 0], "nothing moves where that is not wanted"

    def shades() -> list[int]:
        return [browser.run(SHADE.format(place))[0] for place in (1, 2, 3)]

    expected = [[int(x[frame, 2, 3, 0]) for x in (moving(), moving(5), moving())] for frame in range(8)]
    assert shades() == expected[0]
    browser.click("[name=frame]", along=0.999)
    assert (browser.run(state), shades()) == (["false", 7], expected[7])
    browser.click("[name=frame]", along=0.5)
    assert browser.run(state)[1] in (3, 4)
    browser.press("Home", "ArrowRight", "ArrowRight")
    browser.run("document.activeElement.blur()")
    browser.press("ArrowRight", "ArrowLeft")
    assert (browser.run(state), shades()) == (["false", 2], expected[2])
    browser.press("d")
    assert shades() == [expected[2][0], 8 * 5, expected[2][2]], "differences from the held-out clip, eight times"
    browser.press("d")
    assert shades() == expected[2]
    browser.click("[name=play]")
    browser.wait("document.body.dataset.playing == 'true' && +document.body.dataset.frame != 2")
    browser.press(" ")  # the button that was clicked has the focus: one press, one change
    assert browser.run(state)[0] == "false"
    browser.run("document.activeElement.blur()")
    browser.press(" ")
    browser.wait("document.body.dataset.playing == 'true'")
    browser.prefer(prefers_reduced_motion="no-preference")
    browser.open(page)
    browser.wait("document.body.dataset.playing == 'true' && +document.body.dataset.frame > 0")


@needs_browser
def test_the_browser_check_notices_a_broken_picture_and_a_request(browser: Browser, page: Path) -> None:
    broken = re.sub(r'(class="film"[^>]*data:image/png;base64,)[^"]{200}', r"\1AAAA", page_of_full(), count=1)
    page.write_text(broken.replace("</main>", '<img src="https://example.com/a.png"></main>'))
    browser.console.clear()
    browser.open(page)
    assert browser.run("document.body.dataset.media") == "1 of 3 failed"
    assert any("Content Security Policy" in line for line in browser.console)
    browser.console.clear()


def test_the_page_names_no_other_address():
    text = page_of_full()
    assert re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', text) == []
    assert re.findall(r"url\((?!#)[^)]*\)", text) == []
    assert set(re.findall(r"https?://[^\"'\s<]*", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "default-src 'none'" in text


def test_every_text_from_outside_is_escaped():
    evil = "<script>alert('x')</script>\" onload=\"y {{ title }} {% x %}"
    text = render(
        full(
            title=evil,
            summary=evil,
            made=evil,
            figures=[(evil, evil, evil)],
            checks=[(evil, True, evil)],
            runs={evil: rows(1.0, 1.0)},
            held_out={evil: [(0.5, 0.1)]},
            clips=[ClipPanel(evil, moving(), evil, reference=True)],
            clips_title=evil,
            clips_text=evil,
            tables={evil: {evil: evil}},
            notes=[evil],
        )
    )
    tags = HTMLParser()
    found: list[tuple[str, list]] = []
    tags.handle_starttag = lambda tag, attrs: found.append((tag, attrs))
    tags.feed(text)
    assert [tag for tag, _ in found].count("script") == 1  # the page's own
    assert not any(name.startswith("on") for _, attrs in found for name, _ in attrs)
    assert text.count("alert(&#39;x&#39;)") >= 18


def headings(text: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", text)


def test_pictures_come_before_checks_and_sections_without_data_are_left_out():
    text = render(ReportData(title="Nothing yet"))
    assert headings(text) == ["What you are looking at"]
    assert "<img" not in text
    assert 'class="verdict' not in text
    assert headings(page_of_full()) == [
        "Clips",
        "How much faster",
        "What it costs",
        "Training",
        "What every head computes",
        "Checks",
        "What you are looking at",
        "How it was made",
    ]
    assert "revision 1a2b3c4" in page_of_full()


@pytest.mark.parametrize(
    ("change", "charts_drawn"),
    [
        ({"runs": {"only": rows(1.0, 1.0)}}, 3),  # no twin to compare with
        ({"runs": {"only": [{"step": 1, "loss": 0.5}]}}, 1),
        ({"runs": {"only": [{"step": 1, "loss": float("nan"), "seconds": None}], "none": []}}, 0),
        ({"runs": {"sparse": [{**row, "kept": 1.0} for row in rows(1.0, 1.0)]}}, 3),  # the switch never came
        ({"kept": [(3, np.full((2, 2), np.nan))]}, 0),
        ({"speeds": [Speed(5120, 1.0, 2.0)]}, 1),
        ({"held_out": {"sparse": [(0.5, 0.001), (0.5, 0.9)]}}, 1),
        ({"runs": {"zero": [{"step": 0, "loss": 0.0, "seconds": 0.0}]}}, 2),
    ],
)
def test_partial_data_draws_what_it_can(change, charts_drawn, recwarn):
    text = render(ReportData(**{"title": "a", "allowed": 0.01, **change}))
    assert text.count('class="chart"') == charts_drawn
    assert not recwarn.list


def test_the_verdict_counts():
    few = ReportData(title="a", checks=[("kept", True, ""), ("lost", False, "+2 %")])
    assert "1 of 2 checks passed" in render(few)
    assert '<li class="bad"><b>lost</b>' in render(few)
    assert "All 1 checks passed" in render(ReportData(title="a", checks=few.checks[:1]))


def test_the_file_is_written_where_asked_folders_and_all(tmp_path):
    path = write_report(tmp_path / "new" / "report.html", ReportData(title="Füße"))
    assert path.read_text(encoding="utf-8") == render(ReportData(title="Füße"))


def test_the_page_is_the_same_every_time():
    assert render(full()) == page_of_full()


def frames_of(found) -> np.ndarray:
    """The frames of a film, as a page cuts them out."""
    sheet = np.asarray(Image.open(io.BytesIO(base64.b64decode(found.src.partition(",")[2]))).convert("RGB"))
    h, w = found.height, found.width
    places = (divmod(k, found.columns) for k in range(found.count))
    return np.stack([sheet[y * h : (y + 1) * h, x * w : (x + 1) * w] for y, x in places])


@pytest.mark.parametrize("shape", [(1, 3, 5), (7, 24, 40), (20, 64, 64)])
def test_a_film_is_the_clip_without_loss(shape):
    clip = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    assert np.array_equal(frames_of(film(clip, 10**6)), clip)


def test_a_film_too_large_is_packed_tighter_then_made_smaller():
    y, x, t = np.ogrid[:128, :128, :9]
    smooth_clip = np.stack([128 + 100 * np.sin((x + k * y + 3 * t) / 20).transpose(2, 0, 1) for k in (1, 2, 3)], -1)
    clip = (smooth_clip + np.random.default_rng(0).normal(0, 4, smooth_clip.shape)).clip(0, 255).astype(np.uint8)
    packed = film(clip, 100_000)
    assert (packed.src[:15], len(packed.src) <= 100_000, packed.height) == ("data:image/jpeg", True, 128)
    assert np.abs(frames_of(packed).astype(int) - clip).mean() < 8
    small = film(clip, 12_000)
    assert (len(small.src) <= 12_000, small.height, small.count) == (True, 32, 9)
    coarse = clip.reshape(9, 32, 4, 32, 4, 3).mean((2, 4))
    assert np.abs(frames_of(small) - coarse).mean() < 10
    assert film(np.zeros((3, 16, 9000, 3), np.uint8), 10**7).width == 9000
    assert len(render(full(clips=[ClipPanel("a", moving())] * 9))) < 20e6


def test_clips_of_another_type_are_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="uint8"):
        write_report(tmp_path / "a.html", ReportData(title="a", clips=[ClipPanel("a", np.zeros((2, 8, 8, 3)))]))
    assert list(tmp_path.iterdir()) == []


def test_charts_take_their_colours_from_the_page():
    svg = line_chart([Line([1, 2, 3], [1.0, 2.0, 1.5], "sparse")], label="a < b", last=3, switch=2, limit=1.2, band=0.1)
    tree = ET.fromstring(svg)
    assert tree.attrib["viewBox"]
    assert tree.attrib["aria-label"] == "a < b"
    assert not any(color in svg for color in charts.STAND_IN.values())
    wanted = {"var(--sparse)", "var(--stage)", "var(--band)", "var(--ink)", "var(--muted)"}
    assert wanted <= set(re.findall(r"var\(--\w+\)", svg))
    assert {"← dense", "sparse →"} <= {node.text for node in tree.iter("text")}
    plain = line_chart([Line([1, 2], [1.0, 2.0], "dense")], label="a", last=2)
    assert "sparse →" not in plain


def test_a_gap_of_one_per_cent_can_be_seen_beside_one_of_ninety():
    """The picture is as high as five times what is allowed; what lies beyond is an arrow at its edge."""
    svg = re.search(r'<svg class="chart"[^>]*aria-label="Loss against dense training".*?</svg>', page_of_full(), re.S)[
        0
    ]
    labels = {node.text for node in ET.fromstring(svg).iter("text")}
    assert {"-4 %", "-2 %", "0 %", "2 %", "4 %"} <= {text.replace("\u2212", "-") for text in labels if text}
    assert "random reaches +90" in page_of_full()


def test_heat_maps_shade_by_value_and_leave_nan_blank():
    values = np.array([[0.0, 0.5, 1.0], [np.nan, 2.0, -1.0]])
    cells = ET.fromstring(heat_map(values, low=0, high=1, label="map")).findall("rect")
    assert [cell.attrib["class"] for cell in cells] == ["h0", "h8", "h15", "h15", "h0"]
    assert cells[1].find("title").text == "layer 0, head 1: 50 %"
    assert (cells[3].attrib["x"], cells[3].attrib["y"]) == ("10", "10")
    assert 'class="h0"' in heat_map(np.ones((1, 1)), low=1, high=1, label="flat")


def test_smooth():
    assert smooth([1, 2, 3, 4, 9], 3).tolist() == [1.5, 2, 3, 16 / 3, 6.5]
    assert smooth([1, 2, 90, 4, 5], 3, median=True).tolist() == [1.5, 2, 4, 5, 4.5]
    assert smooth([1, float("nan"), 3], 3).tolist() == [1, 2, 3]
    assert np.isnan(smooth([float("nan")] * 3, 3)).all()


@pytest.mark.parametrize("values", [[0.0101, 0.0102, 0.0103], [0.01] * 3, [1.00001, 1.00002, 1.00003], [-0.05, 0, 0.2]])
def test_labels_of_an_axis_say_where_the_ticks_are(values: list[float]) -> None:
    for percent, last in ((True, 0.3), (False, 3000.0)):
        svg = line_chart([Line([0, last / 2, last], values, "sparse")], label="gap", last=last, percent=percent)
        texts = [text.removesuffix(" %").replace(",", "") for text in re.findall(r"<text[^>]*>([^<]+)</text>", svg)]
        split = texts.index("step")
        for labels in (texts[:split], texts[split + 1 :]):
            ticks = [float(label.replace("\u2212", "-")) for label in labels]
            assert len(set(ticks)) == len(ticks) > 2
            steps = np.diff(ticks)
            assert np.allclose(steps, steps.mean(), rtol=0.05), "evenly spaced, as they are drawn"


@needs_browser
def test_the_page_of_generated_clips_says_what_they_share_and_what_differs(browser: Browser, tmp_path: Path) -> None:
    for number, prompt in enumerate(("a cat", "a dog")):
        settings = {"model": "wan", "steps": 8, "prompt": prompt, "seed": number, "held": 0.25}
        write_mp4(tmp_path / f"{number}.mp4", moving(), 12, about(settings))
    browser.console.clear()
    browser.open(report(tmp_path, 0, "cpu"))
    shown = browser.run("document.querySelector('main').innerText")
    assert all(text in shown for text in ("2 clips", "with wan", "25% of the model's calls"))
    table = "[...document.querySelectorAll('table.grid tr')].map(r => [...r.cells].map(c => c.innerText))"
    assert browser.run(table) == [["", "prompt", "seed"], ["0", "a cat", "0"], ["1", "a dog", "1"]]
    assert not browser.run("document.querySelector('[name=show]').checkVisibility()"), "there is no reference"
    assert browser.console == []
