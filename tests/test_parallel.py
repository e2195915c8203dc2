"""`parallelize` on real gloo ranks against one process: outputs and every parameter's gradient."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from worlds import Worlds

import foveate as fv
from foveate import Selection, SparsityConfig, VideoGrid, sparsify
from foveate.models import adapters
from foveate.models.dit import DiTConfig, VideoDiT
from foveate.parallel import ParallelConfig, mean_over_ranks, parallelize
from foveate.parallel.policy import Fixed, Parallel
from foveate.sparsity.policy import Sparse
from foveate.tiles import CUBE

TOLERANCE = 1e-5


def awake(model: nn.Module) -> nn.Module:
    """Zero-initialised parameters made random: otherwise outputs and gradients are 0."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def dit(heads: int = 4, depth: int = 2) -> tuple[nn.Module, tuple, VideoGrid]:
    torch.manual_seed(0)
    model = awake(VideoDiT(DiTConfig(width=32 * heads, depth=depth, heads=heads, patch=(1, 2, 2), mlp_ratio=2)))
    inputs = (torch.randn(2, 3, 5, 22, 20), torch.rand(2))
    return model, inputs, VideoGrid(5, 11, 10)  # 550 tokens: 9 tiles, the last one short


def tiny(name: str) -> tuple[nn.Module, dict, VideoGrid]:
    """A model of tests/tiny_models.py with its inputs and grid: 315 video tokens, and 11 of text in CogVideoX."""
    from tiny_models import CASES, make

    model, inputs = make(name, (5, 7, 9))
    return model, inputs, VideoGrid(5, 7, 9, text=CASES[name].text)


def fixed(grid: VideoGrid, heads: int, periphery="drop", device: str = "cpu") -> Fixed:
    """Layer 0 sparse by random tiles, 3 to 60 % by head, layer 1 dense."""
    draw = torch.Generator().manual_seed(2)
    shape = (2, heads, grid.tiles(), grid.tiles())
    mask = torch.rand(shape, generator=draw) < torch.linspace(0.03, 0.6, heads)[:, None, None]
    mask |= torch.eye(grid.tiles(), dtype=torch.bool) | grid.text_tiles() | grid.text_tiles()[:, None]
    return Fixed({0: Selection.from_dense(mask, grid).to(device)}, periphery, backend="torch")


def results(model: nn.Module, inputs: tuple | dict, finish: Callable = lambda: None) -> dict[str, Tensor]:
    """The output, and all parameters' gradients of a fixed random mixture of it."""
    model.zero_grad()
    outs = (model(*inputs),) if isinstance(inputs, tuple) else model(**inputs, return_dict=False)
    weights = [torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.device) for out in outs]
    torch.stack([(out * weight).mean() for out, weight in zip(outs, weights, strict=True)]).sum().backward()
    finish()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": torch.cat([out.detach().flatten() for out in outs]), **grads}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Name by name, relative to each one's norm; what is zero but for rounding only has to be so in both."""
    missing = theirs.keys() - ours.keys()
    assert not missing, missing
    nothing = 1e-6 * max(x.norm() for x in theirs.values())
    for name, expected in theirs.items():
        if expected.norm() < nothing:
            assert ours[name].norm() < nothing, name
            continue
        error = float((ours[name] - expected).norm() / expected.norm())
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


def make(kind: str):
    return dit(int(kind[3:] or 4)) if kind.startswith("dit") else tiny(kind)


def one_process(kind: str, periphery="drop", device: str = "cpu") -> dict[str, Tensor]:
    model, inputs, grid = moved(device, *make(kind))
    with adapters.install(model, fixed(grid, adapters_heads(model), periphery, device)):
        return on_cpu(results(model, inputs))


def moved(device: str, model: nn.Module, inputs: tuple | dict, grid: VideoGrid) -> tuple:
    if device == "cpu":
        return model, inputs, grid
    assert isinstance(inputs, tuple)
    return model.to(device), tuple(x.to(device) for x in inputs), grid


def on_cpu(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.cpu() for name, x in found.items()}


def adapters_heads(model: nn.Module) -> int:
    with adapters.install(model, fv.Dense()) as installed:
        return installed.heads


