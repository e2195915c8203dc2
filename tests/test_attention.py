"""`attend` against the float64 oracle, states that merge, and errors."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from foveate import AttnState, Selection, VideoGrid, attend, attention, costs, merge, select
from foveate.kernels import dense

TOLERANCE = 1e-5  # relative L2, float32 against float64
EXAMPLES = 220


def relative(value: Tensor, truth: Tensor, floor: float = 0.0) -> float:
    """Relative L2 error; `floor` is the scale under which a difference is rounding of what cancelled."""
    value, truth = value.double(), truth.double()
    return float((value - truth).norm() / truth.norm().clamp(min=max(floor, 1e-30)))


def run(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor, dtype: torch.dtype, **options
) -> dict[str, Tensor]:
    """out, lse and gradients; rows without a key keep their lse out of the loss."""
    inputs = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
    state = attend(*inputs, **options)
    finite = state.lse.masked_fill(state.lse.isinf(), 0.0)
    loss = (state.out * dout.to(dtype)).sum() + (finite * dlse.to(finite.dtype)).sum()
    dq, dk, dv = torch.autograd.grad(loss, inputs)
    return {"out": state.out.detach(), "lse": state.lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def compare(got: dict[str, Tensor], truth: dict[str, Tensor], scale: float) -> None:
    empty = truth["lse"] == -torch.inf
    assert torch.equal(got["lse"] == -torch.inf, empty)
    for name in ("out", "lse", "dq", "dk", "dv"):
        a, b = (x[name].masked_fill(empty, 0.0) if name == "lse" else x[name] for x in (got, truth))
        assert torch.isfinite(a).all(), name
        # dq and dk are differences of terms this large: where they cancel to 0 (one key, say) only rounding is left.
        floor = scale * math.sqrt(b.numel()) if name in ("dq", "dk", "lse") else 0.0
        error = relative(a, b, floor)
        assert error <= TOLERANCE, f"{name}: {error:.2e}"


def draw_inputs(
    grid: VideoGrid, batch: int, heads: int, groups: int, dim: int, seed: int, strided: bool
) -> list[Tensor]:
    noise = torch.Generator().manual_seed(seed)
    size = (batch, grid.tokens, heads + 2 * groups, dim)
    fused = torch.randn(size, generator=noise, dtype=torch.float64)
    q, k, v = fused.split([heads, groups, groups], dim=2)
    if not strided:
        q, k, v = (x.contiguous() for x in (q, k, v))
    dout = torch.randn(batch, grid.tokens, heads, dim, generator=noise, dtype=torch.float64)
    dlse = torch.randn(batch, heads, grid.tokens, generator=noise, dtype=torch.float64)
    return [q, k, v, dout, dlse]


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 13), st.integers(1, 17)),
    text=st.sampled_from([0, 0, 1, 40]),
    dim=st.sampled_from([24, 32, 64, 72, 96, 128, 160, 256]),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)]),
    batch=st.integers(1, 2),
    query_tile=st.sampled_from([64, 128]),
    density=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    periphery=st.sampled_from(["drop", "pool", "mixed", -0.8]),
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_torch_backend_equals_the_oracle(
    sizes, text, dim, heads, batch, query_tile, density, periphery, strided, seed
) -> None:
    grid = VideoGrid(*sizes, text=text)
    inputs = draw_inputs(grid, batch, *heads, dim, seed, strided)
    shape = (batch, heads[0], grid.tiles(query_tile), grid.tiles())
    # Another mask for each batch and head; some rows stay empty on purpose.
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density
    selection = Selection.from_dense(mask, grid, query_tile=query_tile)
    kinds = ["drop", "pool", -1.5, 0.5][: heads[0]] if periphery == "mixed" else periphery
    truth = run(*inputs, torch.float64, selection=selection, periphery=kinds, backend="reference")
    got = run(*inputs, torch.float32, selection=selection, periphery=kinds, backend="torch")
    compare(got, truth, scale=0.1)


@pytest.mark.parametrize("periphery", ["drop", "pool"])
def test_torch_backend_off_the_cpu_equals_the_oracle(periphery: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other devices have no fused kernel for short rows: their plain products, run here."""
    monkeypatch.setattr(dense, "row_kernels", lambda device: (dense._plain_forward, dense._plain_backward))
    grid = VideoGrid(5, 7, 9, text=11)
    inputs = draw_inputs(grid, 2, 4, 2, 32, 0, strided=True)
    mask = torch.rand(2, 4, grid.tiles(), grid.tiles(), generator=torch.Generator().manual_seed(0)) < 0.3
    options = {"selection": Selection.from_dense(mask, grid), "periphery": periphery}
    truth = run(*inputs, torch.float64, backend="reference", **options)
    compare(run(*inputs, torch.float32, backend="torch", **options), truth, scale=0.1)


