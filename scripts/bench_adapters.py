"""LoRA on one backbone that all clients share, beside a model for each client and loops that swap adapters.

    uv run python scripts/bench_adapters.py            # images/s of one gradient of every client, rivals in turns
    uv run python scripts/bench_adapters.py gpt_tiny   # the same for one model; images are texts of 64 tokens
    uv run python scripts/bench_adapters.py memory     # the most memory of each, in a process of its own
    uv run python scripts/bench_adapters.py chunks     # peak memory of a run against hardware.chunk
    uv run python scripts/bench_adapters.py programs   # traced graphs of a U-Net and a DenseNet, beside torch.vmap
    uv run python scripts/bench_adapters.py rules      # a round of each rule that combines LoRA (adapter.sync)

`shared` is what the engine does: rows of all clients through one traced graph.  `loop` puts one client's row after the
other through the same model.  `swap` is plain PyTorch: each client's parameters are copied into one adapted module.
`peft` is one model of the library peft with an adapter for each client, which it activates one after the other.
`models` is plain PyTorch: an adapted module for each client.  `one` is one model on a batch as large as all clients'
together, the bound of what sharing can reach.
"""

from __future__ import annotations

import copy
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.adapters.lora import LoRA
from fedbench.app.compose import compose
from fedbench.channel.lora_sync import Sync
from fedbench.models.gpt_tiny import GPTTiny
from fedbench.models.vit_tiny import ViTTiny
from fedbench.nn.batched_operators import ForwardContext
from fedbench.nn.flat import FlatModel
from fedbench.simulation import simulator

try:
    import peft
except ImportError:
    peft = None  # type: ignore[assignment]

B, TURNS = 4, 15
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTH, TOKENS = 64, 80  # of a text
MODELS: dict[str, tuple[Any, dict[str, int]]] = {
    "vit_tiny": ((3, 32, 32), {"patch": 4, "width": 64, "depth": 4, "heads": 4}),
    "gpt_tiny": ({"text": (LENGTH,)}, {"width": 64, "depth": 2, "heads": 4}),
    "ViT-S/16": ((3, 96, 96), {"patch": 16, "width": 384, "depth": 12, "heads": 6, "mlp_ratio": 4}),
}
if DEVICE.type == "cuda":
    MODELS["ViT-B/16"] = ((3, 224, 224), {"patch": 16, "width": 768, "depth": 12, "heads": 12, "mlp_ratio": 4})


def bare(name: str) -> nn.Module:
    """Return a model of MODELS without an adapter."""
    shape, options = MODELS[name]
    torch.manual_seed(0)
    return GPTTiny(shape, TOKENS, **options) if name == "gpt_tiny" else ViTTiny(shape, 10, **options)  # type: ignore


def adapted(name: str) -> nn.Module:
    """Return a model of MODELS with LoRA of rank 8 in all linear layers of its blocks."""
    module = bare(name)
    LoRA(["blocks.*"]).insert(module)
    return module.to(DEVICE)


def adapted_by_peft(name: str, k: int) -> nn.Module:
    """Return the model with the LoRA of the library peft, with an adapter and a head for each client.

    Args:
        name: A key of MODELS.
        k: The number of clients.
    """
    module = bare(name)
    layers = [layer for layer, m in module.named_modules() if layer.startswith("blocks.") and type(m) is nn.Linear]
    config = {"r": 8, "lora_alpha": 8, "target_modules": layers, "modules_to_save": ["head"]}
    model = peft.get_peft_model(module, peft.LoraConfig(**config), "0")
    for i in range(1, k):
        model.add_adapter(str(i), peft.LoraConfig(**config))
    return model.to(DEVICE)


def batches(name: str, k: int) -> Any:
    """Return random images [k, B, 3, H, W] for k clients, or texts {"text": [k, B, T]}."""
    shape, _ = MODELS[name]
    if name == "gpt_tiny":
        return {"text": torch.randint(TOKENS, (k, B, *shape["text"]), device=DEVICE)}
    return torch.randn(k, B, *shape, device=DEVICE)


