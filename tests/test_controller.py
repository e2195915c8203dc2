"""The controller: decisions from numbers, and a model whose sparsity rises and falls.

Shapes: B batch, S tokens, H heads, D head dim, W width.
"""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from foveate.attention import Dense, Layer
from foveate.costs import Costs, Machine
from foveate.sparsity import controller
from foveate.sparsity.budgets import at_budget, by_error, smallest_budget
from foveate.sparsity.config import SparsityConfig
from foveate.sparsity.handle import sparsify
from foveate.sparsity.plan import Control, Plan
from foveate.sparsity.profile import CONSTANTS, DROP, POOL, HeadProfile, SparsityProfile
from foveate.tiles import VideoGrid

GRID = VideoGrid(8, 8, 16)
HEADS, DIM, LAYERS = 2, 32, 2
STEPS, TOLERANCE = 240, 0.02
PRICES = Costs("test", machine=Machine(1e11, 0.05, 2.0, 0.05, 0.1, 0.02, 0.0))


class VideoDiT(nn.Module):
    """Named as the adapter table knows it. Values and outputs are learned; queries and keys are given by a dial.

    dial 1: tokens look at their neighbours, a sparse pattern; dial 0: at tokens of like content, wherever they are,
    which no choice of tiles can serve.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(width=HEADS * DIM)
        self.policy = Dense()
        self.blocks = nn.ModuleList(Block(index) for index in range(LAYERS))
        self.dial = 0.0

    def forward(self, x: Tensor, content: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x, content, self.dial, self.policy)
        return x


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.heads = index, HEADS
        self.value, self.out = nn.Linear(HEADS * DIM, HEADS * DIM), nn.Linear(HEADS * DIM, HEADS * DIM)

    def forward(self, x: Tensor, content: Tensor, dial: float, policy) -> Tensor:
        place, near = PLACES.expand(len(x), -1, -1), (16.0 + 4 * self.index) * dial
        far = 8.0 * (1 - dial)
        q = torch.cat([near * place, far * content], -1)
        k = torch.cat([place, content], -1)
        q, k = (y.unsqueeze(2).expand(-1, -1, HEADS, -1).contiguous() for y in (q * DIM**0.5, k))
        q = q * torch.tensor([1.0, 1.5])[:, None]
        out = policy(Layer(self.index, f"blocks.{self.index}", GRID), q, k, self.value(x).unflatten(-1, (HEADS, DIM)))
        return self.out(out.flatten(2))


def places() -> Tensor:
    """(S, 24) unit features of a token's place: their product falls off within a few tokens."""
    sizes = (GRID.frames, GRID.height, GRID.width)
    axes = torch.meshgrid(*(torch.arange(n).float() for n in sizes), indexing="ij")
    raster = torch.stack([axis.flatten() for axis in axes], -1)[GRID.order()]
    rates = torch.randn(3, 12, generator=torch.Generator().manual_seed(1)) * 0.7
    angles = raster @ rates
    return torch.cat([angles.cos(), angles.sin()], -1) / 12**0.5


PLACES = places()


