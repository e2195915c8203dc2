"""The pages of `foveate compare` as a reader meets them: in a browser, by clicks and by keys alone."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, Browser

from foveate import cli
from foveate.compare import blind
from foveate.video import write_mp4

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
SHADES = {"exact": 200, "reuse": 60}
CLIPS = 3
ORDER = "JSON.parse(localStorage.getItem('foveate-blind-' + document.body.dataset.test))"
SHADE = "[...document.querySelectorAll('{} canvas')].map(c => c.getContext('2d').getImageData(9, 9, 1, 1).data[0])"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bright and dark clips that grow brighter by 5 a frame, compared, and a blind test of them."""
    root = tmp_path_factory.mktemp("compared")
    for name, shade in SHADES.items():
        (root / name).mkdir()
        for number in range(CLIPS):
            levels = np.full((6, 32, 48, 3), shade) + 5 * np.arange(6)[:, None, None, None]
            write_mp4(root / name / f"clip{number}.mp4", levels.astype(np.uint8), 12)
    folders = [str(root / name) for name in SHADES]
    for more in (["--windows", "0", "--out", "out"], ["--blind", "--out", "blind"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["compare", *folders, *more[:-1], str(root / more[-1])])
        assert ended.value.code == 0
    return root


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        found.prefer(prefers_reduced_motion="reduce")
        yield found


def contrasts(browser: Browser) -> float:
    """The least contrast (WCAG 2) of any shown text to what is behind it."""
    return browser.run("""(() => {
      const parse = (c) => c.match(/[\\d.]+/g).map(Number);
      const light = (c) => parse(c).slice(0, 3).map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
      let least = 99;
      const clear = (node) => ["rgba(0, 0, 0, 0)", "transparent"].includes(getComputedStyle(node).backgroundColor);
      for (const node of document.querySelectorAll("body *")) {
        const own = [...node.childNodes].some(n => n.nodeType === 3 && n.data.trim());
        if (!own || !node.checkVisibility() || node.closest("svg, button:disabled")) continue;
        let back = node;
        while (back && clear(back)) back = back.parentElement;
        const behind = getComputedStyle(back ?? document.body).backgroundColor;
        const [a, b] = [getComputedStyle(node).color, behind].map(light);
        least = Math.min(least, (Math.max(a, b) + .05) / (Math.min(a, b) + .05));
      }
      return least;
    })()""")


def test_both_pages_fit_are_readable_and_do_not_complain(browser: Browser, root: Path) -> None:
    browser.console.clear()
    for page in (root / "out" / "report.html", root / "blind" / "blind.html"):
        assert page.stat().st_size < 20e6
        for width in (1280, 390):
            for scheme in ("light", "dark"):
                browser.resize(width, 900)
                browser.prefer(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
                browser.open(page)
                assert browser.run("document.body.dataset.media") == f"{2 * CLIPS} ok"
                html = "document.documentElement"
                assert browser.run(f"{html}.scrollWidth - {html}.clientWidth") == 0, "nothing spills over the edge"
                assert contrasts(browser) >= 4.5, (page.name, scheme)
    assert browser.console == []
    browser.resize(1280, 900)


def test_the_scrubber_moves_every_player_and_differences_are_from_their_own_pair(browser: Browser, root: Path) -> None:
    browser.open(root / "out" / "report.html")
    first = browser.run(SHADE.format(".clips"))
    assert len(first) == 2 * CLIPS
    browser.click("[name=frame]", along=0.999)
    last = browser.run(SHADE.format(".clips"))
    assert all(abs(b - a - 25) <= 3 for a, b in zip(first, last, strict=True))
    browser.run("document.activeElement.blur()")
    browser.press("d")
    different = browser.run(SHADE.format(".clips"))
    assert different[::2] == last[::2]
    assert different[1::2] == [255] * CLIPS, "eight times the difference"


def answered(browser: Browser) -> int:
    return browser.run("+document.body.dataset.answered")


def test_a_blind_test_is_answered_by_keys_alone_kept_and_counted(
    browser: Browser, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    page, key = root / "blind" / "blind.html", json.loads((root / "blind" / "blind_key.json").read_text())
    text = page.read_text()
    assert not any(name in re.sub(r"base64,[^\"]*", "", text) for name in (*SHADES, "clip0")), "the page names nobody"
    browser.open(page)
    browser.run("localStorage.clear()")
    browser.open(page)
    # The reader prefers the bright clip, wherever it is shown; then goes back and sees no difference.
    for number in range(CLIPS - 1):
        left, right = browser.run(SHADE.format(".trial"))
        browser.press("1" if left > right else "2")
        assert answered(browser) == number + 1
    browser.press("Backspace", "0")
    browser.open(page)  # closed and opened again: nothing is lost
    assert answered(browser) == CLIPS - 1
    left, right = browser.run(SHADE.format(".trial"))
    browser.press("1" if left > right else "2")
    assert browser.run("document.activeElement.name") == "save", "the next key, Enter, saves"
    browser.ask("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.enter()
    until = time.monotonic() + 20
    while not (files := list(tmp_path.glob("answers-*.json"))) and time.monotonic() < until:
        time.sleep(0.05)
    saved = json.loads(files[0].read_text())
    assert saved == browser.run(ORDER)
    named = [key["pairs"][one["pair"]].get(one["choice"], "none") for one in saved["answers"]]
    assert named == ["exact", "none", "exact"]
    with pytest.raises(SystemExit):
        cli.main(["compare", "--answers", str(files[0]), "--key", str(root / "blind" / "blind_key.json")])
    said = capsys.readouterr().out
    assert "reuse is preferred to exact in 0 % of 2 decided answers; exact binomial 95 % interval 0 to 84 %" in said


def test_clicks_are_kept_as_they_were_made(browser: Browser, root: Path) -> None:
    browser.open(root / "blind" / "blind.html")
    browser.run("localStorage.clear()")
    browser.open(root / "blind" / "blind.html")
    for button in ("left", "right", "none"):
        browser.click(f"[name={button}]")
    state = browser.run(ORDER)
    sides = [one["sides"] for one in state["order"]]
    assert [one["choice"] for one in state["answers"]] == [sides[0][0], sides[1][1], "none"]
    assert [one["pair"] for one in state["answers"]] == [one["pair"] for one in state["order"]]
    browser.click("[name=again]")
    assert (answered(browser), browser.run(ORDER)["answers"]) == (0, [])


def test_answers_of_another_test_are_refused(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "answers.json"
    for found, message in [
        ({"by": "foveate compare --blind", "test": "other", "answers": []}, "answers another test"),
        ([], "no file of answers"),
    ]:
        file.write_text(json.dumps(found))
        with pytest.raises(SystemExit) as ended:
            cli.main(["compare", "--answers", str(file), "--key", str(root / "blind" / blind.KEY)])
        assert (ended.value.code, message in capsys.readouterr().err) == (2, True)
    with pytest.raises(ValueError, match="give it by --key"):
        blind.count([file], None)
