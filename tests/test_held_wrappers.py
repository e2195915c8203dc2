"""Reuse among other people's wrappers, put on before or after it: held as without them, taken out without harm."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_held_pipelines import pipeline, run
from torch import Tensor

from foveate import ReuseConfig, reuse

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


def test_copies_are_plain_and_independent() -> None:
    pipe = pipeline()
    plain = small(pipe)
    with reuse(pipe, ReuseConfig(interval=3, warmup=2)) as handle:
        held = small(pipe)
        twin, third = copy.deepcopy(pipe.transformer), copy.copy(pipe.transformer)
        stored = pickle.loads(pickle.dumps(pipe.transformer))
        for other in (twin, third, stored):
            assert type(other) is diffusers.WanTransformer3DModel
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
