"""Properties of the data that a model's constructor can receive."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataSpec:
    """Properties of the data.  A constructor receives those that it names, or all of them as `spec`.

    Attributes:
        input_shape: Shape of one sample, or of each of its inputs by name.
        num_classes: Outputs of the model for one sample (or pixel).
        class_names: None if classes have no names.
        template: The sentence with a class name for a vision-language model; {} is the name.
        reads: Further inputs that the algorithm reads ("tokens").
        num_clients: Clients that train; None before the data are partitioned.
    """

    input_shape: tuple[int, ...] | dict[str, tuple[int, ...]]
    num_classes: int
    class_names: list[str] | None = None
    template: str = "a photo of a {}."
    reads: tuple[str, ...] = ()
    num_clients: int | None = None
