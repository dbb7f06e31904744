"""The tables of docs/scale.md that `tools/plan.py` is behind: `python tools/plan_tables.py`."""

from __future__ import annotations

from dataclasses import replace

from plan import CORE, H200, Machine, Plan, Work, duration, plan, size

_RESNET = Work(11_173_962, 50_000, ranks=1, products=588)
_VIT = Work(805_130, 60_000, ranks=1, reuse=17, products=568)
_PAPER = Work(93_322, 60_000, 600, 1, "hessian", reuse=30, products=1865, keeps=True)
_REACHED = Work(14_084, 60_000, 1500, 1, reuse=40, products=2408, keeps=True)

# What was measured, of which machine, and with which part of the plan it is compared. The first of
# each machine are those that constants come from.
RUNS: list[tuple[str, Machine, Work, float, str]] = [
    ("ResNet-18, OPG, K = 200 *", H200, _RESNET, 502, "fit"),
    ("ResNet-18, 10,000 images *", H200, _RESNET, 61, "10,000 predictions"),
    ("ViT, OPG, K = 200", H200, _VIT, 30.9, "fit"),
    ("ViT, 10,000 images", H200, _VIT, 4.03, "10,000 predictions"),
    ("the paper's network, Hessian, K = 600, all units", H200, _PAPER, 214, "fit"),
    (
        "… K = 1500",
        H200,
        Work(93_322, 60_000, 1500, 1, "hessian", reuse=30, products=3251, keeps=True),
        362,
        "fit",
    ),
    (
        "… K = 600, silent units left out",
        H200,
        Work(14_084, 60_000, 600, 1, "hessian", reuse=40, products=1865, keeps=True),
        102,
        "fit",
    ),
    ("… OPG, K = 1500, silent units left out", H200, _REACHED, 1.7, "fit"),
    ("… 10,000 images", H200, _REACHED, 0.30, "10,000 predictions"),
]
# Estimator, P, N, K, R, products, whether rows are kept (of a Hessian, what its products share);
# seconds of CPU of the first rank. Measured by `python -m tests.plan_runs`.
ON_CORES = [
    ("opg", 55_210, 600, 40, 1, 196, False, 6.94),
    ("hessian", 55_210, 1000, 30, 1, 251, True, 6.04),
    ("opg", 55_210, 600, 40, 1, 196, True, 3.48),
    ("opg", 190_410, 300, 100, 1, 328, True, 8.43),
    ("opg", 23_530, 2000, 60, 1, 278, False, 6.20),
    ("opg", 112_810, 500, 60, 2, 260, False, 5.20),
    ("opg", 112_810, 500, 60, 4, 260, False, 4.23),
    ("opg", 190_410, 400, 40, 2, 192, False, 6.37),
    ("opg", 112_810, 500, 60, 2, 260, True, 3.93),
    ("opg", 112_810, 500, 60, 4, 260, True, 2.76),
    ("opg", 190_410, 300, 100, 2, 328, True, 4.84),
    ("opg", 55_210, 1500, 40, 4, 212, True, 3.03),
    ("hessian", 55_210, 1500, 20, 2, 158, True, 2.79),
    ("hessian", 55_210, 2000, 40, 4, 290, True, 5.82),
]
for _place, (_kind, _p, _n, _k, _r, _products, _kept, _seconds) in enumerate(ON_CORES):
    _rows = "" if _kind == "hessian" else ", kept" if _kept else ", recomputed"
    _name = f"{_kind}{_rows}, P = {_p:,}, N = {_n:,}, K = {_k}, R = {_r}"
    _work = Work(_p, _n, _k, _r, _kind, 1.0, products=_products, keeps=_kept)
    RUNS.append((_name + (" *" if _place < 2 else ""), CORE, _work, _seconds, "fit"))

