"""Texts that the language model of a client generates, from a run of task=next_token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.core.options import require
from fedbench.core.rng import generator
from fedbench.data.text._tokens import PADDING, HasTokenizer, Tokenizer
from fedbench.simulation.instantiate import component
from fedbench.simulation.simulator import Simulation
from fedbench.tools.export import deployed, index_of


def generate(
    sim: Simulation, client: int | str, prompt: str, tokens: int = 100, temperature: float = 0.8, seed: int = 0
) -> str:
    """Return a text as the language model that a client deploys continues it.

    Tokens are sampled one after the other, each from the softmax of logits / temperature.  The model reads as many of
    the last tokens as a sample of the data set has.

    Args:
        sim: The open run.
        client: Index or name of the client.
        prompt: The beginning of the text.
        tokens: The largest number of tokens to generate; fewer if the model generates the end token.
        temperature: >= 0; 0: the most probable token each time.
        seed: Key of the random numbers.  Equal arguments generate equal texts.

    Returns:
        The prompt, the separator of prompts and responses if the data set has one, and the generated text.

    Raises:
        ConfigError: The run has no language model or tokenizer, there is no such client, or the prompt has no tokens.
    """
    tokenizer = _tokenizer(sim)
    start = [] if tokenizer.start is None else [tokenizer.start]
    prompt += tokenizer.separator
    prompt_tokens = [*start, *tokenizer.encode(prompt)]
    require(bool(prompt_tokens), "--generate needs a text of at least one token: give the beginning of a text")
    model, text, random = _Model(sim, client), list(prompt_tokens), generator(seed, "generate")
    for _ in range(tokens):
        token = _sample(model.next_logits(text), temperature, random.random())
        if token == tokenizer.end:
            break
        text.append(token)
    return prompt + _continuation(tokenizer, prompt_tokens, text)


def _continuation(tokenizer: Tokenizer, prompt_tokens: list[int], text: list[int]) -> str:
    """Return the generated text: the decoded tokens of a text that follow its first ones.

    Tokens are decoded together where possible, because some tokenizers remove the blank before the first word.

    Args:
        tokenizer: The tokenizer.
        prompt_tokens: The first tokens of the text.
        text: All tokens, those of the prompt and the generated ones.
    """
    beginning, whole = tokenizer.decode(prompt_tokens), tokenizer.decode(text)
    return whole[len(beginning) :] if whole.startswith(beginning) else tokenizer.decode(text[len(prompt_tokens) :])


def _tokenizer(sim: Simulation) -> Tokenizer:
    """Return the tokenizer of a run's data set; raise ConfigError if the run has no language model or tokenizer."""
    task, source = sim.engine.task.kind, component(sim.cfg, "dataset")
    require(
        task == "next_token",
        f"--generate needs a language model, but the run has task={task}: choose a run of task=next_token",
    )
    require(
        isinstance(source, HasTokenizer),
        f"--generate needs a tokenizer, but dataset={sim.cfg.choices.dataset} has no method load_tokenizer: choose a "
        "run of dataset=shakespeare_lm or text_files, or add the method to the class of the data set",
    )
    return source.load_tokenizer()  # type: ignore[union-attr]


class _Model:
    """The language model that a client deploys (``_rows``: its trained numbers), which reads ``_length`` tokens.

    Args:
        sim: The open run.
        client: Index or name of the client.
    """

    def __init__(self, sim: Simulation, client: int | str):
        _, rows = deployed(sim, np.array([index_of(sim, client)]))
        self._rows: Any = rows[None] if isinstance(rows, Tensor) and rows.dim() == 1 else rows  # [1, P]
        self._sim, self._device = sim, sim.engine.federation.device
        shape: Any = sim.engine.federation.input_shape
        self._length = shape["text"][0]

    def next_logits(self, text: list[int]) -> np.ndarray:
        """Return the logits [C], float64, of the token that follows a text.

        Args:
            text: The tokens of the text, at least one.  The model reads at most the last ``self._length`` of them.
        """
        read = text[-self._length :]
        x = torch.full((1, 1, self._length), PADDING, device=self._device)  # one client with one sample
        x[0, 0, : len(read)] = torch.tensor(read, device=self._device)
        with torch.no_grad():
            logits = self._sim.algorithm.predict(self._sim.engine.model, self._rows, {"text": x})  # [1, 1, T, C]
        return logits[0, 0, len(read) - 1].double().cpu().numpy()


def _sample(logits: np.ndarray, temperature: float, uniform: float) -> int:
    """Return a token, sampled from softmax(logits / temperature).

    Args:
        logits: Logits of the tokens, [C].
        temperature: 0: the most probable token.
        uniform: A random number in [0, 1), which selects the token by the cumulative probabilities.
    """
    if temperature == 0:
        return int(logits.argmax())
    p = np.exp((logits - logits.max()) / temperature)
    cumulative = p.cumsum()
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
