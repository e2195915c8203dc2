"""Adapters against diffusers' own processors: outputs and all gradients, on tiny random models, in float32.

The sparse reference is the plain model with its plain processor and a mask over tokens in the model's own order, made
from the selection and `grid.order()`.
"""

import copy
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from foveate.attention import Dense, Layer, attend
from foveate.models import adapters
from foveate.models.dit import DiTConfig, VideoDiT
from foveate.models.processor import Context, Processor
from foveate.tiles import Selection, VideoGrid

diffusers = pytest.importorskip("diffusers", reason="needs diffusers: pip install 'foveate[diffusers]'")
TOLERANCE = 1e-5
ODD = (5, 7, 9)


@dataclass
class Case:
    """A tiny model: how to build it and its inputs for a grid, and how many text tokens join the attention."""

    build: Callable[[], nn.Module]
    inputs: Callable[[tuple[int, int, int]], dict]
    text: int = 0
    flat_mask: bool = False  # the plain processor wants an additive mask (B * H, S, S), not a bool one (B, H, S, S)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


def wan(patch=(1, 2, 2), cls: str = "WanTransformer3DModel", **more) -> nn.Module:
    shape = {"num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 3, "out_channels": 3, "text_dim": 8}
    return getattr(diffusers, cls)(
        patch_size=patch, freq_dim=8, ffn_dim=32, num_layers=2, rope_max_seq_len=16, **shape, **more
    )


def wan_inputs(patch=(1, 2, 2), tokens: int = 6, per_token: bool = False, image: bool = False, **more):
    def make(grid: tuple[int, int, int]) -> dict:
        sizes = [size * edge for size, edge in zip(grid, patch, strict=True)]
        times = (2, grid[0] * grid[1] * grid[2]) if per_token else (2,)
        inputs = {"hidden_states": rand(2, 3, *sizes), "timestep": 1000 * torch.rand(times)}
        inputs |= {"encoder_hidden_states": rand(2, tokens, 8)} | more
        return inputs | ({"encoder_hidden_states_image": rand(2, 5, 8)} if image else {})

    return make


def cogvideox(rope: bool, patch_t: int | None = None) -> nn.Module:
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=3, out_channels=3, time_embed_dim=8, num_layers=2,
        text_embed_dim=8, patch_size=2, patch_size_t=patch_t, sample_width=8, sample_height=8, sample_frames=9,
        max_text_seq_length=11, use_rotary_positional_embeddings=rope,
    )  # fmt: skip
    return model


def cogvideox_inputs(rope: bool, patch_t: int = 1):
    def make(grid: tuple[int, int, int]) -> dict:
        frames, height, width = grid[0] * patch_t, grid[1] * 2, grid[2] * 2
        inputs = {"hidden_states": rand(2, frames, 3, height, width), "timestep": 1000 * torch.rand(2)}
        if rope:
            angles = rand(grid[0] * grid[1] * grid[2], 16).repeat_interleave(2, dim=-1)
            inputs["image_rotary_emb"] = (angles.cos(), angles.sin())
        return inputs | {"encoder_hidden_states": rand(2, 11, 8)}

    return make


def ltx() -> nn.Module:
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64,
        num_layers=2, caption_channels=8,
    )  # fmt: skip


