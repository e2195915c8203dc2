"""The report as a reader meets it: in a browser, on a phone, with sections missing and with hostile text."""

import base64
import io
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import av
import numpy as np
import pytest

from foveate import charts
from foveate.charts import Line, heat_map, line_chart, ramp, smooth
from foveate.report import ClipPanel, ReportData, render, write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
QUIET += " --disable-component-update --disable-sync --enable-logging=stderr --v=0 --virtual-time-budget=3000"


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


def clip(title: str, note: str = "") -> ClipPanel:
    y, x, t = np.ogrid[:24, :40, :8]
    levels = (4 * x + 3 * y + 9 * t) % 256
    return ClipPanel(title, np.repeat(levels.transpose(2, 0, 1)[..., None], 3, -1).astype(np.uint8), 12, note)


def full(**change) -> ReportData:
    draw = np.random.default_rng(1)
    profiles = [
        {"step": s, **{key: draw.random((4, 6)) for key in ("recall", "error", "density")}} for s in (5, 10, 20, 40)
    ]
    profiles[1]["recall"][2, 3] = np.nan
    fields = {
        "title": "Sparse against dense",
        "summary": "A small model.",
        "figures": [("Sparse step", "1.9 x faster", "3.0 s to 1.6 s"), ("Validation loss", "+0.3 %", "dense twin")],
        "checks": [("faster", True, "1.9 x"), ("loss kept", False, "+2 %")],
        "runs": {"sparse": rows(1.003, 1.6), "dense": rows(1.0, 3.0), "random": rows(1.05, 1.4)},
        "gap_limit": 0.01,
        "profiles": profiles,
        "clips": [clip("Sparse", "PSNR 34 dB"), clip("Dense twin")],
        "tables": {"Machine": {"cores": 2}, "Versions": {"torch": "2.13"}},
        "notes": ["A note."],
    }
    return ReportData(**{**fields, **change})


@cache
def page_of_full() -> str:
    return render(full())


