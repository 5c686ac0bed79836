"""Chain of compressors: each one compresses the values of the previous one's encoding.

Top-k followed by sign, for example, is similar to sparse ternary compression (Sattler et al., IEEE TNNLS 2020): it
transmits the signs of the selected values and their mean magnitude.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedbench.compression._stream import Reader, Writer
from fedbench.compression.base import Compressor, Direction, Encoded, Message
from fedbench.core.options import require
from fedbench.core.rng import RowRandom
from fedbench.core.rows import RowStore


class Chain(Compressor):
    """Compressors, `operators`, that are applied one after the other, first to last.

    Args:
        operators: The compressors, first to last.  All except the last must have values in their encoding (topk,
            randk), at most one selects positions, and one that uses shapes of parameters must be the first.  Exact
            compressors are skipped.
        error_feedback: Whether clients add the residual of an upload to their next one; set for all operators.
        direction: "up", or "both" to compress downloads too; set for all operators.
    """

    def __init__(self, operators: list, error_feedback: bool = True, direction: Direction = "up"):
        super().__init__(error_feedback, direction)
        self._check(operators)
        self.operators = [o for o in operators if not o.exact]
        for o in self.operators:
            o.error_feedback, o.direction = error_feedback, direction
        self.exact = not self.operators
        self.unbiased = all(o.unbiased for o in self.operators)
        # A chain of contractive compressors is contractive if all except the last transmit selected values unchanged.
        # After a compressor that changes values, the next one could select a value whose sign was flipped.
        selects_only = all(o.selects_positions for o in self.operators[:-1])
        self.contractive = selects_only and all(o.contractive for o in self.operators)
        self.has_values = all(o.has_values for o in self.operators)
        self.selects_positions = any(o.selects_positions for o in self.operators)
        self.uses_shapes = any(o.uses_shapes for o in self.operators)
        require(
            not (self.error_feedback and any(o.selects_positions and o.unbiased and not o.exact for o in operators)),
            "compression.operators has a compressor with unbiased=true, whose residuals would grow with error "
            "feedback: set compression.error_feedback=false, or unbiased=false for this compressor",
        )

    def _check(self, operators: list) -> None:
        """Raise ConfigError if the compressors cannot be chained in this order.

        The list must not be empty.  All except the last must have values in their encoding, and at most one may select
        positions.  One that uses shapes of parameters must be the first.
        """
        key = "compression.operators"
        require(bool(operators), f"{key}=[] must list at least one compressor: add one, or set compression=none")
        wrong = next((type(o).__name__ for o in operators if not isinstance(o, Compressor)), None)
        require(
            wrong is None,
            f"{key} must list compressors of conf/compression by their _target_, got a {wrong}: write each entry as "
            "{_target_: fedbench.compression.topk.TopK, share: 0.01}, for example",
        )
        names = [type(o).__name__ for o in operators]
        for name, o in zip(names[:-1], operators):
            require(
                o.has_values,
                f"{key}: {name} has no values for the next compressor, because it encodes all of them itself: put "
                f"{name} last",
            )
        for name, o in zip(names[1:], operators[1:]):
            require(
                not o.uses_shapes,
                f"{key}: {name} needs the shapes of parameters, which only the first compressor gets: put {name} first",
            )
        selecting = [name for name, o in zip(names, operators) if o.selects_positions]
        require(
            len(selecting) < 2,
            f"{key}: {' and '.join(selecting)} each select positions, and a chain can have one such compressor: keep "
            "one of them",
        )

    def _links(self, message: Message) -> list[tuple[str, Compressor, Message]]:
        """Return a description of what each compressor of the chain compresses.

        Args:
            message: Description of what the whole chain compresses: name, size n, clients; not the content.

        Returns:
            For each compressor: the prefix of its codes' names ("0/", "1/" ...), the compressor, and the description.
        """
        links, size, spans = [], message.size, message.spans  # values and parameters that the next compressor gets
        for i, compressor in enumerate(self.operators):
            part = replace(message, name=f"{i}/{message.name}", size=size, spans=spans)
            links.append((f"{i}/", compressor, part))
            size, spans = compressor.num_values(part), {}  # the next one compresses this one's values
        return links

    def compress(self, x: Tensor, draws: RowRandom, message: Message) -> Encoded:
        """Encode rows x [k, n]: each compressor encodes the float32 values that the one before it transmits.

        Args:
            x: The rows to send, one per client.  # [k, n]
            draws: Random numbers, one key per row.
            message: Description of what is sent: its name, the size n of its rows, its clients; not the content.

        Returns:
            The values of the last compressor, and the codes of all, whose names begin with "0/", "1/" and so on.
        """
        codes = {}
        # each compressor, the prefix of its codes' names, and the description of what it compresses
        for prefix, compressor, part in self._links(message):
            encoded = compressor.compress(x, draws, part)
            codes |= {prefix + name: code for name, code in encoded.codes.items()}
            x = encoded.values  # the next compressor's rows
        return Encoded(x, codes)

    def decompress(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the rows that the receiver gets, decompressed from the last compressor to the first.

        Args:
            encoded: Values of the last compressor, and codes of all; "1/positions" is code "positions" of the second.
            message: Description of what is sent (name, size n, clients), the same as for `compress`; not the content.

        Returns:
            The rows.  # [k, n]
        """
        x = encoded.values
        # each compressor, the prefix of its codes' names, and the description of what it compresses
        for prefix, compressor, part in reversed(self._links(message)):
            x = compressor.decompress(Encoded(x, _below(prefix, encoded.codes)), part)
        return x

    def num_values(self, message: Message) -> int:
        """Return how many float32 values are sent for a row: those in the last compressor's encoding.

        The values of every other compressor are not sent, because the next one encodes them.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        _, compressor, part = self._links(message)[-1]  # the last compressor, and the description of what it compresses
        return compressor.num_values(part)

    def count(self, encoded: Encoded, message: Message) -> Tensor:
        """Return the bits of each row's codes, summed over all compressors, without float32 values.  # [k] int64

        `message` describes what is sent (name, size n, clients), without its content.
        """
        # _links: each compressor, the prefix of its codes' names ("0/", "1/" ...), and the description of what it
        # compresses; _below: the codes with this prefix.  `count` reads codes only, so that any values will do.
        parts = [
            compressor.count(Encoded(encoded.values, _below(prefix, encoded.codes)), part)
            for prefix, compressor, part in self._links(message)
        ]
        return torch.stack(parts).sum(0)

    def write(self, encoded: Encoded, out: Writer, message: Message) -> None:
        """Write the codes of one row (k = 1) to `out`: those of the first compressor, then of the second, and so on.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        # each compressor, the prefix of its codes' names, and the description of what it compresses; `write` reads
        # codes only, so that any values will do
        for prefix, compressor, part in self._links(message):
            compressor.write(Encoded(encoded.values, _below(prefix, encoded.codes)), out, part)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """Read the codes of one row that `write` wrote.

        `message` describes what is sent (name, size n, clients), without its content.

        Returns:
            The codes [1, ...] of all compressors by name; "1/positions" is the code "positions" of the second one.
        """
        codes = {}
        # each compressor, the prefix of its codes' names, and the description of what it compresses
        for prefix, compressor, part in self._links(message):
            codes |= {prefix + name: code for name, code in compressor.read(stream, part).items()}
        return codes

    def setup(self, rows: "RowStore", message: Message) -> None:
        """Create the client states of each compressor for all messages named message.name.

        Args:
            rows: Creates tensors with one row for each client of the run.
            message: Description of these messages, such as name and size; message.ids is empty.
        """
        for _, compressor, part in self._links(message):  # part: description of what this compressor compresses
            compressor.setup(rows, part)

    def update_state(self, encoded: Encoded, message: Message) -> None:
        """Let each compressor update the states of the clients message.ids after `encoded` was transmitted.

        A compressor gets its own codes, and the values that the receiver has after decompression of the next ones.

        `message` describes what is sent (name, size n, clients), without its content.
        """
        if all(type(o).update_state is Compressor.update_state for o in self.operators):
            return  # no compressor has a state, so nothing need be decompressed
        x = encoded.values
        for prefix, compressor, part in reversed(self._links(message)):
            # the values and codes of this compressor; prefix: "0/", "1/" ..., with which the names of its codes begin
            received = Encoded(x, _below(prefix, encoded.codes))
            compressor.update_state(received, part)
            x = compressor.decompress(received, part)  # the values of the compressor before it

    @property
    def reads_losses(self) -> bool:
        """Whether any compressor of the chain implements `observe`."""
        return any(o.reads_losses for o in self.operators)

    def observe(self, losses: Tensor) -> None:
        """Pass the training losses [K] of a round's clients to `observe` of all compressors."""
        for compressor in self.operators:
            compressor.observe(losses)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the compressors' tensors for a checkpoint: "0/q" is the tensor "q" of the first compressor."""
        return {f"{i}/{n}": t for i, o in enumerate(self.operators) for n, t in o.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors of all compressors from the dict that `state_dict` returned."""
        for i, compressor in enumerate(self.operators):
            compressor.load_state_dict(_below(f"{i}/", state))


def _below(prefix: str, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries whose names begin with the prefix, such as "0/", under the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in entries.items() if name.startswith(prefix)}