def ltx_inputs(grid: tuple[int, int, int]) -> dict:
    inputs = {"hidden_states": rand(2, grid[0] * grid[1] * grid[2], 4), "encoder_hidden_states": rand(2, 6, 8)}
    inputs |= {"timestep": 1000 * torch.rand(2), "encoder_attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])}
    return inputs | dict(zip(("num_frames", "height", "width"), grid, strict=True))


CASES = {
    "wan": Case(wan, wan_inputs()),
    "wan22-per-token-time": Case(wan, wan_inputs(per_token=True)),
    "wan-patch-2-1-2": Case(lambda: wan((2, 1, 2)), wan_inputs((2, 1, 2))),
    "wan-image": Case(lambda: wan(image_dim=8, added_kv_proj_dim=64), wan_inputs(tokens=512, image=True)),
    "skyreels": Case(lambda: wan(cls="SkyReelsV2Transformer3DModel"), wan_inputs()),
    "cogvideox": Case(lambda: cogvideox(False), cogvideox_inputs(False), 11, flat_mask=True),
    "cogvideox15-rope": Case(lambda: cogvideox(True, 2), cogvideox_inputs(True, 2), 11, flat_mask=True),
    "ltx": Case(ltx, ltx_inputs, flat_mask=True),
}
MAIN = ("wan", "cogvideox15-rope")


def make(name: str, grid: tuple[int, int, int] = ODD) -> tuple[nn.Module, dict]:
    """A model whose zero-initialised parameters are random too, and its inputs."""
    torch.manual_seed(0)
    model = CASES[name].build()
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model, CASES[name].inputs(grid)


def results(model: nn.Module, *inputs: dict) -> dict[str, Tensor]:
    """Outputs, and all parameters' gradients of a fixed random mixture of them, one backward after all forwards."""
    model.zero_grad()
    outputs = [model(**one, return_dict=False)[0] for one in inputs]
    weights = [torch.randn(out.shape, generator=torch.Generator().manual_seed(7)) for out in outputs]
    sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True)).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {f"output {i}": out.detach() for i, out in enumerate(outputs)} | grads


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Equal name by name, relative to each one's norm. A gradient that is zero but for rounding (a shift of all keys
    changes no softmax, so a bias of keys has none) only has to be so in both."""
    assert ours.keys() == theirs.keys()
    nothing = 1e-6 * max(expected.norm() for expected in theirs.values())
    for name, expected in theirs.items():
        if expected.norm() < nothing:
            assert ours[name].norm() < nothing, f"{name}: should be zero"
            continue
        error = (ours[name] - expected).norm() / expected.norm()
        assert error <= tolerance, f"{name}: relative error {error:.1e}, norm {expected.norm():.1e}"


class Kept:
    """Forces the sparse backend, keeping a fraction of the tiles at random (its own always); counts calls."""

    def __init__(self, fraction: float):
        self.fraction, self.calls, self.layers = fraction, Counter(), []

    def mask(self, index: int, grid: VideoGrid, batch: int, heads: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        tiles = grid.tiles()
        return (torch.rand(batch, heads, tiles, tiles, generator=generator) < self.fraction) | torch.eye(tiles).bool()

    def __call__(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls[layer.name] += 1
        self.layers.append(layer)
        mask = self.mask(layer.index, layer.grid, q.shape[0], q.shape[2])
        return attend(q, k, v, Selection.from_dense(mask, layer.grid), backend="torch").out


class Masked:
    """diffusers' own processor, given a mask that the model itself never passes."""

    def __init__(self, original, mask: Tensor):
        self.original, self.mask = original, mask

    def __call__(
        self,
        attn,
        hidden_states,
        encoder_hidden_states=None,
        attention_mask=None,
        rotary_emb=None,
        image_rotary_emb=None,
    ):
        rotary = rotary_emb if image_rotary_emb is None else image_rotary_emb
        return self.original(attn, hidden_states, encoder_hidden_states, self.mask, rotary)


def mask_tokens(model: nn.Module, case: Case, grid: VideoGrid, policy: Kept) -> None:
    """Puts `policy`'s choice into the plain model as token masks in the model's own order."""
    names = [name for name, module in model.named_modules() if name.endswith("attn1")]
    back = torch.argsort(grid.order())
    for index, name in enumerate(names):
        tiles = policy.mask(index, grid, 2, 2)
        tokens = tiles.repeat_interleave(64, -1).repeat_interleave(64, -2)[..., : grid.tokens, : grid.tokens]
        tokens = tokens[..., back, :][..., back]
        tokens = tokens.roll((grid.text, grid.text), (-1, -2))  # the model has its text first
        attention = model.get_submodule(name)
        if case.flat_mask:
            tokens = torch.zeros(tokens.shape).masked_fill(~tokens, -torch.inf).flatten(0, 1)
        attention.set_processor(Masked(attention.processor, tokens))


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


