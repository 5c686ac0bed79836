"""Generated texts: those of the deployed model, equal when repeated, and refused without a language model."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbench.commands import main
from fedbench.core.options import ConfigError
from fedbench.core.rng import generator
from fedbench.data.text._tokens import Tokenizer
from fedbench.simulation.simulator import Simulation
from fedbench.tools.export import client_module, open_run
from fedbench.tools.generate import _continuation, _sample, generate

LENGTH = 12
SHAKESPEARE = ["dataset=shakespeare_lm", f"dataset.length={LENGTH}", "dataset.min_tokens=9000", "dataset.subset=0.1"]
GPT = ["model=gpt_tiny", "model.width=16", "model.depth=1"]
QUICK = ["partition=domain", "sample_rate=1", "tracking=disabled", "hardware.executor=vmap"]


def finished(run: Path, *words: str) -> Path:
    assert main([*words, *QUICK, f"hydra.run.dir={run}"]) == 0
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate") / "run"
    return finished(folder, *SHAKESPEARE, *GPT, "algorithm=local", "rounds=2", "optimizer=adam", "optimizer.lr=0.01")


@pytest.fixture(scope="module")
def sim(run: Path) -> Simulation:
    return open_run(run)


def by_hand(run: Path, client: int, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """The same text of the client's module alone, from the padded last tokens, by inversion of the cumulative sum."""
    from fedbench.data.text._speech import ALPHABET

    module, text, random = client_module(open_run(run), client), prompt, generator(seed, "generate")
    for _ in range(tokens):
        last = [ALPHABET.index(c) for c in text[-LENGTH:]]
        x = torch.tensor([last + [0] * (LENGTH - len(last))])
        p = (module({"text": x})[0, len(last) - 1].double() / temperature).softmax(0).cumsum(0)
        text += ALPHABET[int((p < random.random()).sum())]
    return text


@pytest.mark.parametrize("client", [0, 2])
def test_a_text_is_what_the_clients_model_says(run: Path, sim: Simulation, client: int) -> None:
    """Longer than a sample of the data set; the clients' models differ, and so do seeds."""
    made = generate(sim, client, "To be", 30, 0.7, 3)
    assert made == by_hand(run, client, "To be", 30, 0.7, 3) and len(made) == 35
    assert generate(sim, client, "To be", 30, 0.7, 3) == made
    assert generate(sim, client, "To be", 30, 0.7, 4) != made != generate(sim, 1, "To be", 30, 0.7, 3)
    assert made.startswith(generate(sim, client, "To be", 10, 0.7, 3))


def test_tokens_are_sampled_by_their_probabilities() -> None:
    logits = np.log([0.2, 0.5, 0.3])
    assert [_sample(logits + 9, 1.0, u) for u in (0.0, 0.19, 0.21, 0.69, 0.71, 0.999)] == [0, 0, 1, 1, 2, 2]
    assert _sample(logits, 0, 0.99) == 1
    squared = np.cumsum(np.square([0.2, 0.5, 0.3])) / np.square([0.2, 0.5, 0.3]).sum()  # at temperature 1/2
    assert [_sample(logits, 0.5, u) for u in (squared[0] - 0.01, squared[0] + 0.01, squared[1] + 0.01)] == [0, 1, 2]