def test_constants_of_the_periphery_can_be_learned() -> None:
    """Their gradient, also through lse, equals autograd's through the oracle, with a dropped head among them."""
    grid = VideoGrid(5, 7, 9, text=11)
    q, k, v, dout, dlse = draw_inputs(grid, 2, 4, 2, 32, 0, strided=True)
    mask = torch.rand(2, 4, grid.tiles(), grid.tiles(), generator=torch.Generator().manual_seed(0)) < 0.3
    selection = Selection.from_dense(mask, grid)
    grads = {}
    for backend in ("reference", "torch"):
        dtype = torch.float64 if backend == "reference" else torch.float32
        constants = torch.tensor([-1.0, 0.0, -torch.inf, 0.6], requires_grad=True)
        inputs = (x.to(dtype) for x in (q, k, v))
        state = attend(*inputs, selection, periphery=constants, backend=backend)
        lse = torch.where(state.lse.isfinite(), state.lse, 0.0)
        ((state.out * dout.to(dtype)).sum() + (lse * dlse.to(dtype)).sum()).backward()
        grads[backend] = constants.grad
    assert grads["torch"][2] == 0
    assert grads["reference"].abs().max() > 1
    assert relative(grads["torch"], grads["reference"]) <= TOLERANCE


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 111, 200])
@pytest.mark.parametrize("groups", [1, 3])
def test_dense_equals_the_oracle_with_gradients_into_lse(tokens: int, groups: int) -> None:
    inputs = draw_inputs(VideoGrid(1, 1, tokens), 2, 3, groups, 32, tokens, strided=True)
    compare(run(*inputs, torch.float32), run(*inputs, torch.float64, backend="reference"), scale=0.1)


@pytest.mark.parametrize("factor", [1.0, 4.0, 16.0])
def test_large_logits_keep_their_relative_error(factor: float) -> None:
    grid = VideoGrid(3, 8, 9)
    q, k, v, dout, dlse = draw_inputs(grid, 1, 2, 2, 64, 3, strided=False)
    mask = torch.rand(1, 2, grid.tiles(), grid.tiles(), generator=torch.Generator().manual_seed(1)) < 0.5
    inputs = (q * factor, k * factor, v, dout, dlse)
    options = {"selection": Selection.from_dense(mask, grid), "periphery": "pool"}
    got = run(*inputs, torch.float32, backend="torch", **options)
    truth = run(*inputs, torch.float64, backend="reference", **options)
    for name in ("out", "dq", "dk", "dv"):
        # Rounding of a logit of size factor^2 moves its weight by as much: the oracle in float32 errs alike.
        assert relative(got[name], truth[name]) <= TOLERANCE * max(1.0, factor**2 / 16), name


def test_keeping_everything_is_dense_attention() -> None:
    grid = VideoGrid(5, 7, 9, text=3)
    inputs = draw_inputs(grid, 1, 2, 2, 32, 0, strided=True)
    everything = Selection.from_dense(torch.ones(1, 2, grid.tiles(), grid.tiles(), dtype=torch.bool), grid)
    dense = run(*inputs, torch.float32)
    for periphery in ("drop", "pool"):
        compare(
            run(*inputs, torch.float32, selection=everything, periphery=periphery, backend="torch"), dense, scale=0.1
        )


