"""Adapters in trainers: LoRA and full weights, copies, wrappers, FSDP2, torch.compile, autocast."""

import copy
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from tiny_models import CASES, MAIN, Kept, assert_same, make, results
from torch import nn

from foveate.attention import Dense
from foveate.models import adapters


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