def batch(seed: int, size: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(size, GRID.tokens, HEADS * DIM, generator=draw)
    content = torch.randn(size, GRID.tokens, 8, generator=draw)
    noise = torch.randn(size, GRID.tokens, HEADS * DIM, generator=draw)
    return x, content / content.norm(dim=-1, keepdim=True), noise


def dial_at(step: int) -> float:
    """0, up to 1, and back to 0."""
    return min(1.0, max(0.0, min((step - 30) / 30, (STEPS - 40 - step) / 80)))


class Run:
    """A training loop that is not ours, with everything that a checkpoint of it needs."""

    def __init__(self) -> None:
        self.model, self.teacher = VideoDiT(), VideoDiT()
        with torch.no_grad():
            for weight in self.teacher.parameters():
                weight.mul_(1.5)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        config = SparsityConfig(tolerance=TOLERANCE, often=4, rare=12, pairs=2, warmup=20, learn_from=4)
        self.handle = sparsify(self.model, config, costs=PRICES)
        self.rows: list[dict] = []
        self.middle: tuple[int, dict] | None = None  # a step in the middle of a measurement, and the state after it

    def train(self, steps: range) -> None:
        for step in steps:
            self.model.dial = self.teacher.dial = dial_at(step)
            x, content, noise = batch(step)
            with torch.no_grad():
                target = self.teacher(x, content) + 0.5 * noise
            loss = (self.model(x, content) - target).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.handle.step()
            decision = self.handle.decision
            row = {"step": step, "loss": loss.item(), "active": decision.active, "epsilon": self.handle.control.epsilon}
            row["kept"] = decision.plan.kept if decision.plan and decision.active else 1.0
            if decision.active and step % 4 == 0:
                row["gap"] = fresh_gap(self, 100_000 + step)
            self.rows.append(row)
            if self.middle is None and decision.active and self.handle.main.pairs:
                self.middle = step, copy.deepcopy(self.state())

    def state(self) -> dict:
        saved = self.handle.state_dict()
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "handle": saved}

    def load(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.handle.load_state_dict(state["handle"])


def fresh_gap(run: Run, seed: int) -> float:
    """Of the loss with sparse attention on clips that training does not see."""
    x, content, noise = batch(seed, 2)
    with torch.no_grad():
        target = run.teacher(x, content) + 0.5 * noise
        values = []
        for mode in ("sparse", "dense"):
            with run.handle.policy.using(mode):
                values.append((run.model(x, content) - target).square().mean().item())
    return values[0] / values[1] - 1


@pytest.fixture(scope="module")
def whole() -> Run:
    run = Run()
    run.train(range(STEPS))
    return run


def test_goes_sparse_and_comes_back(whole: Run) -> None:
    active = [row["active"] for row in whole.rows]
    assert not any(active[:40])
    assert any(active)
    assert not any(active[-20:])
    assert min(row["kept"] for row in whole.rows) < 0.15
    assert whole.handle.policy.computed["sparse"] > 2 * LAYERS * 20


def test_the_gap_stays_within_the_tolerance_on_fresh_batches(whole: Run) -> None:
    gaps = [row["gap"] for row in whole.rows if "gap" in row]
    assert len(gaps) > 10
    assert abs(sum(gaps)) / len(gaps) <= TOLERANCE
    assert max(abs(gap) for gap in gaps) <= 1.5 * TOLERANCE  # where an alarm makes it dense


def test_resumed_in_the_middle_of_a_measurement_it_is_the_same_bit_by_bit(whole: Run) -> None:
    """In sparse training, with new objects."""
    assert whole.middle is not None
    step, state = whole.middle
    second = Run()
    second.load(state)
    second.train(range(step + 1, STEPS))
    assert second.rows == whole.rows[step + 1 :]
    assert second.handle.control == whole.handle.control


# Decisions from numbers


SHARES = {DROP: 1.0, -4.0: 0.9, -2.0: 0.6, -1.0: 0.4, -0.5: 0.402, POOL: 0.5, 0.5: 0.8}  # of the error, by constant


def profile_of(error: float, layers: int = 2, heads: int = 3) -> SparsityProfile:
    """Errors that fall with the budget from `error` at the smallest; pooled half of dropped, least at -1."""
    profile = SparsityProfile.empty(layers)
    curve = error * (1 - torch.tensor(profile.budgets)).expand(heads, -1)
    for index in range(layers):
        scale = torch.arange(1, heads + 1)[:, None] / heads
        shares = torch.tensor([SHARES[x] for x in CONSTANTS])
        errors = (curve * scale)[:, None] * shares[:, None]
        layer = HeadProfile(
            recall_oracle=1 - curve, recall_predicted=1 - curve * scale, error_oracle=errors, error_predicted=errors
        )
        profile = profile.updated(index, layer, 0)
    return profile


def linear(budgets, pooled) -> tuple[float, float]:
    return 0.1 + 1.5 * sum(budgets) / len(budgets), 1.0


def test_smallest_budget_interpolates_and_ends_at_everything() -> None:
    error = torch.tensor([[0.4, 0.2], [0.05, 0.01], [0.29, 0.35], [0.4, 0.2]])
    found = smallest_budget(error, (0.1, 0.5), 0.3)
    assert found.tolist() == pytest.approx([0.3, 0.1, 0.1, 0.3])
    # Between the last measured point and everything, which has no error.
    assert smallest_budget(error[:1], (0.1, 0.5), 0.1).tolist() == pytest.approx([0.75])


def test_one_error_level_gives_each_head_its_own_budget_and_the_best_constant() -> None:
    budgets, constants = by_error(profile_of(0.6), 0.12, "auto")
    assert (constants == -1).all()
    assert budgets[0].tolist() == sorted(budgets[0].tolist())
    assert budgets[0, 0] < budgets[0, 2]
    for periphery, constant in (("pool", POOL), ("drop", DROP), (-2.0, -2.0)):
        others, given = by_error(profile_of(0.6), 0.12, periphery)
        assert (given == constant).all()
        assert (others >= budgets).all()
        assert (others > budgets).any()
    at, chosen = at_budget(profile_of(0.6), 0.1, "auto")
    assert (at == 0.1).all()
    assert (chosen == -1).all()


def test_a_constant_that_is_nearly_as_good_stays_and_plans_survive_json() -> None:
    for old, stays in ((-0.5, True), (POOL, False), (DROP, False)):
        plan = Plan(((0.2,) * 3,) * 2, ((old,) * 3,) * 2, (True, False))
        for found in (by_error(profile_of(0.6), 0.06, "auto", None, plan),
                      at_budget(profile_of(0.6), 0.1, "auto", plan)):  # fmt: skip
            assert (found[1] == (old if stays else -1.0)).all()
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict(), allow_nan=False))) == plan


