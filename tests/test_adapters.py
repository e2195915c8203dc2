"""Adapters against diffusers' own processors: outputs and all gradients, on tiny random models, in float32.

The sparse reference is the plain model with its plain processor and a mask over tokens in the model's own order, made
from the selection and `grid.order()`.
"""

import copy
from pathlib import Path

import pytest
import torch
from tiny_models import CASES, MAIN, ODD, Kept, Masked, assert_same, make, mask_tokens, rand, results, wan, wan_inputs
from torch import Tensor, nn

from foveate.attention import Dense, Layer, attend
from foveate.models import adapters
from foveate.models.dit import DiTConfig, VideoDiT
from foveate.models.processor import Context, Processor
from foveate.tiles import VideoGrid


@pytest.mark.parametrize("name", CASES)
def test_keeping_every_tile_equals_the_plain_model(name: str) -> None:
    model, inputs = make(name)
    plain = results(model, inputs)
    policy = Kept(1.1)
    installed = adapters.install(model, policy)
    assert_same(results(model, inputs), plain)
    assert policy.calls == dict.fromkeys(installed.layers, 1)
    assert (installed.heads, installed.dim, len(installed.layers)) == (2, 32, 2)
    assert {layer.grid for layer in policy.layers} == {VideoGrid(*ODD, text=CASES[name].text)}