@pytest.mark.parametrize("grid", [ODD, (3, 6, 10)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_sparse_equals_the_masked_plain_model(name: str, grid: tuple[int, int, int]) -> None:
    model, inputs = make(name, grid)
    masked = copy.deepcopy(model)
    mask_tokens(masked, CASES[name], VideoGrid(*grid, text=CASES[name].text), Kept(0.3))
    dense = results(model, inputs)
    adapters.install(model, Kept(0.3))
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


@pytest.mark.parametrize("order", ["lora first", "policy first"])
@pytest.mark.parametrize("name", MAIN)
def test_lora_trains_and_loads_in_plain_diffusers(name: str, order: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)

    def trained(policy) -> nn.Module:
        model, inputs = make(name)
        torch.manual_seed(1)
        if policy is not None and order == "policy first":
            adapters.install(model, policy)
        model.add_adapter(lora)
        if policy is not None and order == "lora first":
            adapters.install(model, policy)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for _ in range(2):
            results(model, inputs)
            optimizer.step()
        return model

    plain, ours, (fresh, inputs) = trained(None), trained(Kept(1.1)), make(name)
    assert_same(dict(ours.named_parameters()), dict(plain.named_parameters()))
    ours.save_lora_adapter(tmp_path)
    fresh.load_lora_adapter(tmp_path, prefix=None, weight_name="pytorch_lora_weights.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(fresh(**inputs).sample, ours(**inputs).sample, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MAIN)
def test_full_weights_load_in_plain_diffusers(name: str, tmp_path: Path) -> None:
    model, inputs = make(name)
    keys = list(model.state_dict())
    adapters.install(model, Kept(1.1))
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert list(loaded.state_dict()) == keys
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).sample, model(**inputs).sample, rtol=1e-5, atol=1e-5)
    installed = adapters.install(loaded, Kept(1.1))
    loaded.load_state_dict(model.state_dict())
    installed.remove()


def test_a_copy_has_its_own_policy() -> None:
    model, inputs = make("wan", (2, 3, 4))
    policy = Kept(1.1)
    adapters.install(model, policy)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        torch.testing.assert_close(twin(**inputs).sample, model(**inputs).sample)
    assert set(policy.calls.values()) == {1}


def test_names_survive_wrappers() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, inputs = make("wan", (2, 3, 4))
    names = ("blocks.0.attn1", "blocks.1.attn1")
    plain = results(model, inputs)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(torch.compile(block, backend="eager"))
    installed = adapters.install(torch.compile(model, backend="eager"), Kept(1.1))
    assert installed.layers == names
    installed.remove()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = block._checkpoint_wrapped_module._orig_mod
        model.blocks[index] = checkpoint_wrapper(model.blocks[index])
    with adapters.install(nn.Sequential(model), Kept(1.1)) as installed:
        ours = {key.replace("_checkpoint_wrapped_module.", ""): value for key, value in results(model, inputs).items()}
        assert installed.layers == names
        assert_same(ours, plain)


@pytest.mark.parametrize("first", ["shard", "install"])
def test_fully_shard_before_or_after(first: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model, inputs = make("wan", (2, 3, 4))
    plain = results(model, inputs)
    with tempfile.NamedTemporaryFile() as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        try:
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
            policy = Kept(1.1)
            for step in ("shard", "install") if first == "shard" else ("install", "shard"):
                if step == "install":
                    installed = adapters.install(model, policy)
                else:
                    for block in model.blocks:
                        fully_shard(block, mesh=mesh)
                    fully_shard(model, mesh=mesh)
            ours = {name: getattr(x, "_local_tensor", x) for name, x in results(model, inputs).items()}
            assert_same(ours, plain)
            assert policy.calls == dict.fromkeys(installed.layers, 1)
        finally:
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", MAIN)
def test_compiles_whole_without_a_graph_break(name: str) -> None:
    model, inputs = make(name, (2, 3, 4))
    blocks = next(module for path, module in model.named_children() if path.endswith("blocks"))
    del blocks[1:]  # one is enough to compile
    plain = {f"_orig_mod.{key}" if key[:6] != "output" else key: x for key, x in results(model, inputs).items()}
    adapters.install(model, Dense())
    torch._dynamo.reset()
    assert_same(results(torch.compile(model, fullgraph=True, backend="aot_eager"), inputs), plain)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled_blocks_share_one_graph() -> None:
    """One graph for all blocks, though each has a layer number; checkpointing and another size on top."""
    model, first = make("wan", (2, 3, 4))
    second = CASES["wan"].inputs((3, 4, 2))
    plain = results(model, first, second)
    adapters.install(model, Dense())
    torch._dynamo.reset()
    model.compile_repeated_blocks(fullgraph=True)
    model.enable_gradient_checkpointing()
    torch._dynamo.utils.counters.clear()
    results(model, first)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert_same(results(model, first, second), plain)


def test_training_after_inference_mode_and_under_autocast() -> None:
    model, inputs = make("wan", (2, 3, 5))
    adapters.install(model, Kept(1.1))
    with torch.inference_mode():
        model(**inputs)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**inputs).sample
    out.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


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