_SMALL = Work(299_050, 64, 40, 1)
# Peak bytes of a rank.
PEAKS: list[tuple[str, Machine, Work, float]] = [
    ("ResNet-18, OPG, K = 200", H200, _RESNET, 32.5e9),
    ("ViT, OPG, K = 200", H200, _VIT, 27.1e9),
    ("a CPU, OPG, kept, P = 299,050, N = 64, K = 40, R = 1", CORE, _SMALL, 196e6),
    ("… R = 2", CORE, replace(_SMALL, ranks=2), 139e6),
    ("… R = 4", CORE, replace(_SMALL, ranks=4), 80e6),
]

_WHOLE = 1e9  # parameters of a network of which some are fitted
_TOKENS = 128


def _some(parameters: float, examples: float, ranks: int) -> Work:
    """A fit of some of the parameters: all of the network is gone through all the same."""
    reuse = _TOKENS * _WHOLE / parameters
    return Work(parameters, examples, ranks=ranks, reuse=reuse, frozen=_WHOLE)


PLANS = [
    *(Work(p, n, ranks=r) for p in (1e7, 1e8) for n in (1e6, 1e8) for r in (8, 64, 1024)),
    Work(1e8, 1e6, 200, 64, "hessian"),
    Work(1e9, 1e6, ranks=64),
    Work(1e9, 1e6, 50, 64),
    Work(1e9, 1e6, 50, 1024),
    Work(1e9, 1e8, 50, 1024),
    Work(1e9, 1e6, 200, 1024, "hessian"),
]
# Of a network of a billion parameters and 128 tokens.
INSTEAD = [
    ("all of it", Work(_WHOLE, 1e8, 50, 1024, reuse=_TOKENS)),
    ("a sample of the data", Work(_WHOLE, 1e5, 50, 64, reuse=_TOKENS)),
    ("LoRA, a million parameters", _some(1e6, 1e6, 64)),
    ("LoRA and a sample", _some(1e6, 5e4, 8)),
    ("the last layer, ten classes", _some(2e4, 1e6, 8)),
]


def checked(run: tuple[str, Machine, Work, float, str]) -> str:
    """A line of the table of measured runs."""
    name, machine, work, measured, what = run
    found = plan(work, machine)
    planned = found.total if what == "fit" else found.seconds[what]
    return f"| {name} | {measured:.3g} s | {planned:.3g} s | {planned / measured:.2f} |"


def peak(run: tuple[str, Machine, Work, float]) -> str:
    """A line of the table of measured peaks."""
    name, machine, work, measured = run
    found = plan(work, machine).bytes
    return f"| {name} | {size(measured)} | {size(found)} | {found / measured:.2f} |"


def planned(work: Work) -> str:
    """A line of the table of plans."""
    found = plan(work)
    cells = [
        {"opg": "OPG", "hessian": "H"}[work.estimator],
        _power(work.parameters),
        _power(work.examples),
        str(work.rank),
        f"{work.ranks:,}",
        _memory(found),
        size(found.sent),
        duration(found.seconds["gradients"] + found.seconds["products"]),
        duration(sum(found.seconds[name] for name in ("basis", "steps", "start"))),
        duration(found.seconds["messages"]),
        duration(found.total),
        duration(found.seconds["last checkpoint"]),
    ]
    return "| " + " | ".join(cells) + " |"


def instead(name: str, work: Work) -> str:
    """A line of the table of what to do."""
    found = plan(work)
    what = f"{_power(work.parameters)}; {_power(work.examples)}; {work.rank}"
    kept = "kept" if found.keeps else "recomputed"
    cells = [name, what, f"{work.ranks:,}", _memory(found), kept, duration(found.total)]
    return "| " + " | ".join(cells) + " |"


def _memory(found: Plan) -> str:
    return size(found.bytes) + ("" if found.fits else ", too much")


def _power(count: float) -> str:
    return f"{count:.0e}".replace("e+0", "e")


def lines() -> list[str]:
    """All lines of the tables."""
    return [
        *map(checked, RUNS),
        *map(peak, PEAKS),
        *map(planned, PLANS),
        *(instead(name, work) for name, work in INSTEAD),
    ]


if __name__ == "__main__":
    print("\n".join(lines()))
