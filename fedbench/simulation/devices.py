"""What the hardware decides: the device, its precision and memory, CUDA graphs, samples per evaluation batch."""

from __future__ import annotations

import torch
from omegaconf import DictConfig

from fedbench.core.options import require
from fedbench.core.rows import disk_space, memory
from fedbench.engine import ranks as processes

MANY_OUTPUTS = 1024  # of a sample: more than lists of classes have
MOST_OUTPUTS = 1 << 17  # of a client's batch


def device_of(cfg: DictConfig) -> torch.device:
    """The compute device; asking for one that is absent is refused.  Ranks of a machine get one GPU each, unless all
    are given the same by its number."""
    name, ranks = cfg.hardware.device, processes.current()
    if ranks.size > 1 and torch.cuda.is_available() and name in ("auto", "cuda"):
        require(
            ranks.local_size <= torch.cuda.device_count(),
            f"torchrun started {ranks.local_size} processes on a machine with {torch.cuda.device_count()} CUDA "
            f"devices: use --nproc-per-node={torch.cuda.device_count()}, or hardware.device=cuda:0 to share one",
        )
        return torch.device("cuda", ranks.local)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    require(
        not name.startswith("cuda") or torch.cuda.is_available(),
        f"hardware.device={name}: this machine has no usable CUDA device "
        f"(torch {torch.__version__}); use hardware.device=cpu or auto",
    )
    require(name != "mps" or torch.backends.mps.is_available(), "hardware.device=mps: not available here; use cpu")
    device = torch.device(name)
    require(
        device.index is None or device.index < torch.cuda.device_count(),
        f"hardware.device={name}: there are {torch.cuda.device_count()} CUDA devices",
    )
    return device


def set_precision(name: str) -> None:
    """float32: exact float32; tf32: tensor cores for float32 products where the GPU has them; bf16 is the model's."""
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"


def memory_limits(device: torch.device, ranks: int = 1) -> tuple[int, int, int]:
    """Bytes that the stores of rows may come to take on the device, in host memory and on disk: half of the memory, and
    what is free; of the host's, every one of the machine's ranks has its part."""
    host, disk = memory(torch.device("cpu")) // 2 // ranks, disk_space() // ranks
    return (memory(device) // 2, host, disk) if device.type == "cuda" else (host, 0, disk)


def cuda_graphs(setting: bool | str, device: torch.device) -> bool | None:
    """hardware.graphs: True, False, or None where it is to be timed."""
    require(
        setting is not True or device.type == "cuda",
        f"hardware.graphs=true: CUDA graphs need a CUDA device, and this run is on {device}; use auto or false",
    )
    return None if setting == "auto" else bool(setting)


def evaluation_batch(device: torch.device) -> int:
    """Samples per evaluation batch.  A GPU wants many; of CPUs, one with small caches convolves 64 1.2 times as fast as
    256, one with large caches 256 1.2 times as fast as 64 (and 128 1.14 times)."""
    return 128 if device.type == "cpu" else 512


def smaller_for_masks(batch: int, outputs: int) -> int:
    """Samples per evaluation batch where a sample has so many outputs: fewer where each pixel has some, so that a batch
    of several clients, and all that a network computes between, stay in a few hundred megabytes."""
    return max(1, min(batch, MOST_OUTPUTS // outputs)) if outputs > MANY_OUTPUTS else batch


def shared_evaluation_batch(device: torch.device, sample_bytes: int) -> int:
    """Samples per evaluation batch of a row that all clients hold, so that nothing is padded: more where inputs are
    small and a batch is made of overheads (1,000 clients of 7 test samples of 64 numbers: 1.4 times as fast)."""
    return max(evaluation_batch(device), (1 << 18 if device.type == "cpu" else 1 << 22) // sample_bytes)