def on_ranks(kind: str, head: int, sequence: int, periphery="drop", device: str = "cpu") -> dict[str, Tensor]:
    model, inputs, grid = moved(device, *make(kind))
    installed = adapters.install(model, fixed(grid, adapters_heads(model), periphery, device))
    handle = parallelize(model, ParallelConfig(head=head, sequence=sequence))
    assert isinstance(installed.policy, Parallel)
    found = on_cpu(results(model, inputs, handle.reduce_gradients))
    handle.remove()
    installed.remove()
    return found


MODELS = [
    ("dit", 2, 1), ("dit", 1, 2), ("dit", 2, 2), ("dit7", 4, 1), ("dit", 1, 4), ("dit", 4, 2),
    ("wan", 2, 1), ("wan", 1, 4), ("wan22-per-token-time", 1, 2), ("wan22-per-token-time", 2, 2),
    ("cogvideox15-rope", 2, 1), ("cogvideox15-rope", 2, 2), ("ltx", 1, 2), ("skyreels", 1, 2),
    ("hunyuan", 1, 2), ("hunyuan15", 2, 1), ("mochi", 2, 2), ("vace", 1, 2), ("ltx2", 1, 2),
    ("ltx23-split-gated", 2, 1), ("minimax", 1, 2), ("minimax", 2, 2),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "head", "sequence"), MODELS)
def test_outputs_and_all_gradients_equal_one_process(kind: str, head: int, sequence: int, worlds: Worlds) -> None:
    if not kind.startswith("dit"):
        pytest.importorskip("diffusers", reason="needs diffusers: pip install 'foveate[diffusers]'")
    periphery = "pool" if sequence > 1 else "drop"
    truth = one_process(kind, periphery)
    found = worlds(head * sequence).run(on_ranks, kind, head, sequence, periphery)
    for ours in found:
        assert_same(ours, truth)
    assert all(torch.equal(x["output"], found[0]["output"]) for x in found), "ranks return different outputs"


def train(replica: int, model: nn.Module, generator: Callable, finish: Callable) -> dict[str, Tensor]:
    """One step on a replica's own clip of two, its noise and level from `generator`."""
    clip = torch.randn(2, 3, 5, 22, 20, generator=torch.Generator().manual_seed(5))[replica][None]
    draw = generator(3, 0)
    noise, sigma = torch.randn(clip.shape, generator=draw), torch.rand(1, generator=draw)
    out = model((1 - sigma) * clip + sigma * noise, sigma)
    (out - (noise - clip)).square().mean().backward()
    finish()
    return {"noise": noise, "output": out.detach()}


def replicated(wrapper: str) -> dict[str, Tensor]:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model, _, grid = dit()
    installed = adapters.install(model, fixed(VideoGrid(5, 11, 10), 4))
    installed.policy = Fixed({0: one_clip(fixed(grid, 4).selections[0])}, "pool", backend="torch")
    handle = parallelize(model, ParallelConfig(head=2, sequence=1))
    names = dict(model.named_parameters())
    wrapped: nn.Module = model
    if wrapper == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        wrapped = fully_shard(model)
        names = dict(model.named_parameters())
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model)
    finish = handle.reduce_gradients if wrapper == "none" else lambda: None
    found = train(handle.replica, wrapped, handle.generator, finish)
    if wrapper == "fsdp":
        with pytest.raises(ValueError, match="sharded by FSDP"):
            handle.reduce_gradients()
    found |= {name: full(p.grad) for name, p in names.items()}
    assert handle.mesh().mesh_dim_names == ("data", "sequence", "head")
    handle.remove()
    installed.remove()
    return found