def run_controller(config: SparsityConfig, gaps: list[float | None], error: float = 0.3) -> list[Control]:
    states = [controller.begin(config)]
    for index, gap in enumerate(gaps):
        states.append(controller.advance(states[-1], config, profile_of(error), gap, 10 * index, linear))
    return states[1:]


def test_two_clean_measurements_make_it_sparse_and_an_alarm_dense() -> None:
    config = SparsityConfig(tolerance=0.01)
    states = run_controller(config, [None, None, 0.002, 0.003, 0.004, 0.02])
    assert [state.decision.active for state in states] == [False, False, False, True, True, False]
    assert states[-1].epsilon < 0.9 * states[-2].epsilon
    assert "too large" in states[-1].decision.reason


def test_slightly_above_the_tolerance_twice_is_too_much() -> None:
    states = run_controller(SparsityConfig(tolerance=0.01), [None, None, 0.002, 0.003, 0.011, 0.011])
    assert [state.decision.active for state in states[3:]] == [True, True, False]


def test_inside_the_band_nothing_moves_and_measurements_get_rare() -> None:
    states = run_controller(SparsityConfig(tolerance=0.01, often=10, rare=30), [None, None, 0.002, *[0.008] * 6])
    assert states[-1].decision is states[-3].decision
    assert states[-1].interval == 30


def test_rising_error_ends_sparse_training_though_the_gap_is_fine() -> None:
    config = SparsityConfig(tolerance=0.01)
    last = run_controller(config, [None, None, 0.008, 0.008])[-1]
    assert last.decision.active
    state = controller.advance(last, config, profile_of(30.0), 0.008, 50, linear)
    assert not state.decision.active
    assert "does not pay" in state.decision.reason


def test_fixed_budgets_and_dsv() -> None:
    fixed = run_controller(SparsityConfig(budget=[0.1, 0.2, 0.3]), [None])[-1].decision
    assert fixed.active
    assert fixed.plan is not None
    assert fixed.plan.budgets[0] == pytest.approx((0.1, 0.2, 0.3))
    too_much = run_controller(SparsityConfig(budget=0.7), [None])[-1].decision
    assert not too_much.active
    assert "does not pay" in too_much.reason
    dsv = run_controller(SparsityConfig(rule="dsv"), [None], error=0.15)[-1].decision
    assert dsv.plan is not None
    assert not any(map(any, dsv.plan.pooled))
    assert dsv.plan.budgets[0] == pytest.approx((0.005, 0.005, 1 / 3))
    assert dsv.plan.sparse == (True, True)


@pytest.mark.parametrize("goal", [{"budget": 0.1}, {"rule": "dsv"}, {"tolerance": 0.01}])
def test_layers_that_are_to_stay_dense_do(goal: dict) -> None:
    decision = run_controller(SparsityConfig(dense_layers=(1,), **goal), [None, 0.002], error=0.15)[-1].decision
    assert decision.plan is not None
    assert decision.plan.sparse == (True, False)


def test_profiles_travel_as_one_tensor() -> None:
    layers = [layer for layer in profile_of(0.3).layers if layer is not None]
    for before in layers:
        for name, values in vars(HeadProfile.from_flat(before.flat())).items():
            assert torch.equal(values, getattr(before, name)), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tolerance": 0.01, "budget": 0.1}, "not both"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"budget": 1.5}, "budget"),
        ({"budget": []}, "budget"),
        ({"rule": "dsv", "budget": 0.1}, "no use"),
        ({"rule": "dsv", "periphery": "pool"}, "drops"),
        ({"rule": "mass"}, "rule"),
        ({"periphery": "blur"}, "periphery"),
        ({"query_tile": 32}, "query_tile"),
        ({"tile_shape": (4, 4, 8, 1)}, "tile_shape"),
        ({"tile_shape": (4, 4, 5)}, "tile_shape"),
        ({"backend": "magic"}, "backend"),
        ({"often": 0}, "often"),
        ({"shift": 2.0}, "shift"),
        ({"rare": 10}, "rare"),
        ({"training_free_steps": 3}, "needs a budget"),
    ],
)
def test_bad_settings_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparsityConfig(**arguments)


def test_a_configuration_may_be_given_another_goal() -> None:
    """What nobody set is not set: the default tolerance does not stand in the way of a budget."""
    assert SparsityConfig().goal == 0.005
    assert replace(SparsityConfig(), budget=0.1).goal is None
    assert replace(SparsityConfig(), rule="dsv").goal is None
