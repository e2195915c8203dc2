"""The arms of study_training.py: what attention does, what the loss is, where training starts, for how many steps."""

from dataclasses import dataclass, field
from typing import Any

BUDGETS = (0.1, 0.05, 0.03)
REST = {"drop": "drop", "pool": "pool", "weighed pool": "auto"}  # foveate's own peripheries
BRANCHES = ("coarse", "linear")
OBJECTIVES = ("flow", "distilled", "distilled 1 in 8")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """kind: dense, foveate (by `sparsity`, further arguments of SparsityConfig), window or random (budget only).

    branch: a learned one for the tiles that are not kept, beside foveate's. objective: flow (noise - clip), distilled
    (the velocity of the frozen dense checkpoint), or that in one step of eight. start: checkpoint or scratch.
    in_time_of: as many steps as fit into that arm's seconds, which must have been run before, with this arm's twin.
    """

    name: str
    kind: str
    budget: float = 1.0
    sparsity: dict[str, Any] = field(default_factory=dict)
    branch: str = ""
    objective: str = "flow"
    start: str = "checkpoint"
    in_time_of: tuple[str, str] | None = None


def _all() -> dict[str, Arm]:
    arms = [Arm(name="dense", kind="dense"), Arm(name="dense, scratch", kind="dense", start="scratch")]
    for budget in BUDGETS:
        share = f"{budget:.0%}".replace("%", " %")
        for objective in OBJECTIVES:
            end = "" if objective == "flow" else f", {objective}"
            for rest, periphery in REST.items():
                fixed = {"budget": budget, "periphery": periphery}
                arms.append(Arm(
                    name=f"{share}, {rest}{end}", kind="foveate", budget=budget, sparsity=fixed, objective=objective
                ))  # fmt: skip
            for branch in BRANCHES:
                fixed = {"budget": budget, "periphery": "drop"}
                arms.append(Arm(
                    name=f"{share}, {branch}{end}", kind="foveate", budget=budget, sparsity=fixed, branch=branch,
                    objective=objective,
                ))  # fmt: skip
        for kind in ("window", "random"):
            arms.append(Arm(name=f"{share}, {kind}", kind=kind, budget=budget))
    for budget, name in ((0.1, "10 %, weighed pool"), (0.05, "5 %, weighed pool")):
        fixed = {"budget": budget, "periphery": "auto"}
        arms.append(Arm(
            name=f"{name}, in dense's time", kind="foveate", budget=budget, sparsity=fixed, in_time_of=("dense", name)
        ))  # fmt: skip
        arms.append(Arm(name=f"{name}, scratch", kind="foveate", budget=budget, sparsity=fixed, start="scratch"))
    arms += [
        Arm(name="tolerance 0.5 %", kind="foveate", sparsity={"tolerance": 0.005, "often": 10, "rare": 30}),
        Arm(name="DSV's rule", kind="foveate", sparsity={"rule": "dsv"}),
    ]
    return {arm.name: arm for arm in arms}


ARMS = _all()
CURVES = {  # arms that are judged on their way, too (first seed), and whose sparsity is measured at the end
    "dense", "10 %, weighed pool", "5 %, weighed pool", "10 %, weighed pool, in dense's time",
    "5 %, weighed pool, in dense's time", "tolerance 0.5 %",
    "dense, scratch", "10 %, weighed pool, scratch",
}  # fmt: skip
QUEUE: list[tuple[str, int]] = [  # arm and seed, those that say most first
    ("dense", 0),
    ("10 %, weighed pool", 0),
    ("5 %, weighed pool", 0),
    ("5 %, drop", 0),
    ("10 %, window", 0),
    ("10 %, random", 0),
    ("3 %, weighed pool", 0),
    ("5 %, coarse", 0),
    ("5 %, linear", 0),
    ("dense", 1),
    ("10 %, weighed pool", 1),
    ("10 %, weighed pool, in dense's time", 0),
    ("dense", 2),
    ("10 %, weighed pool", 2),
    ("5 %, weighed pool, in dense's time", 0),
    ("5 %, weighed pool, distilled", 0),
    ("10 %, drop", 0),
    ("5 %, pool", 0),
    ("5 %, drop, distilled", 0),
    ("5 %, weighed pool", 1),
    ("tolerance 0.5 %", 0),
    ("3 %, drop", 0),
    ("5 %, window", 0),
    ("10 %, pool", 0),
    ("10 %, coarse", 0),
    ("10 %, linear", 0),
    ("5 %, weighed pool", 2),
    ("3 %, coarse", 0),
    ("3 %, linear", 0),
    ("DSV's rule", 0),
]
QUEUE += [(name, 0) for name in ARMS if (name, 0) not in QUEUE]