def test_shapes_may_change_and_change_back() -> None:
    results = []
    for sizes in ((3, 7, 9), (1, 5, 5), (3, 7, 9)):
        grid = VideoGrid(*sizes)
        inputs = draw_inputs(grid, 1, 2, 2, 32, 0, strided=False)
        mask = torch.rand(1, 2, grid.tiles(), grid.tiles(), generator=torch.Generator().manual_seed(5)) < 0.6
        results.append(run(*inputs, torch.float32, selection=Selection.from_dense(mask, grid), backend="torch"))
    assert all(torch.equal(results[0][name], results[2][name]) for name in results[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_served_in_its_own_dtype(dtype: torch.dtype) -> None:
    grid = VideoGrid(3, 7, 9)
    inputs = [x.to(dtype).double() for x in draw_inputs(grid, 1, 2, 2, 64, 0, strided=False)]
    mask = torch.rand(1, 2, grid.tiles(), grid.tiles(), generator=torch.Generator().manual_seed(5)) < 0.6
    selection = Selection.from_dense(mask, grid)
    got = run(*inputs, dtype, selection=selection, backend="torch")
    truth = run(*inputs, torch.float64, selection=selection, backend="reference")
    assert got["out"].dtype == got["dk"].dtype == dtype
    for name in ("out", "dq", "dk", "dv"):
        assert relative(got[name], truth[name]) <= 8e-3, name


def split_states(parts: int, dtype: torch.dtype = torch.float32) -> tuple[list[AttnState], AttnState]:
    grid = VideoGrid(1, 1, 96)
    q, k, v, *_ = (x.to(dtype) for x in draw_inputs(grid, 1, 2, 2, 32, 0, strided=False))
    states = [attend(q, a, b) for a, b in zip(k.chunk(parts, 1), v.chunk(parts, 1), strict=True)]
    return states, attend(*(x.double() for x in (q, k, v)), backend="reference")


def test_states_over_disjoint_keys_merge_to_the_whole_in_any_order() -> None:
    states, whole = split_states(4)
    a, b, c, d = states
    for merged in (merge(a, b, c, d), merge(merge(d, c), merge(b, a)), merge(AttnState.empty_like(a.out), d, b, c, a)):
        assert relative(merged.out, whole.out) <= TOLERANCE
        assert relative(merged.lse, whole.lse) <= TOLERANCE


def test_merging_does_not_touch_its_inputs_and_empty_is_the_identity() -> None:
    (a, b), _ = split_states(2)
    before = a.out.clone(), a.lse.clone()
    merge(a, b)
    empty = AttnState.empty_like(a.out)
    same = merge(a, empty)
    assert torch.equal(a.out, before[0])
    assert torch.equal(a.lse, before[1])
    assert torch.equal(same.out, a.out)
    assert torch.equal(same.lse, a.lse)
    nothing = merge(empty, empty)
    assert (nothing.out == 0).all()
    assert (nothing.lse == -torch.inf).all()


def test_infinite_lse_merges_without_nan() -> None:
    (a, b), _ = split_states(2)
    certain = AttnState(b.out, torch.full_like(b.lse, torch.inf))
    assert torch.equal(merge(a, certain).out, b.out)
    assert torch.isfinite(merge(certain, certain).out).all()


def test_bfloat16_states_merge_in_float32() -> None:
    errors = {
        parts: relative(merge(*split_states(parts, torch.bfloat16)[0]).out, split_states(parts)[1].out)
        for parts in (1, 8)
    }
    assert errors[8] <= 1.2 * errors[1]


def test_gradients_of_a_users_own_merge_are_right() -> None:
    q, k, v, dout, _ = draw_inputs(VideoGrid(1, 1, 96), 1, 2, 2, 32, 0, strided=False)
    inputs = [x.float().requires_grad_() for x in (q, k, v)]
    parts = [attend(inputs[0], a, b) for a, b in zip(inputs[1].chunk(3, 1), inputs[2].chunk(3, 1), strict=True)]
    got = torch.autograd.grad((merge(*parts).out * dout.float()).sum(), inputs)
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    truth = torch.autograd.grad((attend(*exact, backend="reference").out * dout).sum(), exact)
    for a, b in zip(got, truth, strict=True):
        assert relative(a, b) <= TOLERANCE


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_sparse_layer_compiles_whole(compiler: str) -> None:
    grid = VideoGrid(3, 8, 9)
    inputs = [x.float() for x in draw_inputs(grid, 1, 2, 2, 32, 0, strided=True)[:3]]
    mask = torch.rand(1, 2, grid.tiles(), grid.tiles(), generator=torch.Generator().manual_seed(5)) < 0.6
    selection = Selection.from_dense(mask, grid)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        chosen = select(q, k, grid, budget=[0.5, 0.7])
        state = merge(attend(q * 1.5, k, v, selection, periphery=["pool", "drop"]), attend(q, k, v, chosen))
        return state.out.sin().sum() + state.lse.cos().sum() + attend(q, k, v).out.cos().sum()

    def gradients(function) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*leaves), leaves)

    torch.compiler.reset()
    compiled = gradients(torch.compile(layer, fullgraph=True, backend=compiler))
    for got, truth in zip(compiled, gradients(layer), strict=True):
        assert relative(got, truth) <= 1e-5