def browse(path: Path, tmp_path: Path, *options: str) -> tuple[str, str]:
    """(the page after its scripts ran, console messages)."""
    command = [CHROMIUM, *QUIET.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", *options]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=90)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_everything_without_complaint(tmp_path, width):
    page = tmp_path / "report.html"
    # The page's own width, read by a script of the test's.
    width_of = (
        "const root = document.documentElement; document.body.dataset.spill = root.scrollWidth - root.clientWidth"
    )
    probe = f"<script>{width_of}</script></body>"
    page.write_text(page_of_full().replace("</body>", probe))
    dom, console = browse(page, tmp_path, f"--window-size={width},900")
    assert console == ""
    assert 'data-media="4 ok"' in dom  # two videos and two strips of stills have a size, so they were decoded
    assert 'data-spill="0"' in dom


@needs_browser
def test_the_browser_check_notices_a_broken_video_and_a_request(tmp_path):
    page = tmp_path / "report.html"
    broken = re.sub(r"(data:video/mp4;base64,)[^\"]{2000}", r"\1AAAA", page_of_full(), count=1)
    page.write_text(broken.replace("</main>", '<img src="https://example.com/a.png"></main>'))
    dom, console = browse(page, tmp_path)
    assert 'data-media="2 of 5 failed"' in dom
    assert "Content Security Policy" in console


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
    evil = "<script>alert('x')</script>\" onload=\"y $title & $body"
    text = render(
        full(
            title=evil,
            summary=evil,
            figures=[(evil, evil, evil)],
            checks=[(evil, True, evil)],
            runs={evil: rows(1.0, 1.0)},
            density_means=evil,
            clips=[clip(evil, evil)],
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
    assert text.count("alert(&#x27;x&#x27;)") >= 15


def test_sections_without_data_are_left_out():
    text = render(ReportData(title="Nothing yet"))
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["What you are looking at"]
    assert "<video" not in text
    assert "verdict good" not in text
    assert re.findall(r"<h2>(.*?)</h2>", page_of_full()) == [
        "Checks",
        "What you are looking at",
        "Clips",
        "Training",
        "Where attention goes",
        "How it was made",
    ]


@pytest.mark.parametrize(
    ("change", "charts_drawn"),
    [
        ({"runs": {"only": rows(1.0, 1.0)}}, 3),  # no twin to compare with
        ({"runs": {"only": [{"step": 1, "loss": 0.5}]}}, 1),
        ({"runs": {"only": [{"step": 1, "loss": float("nan"), "seconds": None}], "none": []}}, 0),
        ({"runs": {"sparse": [{**row, "kept": 1.0} for row in rows(1.0, 1.0)]}}, 3),  # the switch never came
        ({"runs": {}, "profiles": [{"step": 3, "recall": [[0.5, 0.25]]}]}, 1),
        ({"runs": {}, "profiles": [{"step": 3, "density": np.full((2, 2), np.nan)}]}, 0),
        ({"runs": {"zero": [{"step": 0, "loss": 0.0, "seconds": 0.0}]}}, 2),
    ],
)
def test_partial_data_draws_what_it_can(change, charts_drawn, recwarn):
    text = render(ReportData(**{"title": "a", "gap_limit": 0.01, **change}))
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


def test_the_videos_inside_are_the_clips():
    shown = clip("a")
    encoded = re.search(r"data:video/mp4;base64,([^\"]*)", render(ReportData(title="a", clips=[shown])))[1]
    with av.open(io.BytesIO(base64.b64decode(encoded))) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    times = frames.shape[1] // 24
    assert frames.shape == (8, 24 * times, 40 * times, 3)
    assert min(frames.shape[1:3]) >= 256
    middle = frames[:, times // 2 :: times, times // 2 :: times].astype(int)
    assert np.abs(middle - shown.video).mean() < 6


def test_clips_of_another_type_are_refused():
    with pytest.raises(ValueError, match="uint8"):
        render(ReportData(title="a", clips=[ClipPanel("a", np.zeros((2, 8, 8, 3)))]))


def test_charts_take_their_colours_from_the_page():
    svg = line_chart([Line([1, 2, 3], [1.0, 2.0, 1.5], "sparse")], label="a < b", last=3, switch=2, limit=1.2)
    tree = ET.fromstring(svg)
    assert tree.attrib["viewBox"]
    assert tree.attrib["aria-label"] == "a < b"
    assert not any(color in svg for color in charts.STAND_IN.values())
    assert {"var(--sparse)", "var(--stage)", "var(--ink)", "var(--muted)"} <= set(re.findall(r"var\(--\w+\)", svg))
    assert {"← dense", "sparse →"} <= {node.text for node in tree.iter("text")}
    plain = line_chart([Line([1, 2], [1.0, 2.0], "dense")], label="a", last=2)
    assert "sparse →" not in plain


def test_heat_maps_shade_by_value_and_leave_nan_blank():
    values = np.array([[0.0, 0.5, 1.0], [np.nan, 2.0, -1.0]])
    cells = ET.fromstring(heat_map(values, low=0, high=1, label="map")).findall("rect")
    assert [cell.attrib["class"] for cell in cells] == ["h0", "h8", "h15", "h15", "h0"]
    assert cells[1].find("title").text == "layer 0, head 1: 50 %"
    assert (cells[3].attrib["x"], cells[3].attrib["y"]) == ("10", "10")
    assert 'class="h0"' in heat_map(np.ones((1, 1)), low=1, high=1, label="flat")


def test_smooth_and_ramp():
    assert smooth([1, 2, 3, 4, 9], 3).tolist() == [1.5, 2, 3, 16 / 3, 6.5]
    assert smooth([1, 2, 90, 4, 5], 3, median=True).tolist() == [1.5, 2, 4, 5, 4.5]
    assert smooth([1, float("nan"), 3], 3).tolist() == [1, 2, 3]
    assert np.isnan(smooth([float("nan")] * 3, 3)).all()
    assert ramp(3) == ["#1a9a9a", "#6f6bd8", "#d64d8b"]
    assert len(set(ramp(40))) == 40
    assert ramp(1) == ["#1a9a9a"]
