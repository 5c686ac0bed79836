"""Measure how far the product of averaged LoRA factors is from the averaged product, in each layer and round.

    uv run python scripts/lora_products.py table.csv figure.png model=vit_tiny adapter=lora sample_rate=1 rounds=10

The last arguments are those of a run of FedAvg with LoRA in which all clients take part.  The distance of a layer after
a round is |sum_i p_i B_i A_i - B A|_F / |sum_i p_i B_i A_i|_F.  A_i and B_i are the factors that client i has trained,
p_i is its weight in the server's mean, and A and B are the means of the factors.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedbench.algorithms.fedavg import FedAvg
from fedbench.app.compose import compose
from fedbench.channel.lora_sync import Factors
from fedbench.config.check import check
from fedbench.core.options import require
from fedbench.report.drawing import COLOURS, pyplot
from fedbench.simulation.simulator import prepare, run_round


def distance(A: Tensor, B: Tensor, weights: Tensor) -> float:
    """Return the distance of a layer in one round.

    Args:
        A: Factors of the clients.  # [K, r, in]
        B: Factors of the clients.  # [K, out, r]
        weights: Weights of the mean, whose sum is 1.  # [K]
    """
    factors = Factors(A.double(), B.double(), weights.double(), lambda: A[0])
    mean_A, mean_B = factors.means(factors.weights)
    product = factors.mean_product
    return float((product - mean_B @ mean_A).norm() / product.norm())


def measure(overrides: list[str]) -> pd.DataFrame:
    """Run FedAvg, and return the distance of each layer after each round: columns seed, round, layer and distance."""
    # deploy=local keeps the models as the clients have trained them, and trains as deploy=global does
    cfg = compose([*overrides, "algorithm=fedavg", "algorithm.deploy=local"])
    check(cfg)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sim = prepare(cfg, Path(folder), saved=None)
        model, clients = sim.engine.model, sim.engine.federation
        names = [name for name in model.spans if ".lora_A." in name]
        require(bool(names), f"{' '.join(overrides)} has no LoRA: add adapter=lora")
        require(
            clients.cohort_size == clients.num_clients,
            f"{clients.cohort_size} of {clients.num_clients} clients take part in a round: add sample_rate=1",
        )
        weights = torch.from_numpy(clients.num_samples / clients.num_samples.sum())  # p_i, [K]
        layout = model.message_layout(model.size)
        assert isinstance(sim.algorithm, FedAvg) and sim.algorithm.theta is not None and layout is not None
        for _ in range(cfg.rounds):
            run_round(sim, [])
            theta = sim.algorithm.theta[np.arange(clients.num_clients)].cpu()  # [K, P]
            for name in names:
                (start, stop, of_A), (first, last, _) = (layout.spans[n] for n in (name, name.replace("_A.", "_B.")))
                A, B = (
                    theta[:, start:stop].unflatten(1, (of_A[0], -1)),
                    theta[:, first:last].unflatten(1, (-1, of_A[0])),
                )
                layer = name.partition(".lora_A.")[0]
                rows.append({"seed": cfg.seed, "round": sim.done, "layer": layer, "distance": distance(A, B, weights)})
    return pd.DataFrame(rows)


def draw(table: pd.DataFrame, path: Path) -> None:
    """Draw the distances over rounds, as means over seeds: a panel for each kind of layer, a line for each block."""
    means = table.groupby(["layer", "round"], sort=False)["distance"].mean()
    blocks, kinds = (list(dict.fromkeys(parts)) for parts in zip(*map(parts_of, table["layer"])))
    plt = pyplot()
    size = {"figsize": (2.8 * len(kinds), 2.9), "sharex": True, "sharey": True, "squeeze": False}
    figure, grid = plt.subplots(1, len(kinds), layout="constrained", **size)
    for layer in dict.fromkeys(table["layer"]):
        block, kind = parts_of(layer)
        axes, line = grid[0, kinds.index(kind)], means[layer]
        axes.plot(line.index, line.values, color=COLOURS[blocks.index(block) % len(COLOURS)], label=block)
        axes.set(title=kind, xlabel="round")
    grid[0, 0].set_ylabel("relative distance")
    grid[0, 0].set_ylim(bottom=0)
    grid[0, -1].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parts_of(layer: str) -> tuple[str, str]:
    """Return the block and the kind of a layer: "blocks.0" and "attn.qkv" of "blocks.0.attn.qkv"."""
    words = layer.split(".")
    number = next((i for i, word in enumerate(words) if word.isdigit()), -1)
    return ".".join(words[: number + 1]), ".".join(words[number + 1 :])


def main() -> None:
    """Write the table and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="the .csv file of all distances")
    parser.add_argument("figure", type=Path, help="the .png, .pdf or .svg file of the figure")
    parser.add_argument("overrides", nargs="+", help="options of the run, without algorithm")
    parser.add_argument("--seeds", default="0", help="seeds of the runs, separated by commas (default: 0)")
    args = parser.parse_intermixed_args()
    table = pd.concat([measure([*args.overrides, f"seed={seed}"]) for seed in args.seeds.split(",")])
    table.to_csv(args.table, index=False, float_format="%.6g")
    draw(table, args.figure)
    print(f"{args.table}, {args.figure}: {table['layer'].nunique()} layers, {table['round'].max()} rounds")


if __name__ == "__main__":
    main()