def test_the_operator_tells_torch_the_truth() -> None:
    grid = VideoGrid(1, 10, 10)
    q, k, v = (x.float().requires_grad_() for x in draw_inputs(grid, 1, 2, 2, 32, 0, strided=True)[:3])
    words = Selection.from_dense(torch.ones(1, 2, 2, 2, dtype=torch.bool), grid).words
    for arguments in ((words, torch.tensor([True, False]), "torch"), (None, None, "dense")):
        torch.library.opcheck(torch.ops.foveate.attend.default, (q, k, v, *arguments, 64, 64, 0.2, False))
        parts = [x.detach().bfloat16() for x in (q, k, v)]  # who merges results also differentiates
        torch.library.opcheck(torch.ops.foveate.attend.default, (*parts, *arguments, 64, 64, 0.2, False, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_operator_returns_the_dtypes_it_promises(dtype: torch.dtype) -> None:
    """Gradients into lse widen the inputs on the way; autograd would hide a wrong dtype, a compiled graph would not."""
    grid = VideoGrid(1, 10, 10)
    q, k, v, dout, dlse = draw_inputs(grid, 1, 2, 2, 32, 0, strided=False)
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    words = Selection.from_dense(torch.ones(1, 2, 2, 2, dtype=torch.bool), grid).words
    for chosen, kernel in ((words, "torch"), (None, "dense")):
        out, lse = torch.ops.foveate.attend(q, k, v, chosen, None, kernel, 64, 64, 0.2, False)
        grads = torch.ops.foveate.attend_backward(
            dout, dlse.float(), q, k, v, out, lse, chosen, None, kernel, 64, 64, 0.2
        )
        assert [grad.dtype for grad in grads] == [dtype] * 3
        wide = torch.ops.foveate.attend_backward(dout, None, q, k, v, out, lse, chosen, None, kernel, 64, 64, 0.2, True)
        assert [grad.dtype for grad in wide] == [torch.float32] * 3
        assert [grad.shape for grad in grads] == [x.shape for x in (q, k, v)]


def test_checkpointing_runs_the_same_attention_again() -> None:
    grid = VideoGrid(3, 8, 9)
    q, k, v, dout, _ = draw_inputs(grid, 1, 2, 2, 32, 0, strided=False)
    mask = torch.rand(1, 2, grid.tiles(), grid.tiles(), generator=torch.Generator().manual_seed(5)) < 0.6
    selection = Selection.from_dense(mask, grid)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    plain = torch.autograd.grad((attend(*leaves, selection).out * dout.float()).sum(), leaves)
    again = checkpoint(lambda *x: attend(*x, selection).out, *leaves, use_reentrant=False)
    for got, truth in zip(torch.autograd.grad((again * dout.float()).sum(), leaves), plain, strict=True):
        assert torch.equal(got, truth)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(("name", "tile"), [("triton", 64), ("fa4", 128)])
def test_backends_that_cannot_run_here_say_so(name: str, tile: int) -> None:
    grid = VideoGrid(1, 10, 20)
    q = torch.zeros(1, 200, 2, 64)
    tiles = grid.tiles(tile)
    mask = torch.ones(1, 2, tiles, tiles, dtype=torch.bool)
    with pytest.raises((ValueError, ImportError), match=r"CUDA|NVIDIA|flash-attn-4"):
        attend(q, q, q, Selection.from_dense(mask, grid, query_tile=tile, kv_tile=tile), backend=name)


@pytest.mark.parametrize(("fa4_ms", "expected"), [(3.0, "fa4"), (9.0, "torch"), (None, "torch")])
def test_auto_takes_the_faster_dense_kernel_of_the_cards_table(fa4_ms, expected, monkeypatch) -> None:
    row = {"length": 32768, "heads": 8, "dim": 128, "density": 1.0, "lists": "all", "backward_ms": 1.0}
    times = {"cudnn dense": 6.0, "fa4 dense": fa4_ms}
    rows = tuple({"kernel": name, "forward_ms": ms, **row} for name, ms in times.items() if ms is not None)
    monkeypatch.setattr(attention, "unavailable", lambda name, device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    card = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    monkeypatch.setattr(attention.costs, "for_device", lambda kind, name: costs.Costs("a table", rows))
    attention.choose_backend.cache_clear()
    name, reason = attention.choose_backend("cuda", 0, (4096, 4, 64))
    assert (name, "a table" in reason) == (expected, True)
    assert attention.choose_backend("cuda", 0, (4096, 4, 96))[0] == "torch"  # no kernel of flash-attn-4's
    assert attention.choose_backend("cuda", 0, (4096, 4, 64), torch.float32)[0] == "torch"
    assert attention.choose_backend("cuda", 64)[0] == "triton"
    assert attention.choose_backend("cuda", 128)[0] == "fa4"
    name, reason = attention.choose_backend("cuda", 128, (4096, 4, 96))
    assert (name, "takes no head dim 96" in reason) == ("triton", True)
    assert attention.choose_backend("cuda", 128, repeats=True)[0] == "triton"
    card[0] = 10
    attention.choose_backend.cache_clear()
    name, reason = attention.choose_backend("cuda", 128)
    assert (name, "this card has 10" in reason) == ("triton", True)
    assert attention.choose_backend("cuda", 0, repeats=True)[0] == "torch"
    attention.choose_backend.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_named_backend_is_not_ignored_by_dense_attention() -> None:
    q = torch.zeros(1, 64, 2, 64)
    with pytest.raises(ValueError, match="NVIDIA"):
        attend(q, q, q, backend="fa4")


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("dim", "kernel"), [(24, 32), (72, 96), (80, 96), (160, 256)])
def test_other_head_dims_are_filled_up_for_kernels_that_lack_them(dim, kernel, sparse, monkeypatch) -> None:
    """What GPU kernels are given, on the CPU: the scale is that of the true head dim, gradients are cut off."""
    assert attention.kernel_dim(dim, "cuda") == kernel
    seen, plain = [], attention._load
    monkeypatch.setattr(attention, "kernel_dim", lambda dim, device: kernel)
    monkeypatch.setattr(attention, "_load", lambda name, q, *rest: seen.append(q.shape[-1]) or plain(name, q, *rest))
    grid = VideoGrid(3, 5, 9, text=3)
    inputs = draw_inputs(grid, 2, 4, 2, dim, 0, strided=True)
    mask = torch.rand(2, 4, grid.tiles(), grid.tiles(), generator=torch.Generator().manual_seed(0)) < 0.5
    options = {"selection": Selection.from_dense(mask, grid), "periphery": "pool"} if sparse else {}
    got = run(*inputs, torch.float32, backend="torch", **options)
    compare(got, run(*inputs, torch.float64, backend="reference", **options), scale=0.1)
    assert seen == [kernel if sparse or kernel <= 128 else dim] * 2
    assert got["out"].shape[-1] == got["dk"].shape[-1] == dim
    part = torch.ops.foveate.attend(*(x.float() for x in inputs[:3]), None, None, "dense", 64, 64, 0.2, False, True)[0]
    assert part.shape[-1] == dim  # and for those who merge parts


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", ["torch", "plain", "reference"])
def test_a_nan_reaches_only_the_rows_that_keep_its_tile(backend: str, value: float, monkeypatch) -> None:
    if backend == "plain":
        monkeypatch.setattr(dense, "row_kernels", lambda device: (dense._plain_forward, dense._plain_backward))
        backend = "torch"
    grid = VideoGrid(1, 10, 30)  # four whole tiles, and one of 44 tokens
    q, k, v, dout, dlse = draw_inputs(grid, 1, 3, 3, 32, 0, strided=False)
    mask = torch.zeros(1, 3, 5, 5, dtype=torch.bool)
    rows = [[0, 1, 3], [0, 1], [3], [1, 2, 4], [4]]  # tile 2 is bad: row 3 keeps it, and head 2 pools it elsewhere
    for row, columns in enumerate(rows):
        mask[:, :, row, columns] = True
    options = {"selection": Selection.from_dense(mask, grid), "periphery": ["drop", "drop", "pool"], "backend": backend}
    clean = run(q, k, v, dout, dlse, torch.float32, **options)
    for name, bad in (("k", k.clone()), ("v", v.clone())):
        bad[:, 130] = value
        got = run(q, *((bad, v) if name == "k" else (k, bad)), dout, dlse, torch.float32, **options)
        touched = torch.arange(300) // 64 == 3
        for part in ("out", "lse", "dq"):
            rows_of = {
                x: (y.transpose(1, 2) if part != "lse" else y)[0] for x, y in (("a", got[part]), ("b", clean[part]))
            }
            assert torch.equal(rows_of["a"][:2, ~touched], rows_of["b"][:2, ~touched]), (name, part)
            if (name, part) != ("v", "lse"):
                assert not torch.isfinite(rows_of["a"][:2, touched]).any(-1).all(), (name, part)
                assert not torch.isfinite(rows_of["a"][2]).all(), (name, part)
        shared = torch.isin(torch.arange(300) // 64, torch.tensor([1, 2, 4]))  # with the row that sees it
        for part in ("dk", "dv"):
            assert torch.equal(got[part][:, ~shared, :2], clean[part][:, ~shared, :2]), (name, part)


def test_an_empty_state_counts_for_nothing_whatever_its_out_holds() -> None:
    q, k, v = (x.float() for x in draw_inputs(VideoGrid(1, 1, 70), 1, 2, 2, 32, 0, strided=False)[:3])
    state, out = attend(q, k, v), torch.full_like(q, torch.nan).requires_grad_()
    lse = torch.full((1, 2, 70), -torch.inf).requires_grad_()
    merged = merge(state, AttnState(out, lse))
    assert torch.equal(merged.out, state.out)
    for grad in torch.autograd.grad(merged.out.sum(), (out, lse)):
        assert (grad == 0).all()


SPARSE = pytest.mark.parametrize("sparse", [False, True])


def small(sparse: bool, batch: int = 1) -> tuple[Tensor, Selection | None]:
    q = torch.randn(batch, 100, 2, 32, generator=torch.Generator().manual_seed(0))
    full = torch.ones(batch, 2, 2, 2, dtype=torch.bool)
    return q, Selection.from_dense(full, VideoGrid(1, 1, 100)) if sparse else None


@SPARSE
def test_transforms_are_refused_not_answered_with_zeros(sparse: bool) -> None:
    q, selection = small(sparse)
    keys = q.clone()

    def out(q: Tensor, backend: str = "auto") -> Tensor:
        return attend(q, keys.to(q.dtype), keys.to(q.dtype), selection, backend=backend).out

    def dual() -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            return out(torch.autograd.forward_ad.make_dual(q, q))

    def twice() -> Tensor:
        x = q.clone().requires_grad_()
        (grad,) = torch.autograd.grad(out(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    refused = (
        dual,
        twice,
        lambda: torch.func.jvp(out, (q,), (q,)),
        lambda: torch.func.vmap(out)(q[None]),
        lambda: torch.func.grad(lambda q: out(q).sum())(q),
    )
    for ask in refused:
        with pytest.raises(NotImplementedError, match="reference"):
            ask()
    _, tangent = torch.func.jvp(lambda q: out(q, "reference"), (q.double(),), (q.double(),))
    step = 1e-6
    numeric = (out(q.double() * (1 + step)) - out(q.double() * (1 - step))) / (2 * step)
    assert relative(tangent, numeric) < 1e-6


@SPARSE
def test_tensors_of_every_kind_are_served(sparse: bool) -> None:
    q, selection = small(sparse, batch=0)
    for backend in ("auto", "reference"):
        x = q.clone().requires_grad_()
        state = attend(x, x, x, selection, backend=backend)
        (state.out.sum() + state.lse.sum()).backward()
        assert state.out.shape == x.grad.shape == (0, 100, 2, 32)
    q, selection = small(sparse)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend(q, q, q, selection).out, attend(q, q, q, selection).out.float())
    meta = q.to("meta").requires_grad_()
    for backend in ("auto", "reference"):
        state = attend(meta, meta, meta, selection and selection.to("meta"), periphery="pool", backend=backend)
        state.out.sum().backward()
        assert meta.grad.shape == state.out.shape == q.shape
    with attention.no_autocast(meta.device), FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(1, 100, 2, 32, requires_grad=True)
        attend(fake, fake, fake, selection).out.sum().backward()
        assert fake.grad.shape == fake.shape
    for index in range(3):
        parts = [q.clone().requires_grad_(index == place) for place in range(3)]
        attend(*parts, selection).out.square().sum().backward()
        assert [x.grad is not None for x in parts] == [index == place for place in range(3)]
    with torch.inference_mode():
        inside = q.clone()
    assert torch.equal(attend(inside, inside, inside, selection).out, attend(q, q, q, selection).out)
    wide = attend(q.double(), q.double(), q.double(), selection)
    assert (wide.out.dtype, wide.lse.dtype) == (torch.float64, torch.float64)
    assert relative(attend(q, q, q, selection).out, wide.out) < TOLERANCE


Q = torch.zeros(1, 100, 2, 32)
GRID = VideoGrid(1, 1, 100)
FULL = Selection.from_dense(torch.ones(1, 2, 2, 2, dtype=torch.bool), GRID)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Q[0], Q[0], Q[0]), {}, r"\(B, S, H, D\)"),
        ((Q, Q, Q[:, :50]), {}, r"\(B, S, H, D\)"),
        ((torch.zeros(1, 100, 2, 257),) * 3, {}, "head dim must lie in 1 ... 256"),
        ((Q.double(),) * 3, {"backend": "torch"}, "reference"),
        ((torch.zeros(1, 9, 3, 32), torch.zeros(1, 9, 2, 32), torch.zeros(1, 9, 2, 32)), {}, "do not divide"),
        ((Q.int(), Q.int(), Q.int()), {}, "must share one of"),
        ((Q, Q.half(), Q.half()), {}, "must share one of"),
        ((Q, Q, Q), {"backend": "magic"}, "one of auto"),
        ((Q[:, :0], Q, Q), {}, "at least one query"),
        ((Q[:, :64], Q, Q), {"selection": FULL}, "the selection is for 100 tokens"),
        ((Q.expand(2, -1, -1, -1),) * 3, {"selection": FULL}, "batch, heads"),
        ((Q, Q, Q), {"selection": FULL, "periphery": "blur"}, "periphery"),
        ((Q, Q, Q), {"selection": FULL, "periphery": ["drop"]}, "each of 2 heads"),
        ((Q, Q, Q), {"selection": FULL, "periphery": torch.tensor([True])}, r"float32 or bool \(2,\)"),
        ((Q, Q, Q), {"selection": FULL, "periphery": [0.0, float("nan")]}, "a number below infinity"),
    ],
)
def test_bad_input_says_what_to_do(arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(*arguments, **options)