def sharded_in_bfloat16() -> tuple[float, str]:
    """Distance of the FSDP2 model that computes in bfloat16 to the float32 one, and the dtype of its gradients."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, inputs, _ = dit()
    with torch.no_grad():
        exact = model(*inputs)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=mixed)
    fully_shard(model, mp_policy=mixed)
    out = model(*inputs)
    out.float().square().mean().backward()
    return float((out.detach().float() - exact).norm() / exact.norm()), str(full(model.embed.weight.grad).dtype)


def test_the_built_in_model_computes_in_bfloat16_under_fsdp(worlds: Worlds) -> None:
    for error, dtype in worlds(2).run(sharded_in_bfloat16):
        assert 0 < error < 0.03
        assert dtype == "torch.float32"


def one_clip(selection: Selection) -> Selection:
    return Selection(selection.words[:1], selection.grid)


def full(x) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x.clone()


@pytest.mark.parametrize("wrapper", ["none", "ddp", "fsdp"])
def test_two_replicas_of_two_ranks_give_the_gradient_of_two_clips(wrapper: str, worlds: Worlds) -> None:
    """Loss scaling of data-parallel x context-parallel, and the noise of peers."""
    found = worlds(4).run(replicated, wrapper)
    noises = [x["noise"] for x in found]
    assert torch.equal(noises[0], noises[1])
    assert torch.equal(noises[2], noises[3])
    assert not torch.equal(noises[0], noises[2])
    truth: dict[str, Tensor] = {}
    for replica in (0, 1):
        model, _, grid = dit()
        policy = Fixed({0: one_clip(fixed(grid, 4).selections[0])}, "pool", backend="torch")

        def stream(*numbers: int, replica: int = replica) -> torch.Generator:
            return torch.Generator().manual_seed(hash((*numbers, replica)) & 0x7FFF_FFFF_FFFF_FFFF)

        with adapters.install(model, policy):
            train(replica, model, stream, lambda: None)
        for name, p in model.named_parameters():
            truth[name] = truth.get(name, 0) + p.grad / 2
    for ours in found:
        assert_same(ours, truth)


def checkpointed() -> dict[str, Tensor]:
    """As `on_ranks`, with every block recomputed in the backward."""
    model, inputs, grid = make("wan")
    installed = adapters.install(model, fixed(grid, adapters_heads(model), "pool"))
    handle = parallelize(model, ParallelConfig(sequence=2))
    model.enable_gradient_checkpointing()
    found = results(model.train(), inputs, handle.reduce_gradients)
    handle.remove()
    installed.remove()
    return found


def test_checkpointed_blocks_are_the_same(worlds: Worlds) -> None:
    pytest.importorskip("diffusers", reason="needs diffusers: pip install 'foveate[diffusers]'")
    truth = one_process("wan", "pool")
    for ours in worlds(2).run(checkpointed):
        assert_same(ours, truth)


FAST = {"warmup": 3, "learn_from": 2, "often": 2, "rare": 4, "force": True}
STEPS = 10


def sparse_training(head: int, sequence: int, checkpointing: bool = False) -> tuple[list[float], dict, dict]:
    """Losses, predictors and what was computed of a short run in which the controller goes sparse."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model, _, _ = dit()
    if checkpointing:
        apply_activation_checkpointing(model, check_fn=lambda x: type(x).__name__ == "Block")
    config = SparsityConfig(tolerance=0.5, periphery="pool", **FAST)
    ranks = head * sequence > 1
    handle = sparsify(model, config, reduce=mean_over_ranks if ranks else None)
    parallel = parallelize(model, ParallelConfig(head=head, sequence=sequence, replan=3, plan="all")) if ranks else None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        x, sigma = torch.randn(1, 3, 5, 22, 20, generator=draw), torch.rand(1, generator=draw)
        loss = (model(x, sigma) + x).square().mean()
        loss.backward()
        if parallel is not None:
            parallel.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
        handle.step()
        if parallel is not None:
            parallel.step()
        losses.append(loss.item())
    assert handle.policy.influence.mean is not None
    state, computed = handle.state_dict()["predictors"], dict(handle.policy.computed)
    state["influence"] = handle.policy.influence.mean
    if parallel is not None:
        assert isinstance(handle.policy, Sparse)
        assert handle.installed.policy is parallel.policy
        parallel.remove()
        assert handle.installed.policy is handle.policy
    handle.remove()
    return losses, state, computed


@pytest.mark.parametrize(("head", "sequence", "checkpointing"), [(2, 1, False), (1, 2, True), (2, 2, False)])
def test_sparse_training_on_ranks_follows_one_process(
    head: int, sequence: int, checkpointing: bool, worlds: Worlds
) -> None:
    """The controller, the predictors and the losses, through dense steps, lessons, decisions and sparse steps."""
    losses, state, computed = sparse_training(1, 1)
    assert computed["sparse"] > 4
    for ours, predictors, counted in worlds(head * sequence).run(sparse_training, head, sequence, checkpointing):
        assert torch.tensor(ours).allclose(torch.tensor(losses), rtol=1e-4)
        if not checkpointing:
            assert counted == computed
        for name, theirs in state.items():
            assert torch.allclose(predictors[name].float(), theirs.float(), rtol=5e-2, atol=2e-3), name