def test_the_command_prints_the_prompt_and_the_text(
    run: Path, sim: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Defaults are 100 tokens, temperature 0.8 and seed 0; nothing is written; 0 is the most probable token."""
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    for words, options in (
        ([], {"tokens": 100, "temperature": 0.8, "seed": 0}),
        (["--tokens", "7", "--temperature", "0", "--seed", "5"], {"tokens": 7, "temperature": 0.0}),
        (["--tokens", "9", "--seed", "5"], {"tokens": 9, "temperature": 0.8, "seed": 5}),
    ):
        assert main(["export", str(run), "--client", "1", "--generate", "The ", *words]) == 0
        assert capsys.readouterr().out == f"{generate(sim, 1, 'The ', **options)}\n"
    assert not list(tmp_path.iterdir())


def test_one_model_of_the_server_generates_for_all(tmp_path: Path) -> None:
    sim = open_run(finished(tmp_path / "run", *SHAKESPEARE, *GPT, "algorithm=fedavg", "rounds=1"))
    assert generate(sim, 0, "To", 20) == generate(sim, 1, "To", 20)


# -- prompts and responses -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned to answer each of two prompts, and to end."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [{"client": c, "ask": ask, "say": say} for c in "AB" for ask, say in [("up", "down"), ("left", "right")] * 8]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["dataset=text_files", f"dataset.path={folder / 'pairs.jsonl'}", "dataset.length=12"]
    keys = ["dataset.prompt=ask", "dataset.response=say"]
    learn = ["algorithm=local", "rounds=12", "local.epochs=3", "optimizer=adam", "optimizer.lr=0.02", "eval.every=12"]
    return finished(folder / "run", *data, *keys, *GPT, *learn)


def test_a_response_is_learned_and_ends(pairs: Path) -> None:
    """The separator is added to the prompt, and nothing follows the end token."""
    sim = open_run(pairs)
    assert [generate(sim, 0, prompt, 100, 0.0) for prompt in ("up", "left")] == ["up\ndown", "left\nright"]
    with pytest.raises(ConfigError, match="characters 'X', which the data set of the run does not have"):
        generate(sim, 0, "X")


# -- transformers ----------------------------------------------------------------------------------------
@pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers")
def test_a_network_of_transformers_generates_what_transformers_does(tmp_path: Path) -> None:
    """Greedily, within the length of a sample: generate() of the network with the client's weights."""
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    options = "{" + ",".join(f"{key}:{value}" for key, value in size.items()) + "}"
    model = ["model=hf_causal", "model.name=llama", f"model.options={options}", "optimizer.lr=1"]
    run = finished(tmp_path / "run", *SHAKESPEARE, *model, "algorithm=local", "rounds=1")
    from fedbench.data.text._speech import ALPHABET

    sim = open_run(run)
    made = generate(sim, 2, "To be", LENGTH - 5, 0.0)
    network = client_module(open_run(run), 2).network
    prompt = torch.tensor([[ALPHABET.index(c) for c in "To be"]])
    theirs = network.generate(prompt, max_new_tokens=LENGTH - 5, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert made == "".join(ALPHABET[i] for i in theirs[0].tolist())


def test_the_blank_between_words_is_kept() -> None:
    """As in Llama's tokenizer, whose decoder removes the blank before the first word."""
    words = ["To", " be", " or", "?"]
    decode = lambda tokens: "".join(words[i] for i in tokens).lstrip()  # noqa: E731
    tokenizer = Tokenizer(4, encode=lambda text: [0, 1], encode_whole=lambda text, n: [0, 1], decode=decode)
    assert _continuation(tokenizer, [0, 1], [0, 1, 2, 3]) == " or?"


# -- what is refused -------------------------------------------------------------------------------------
def test_other_models_are_refused(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    quick = ["rounds=1", "local.epochs=1", "tracking=disabled", "hardware.executor=vmap", f"hydra.run.dir={other}"]
    assert main(["algorithm=fedavg", *quick]) == 0

    def refused(*words: str) -> str:
        capsys.readouterr()
        assert main(["export", *words]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return err

    said = refused(str(other), "--client", "0", "--generate", "To be")
    assert "--generate needs a language model, but the run has task=classification: choose a run of task=nex" in said
    assert "--generate needs a text of at least one token" in refused(str(run), "--client", "0", "--generate", "")
    assert "client 99 is not among the" in refused(str(run), "--client", "99", "--generate", "a")
    assert "--generate 'a' needs the model of a client: add --client N" in refused(str(run), "--generate", "a")
    for words, expected in (
        (["--tokens", "3"], "--tokens belong to --generate: add --generate TEXT"),
        (["--generate", "a", "--tokens", "0"], "must be an integer >= 1, got '0'"),
        (["--generate", "a", "--temperature", "-1"], "must be a number >= 0, got '-1'"),
        (["--generate", "a", "--temperature", "nan"], "must be a number >= 0, got 'nan'"),
        (["--generate", "a", "--seed", "-1"], "must be an integer >= 0, got '-1'"),
        (["--generate", "a", "--out", "x.pt"], "--out x.pt and --generate exclude each other"),
        (["--generate", "a", "--merged"], "not allowed with argument"),
    ):
        assert expected in refused(str(run), "--client", "0", *words)


def test_a_data_set_without_a_tokenizer_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sim = open_run(run)
    monkeypatch.setattr(sys.modules["fedbench.tools.generate"], "component", lambda cfg, group: object())
    with pytest.raises(ConfigError, match="dataset=shakespeare_lm has no method load_tokenizer"):
        generate(sim, 0, "a")
