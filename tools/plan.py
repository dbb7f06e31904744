"""What a fit takes on so many GPUs, on paper: `python tools/plan.py --parameters 1e8 --gpus 64`.

A cost model of `deltabars.fit` in float32: memory of a rank, messages, and seconds by part. Its
constants and how far it is off are in docs/scale.md.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace

FLOAT = 4  # bytes
BASIS = 2.2  # rows of the Krylov basis a pair, before it is restarted
PRODUCTS = 3.0  # a pair: 1.6 to 3.1 in fits of trained networks
GUARD = 8  # products at the end, that look for what was missed
_BLOCKS = 2  # whole rows of a block that are there at once: those gathered, and their sum
_COPIES = 4  # of the weights: the model's, the fit's, the gradient, and one on the way
_SWEEPS = 70  # over a block in memory, a step: to orthonormalise it twice, to scale and to check it
_DRAWN = 5.5e-9  # seconds for a random number of the start, on a core; every rank draws all
_SINGLE, _WITH_BLOCKS = 6.5, 11.5  # messages a step
_EIGHTHS = {"kept": 3, "basis": 2, "chunk": 2}  # of the memory budget


@dataclass(frozen=True)
class Machine:
    """One rank of a kind, in units of seconds, bytes and operations.

    Attributes:
        flops: float32 operations a second in matrix products.
        bandwidth: bytes a second, to and from memory.
        row: seconds for each number of a row of gradients, beyond its operations.
        hessian: operations a second in Hessian products.
        predicted: seconds for each class and parameter of an input, beyond the projection; not a
            number where it was not measured.
        ritz: seconds for an eigenproblem of one row; it grows with the third power.
        step: seconds of a step, whatever its size.
        latency: seconds of a small message, for each doubling of the ranks.
        near: bytes a second between ranks of a node.
        far: the same between nodes.
        node: ranks of a node.
        writing: bytes a second to files, a process, with their digests.
        memory: bytes.
        chunk: bytes that rows of some examples take at a time.
        budget: the part of it that a fit takes as its memory budget.
    """

    name: str
    flops: float
    bandwidth: float
    row: float
    hessian: float
    predicted: float
    ritz: float
    step: float
    latency: float
    near: float
    far: float
    node: int
    writing: float
    memory: float
    chunk: float = 1 << 34
    budget: float = 0.5


H200 = Machine(
    name="NVIDIA H200",
    flops=40e12,
    bandwidth=3.4e12,
    row=1.11e-11,
    hessian=19e12,
    predicted=4.5e-11,
    ritz=3e-12,
    step=5.6e-3,
    latency=2e-5,
    near=360e9,
    far=40e9,
    node=8,
    writing=0.28e9,
    memory=140e9,
)
CORE = Machine(
    name="one core, Gloo",
    flops=85e9,
    bandwidth=9.4e9,
    row=1.76e-9,
    hessian=46e9,
    predicted=math.nan,
    ritz=4e-10,
    step=5e-4,
    latency=5e-4,
    near=0.7e9,
    far=0.7e9,
    node=1 << 30,
    writing=0.18e9,
    memory=4e9,
    chunk=1 << 28,
)


@dataclass(frozen=True)
class Work:
    """A fit.

    Attributes:
        parameters: P, those that the examples reach.
        examples: N.
        rank: K.
        ranks: R.
        estimator: "opg", "ggn" or "hessian".
        reuse: multiplications for each parameter in one forward pass of an example: 1 in a dense
            network, the tokens in a transformer, about 50 in ResNet-18.
        classes: C.
        products: where they are known; otherwise three times the rank.
        frozen: further parameters of the network, which are not fitted.
        keeps: whether rows are kept, or what Hessian products share; by default rows are where
            they fit, and the other is not.
    """

    parameters: float
    examples: float
    rank: int = 200
    ranks: int = 8
    estimator: str = "opg"
    reuse: float = 50.0
    classes: int = 10
    products: int | None = None
    frozen: float = 0.0
    keeps: bool | None = None

    @property
    def block(self) -> int:
        """Vectors a step."""
        return 1 if self.estimator == "hessian" else max(2, min(100, self.rank // 10))

    @property
    def rows(self) -> float:
        """Rows of gradients."""
        return self.examples * (self.classes if self.estimator == "ggn" else 1)

    @property
    def blocks(self) -> float:
        """Steps with whole blocks."""
        products = PRODUCTS * self.rank + GUARD if self.products is None else self.products
        return max(1.0, (products - GUARD) / self.block)


@dataclass(frozen=True)
class Plan:
    """What it takes.

    Attributes:
        keeps: whether rows of gradients are kept.
        memory: bytes of a rank, by part.
        messages: a step.
        sent: bytes that a rank gives into them, a step.
        seconds: by part.
        fits: whether the memory is enough.
    """

    keeps: bool
    memory: dict[str, float]
    messages: float
    sent: float
    seconds: dict[str, float]
    fits: bool

    @property
    def bytes(self) -> float:
        """The memory of a rank."""
        return sum(self.memory.values())

    @property
    def total(self) -> float:
        """All seconds of the fit, without files and predictions."""
        return sum(value for name, value in self.seconds.items() if name not in AFTERWARDS)

    @property
    def limit(self) -> str:
        """The part that takes longest; or the memory, where there is not enough."""
        if not self.fits:
            return "memory: " + max(self.memory, key=lambda name: self.memory[name])
        during = {name: self.seconds[name] for name in self.seconds if name not in AFTERWARDS}
        return max(during, key=lambda name: during[name])


AFTERWARDS = ("last checkpoint", "files", "10,000 predictions")


def plan(work: Work, machine: Machine = H200) -> Plan:
    """Memory, messages and seconds of a fit on ranks of a machine."""
    budget = machine.budget * machine.memory
    share = {name: budget * eighths / 8 for name, eighths in _EIGHTHS.items()}
    whole = work.parameters * FLOAT  # bytes of a row
    own = whole / work.ranks
    by_rows = work.estimator != "hessian"
    keeps = by_rows and (work.rows * own <= share["kept"] if work.keeps is None else work.keeps)
    least = work.rank + 2 * work.block
    held = max(least, min(BASIS * work.rank, share["basis"] / own))
    # Rows that one rank keeps alone are computed where they stay.
    copies = 2 if not keeps else 1 if work.ranks > 1 else 0
    example = copies * whole * work.rows / work.examples if by_rows else 0.0
    here = example * work.examples / work.ranks if by_rows else math.inf
    memory = {
        "basis": held * own,
        "kept rows": work.rows * own if keeps else 0.0,
        "blocks": _BLOCKS * work.block * (own if keeps else whole),
        "weights": _COPIES * whole + FLOAT * work.frozen,
        "chunk": max(example, min(machine.chunk, share["chunk"], here)),
    }
    messages, sent = _messages(work, keeps)
    seconds = {**_computing(work, machine, keeps), **_sending(work, machine, keeps)}
    seconds["last checkpoint"] = work.rank * whole / machine.writing
    seconds["files"] = work.rank * own / machine.writing
    each = machine.predicted + 2 * work.rank / machine.flops
    seconds["10,000 predictions"] = 1e4 * work.classes * work.parameters * each / work.ranks
    fits = sum(memory.values()) <= machine.memory
    return Plan(keeps, memory, messages, sent, seconds, fits)


def _computing(work: Work, machine: Machine, keeps: bool) -> dict[str, float]:
    """Seconds of computing."""
    own = work.parameters / work.ranks
    numbers = work.rows * own  # of the gradients of a rank's examples
    flops, bandwidth, block = machine.flops, machine.bandwidth, work.block
    singles = GUARD + 1  # the guard's, and the one that audits
    steps = work.blocks + singles
    if work.estimator == "hessian":
        rows = numbers * 6 * work.reuse / flops  # the gradient
        # Six products a layer; and half as many again for what is not kept between them.
        products = steps * numbers * (12 if work.keeps else 18) * work.reuse / machine.hessian
    else:
        one = numbers * (6 * work.reuse / flops + machine.row)
        # Reading, each product, and the trace; or once, when they are kept.
        rows = one * (2 if keeps else steps + 2)
        width = work.blocks * block + singles
        products = numbers * (4 * width / flops + 2 * FLOAT * steps / bandwidth)
    mean = min(work.blocks * block / 2, (1 + BASIS) / 2 * work.rank)
    basis = 2 * work.blocks * mean * own * (4 * block / flops + 2 * FLOAT / bandwidth)
    basis += 2 * singles * work.rank * own * (4 / flops + 2 * FLOAT / bandwidth)
    basis += (work.blocks * block + singles) * own * _SWEEPS * FLOAT / bandwidth
    rows_at_end = min(work.blocks * block, BASIS * work.rank)
    checks = (work.blocks * block - work.rank) / max(block, rows_at_end / 24)
    ritz = max(1.0, checks) * rows_at_end**3 * machine.ritz + steps * machine.step
    start = (block + 1) * work.parameters * _DRAWN
    parts = {"gradients": rows, "products": products, "basis": basis}
    return {**parts, "steps": ritz, "start": start}


def _messages(work: Work, keeps: bool) -> tuple[float, float]:
    """Messages a step, and the bytes of them."""
    if work.ranks == 1:
        return 0.0, 0.0
    short = 2 * work.block * BASIS * work.rank * 8
    if keeps:
        return _WITH_BLOCKS - 1, work.block * work.rows * FLOAT + short
    count = _SINGLE if work.estimator == "hessian" else _WITH_BLOCKS
    return count, work.block * work.parameters * FLOAT * (1 + 1 / work.ranks) + short


def _sending(work: Work, machine: Machine, keeps: bool) -> dict[str, float]:
    """Seconds of messages."""
    if work.ranks == 1:
        return {"messages": 0.0}
    link = machine.near if work.ranks <= machine.node else machine.far
    ring = 2 * (work.ranks - 1) / work.ranks / link  # both ways around
    long = work.rows if keeps else work.parameters
    singles = GUARD + 1
    count = work.blocks * _messages(work, keeps)[0] + singles * _SINGLE
    seconds = ring * FLOAT * long * (work.blocks * work.block + singles)
    seconds += ring * 2 * 8 * work.blocks * work.block * BASIS * work.rank
    seconds += count * machine.latency * math.log2(work.ranks)
    if keeps:  # each rank's rows to all the others, by columns
        seconds += work.rows * work.parameters * FLOAT / work.ranks / link
    return {"messages": seconds}


def size(count: float) -> str:
    """Bytes as people say them."""
    unit, power = next(
        (each for each in (("TB", 12), ("GB", 9), ("MB", 6)) if count >= 10 ** each[1]), ("kB", 3)
    )
    return f"{_short(count / 10**power)} {unit}"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    units = (("days", 86400), ("h", 3600), ("min", 60))
    unit, length = next((each for each in units if seconds >= 1.5 * each[1]), ("s", 1))
    return f"{_short(seconds / length)} {unit}"


def _short(count: float) -> str:
    return f"{count:.0f}" if count >= 9.95 else f"{count:.1f}"


def main() -> None:
    """Print the plan of the fit that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("parameters", 1e7), ("examples", 1e6), ("reuse", 50.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    for name, number in (("rank", 200), ("gpus", 8), ("classes", 10)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--estimator", choices=("opg", "ggn", "hessian"), default="opg")
    # What another machine has, in bytes and seconds.
    own = ("memory", "flops", "bandwidth", "near", "far", "latency", "writing")
    for name in own:
        parser.add_argument(f"--{name}", type=float, default=getattr(H200, name))
    given = parser.parse_args()
    machine = replace(H200, **{name: getattr(given, name) for name in own})
    work = Work(
        given.parameters,
        given.examples,
        given.rank,
        given.gpus,
        given.estimator,
        given.reuse,
        given.classes,
    )
    found = plan(work, machine)
    print(f"{machine.name}, {work.ranks:,} of them; rows of gradients kept: {found.keeps}")
    print(f"memory of a rank {size(found.bytes)}" + ("" if found.fits else ", which is too much"))
    for name, value in found.memory.items():
        print(f"  {name:20}{size(value):>10}")
    print(f"messages a step {found.messages:.3g}, of {size(found.sent)} together")
    print(f"seconds of the fit {duration(found.total)}")
    for name, value in found.seconds.items():
        print(f"  {name:20}{duration(value):>10}" + ("  (afterwards)" * (name in AFTERWARDS)))
    print(f"what limits it: {found.limit}")


if __name__ == "__main__":
    main()
