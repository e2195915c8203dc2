"""The documentation is true: its code runs, the messages it explains exist, and its site builds."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines
import torch
from torch import nn

import foveate as fv
from foveate.models.dit import DiTConfig, VideoDiT

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Code that is not run here: what needs ranks (the examples' tests run it), and parts of a file in the package.
ELSEWHERE = ("ray.train", "parallelize(", "class LTXProcessor", "class MochiProcessor")


def code(page: Path) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    return [block for block in found if not any(word in block for word in ELSEWHERE)]


def flow_loss(
    model: nn.Module, clip: torch.Tensor, noise: torch.Tensor | None = None, sigma: torch.Tensor | None = None
) -> torch.Tensor:
    noise = torch.randn_like(clip) if noise is None else noise
    sigma = torch.rand(len(clip)) if sigma is None else sigma
    level = sigma[:, None, None, None, None]
    return (model((1 - level) * clip + level * noise, sigma) - (noise - clip)).square().mean()


def sample_pipeline() -> Any:
    """Called as the pages do: with anything, or with a prompt, which a pipeline without a text encoder cannot take."""
    pipe, given = tiny_pipelines.made("wan")

    class Sample(type(pipe)):
        def __call__(self, *_: Any, prompt: str | None = None, num_inference_steps: int = 8, **__: Any) -> Any:
            return super().__call__(**given, num_inference_steps=num_inference_steps, output_type="latent")

    pipe.__class__ = Sample
    return pipe


def a_users_names() -> dict[str, Any]:
    """What the pages take for granted."""
    torch.manual_seed(0)
    model = VideoDiT(DiTConfig(width=32, depth=2, heads=2, patch=(1, 1, 1)))
    q, k, v, key, value = torch.randn(5, 1, 20 * 16 * 16, 2, 16)
    clips = torch.randn(24, 1, 3, 4, 8, 8)
    names: dict[str, Any] = {"fv": fv, "q": q, "k": k, "v": v, "model": model, "transformer": model, "data": clips}
    names |= {"optimizer": torch.optim.AdamW(model.parameters()), "flow_loss": flow_loss, "pipe": sample_pipeline()}
    names |= {
        "prompts": ["a walk", "a run", "a swim", "a flight"],
        "other_state": fv.attend(q, key[:, :64], value[:, :64]),
    }
    names |= {"torch": torch, "clips": clips[0], "noise": torch.randn_like(clips[0]), "sigma": torch.tensor([0.5])}
    names["closure"] = lambda: flow_loss(model, clips[0])
    return names


@pytest.mark.parametrize("page", [page for page in PAGES if code(page)], ids=lambda page: page.name)
def test_its_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = a_users_names()
    for block in code(page):
        exec(compile(block, page.name, "exec"), names)
        handle = names.get("handle")
        if isinstance(handle, fv.ReuseHandle):
            handle.remove()


def test_messages_that_are_explained_exist() -> None:
    said = "".join(path.read_text() for path in sorted((ROOT / "foveate").rglob("*.py")))
    said = re.sub(r'"\s*\n\s*f?"', "", said)  # a message over two lines
    explained = re.findall(r"^\*\*(.+?)\*\* —", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    assert len(explained) > 20
    quoted = [part for line in explained for part in re.findall(r"`([^`]+)`", line)]
    parts = [part.strip(" :;") for message in quoted for part in message.split("…")]
    missing = [part for part in parts if len(part) > 3 and part not in said]
    assert not missing


def test_the_site_builds_and_every_link_in_it_leads_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs mkdocs: pip install 'foveate[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sparsify" in (tmp_path / "site/api/index.html").read_text()


def test_links_of_the_readme_and_pages_lead_to_files() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), (page.name, link)


def test_the_log_has_one_dated_line_an_idea() -> None:
    ideas = [line for line in (ROOT / "docs/log.md").read_text().splitlines() if line.startswith("| ")]
    ideas = [re.split(r"(?<!\\)\|", line)[1:-1] for line in ideas if not line.startswith("| date")]
    assert len(ideas) > 100
    wrong = [
        idea
        for idea in ideas
        if len(idea) != 4
        or not re.fullmatch(r" 20\d\d-\d\d(-\d\d)? ", idea[0])
        or not (idea[1].strip() and idea[3].strip())
    ]
    assert not wrong
