"""Video and other tokens in one attention: padding, policies, compiled blocks, LoRA, held states, packed sequences."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import CASES, PADDED, TOKENS, Kept, assert_same, make, minimax_inputs, rand, results
from torch import Tensor, nn
from worlds import Worlds

import foveate as fv
from foveate.attention import Dense, attend, attend_masked, merge
from foveate.models import adapters
from foveate.models.minimax import minimax_grid
from foveate.parallel.comm import Shards, alone
from foveate.parallel.shard import TokenShards
from foveate.sparsity.policy import Sparse
from foveate.tiles import VideoGrid

SMALL = (3, 6, 10)
JOINT = ("hunyuan", "hunyuan15", "mochi", "minimax")
NEW = (*JOINT, "ltx2", "vace")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_attention_against_torch(dtype: torch.dtype) -> None:
    q, k, v = (rand(2, tokens, 2, 40).to(dtype).requires_grad_() for tokens in (9, 7, 7))
    valid = torch.tensor([[1, 0, 1, 1, 0, 0, 1], [1] * 7]).bool()
    weight, shift = rand(2, 9, 2, 40), rand(2, 2, 9)
    state = attend_masked(q, k, v, valid)
    found = torch.autograd.grad((state.out * weight).sum() + (state.lse * shift).sum(), (q, k, v))
    qh, kh, vh = (x.transpose(1, 2).float() for x in (q, k, v))
    logits = (qh @ kh.mT / 40**0.5).masked_fill(~valid[:, None, None], -torch.inf)
    out, lse = (logits.softmax(-1) @ vh).transpose(1, 2), logits.logsumexp(-1)
    truth = torch.autograd.grad((out * weight).sum() + (lse * shift).sum(), (q, k, v))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    names = ("out", "lse", "dq", "dk", "dv")
    ours, theirs = (
        dict(zip(names, (y.float() for y in x), strict=True))
        for x in ((state.out, state.lse, *found), (out, lse, *truth))
    )
    assert_same(ours, theirs, tolerance)
    assert not found[1][0, ~valid[0]].any(), "a gradient has reached a key that is not valid"


def test_what_is_not_valid_reaches_nothing() -> None:
    q, k, v, valid = rand(2, 9, 2, 32), rand(2, 7, 2, 32), rand(2, 7, 2, 32), torch.zeros(2, 7).bool()
    valid[1, :3] = True
    whole = attend_masked(q, k, v, valid)
    k[~valid], v[~valid] = torch.nan, torch.inf
    again = attend_masked(q, k, v, valid)
    assert torch.equal(again.out, whole.out)
    assert torch.equal(again.lse, whole.lse)
    few = attend(q[1:], k[1:, :3], v[1:, :3])
    torch.testing.assert_close(whole.out[1:], few.out)
    torch.testing.assert_close(whole.lse[1:], few.lse)
    other = attend(q, rand(2, 5, 2, 32), rand(2, 5, 2, 32))
    assert torch.equal(merge(other, whole).out[0], other.out[0]), "a sequence without a valid key weighs something"


def more_padding(inputs: dict[str, Tensor], by: int = 3) -> dict[str, Tensor]:
    """Other numbers in padding tokens, and more of them."""
    inputs = dict(inputs)
    text, mask = inputs["encoder_hidden_states"].clone(), inputs["encoder_attention_mask"]
    text[~mask.bool()] = 100 * rand(int((~mask.bool()).sum()), text.shape[-1])
    inputs["encoder_hidden_states"] = torch.cat([text, 100 * rand(2, by, text.shape[-1])], 1)
    inputs["encoder_attention_mask"] = nn.functional.pad(mask, (0, by))
    return inputs


@pytest.mark.parametrize("name", ["hunyuan", "hunyuan15", "mochi"])
def test_padding_never_changes_the_result(name: str) -> None:
    """Sparse and random tiles: what is in padding tokens, and how many there are, changes nothing."""
    model, inputs = make(name, SMALL)
    adapters.install(model, Kept(0.3))
    assert_same(results(model, more_padding(inputs)), results(model, inputs))
    valid = inputs | {"encoder_attention_mask": torch.ones_like(inputs["encoder_attention_mask"])}
    with torch.no_grad():
        assert (model(**valid).sample - model(**inputs).sample)[1].norm() > 1e-3, "the mask does nothing"


@pytest.mark.parametrize("name", ["hunyuan", "minimax"])
def test_a_learned_choice_follows_the_video_alone(name: str) -> None:
    """At budget 1 the sparse policy gives the plain model; at less it is told of video tiles only."""
    model, inputs = make(name, SMALL)
    plain = results(model, inputs)
    installed = adapters.install(model, Dense())
    policy = Sparse(2, 2, 32, budget=1.0, backend="torch")
    installed.policy, policy.learning = policy, True
    assert_same(results(model, inputs), plain)
    policy.mode, policy.learning = "sparse", False
    assert_same(results(model, inputs), plain)
    policy.assign(0, [0.3, 0.6], [True, False], True)
    sparse = results(model, inputs)
    assert installed.grid == VideoGrid(*SMALL)
    assert (sparse["output 0"] - plain["output 0"]).norm() > 1e-4 * plain["output 0"].norm()
    assert policy.computed == {"dense": 2, "sparse": 4}


def outputs(model: nn.Module, inputs: dict) -> dict[str, Tensor]:
    with torch.no_grad():
        return {str(index): out for index, out in enumerate(model(**inputs, return_dict=False))}


@pytest.mark.parametrize("name", [name for name in NEW if name != "hunyuan15"])  # the processor of hunyuan
def test_blocks_compile_without_a_graph_break(name: str) -> None:
    """Every kind of block, with the sparse policy: outputs are those of the blocks as they are; of one model, gradients
    too, which reach the policy's operator through its lse as well."""
    model, inputs = make(name, (2, 5, 8))
    installed, policy = adapters.install(model, Dense()), Sparse(2, 2, 32, budget=0.5, backend="torch")
    installed.policy, policy.mode = policy, "sparse"
    trained = name == "minimax"
    model.requires_grad_(trained)
    compute = results if trained else outputs
    expected = compute(model, inputs)
    torch._dynamo.reset()
    kinds = {type(block): block for block in reversed(installed.blocks().values())}
    for block in kinds.values():
        block.compile(fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    assert_same(compute(model, inputs), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(kinds)
    assert policy.inside_graphs == trained


@pytest.mark.parametrize("name", NEW)
def test_lora_trains_as_on_the_plain_model(name: str) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(
        r=2, target_modules=["to_q", "to_k", "to_v", "add_k_proj", "to_out.0"], init_lora_weights=False
    )

    model, inputs = make(name, SMALL)
    torch.manual_seed(1)
    model.add_adapter(lora)
    plain = results(model, inputs)
    assert any("lora_A" in key for key in plain)
    adapters.install(model, Kept(1.1))
    assert_same(results(model, inputs), plain, 3e-5)  # gradients of matrices of rank 2 are small


def held(name: str, **config: Any) -> None:
    """A forward that never changes: what is held is what would be computed, so held steps give the plain model."""
    model, inputs = make(name, SMALL)
    with torch.no_grad():
        plain = model(**inputs, return_dict=False)
        with fv.reuse(model, fv.ReuseConfig(hold="attention", interval=3, warmup=2, **config)) as handle:
            for step in range(6):
                with handle.during(step=step, sigma=1 - step / 10):
                    found = model(**inputs, return_dict=False)
                for ours, theirs in zip(found, plain, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            assert handle.report().hit_rate > 0


@pytest.mark.parametrize("name", NEW)
def test_held_states_are_merged_with_fresh_ones(name: str) -> None:
    held(name)


def test_held_states_on_two_ranks(worlds: Worlds) -> None:
    worlds(2).run(held, "hunyuan")
    worlds(2).run(partial(held, head=1, states=2, groups=2, local="fresh"), "mochi")
    worlds(2).run(partial(held, head=2), "minimax")


def test_a_policy_without_states_is_refused() -> None:
    model, inputs = make("hunyuan", (2, 3, 4))
    adapters.install(model, lambda layer, q, k, v: attend(q, k, v).out)
    with pytest.raises(ValueError, match=r"gives no lse.*method state"):
        model(**inputs)


def test_a_mask_of_queries_is_refused() -> None:
    model, inputs = make("hunyuan", (2, 3, 4))
    adapters.install(model, Dense())
    mask = {"attention_mask": torch.ones(2, 1, 35, 35)}
    model.transformer_blocks[0].attn.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | mask), with_kwargs=True
    )
    with pytest.raises(ValueError, match="honours masks of other tokens' keys"):
        model(**inputs)


def test_attention_left_out_for_guidance_takes_the_values() -> None:
    """LTX-2's spatio-temporal guidance, of one sequence of the batch and of both."""
    model, inputs = make("ltx23-split-gated", SMALL)
    adapters.install(model, Kept(1.1))
    installed = adapters.installed(model)
    for mask in (torch.tensor([0.0, 1.0]), torch.zeros(2)):
        more = inputs | {"spatio_temporal_guidance_blocks": [1], "perturbation_mask": mask}
        with torch.no_grad():
            ours = model(**more, return_dict=False)
            installed.remove()
            theirs = model(**more, return_dict=False)
            installed = adapters.install(model, Kept(1.1))
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_packed_sequences_are_read_from_their_positions() -> None:
    """Conditioning frames elsewhere, or of another size beside the clip, are other tokens."""
    inputs = minimax_inputs((4, 3, 5))
    found = minimax_grid(None, inputs)
    assert found.grid == VideoGrid(4, 3, 5)
    assert found.rows.tolist() == [*range(TOKENS + 15 + 7, TOKENS + 15 + 7 + 60), *range(TOKENS + 15 + 7)]
    one = minimax_inputs((1, 3, 5))
    assert minimax_grid(None, one).grid == VideoGrid(1, 3, 5)
    rows = inputs["video_indices"]
    beside = inputs["position_ids"].clone()
    beside[TOKENS + 15 : TOKENS + 15 + 7] = torch.tensor([90.0, 1.0, 2.0])  # a smaller frame just before the clip
    longer = torch.cat([rows[:15], torch.arange(TOKENS + 15, TOKENS + 22), rows[15:]])
    assert minimax_grid(None, {"video_indices": longer, "position_ids": beside}).grid == VideoGrid(4, 3, 5)
    broken = inputs["position_ids"].clone()
    broken[-2, 2] = 77.0
    with pytest.raises(ValueError, match="no raster"):
        minimax_grid(None, {"video_indices": rows, "position_ids": broken})


@pytest.mark.parametrize("name", ["vace", "minimax", "hunyuan", "hunyuan-first-frame"])
def test_one_context_parallel_rank_runs_the_same_path(name: str) -> None:
    model, inputs = make(name, SMALL)
    plain = results(model, inputs)
    installed = adapters.install(model, Kept(1.1))
    shards = TokenShards(installed, alone(), lambda grid: Shards((0, grid.tokens)))
    if name == "hunyuan-first-frame":
        with pytest.raises(ValueError, match=r"token_replace_emb.*cannot be run with context parallelism"):
            model(**inputs)
        return
    assert_same(results(model, inputs), plain)
    shards.remove()
    assert_same(results(model, inputs), plain)


def test_head_dims_between_those_of_kernels_are_filled_up_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card, where 40 becomes 64, and so does 48, with the columns of a mask."""
    from foveate import attention

    q, k, v = (rand(2, 64, 2, 40) for _ in range(3))
    valid = torch.rand(2, 64) < 0.7
    plain, masked = attend(q, k, v), attend_masked(q, k, v, valid)
    monkeypatch.setattr(
        attention, "kernel_dim", lambda dim, device: next(size for size in attention.HEAD_DIMS if size >= dim)
    )
    for ours, theirs in ((attend(q, k, v), plain), (attend_masked(q, k, v, valid), masked)):
        torch.testing.assert_close(ours.out, theirs.out)
        torch.testing.assert_close(ours.lse, theirs.lse)


def test_models_without_a_row_are_refused_with_the_way_out() -> None:
    class Unknown(nn.Module):
        config = SimpleNamespace()

    with pytest.raises(ValueError, match=r"no adapter for Unknown; supported are .*MiniMaxH3.*adding-a-model"):
        fv.sparsify(Unknown(), fv.SparsityConfig())


assert PADDED.shape[1] == TOKENS
assert set(NEW) <= set(CASES)
