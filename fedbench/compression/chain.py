"""Operators one after the other: the second one compresses the numbers that the first one sends, and so on.

Top-k and then sign, for instance, is sparse ternary compression's kind (Sattler et al., IEEE TNNLS 2020): the kept
numbers' mean magnitude and their signs.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedbench.compression._stream import Reader, Writer
from fedbench.compression.base import Direction, Message, Operator, Sent
from fedbench.core.options import require
from fedbench.core.rng import RowRandom
from fedbench.core.rows import RowStore


class Chain(Operator):
    """operators: from the first to the last.  All but the last leave numbers (topk, randk), one of them at most
    chooses positions, and what needs the shapes of parameters comes first.  Exact ones are passed over.
    error_feedback, direction: of the chain, which its operators' own are set to.
    """

    def __init__(self, operators: list, error_feedback: bool = True, direction: Direction = "up"):
        super().__init__(error_feedback, direction)
        self._check(operators)
        self.operators = [o for o in operators if not o.exact]
        for o in self.operators:
            o.error_feedback, o.direction = error_feedback, direction
        self.exact = not self.operators
        self.unbiased = all(o.unbiased for o in self.operators)
        # behind an operator that changes numbers another may choose one whose sign was turned: contractions compose
        # where all but the last one pass on what they choose as it is
        passes_on = all(o.chooses for o in self.operators[:-1])
        self.contracts = passes_on and all(o.contracts for o in self.operators)
        self.leaves_numbers = all(o.leaves_numbers for o in self.operators)
        self.chooses = any(o.chooses for o in self.operators)
        self.reads_spans = any(o.reads_spans for o in self.operators)
        require(
            not (self.error_feedback and any(o.chooses and o.unbiased and not o.exact for o in operators)),
            "compression.operators has one that scales numbers up, to be right on average without error feedback: set "
            "compression.error_feedback=false",
        )

    def _check(self, operators: list) -> None:
        key = "compression.operators"
        require(bool(operators), f"{key} must have one operator or more, got none")
        wrong = next((type(o).__name__ for o in operators if not isinstance(o, Operator)), None)
        require(wrong is None, f"{key} must be operators of conf/compression, each with its _target_, got a {wrong}")
        names = [type(o).__name__ for o in operators]
        for name, o in zip(names[:-1], operators):
            require(o.leaves_numbers, f"{key}: {name} leaves no numbers for the next one to compress: put it last")
        for name, o in zip(names[1:], operators[1:]):
            require(not o.reads_spans, f"{key}: {name} needs the shapes of parameters, which are there at first only")
        choosing = [name for name, o in zip(names, operators) if o.chooses]
        require(len(choosing) < 2, f"{key}: {' and '.join(choosing)} all choose positions: keep one of them")

    def _links(self, message: Message) -> list[tuple[str, Operator, Message]]:
        """Each operator with a prefix for its names, and what it compresses, named so."""
        links, size, spans = [], message.size, message.spans
        for i, operator in enumerate(self.operators):
            part = replace(message, name=f"{i}/{message.name}", size=size, spans=spans)
            links.append((f"{i}/", operator, part))
            size, spans = operator.num_numbers(part), {}
        return links

    def pack(self, x: Tensor, draws: RowRandom, message: Message) -> Sent:
        """The last one's numbers, and all codes, under the operators' prefixes."""
        codes = {}
        for prefix, operator, part in self._links(message):
            sent = operator.pack(x, draws, part)
            codes |= {prefix + name: code for name, code in sent.codes.items()}
            x = sent.numbers
        return Sent(x, codes)

    def unpack(self, sent: Sent, message: Message) -> Tensor:
        """From the last one to the first.  # [k, n]"""
        x = sent.numbers
        for prefix, operator, part in reversed(self._links(message)):
            x = operator.unpack(Sent(x, _below(prefix, sent.codes)), part)
        return x

    def num_numbers(self, message: Message) -> int:
        """The last one's."""
        _, operator, part = self._links(message)[-1]
        return operator.num_numbers(part)

    def count(self, sent: Sent, message: Message) -> Tensor:
        """All together.  # [k]"""
        parts = [
            operator.count(Sent(sent.numbers, _below(prefix, sent.codes)), part)
            for prefix, operator, part in self._links(message)
        ]
        return torch.stack(parts).sum(0)

    def write(self, sent: Sent, out: Writer, message: Message) -> None:
        """One after the other."""
        for prefix, operator, part in self._links(message):
            operator.write(Sent(sent.numbers, _below(prefix, sent.codes)), out, part)

    def read(self, stream: Reader, message: Message) -> dict[str, Tensor]:
        """One after the other."""
        codes = {}
        for prefix, operator, part in self._links(message):
            codes |= {prefix + name: code for name, code in operator.read(stream, part).items()}
        return codes

    def setup(self, rows: "RowStore", message: Message) -> None:
        """The states of each operator, under its own name."""
        for _, operator, part in self._links(message):
            operator.setup(rows, part)

    def keep(self, sent: Sent, message: Message) -> None:
        """Of each operator, from what the other side sees of what it packed."""
        if all(type(o).keep is Operator.keep for o in self.operators):
            return  # which spares unpacking once more
        x = sent.numbers
        for prefix, operator, part in reversed(self._links(message)):
            mine = Sent(x, _below(prefix, sent.codes))
            operator.keep(mine, part)
            x = operator.unpack(mine, part)

    @property
    def reads_losses(self) -> bool:
        """Whether one does."""
        return any(o.reads_losses for o in self.operators)

    def observe(self, losses: Tensor) -> None:
        """All learn from them."""
        for operator in self.operators:
            operator.observe(losses)

    def state_dict(self) -> dict[str, Tensor]:
        """Theirs, under their prefixes."""
        return {f"{i}/{n}": t for i, o in enumerate(self.operators) for n, t in o.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Theirs."""
        for i, operator in enumerate(self.operators):
            operator.load_state_dict(_below(f"{i}/", state))


def _below(prefix: str, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin so, without that."""
    return {name.removeprefix(prefix): t for name, t in entries.items() if name.startswith(prefix)}