def shape_search(head: int, sequence: int) -> tuple[dict, list[float]]:
    """A search for a shape of tiles that finds one, and losses before and after."""
    torch.manual_seed(0)
    model = VideoDiT(DiTConfig(width=64, depth=1, heads=2, patch=(1, 2, 2)))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    handle = sparsify(model, SparsityConfig(budget=0.3, **{**FAST, "warmup": 6, "pairs": 1}))
    if head * sequence > 1:
        parallelize(model, ParallelConfig(head=head, sequence=sequence))
    losses = []
    for step in range(9):
        still = torch.randn(1, 3, 1, 20, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(still.expand(-1, -1, 16, -1, -1), torch.tensor([0.3])) + still).square().mean()
        loss.backward()
        model.zero_grad()
        handle.step()
        losses.append(loss.item())
    assert handle.policy.computed["sparse"] > 1
    return handle.search.to_dict(), losses


def test_ranks_find_the_shape_of_tiles_that_one_process_finds(worlds: Worlds) -> None:
    search, losses = shape_search(1, 1)
    assert search["shape"] != CUBE
    for theirs, values in worlds(2).run(shape_search, 1, 2):
        assert theirs["shape"] == search["shape"]
        assert theirs["said"][:60] == search["said"][:60]
        assert values == pytest.approx(losses, rel=1e-4)


def enabled_again(kind: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    model, inputs, _ = make(kind)
    keys, hooks = list(model.state_dict()), count_hooks(model)
    outputs = []
    with torch.no_grad():
        plain = model(*inputs)
        for head, sequence in ((2, 1), (1, 2), (2, 1)):
            handle = parallelize(model, ParallelConfig(head=head, sequence=sequence))
            with pytest.raises(ValueError, match="parallelized already"):
                parallelize(model, ParallelConfig(head=2))
            outputs.append(model(*inputs))
            handle.remove()
            handle.remove()
        again = model(*inputs)
    assert list(model.state_dict()) == keys
    assert count_hooks(model) == hooks
    return plain, again, outputs


def count_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def test_remove_leaves_no_trace(worlds: Worlds) -> None:
    for plain, again, outputs in worlds(2).run(enabled_again, "dit"):
        assert torch.equal(plain, again)
        assert all(torch.allclose(x, plain, rtol=1e-4, atol=1e-5) for x in outputs)


def different_inputs() -> str:
    model, (x, sigma), _ = dit()
    handle = parallelize(model, ParallelConfig(head=2))
    try:
        model(x + torch.distributed.get_rank(), sigma)
    except ValueError as error:
        return str(error)
    finally:
        handle.remove()
    return "no error"


def test_inputs_that_differ_between_peers_are_refused(worlds: Worlds) -> None:
    for message in worlds(2).run(different_inputs):
        assert "ranks [1] were given other inputs than rank 0" in message


def refused() -> list[str]:
    messages = []
    small = VideoDiT(DiTConfig(width=32, depth=1, heads=1, patch=(1, 2, 2)))
    for model, config in (
        (small, {"head": 2}),
        (small, {"head": 1, "sequence": 3}),
        (nn.Linear(2, 2), {"sequence": 2}),
    ):
        try:
            parallelize(model, ParallelConfig(**config))
            messages.append("no error")
        except ValueError as error:
            messages.append(str(error))
    with adapters.install(small, lambda layer, q, k, v: q):
        try:
            parallelize(small, ParallelConfig(sequence=2))
        except ValueError as error:
            messages.append(str(error))
    handle = parallelize(small, ParallelConfig(sequence=2))
    try:
        small(torch.randn(1, 3, 1, 8, 8), torch.rand(1))  # 16 tokens
    except ValueError as error:
        messages.append(str(error))
    handle.remove()
    return messages


def test_what_cannot_be_sharded_is_refused_with_advice(worlds: Worlds) -> None:
    expected = [
        "1 heads cannot be spread over head=2 ranks", "do not divide the 2 of this job", "no adapter for Linear",
        "cannot be run with context parallelism", "too few for 2 context-parallel ranks",
    ]  # fmt: skip
    for messages in worlds(2).run(refused):
        for message, words in zip(messages, expected, strict=True):
            assert words in message
    for bad in ({"head": 0}, {"plan": "best"}, {"fetch_cap": 1.5}, {"timeout": 0}, {"replan": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ParallelConfig(**bad)
    with pytest.raises(ValueError, match="torchrun"):
        parallelize(nn.Linear(2, 2), ParallelConfig())
