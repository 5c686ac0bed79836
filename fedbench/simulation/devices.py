"""Settings that depend on the hardware: device, precision, memory limits, CUDA graphs, evaluation batch sizes."""

from __future__ import annotations

import torch
from omegaconf import DictConfig

from fedbench.core.options import require
from fedbench.core.rows import disk_space, free_memory
from fedbench.engine import ranks as processes

MANY_OUTPUTS = 1024  # outputs per sample from which on they are those of pixels
MOST_OUTPUTS = 1 << 17  # outputs in a client's evaluation batch


def device_of(cfg: DictConfig) -> torch.device:
    """Return the compute device of this process.

    With several processes, each gets its own GPU, unless hardware.device is a GPU with a number.

    Args:
        cfg: The checked configuration.

    Raises:
        ConfigError: The device does not exist.
    """
    name, ranks = cfg.hardware.device, processes.current()
    if ranks.world_size > 1 and torch.cuda.is_available() and name in ("auto", "cuda"):
        require(
            ranks.local_world_size <= torch.cuda.device_count(),
            f"torchrun started {ranks.local_world_size} processes on a machine with {torch.cuda.device_count()} CUDA "
            f"devices: use --nproc-per-node={torch.cuda.device_count()}, or hardware.device=cuda:0 to share one",
        )
        return torch.device("cuda", ranks.local_rank)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    require(
        not name.startswith("cuda") or torch.cuda.is_available(),
        f"hardware.device={name}: this machine has no usable CUDA device "
        f"(torch {torch.__version__}); use hardware.device=cpu or auto",
    )
    require(
        name != "mps" or torch.backends.mps.is_available(),
        "hardware.device=mps: this machine has no usable MPS device; use hardware.device=cpu",
    )
    device = torch.device(name)
    require(
        device.index is None or device.index < torch.cuda.device_count(),
        f"hardware.device={name}: this machine has {torch.cuda.device_count()} CUDA devices, numbered from 0: give the "
        "number of one of them",
    )
    return device


def set_precision(name: str) -> None:
    """Set the precision of matrix products of this process.

    Args:
        name: The option hardware.precision.  "tf32" allows tensor cores for float32 products.  "float32" and "bf16" do
            not: with bf16, the model itself casts to bfloat16.
    """
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"


def memory_limits(device: torch.device, ranks: int = 1) -> tuple[int, int, int]:
    """Return the bytes that clients' states may use: on the device, in host memory, and on disk.

    These are half of the memory and all free disk space.  The processes of a machine share host memory and disk.
    Without a GPU, the device is the CPU: its memory is the first number, and the second is 0.

    Args:
        device: The compute device.
        ranks: The number of processes on this machine.
    """
    host, disk = free_memory(torch.device("cpu")) // 2 // ranks, disk_space() // ranks
    return (free_memory(device) // 2, host, disk) if device.type == "cuda" else (host, 0, disk)


def cuda_graphs(setting: bool | str, device: torch.device) -> bool | None:
    """Return whether to use CUDA graphs; None if both are to be timed.

    Args:
        setting: The option hardware.graphs: True, False, or "auto" to time both.
        device: The compute device.

    Raises:
        ConfigError: CUDA graphs are requested without a CUDA device.
    """
    require(
        setting is not True or device.type == "cuda",
        f"hardware.graphs=true: CUDA graphs need a CUDA device, and this run is on {device}; use auto or false",
    )
    return None if setting == "auto" else bool(setting)


def evaluation_batch(device: torch.device) -> int:
    """Return the default number of samples per client that an evaluation computes at once: 128 on a CPU, else 512."""
    return 128 if device.type == "cpu" else 512  # a compromise between CPUs with small and large caches


def smaller_for_masks(batch: int, outputs: int) -> int:
    """Return a smaller evaluation batch for models with outputs for each pixel, else the same.

    Activations then stay in a few hundred MB.

    Args:
        batch: The number of samples of a batch for other models.
        outputs: The number of outputs per sample.
    """
    # MANY_OUTPUTS: more than any number of classes; MOST_OUTPUTS: outputs of a whole batch
    return max(1, min(batch, MOST_OUTPUTS // outputs)) if outputs > MANY_OUTPUTS else batch


def shared_evaluation_batch(device: torch.device, sample_bytes: int) -> int:
    """Return the samples per evaluation batch of a model that all clients share, larger for small inputs.

    Args:
        device: The compute device.
        sample_bytes: Bytes of the inputs of a sample.
    """
    input_bytes = 1 << 18 if device.type == "cpu" else 1 << 22  # approximate bytes of the inputs of a batch
    return max(evaluation_batch(device), input_bytes // sample_bytes)
