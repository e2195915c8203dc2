"""Reuse among other people's wrappers, put on before or after it: held as without them, taken out without harm."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_held_pipelines import pipeline, run
from torch import Tensor

from foveate import ParallelConfig, ReuseConfig, parallelize, reuse
from foveate.models.adapters import installed

diffusers = pytest.importorskip("diffusers", reason="needs diffusers: pip install 'foveate[diffusers]'")
STEPS = 9


def lora(pipe: Any) -> None:
    from peft import LoraConfig

    torch.manual_seed(0)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))


def first_block_cache(pipe: Any) -> None:
    from diffusers import FirstBlockCacheConfig

    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e-6))


def foreign_forward(pipe: Any) -> None:
    """Anyone's wrapper around `forward`."""
    plain = pipe.transformer.forward
    pipe.transformer.forward = lambda *args, **kwargs: plain(*args, **kwargs)


def group_offload(pipe: Any) -> None:
    device = torch.device("cpu")
    pipe.transformer.enable_group_offload(device, device, offload_type="block_level", num_blocks_per_group=1)


def compile_blocks(pipe: Any, fullgraph: bool = True) -> None:
    pipe.transformer.compile_repeated_blocks(fullgraph=fullgraph, backend="eager")


def sequential_offload(pipe: Any) -> None:
    """accelerate's hook on every module, as sequential offload has it; its own call fails where the card is the CPU."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for module in list(pipe.transformer.modules()):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda pipe: None,
    "forward": foreign_forward,
    "model offload": lambda pipe: pipe.enable_model_cpu_offload(device="cpu"),
    "group offload": group_offload,
    "sequential offload": sequential_offload,
    "casting": lambda pipe: pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32),
    "cache": first_block_cache,
    "compiled blocks": compile_blocks,
    "compiled in place": lambda pipe: pipe.transformer.compile(backend="eager"),
    "lora": lora,
}


def count(pipe: Any) -> list[int]:
    """Calls of the first block, which stands for the model."""
    calls = [0]

    @torch.compiler.disable  # or every number of calls would be compiled anew
    def note(*_: Any) -> None:
        calls[0] += 1

    pipe.transformer.patch_embedding.register_forward_hook(note)
    return calls


def small(pipe: Any) -> Tensor:
    return run(pipe, size=(2, 4, 6), batch=1, steps=STEPS)


@pytest.mark.parametrize("hold", ["output", "attention"])
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_held_among_wrappers(name: str, first: bool, hold: Any) -> None:
    wrap = WRAPPERS[name]
    if name == "compiled blocks" and hold == "attention":
        wrap = partial(compile_blocks, fullgraph=False)  # the policy runs outside compiled graphs
    torch._dynamo.reset()
    ours, theirs = pipeline(), pipeline()
    wrap(theirs)
    plain = small(theirs)
    if first:
        wrap(ours)
    handle = reuse(ours, ReuseConfig(interval=3, warmup=2, hold=hold))
    if not first:
        wrap(ours)
    calls, made, each = count(ours), [], []
    for _ in range(3):
        before = calls[0]
        made.append(small(ours))
        each.append(calls[0] - before)
    assert each == [2 * (STEPS if hold == "attention" else 4)] * 3
    assert handle.report().hit_rate == pytest.approx(5 / 9)
    assert torch.equal(made[0], made[2])
    assert not torch.equal(made[0], plain)
    handle.remove()
    assert type(ours.transformer) is type(theirs.transformer)
    for _ in range(2):
        assert torch.equal(small(ours), plain)
    assert handle.bytes_held() == 0


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_compiled_model_is_one_graph_and_held_from_outside(first: bool) -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter, pipe, plain = CompileCounter(), pipeline(), small(pipeline())

    def wrap() -> None:
        pipe.transformer = torch.compile(pipe.transformer, backend=counter, fullgraph=True)

    if first:
        wrap()
    with reuse(pipe, ReuseConfig(interval=3, warmup=2)) as handle:
        if not first:
            wrap()
        made = [small(pipe) for _ in range(2)]
        assert torch.equal(*made)
        assert handle.report().hit_rate == pytest.approx(5 / 9)
        assert counter.frame_count == 1 + (not first), "the model; and what stands for a held call"
    torch.testing.assert_close(small(pipe), plain)


@pytest.mark.parametrize("name", ["mag", "blocks", "attention"])
def test_caches_inside_that_leave_layers_out_are_told_of_and_nothing_is_held_wrongly(name: str, caplog: Any) -> None:
    configs: dict[str, Any] = {
        "mag": diffusers.MagCacheConfig(num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS, max_skip_steps=2),
        "blocks": diffusers.FirstBlockCacheConfig(threshold=0.3),
        "attention": diffusers.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(0, 1000),
            current_timestep_callback=lambda: 500,
        ),
    }  # fmt: skip
    pipe = pipeline()
    pipe.transformer.enable_cache(configs[name])
    alone = small(pipe)
    for hold, said in (("attention", "not all attention layers ran"), ("output", "the errors of both add up")):
        caplog.clear()
        with reuse(pipe, ReuseConfig(interval=3, warmup=2, hold=hold)):  # pyright: ignore[reportArgumentType]
            made = [small(pipe) for _ in range(2)]
        assert torch.equal(*made)
        assert [said in record.message for record in caplog.records].count(True) == 1
        if hold == "attention" and name != "attention":  # that one keeps the layers of one branch alone
            assert (made[0] - alone).norm() < 1e-5 * alone.norm()
        assert torch.equal(small(pipe), alone)


@pytest.mark.parametrize("hold", ["output", "attention"])
def test_copies_are_plain_and_independent(hold: Any) -> None:
    pipe = pipeline()
    plain = small(pipe)
    with reuse(pipe, ReuseConfig(interval=3, warmup=2, hold=hold)) as handle:
        held = small(pipe)
        twin, third = copy.deepcopy(pipe.transformer), copy.copy(pipe.transformer)
        torch.save(pipe, file := io.BytesIO())
        file.seek(0)
        stored = torch.load(file, weights_only=False).transformer
        for other in (twin, third, stored, pickle.loads(pickle.dumps(pipe)).transformer):
            assert type(other) is diffusers.WanTransformer3DModel
            if hold == "output" or other is not third:  # a shallow copy shares its attentions with the model
                assert installed(other) is None
        for parameter in twin.parameters():
            parameter.data.zero_()
        assert torch.equal(small(pipe), held)
        for other, expected in ((stored, plain), (twin, None)):
            ours = pipeline()
            ours.transformer = other
            made = small(ours)
            assert torch.equal(made, plain) if expected is not None else not torch.equal(made, plain)
        assert handle.report().steps[-1].step == STEPS - 1


def test_what_others_built_upon_it_lets_through() -> None:
    """A class derived from ours, as fully_shard makes one, cannot be taken off: the layer does nothing from then on."""
    pipe = pipeline()
    plain = small(pipe)
    handle = reuse(pipe, ReuseConfig(interval=3, warmup=2))
    ours = type(pipe.transformer)
    pipe.transformer.__class__ = type("FSDPWanTransformer3DModel", (ours,), {})
    assert not torch.equal(small(pipe), plain)
    handle.remove()
    assert torch.equal(small(pipe), plain)
    with reuse(pipe, ReuseConfig(interval=3, warmup=2)) as again:
        assert not torch.equal(small(pipe), plain)
        assert again.report().hit_rate > 0.5
    assert torch.equal(small(pipe), plain)


def on_halves(hold: Any, names: list[str], first: bool) -> list[str]:
    """What is wrong where two ranks take a branch of guidance each, among each of the wrappers."""
    wrong, settings = [], {"interval": 3, "warmup": 2, "hold": hold}
    with reuse(pipe := pipeline(), ReuseConfig(**settings, ranks="independent")):
        alone = small(pipe)
    for name in names:
        torch._dynamo.reset()
        wrap, ours, theirs = WRAPPERS[name], pipeline(), pipeline()
        wrap(theirs)
        plain = small(theirs)
        if first:
            wrap(ours)
        with reuse(ours, ReuseConfig(**settings, cfg=2, head=1)) as handle:
            if not first:
                wrap(ours)
            calls, made, each = count(ours), [], []
            for _ in range(2):
                before = calls[0]
                made.append(small(ours))
                each.append(calls[0] - before)
            rate = handle.report().hit_rate
        expected = 1 + (STEPS if hold == "attention" else 4)  # both compute step 0
        held = 5 / 10 if hold == "attention" else 5 / 9
        checks = {
            "repeats": torch.equal(*made),
            "alone": name in ("lora", "casting") or near(made[0], alone),
            "calls": each == [expected] * 2,
            "rate": abs(rate - held) < 1e-3,
            "plain after": torch.equal(small(ours), plain),
        }
        wrong += [f"{name}: {what} {each} {rate:.2f}" for what, fine in checks.items() if not fine]
    return wrong


def near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() < 1e-5 * b.norm())


@pytest.mark.parametrize(("hold", "first"), [("output", True), ("output", False), ("attention", True)])
def test_branches_on_halves_of_the_ranks_among_wrappers(hold: Any, first: bool, worlds: Any) -> None:
    some = {"model offload", "group offload", "cache", "lora"} if hold == "attention" or not first else {*WRAPPERS}
    names = [name for name in WRAPPERS if name in some - {"compiled in place"}]
    assert worlds(2).run(on_halves, hold, names, first) == [[], []]


def tiled(pipe: Any) -> Tensor:
    """Of a tile of tokens a rank."""
    return run(pipe, size=(1, 16, 32), batch=1, steps=STEPS)


def copied(hold: Any) -> list[bool]:
    pipe = pipeline()
    plain, spread = tiled(pipe), parallelize(pipe.transformer, ParallelConfig(sequence=2))
    with reuse(pipe, ReuseConfig(interval=3, warmup=2, hold=hold)):
        held, same = tiled(pipe), []
        for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
            same += [torch.equal(tiled(other), plain), installed(other.transformer) is None]
        same.append(torch.equal(tiled(pipe), held))
    spread.remove()
    return same


def test_copies_of_a_model_on_ranks_are_plain(worlds: Any) -> None:
    for hold in ("output", "attention"):
        assert worlds(2).run(copied, hold) == [[True] * 5] * 2