def part(x: Any, take: Callable[[Tensor], Tensor]) -> Any:
    """Return images x, or the tokens of each entry of texts x, after a function ``take`` selected from them."""
    return {key: take(value) for key, value in x.items()} if isinstance(x, dict) else take(x)


def ways(name: str, k: int) -> dict[str, Callable[[], Any]]:
    """Return functions that compute one gradient of k clients, on a batch of B images or texts each, by name.

    "shared": all clients at once on one backbone.  "loop": one client after the other on this backbone.  "models": a
    copy of the whole model for each client.  "one": one client on the images of all.  "swap": one module, into which
    the parameters of one client after the other are copied.  "peft": as "swap", by adapters of the library peft.

    Args:
        name: A key of MODELS.
        k: The number of clients.
    """
    module = adapted(name)
    model = FlatModel(module, {}, DEVICE)
    rows = model.init_row().repeat(k, 1)
    x = batches(name, k)
    modules: list[nn.Module] = []
    swapped = copy.deepcopy(module)
    trained = [p for p in swapped.parameters() if p.requires_grad]
    states = [[p.detach().clone() for p in trained] for _ in range(k)]
    libraries: list[Any] = []

    def gradient(rows: Tensor, x: Any) -> Tensor:
        leaf = rows.clone().requires_grad_()
        outputs = model.apply(model.named(leaf), x, True, ForwardContext(True))
        loss = outputs.square().flatten(1).mean(1).sum()
        return torch.autograd.grad(loss, leaf)[0]

    def plain(module: nn.Module, x: Any) -> None:
        loss = module(x).square().mean()
        torch.autograd.grad(loss, [p for p in module.parameters() if p.requires_grad])

    def models() -> None:
        if not modules:
            modules.extend(copy.deepcopy(module) for _ in range(k))
        for i, m in enumerate(modules):
            plain(m, part(x, lambda t, i=i: t[i]))

    def swap() -> None:
        for i, state in enumerate(states):
            with torch.no_grad():
                for parameter, value in zip(trained, state):
                    parameter.copy_(value)
            plain(swapped, part(x, lambda t, i=i: t[i]))

    def by_peft() -> None:
        if not libraries:
            libraries.append(adapted_by_peft(name, k))
        for i in range(k):
            libraries[0].set_adapter(str(i))
            plain(libraries[0], part(x, lambda t, i=i: t[i]))

    return {
        "shared": lambda: gradient(rows, x),
        "loop": lambda: [gradient(rows[i : i + 1], part(x, lambda t, i=i: t[i : i + 1])) for i in range(k)],
        "swap": swap,
        **({} if peft is None else {"peft": by_peft}),
        "models": models,
        "one": lambda: plain(module, part(x, lambda t: t.flatten(0, 1))),
    }


