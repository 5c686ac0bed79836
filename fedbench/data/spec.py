"""What a model's constructor may ask about the data that it is built for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataSpec:
    """A constructor is given those of these that it names, or, by the name `spec`, all of them.

    input_shape: of one sample's inputs, or by name where there are several.  num_classes: outputs of the model for one
    sample (or pixel).  class_names: None where the data have none.  template: the sentence that names a class to a
    vision-language model, {} being the name.  reads: what the algorithm reads of the inputs ("tokens").  num_clients:
    that take part in the rounds; None before the data are divided.
    """

    input_shape: tuple[int, ...] | dict[str, tuple[int, ...]]
    num_classes: int
    class_names: list[str] | None = None
    template: str = "a photo of a {}."
    reads: tuple[str, ...] = ()
    num_clients: int | None = None