@pytest.mark.parametrize(("grid", "shape"), [(ODD, (4, 4, 4)), ((3, 6, 10), (2, 2, 16))], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_sparse_equals_the_masked_plain_model(name: str, grid: tuple[int, int, int], shape: tuple) -> None:
    model, inputs = make(name, grid)
    masked = copy.deepcopy(model)
    mask_tokens(masked, CASES[name], VideoGrid(*grid, text=CASES[name].text, cube=shape), Kept(0.3))
    dense = results(model, inputs)
    adapters.install(model, Kept(0.3)).tile_shape = shape
    ours = results(model, inputs)
    assert_same(ours, results(masked, inputs))
    assert (ours["output 0"] - dense["output 0"]).norm() > 1e-3 * dense["output 0"].norm()


@pytest.mark.parametrize("name", MAIN)
def test_checkpointing_recomputes_each_forward_on_its_own_grid(name: str) -> None:
    """Two sizes with equally many tokens in flight at once, and one backward."""
    model, first = make(name, (5, 7, 9))
    second = CASES[name].inputs((7, 5, 9))
    adapters.install(model, Kept(0.3))
    expected = results(model, first, second)
    model.enable_gradient_checkpointing()
    policy = Kept(0.3)
    adapters.installed(model).policy = policy
    assert_same(results(model, first, second), expected)
    assert set(policy.calls.values()) == {4}, "each layer once and once more, twice"


@pytest.mark.parametrize("name", MAIN)
def test_a_size_change_leaves_nothing_stale(name: str) -> None:
    model, first = make(name)
    second = CASES[name].inputs((2, 9, 4))
    plain = [results(model, inputs) for inputs in (first, second, first)]
    with adapters.install(model, Kept(1.1)) as installed:
        for inputs, expected in zip((first, second, first), plain, strict=True):
            assert_same(results(model, inputs), expected)
        assert installed.layers


@pytest.mark.parametrize("name", CASES)
def test_remove_restores_the_model(name: str) -> None:
    model, inputs = make(name)
    before, plain = snapshot(model), results(model, inputs)
    for _ in range(2):
        installed = adapters.install(model, Kept(0.3))
        with pytest.raises(ValueError, match="already"):
            adapters.install(model, Dense())
        assert not torch.equal(results(model, inputs)["output 0"], plain["output 0"])
        installed.remove()
        installed.remove()
        assert snapshot(model) == before
        after = results(model, inputs)
        assert all(torch.equal(after[key], plain[key]) for key in plain)


def snapshot(model: nn.Module) -> list:
    """Everything a module holds but parameters' values: attributes, hooks, processors by identity."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    return [
        (
            name,
            sorted(vars(module)),
            id(getattr(module, "processor", None)),
            [len(vars(module)[hook]) for hook in hooks],
        )
        for name, module in model.named_modules()
    ]


def test_the_built_in_model_is_a_row_too() -> None:
    torch.manual_seed(0)
    model = VideoDiT(DiTConfig(width=64, depth=2, heads=2, patch=(1, 2, 2)))
    nn.init.normal_(model.head.weight)
    x, sigma, original = rand(2, 3, 5, 14, 18), torch.tensor([0.2, 0.7]), model.policy
    plain, policy = model(x, sigma), Kept(1.1)
    installed = adapters.install(model, policy)
    assert (installed.layers, installed.heads, installed.dim) == (("blocks.0", "blocks.1"), 2, 32)
    installed.set_context(step=4, branch="uncond")
    torch.testing.assert_close(model(x, sigma), plain)
    assert [(layer.step, layer.branch, layer.grid) for layer in policy.layers] == [(4, "uncond", VideoGrid(*ODD))] * 2
    installed.tile_shape = (2, 1, 32)
    torch.testing.assert_close(model(x, sigma), plain)
    assert policy.layers[-1].grid == VideoGrid(*ODD, cube=(2, 1, 32))
    with pytest.raises(ValueError, match="already"):
        adapters.install(model, Dense())
    installed.remove()
    assert model.policy is original
    assert torch.equal(model(x, sigma), plain)


def test_layers_are_told_step_and_branch() -> None:
    model, inputs = make("wan", (2, 3, 4))
    policy = Kept(1.1)
    installed = adapters.install(model, policy)
    with torch.no_grad():
        with model.cache_context("cond", step_index=3):
            model(**inputs)
        with model.cache_context("uncond"):
            model(**inputs)
        model(**inputs)
        installed.set_context(step=8, branch="both")
        model(**inputs)
    told = [(layer.step, layer.branch) for layer in policy.layers[::2]]
    assert told == [(3, "cond"), (None, "uncond"), (None, ""), (8, "both")]


@pytest.mark.parametrize("name", MAIN)
def test_fused_projections(name: str) -> None:
    model, inputs = make(name)
    with torch.no_grad():
        expected = model(**inputs).sample
        model.fuse_qkv_projections()
        installed = adapters.install(model, Kept(1.1))
        torch.testing.assert_close(model(**inputs).sample, expected)
        installed.remove()
        model.unfuse_qkv_projections()
        adapters.install(model, Kept(1.1))
        model.fuse_qkv_projections()
        if name == "wan":
            torch.testing.assert_close(model(**inputs).sample, expected)
        else:  # CogVideoX puts in other processors to fuse: said, not silently dense
            with pytest.raises(ValueError, match="no longer has"):
                model(**inputs)


def test_grouped_key_heads_pass_through() -> None:
    context = Context(lambda layer, q, k, v: attend(q, k, v).out, text_first=True)
    context.enter(VideoGrid(2, 3, 5, text=4), torch.device("cpu"))
    q, k, v = rand(2, 34, 4, 32), rand(2, 34, 2, 32), rand(2, 34, 2, 32)
    out = Processor(context, 0, "a").attend(q, k, v, [nn.Identity()]).unflatten(2, (4, 32))
    wide = [x.transpose(1, 2).repeat_interleave(n, 1) for x, n in ((q, 1), (k, 2), (v, 2))]
    expected = nn.functional.scaled_dot_product_attention(*wide).transpose(1, 2)
    torch.testing.assert_close(out, expected)


def test_the_projection_keeps_no_copy_of_what_attention_keeps() -> None:
    model, inputs = make("wan", (2, 3, 5))
    made, kept = [], []

    def policy(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made.append(attend(q, k, v).out)
        return made[-1]

    adapters.install(model, policy)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        model(**inputs)
    assert made
    for out in made:
        assert kept.count(out.data_ptr()) == 2  # attention's own, and the projection's: the same memory


def test_the_row_in_the_documentation_works(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parent.parent / "docs" / "adding-a-model.md").read_text()
    monkeypatch.setattr(adapters, "TABLE", list(adapters.TABLE))
    exec(text.split("```python")[1].split("```")[0], {})
    torch.manual_seed(0)
    more = {"vace_layers": [0, 1], "vace_in_channels": 4}
    model = wan(cls="WanVACETransformer3DModel", **more)
    inputs = wan_inputs(control_hidden_states=rand(2, 4, 5, 14, 18))(ODD)
    plain, policy = results(model, inputs), Kept(1.1)
    installed = adapters.install(model, policy)
    assert_same(results(model, inputs), plain)
    assert policy.calls == dict.fromkeys(installed.layers, 1)
    assert len(installed.layers) == 4


class MyCausalWan(nn.Module):
    pass


def refused(kind: str) -> None:
    model, inputs = make("cogvideox" if kind == "mask" else "wan", (2, 3, 4))
    if kind == "mask":
        adapters.install(model, Dense())
        model(**inputs, attention_kwargs={"attention_mask": torch.ones(2, 35)})
    elif kind == "cache":
        adapters.install(model, Dense())
        model.blocks[0].attn1(rand(2, 24, 64), kv_cache=object())
    elif kind == "outside":
        adapters.install(model, Dense())
        model.blocks[0].attn1(rand(2, 24, 64))
    elif kind == "processor":
        model.blocks[1].attn1.set_processor(Masked(None, rand(1)))
        adapters.install(model, Dense())
    elif kind == "two":
        adapters.find(nn.ModuleList([model, wan()]))
    else:
        others = {"unknown": nn.Linear(1, 1), "causal": MyCausalWan(), "pipeline": object()}
        others["block-causal"] = wan(cls="SkyReelsV2Transformer3DModel", num_frame_per_block=2)
        adapters.find(others[kind])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("unknown", "CogVideoXTransformer3DModel.*docs/adding-a-model.md"),
        ("pipeline", "pass pipe.transformer"),
        ("causal", "MyCausalWan attends block-causally"),
        ("block-causal", "num_frame_per_block=2"),
        ("processor", "blocks.1.attn1 has a Masked"),
        ("two", "holds 2 transformers"),
        ("mask", "attention_mask, which foveate does not honour"),
        ("cache", "kv_cache, which foveate does not honour"),
        ("outside", "outside its transformer's forward"),
    ],
)
def test_refusals_say_what_to_do(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refused(kind)