def seconds(work: Callable[[], Any]) -> float:
    """Return the seconds of one call, until the device has finished."""
    start = time.perf_counter()
    work()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turns(rivals: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return the seconds of TURNS calls of each function, which take turns after a call that is not timed.

    Args:
        rivals: The functions by name.
    """
    for work in rivals.values():
        seconds(work)
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(TURNS):
        for name, work in rivals.items():
            times[name].append(seconds(work))
    return times


def speed(*names: str) -> None:
    """Print images/s of each way, and its time as a multiple of that of "shared": median, smallest and largest turn.

    Args:
        *names: Keys of MODELS.  Default: all.
    """
    for name in names or MODELS:
        for k in (6, 32):
            times = in_turns(ways(name, k))
            for rival, turns in times.items():
                ratios = [own / shared for own, shared in zip(turns, times["shared"])]
                rate = k * B / statistics.median(turns)
                spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                print(f"{name:9} {k:3} clients  {rival:7} {rate:8.1f} images/s  time of shared's: {spread}", flush=True)


def memory(name: str | None = None, k: int = 0, rival: str = "") -> None:
    """Print by how many MiB a gradient raises the peak memory of a process.

    Args:
        name: A key of MODELS, measured in this process.  None: all models and ways, each in a process of its own.
        k: The number of clients.
        rival: A way, a key of `ways`.
    """
    if name is None:
        for model in MODELS:
            for clients in (6, 32):
                for way in ("shared", "loop", "swap", "peft", "models", "one"):
                    command = [sys.executable, __file__, "memory", model, str(clients), way]
                    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                    print(f"{model:9} {clients:3} clients  {way:7} {output.strip()} MiB", flush=True)
        return
    work = ways(name, k)[rival]
    if DEVICE.type == "cuda":
        before = torch.cuda.memory_allocated()
        work()
        print(f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}")
        return
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # peak memory so far, in KiB
    work()
    print(f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024:.0f}")


RUN = """
algorithm=fedavg dataset=synthetic dataset.kind=images dataset.n=160 dataset.num_classes=10 dataset.shape=[3,96,96]
partition=iid partition.num_clients=32 local.epochs=1 local.batch_size=4 model=vit_tiny model.patch=16 model.width=384
model.depth=12 model.heads=6 model.mlp_ratio=4 adapter=lora hardware=cpu hardware.executor=vmap
"""


def chunks(size: int = 0) -> None:
    """Print by how many MiB a round of LoRA in ViT-S/16 with 32 clients raises the peak memory of a process.

    Args:
        size: The number of clients computed at once, measured in this process.  0: several, each in its own process.
    """
    if not size:
        for size in (2, 4, 8, 16, 32):
            command = [sys.executable, __file__, "chunks", str(size)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            print(f"ViT-S/16  32 clients, hardware.chunk={size:<2} {output.split()[-1]} MiB", flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        sim = simulator.prepare(compose([*RUN.split(), f"hardware.chunk={size}"]), Path(folder), None)
        cohort = simulator.Cohort(sim.engine, np.arange(32), 0)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # peak memory so far, in KiB
        sim.algorithm.round(cohort)
        print(f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024:.0f}")


class UNet(nn.Module):
    """[B, 3, H, W] -> [B, 2, H, W]: two halvings, transposed convolutions back, skips by cat."""

    def __init__(self, f: int = 8):
        super().__init__()

        def block(a: int, b: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU()
            )

        self.down1, self.down2, self.bottom = block(3, f), block(f, 2 * f), block(2 * f, 4 * f)
        self.pool1, self.pool2 = nn.MaxPool2d(2), nn.MaxPool2d(2)
        self.up2, self.right2 = nn.ConvTranspose2d(4 * f, 2 * f, 2, 2), block(4 * f, 2 * f)
        self.up1, self.right1 = nn.ConvTranspose2d(2 * f, f, 2, 2), block(2 * f, f)
        self.head = nn.Conv2d(f, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of two classes for each pixel."""
        a = self.down1(x)
        b = self.down2(self.pool1(a))
        y = self.up2(self.bottom(self.pool2(b)))
        y = self.up1(self.right2(torch.cat([b, y], 1)))
        return self.head(self.right1(torch.cat([a, y], 1)))


class DenseNet(nn.Module):
    """[B, 3, H, W] -> [B, 10]: two dense blocks of four layers with group norm."""

    def __init__(self, growth: int = 8):
        super().__init__()
        self.stem, channels = nn.Conv2d(3, 16, 3, padding=1), 16
        self.blocks = nn.ModuleList()
        for _ in range(2):
            layers = nn.ModuleList()
            for _ in range(4):
                layers.append(nn.Sequential(nn.GroupNorm(4, channels), nn.ReLU(), nn.Conv2d(channels, growth, 3, 1, 1)))
                channels += growth
            self.blocks.append(layers)
        self.pool, self.end = nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)
        self.flat, self.head = nn.Flatten(), nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of ten classes."""
        x = self.stem(x)
        for layers in self.blocks:
            for layer in layers:  # type: ignore[attr-defined]
                x = torch.cat([x, layer(x)], 1)
            x = self.pool(x)
        return self.head(self.flat(self.end(x)))


def programs(k: int = 5) -> None:
    """Compare gradients of k clients by the traced graph of a module and by torch.vmap of the same module."""
    for kind, size, batch in ((UNet, 64, 4), (DenseNet, 32, 10)):
        torch.manual_seed(0)
        module = kind()
        traced = FlatModel(copy.deepcopy(module), {}, DEVICE)
        module.head.register_forward_hook(lambda *_: None)  # a layer with a hook cannot be traced
        mapped = FlatModel(module, {}, DEVICE)
        assert traced.traced_graph is not None and mapped.uses_vmap
        x, rows = torch.randn(k, batch, 3, size, size, device=DEVICE), traced.init_row().repeat(k, 1)

        def gradient(model: FlatModel, rows: Tensor = rows, x: Tensor = x) -> Tensor:
            leaf = rows.clone().requires_grad_()
            logits = model.apply(model.named(leaf), x, True, ForwardContext(True))
            return torch.autograd.grad(logits.square().flatten(1).mean(1).sum(), leaf)[0]

        by_graph, by_vmap = gradient(traced), gradient(mapped)
        assert float((by_graph - by_vmap).abs().max()) < 1e-4 * float(by_vmap.abs().max())

        def loop(model: FlatModel = traced, rows: Tensor = rows, x: Tensor = x) -> None:
            for i in range(k):
                gradient(model, rows[i : i + 1], x[i : i + 1])

        times = in_turns({"graph": partial(gradient, traced), "mapped": partial(gradient, mapped), "loop": loop})
        for rival in ("mapped", "loop"):
            ratios = [own / graph for own, graph in zip(times[rival], times["graph"])]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{kind.__name__:9} {k} clients of {batch}: {rival} takes {spread} times as long as the graph")


ROUND = """
algorithm=fedavg local.epochs=1 local.batch_size=4 clients_per_round=32 optimizer.lr=0.01 adapter=lora hardware=cpu
hardware.executor=vmap hardware.threads=1 tracking=disabled
"""
ROUNDS = {
    "vit_tiny": """
