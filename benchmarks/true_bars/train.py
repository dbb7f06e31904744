"""Train subjects and their replicas, and keep what all of them say.

`python -m benchmarks.true_bars.train NAME … --data FOLDER --out FOLDER`
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from benchmarks.true_bars.outputs import outputs_of, save_outputs
from benchmarks.true_bars.replicas import quality, train_all
from benchmarks.true_bars.subjects import SUBJECTS


def main() -> None:
    """Train what is not there yet, and print how good the networks are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.true_bars.train")
    parser.add_argument("names", nargs="+", choices=SUBJECTS)
    parser.add_argument("--data", type=Path, required=True, help="the folder of `prepare`")
    parser.add_argument("--out", type=Path, required=True, help="where state dicts go")
    parser.add_argument("--count", type=int, default=16, help="bootstrap replicas")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the epochs")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap samples")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)
    started = time.perf_counter()

    def say(line: str) -> None:
        print(f"{time.perf_counter() - started:7.1f} s  {line}", flush=True)

    for name in given.names:
        subject = SUBJECTS[name]
        data = subject.load(given.data)
        weights = sum(value.numel() for value in subject.make().parameters())
        say(f"{name}: {subject.title}; P = {weights:,}, N = {len(data):,}")
        done = train_all(
            subject, data, given.count, given.seed, given.out, given.device, say, scale=given.scale
        )
        outputs = outputs_of(subject, data, done.states, given.device)
        save_outputs(given.out / name / "outputs.npz", outputs)
        best = [quality(subject, data, "test", state, given.device) for state in done.states[:4]]
        train = quality(subject, data, "train", done.states[0], given.device)
        shown = ", ".join(f"{each:.4f}" for each in best)
        took = f"{done.trained} networks in {done.seconds:.1f} s"
        say(f"{name}: {took}; train {train:.4f}, test {shown}")


if __name__ == "__main__":
    main()