model=vit_tiny model.patch=4 model.width=64 model.depth=4 model.heads=4 dataset=synthetic dataset.kind=images
dataset.n=640 dataset.num_classes=10 dataset.shape=[3,32,32] partition=iid partition.num_clients=32
""",
    "gpt_tiny": "model=gpt_tiny dataset=shakespeare_lm dataset.subset=0.2 partition=domain",
}


def rules() -> None:
    """Print images/s of rounds of 32 clients by each rule, training and server, and as a multiple of average's."""
    torch.set_num_threads(1)
    for name, overrides in ROUNDS.items():
        round_by_rule: dict[str, Callable[[], Any]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for rule in get_args(Sync):
                composed = compose([*ROUND.split(), *overrides.split(), f"adapter.sync={rule}"])
                sim = simulator.prepare(composed, Path(folder), None)
                round_by_rule[rule] = partial(round_of, sim)
            times = in_turns(round_by_rule)
            samples = round_of(sim)  # the same number for each rule
        for rule, turns in times.items():
            ratios = [average / own for own, average in zip(turns, times["average"])]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            rate = samples / statistics.median(turns)
            print(f"{name:9} {rule:8} {rate:8.1f} images/s  of average's: {spread}", flush=True)


def round_of(sim: simulator.Simulation) -> int:
    """Run the next round, with the first 32 clients, and return its number of samples."""
    cohort = simulator.Cohort(sim.engine, np.arange(32), sim.done)
    sim.algorithm.round(cohort)
    sim.done += 1
    return cohort.cost.samples


if __name__ == "__main__":
    if sys.argv[1:2] == ["memory"]:
        memory(*sys.argv[2:3], *map(int, sys.argv[3:4]), *sys.argv[4:5])
    elif sys.argv[1:2] == ["chunks"]:
        chunks(*map(int, sys.argv[2:3]))
    elif sys.argv[1:2] == ["programs"]:
        programs()
    elif sys.argv[1:2] == ["rules"]:
        rules()
    else:
        speed(*sys.argv[1:])
