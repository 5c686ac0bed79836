"""Random numbers of a mapped module, keyed by the client, and fused layers in a form that vmap and autograd follow.

A module outside the table of program.py runs its own forward pass.  Its random numbers must be those of the client's
key, not of torch's global generator: otherwise a run does not repeat itself, and depends on the executor.
`ClientRandom` stands between the module and torch for the time of a pass and answers what draws: dropout in all its
forms (attention and recurrent layers included), Bernoulli masks (stochastic depth), uniform and normal noise.  What
draws otherwise is noticed before round 1 (autotune.py).

Recurrent layers run in training mode, without torch's own dropout (cuDNN has a gradient in that mode alone), and are
written out for several clients.  While the mode is active, PyTorch's encoder layers take no fast path of evaluation,
which neither vmap nor autograd can follow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedbench.core.options import ConfigError
from fedbench.core.rng import RowRandom, key

RandomFunction = Callable[..., Any]  # (mode, torch's function, *its arguments) -> what it returns
ATTENTION = inspect.signature(F.multi_head_attention_forward)


class ClientRandom(TorchFunctionMode):
    """The mode in which a mapped module's pass runs: the i-th draw is a function of the client's key and i.

    client_key: int64 [] (None: nothing is in training).  many: whether torch.vmap maps the pass.
    """

    def __init__(self, client_key: Tensor | None, many: bool):
        super().__init__()
        self.client_key, self.many, self.draws = client_key, many, 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        function = RANDOM_FUNCTIONS.get(func)
        return func(*args, **(kwargs or {})) if function is None else function(self, func, *args, **(kwargs or {}))

    def random(self, like: Tensor) -> RowRandom:
        """The next draw, of one row."""
        self.draws += 1
        unkeyed = torch.zeros((), dtype=torch.int64, device=like.device)
        client_key = unkeyed if self.client_key is None else self.client_key
        return RowRandom(client_key[None] ^ (key("draw", self.draws) >> 1))

    def masked(self, x: Tensor, p: float, shape: tuple[int, ...] | torch.Size) -> Tensor:
        """Dropout: x times a mask of this shape, 0 with probability p and else 1 / (1 - p)."""
        stays = self.random(x).uniform(*shape)[0] >= p
        return x * stays / (1 - p) if p < 1 else x * 0


# -- dropout ---------------------------------------------------------------------------------------------------
def _dropout(
    mode: ClientRandom,
    func: Any,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool = True,
) -> Tensor:
    return mode.masked(input, p, input.shape) if training and train and p > 0 else input


def _channels(axes: int) -> RandomFunction:
    """Return dropout of whole channels of [B, C, ...], or of [C, ...] where the input has so many axes."""

    def drawn(
        mode: ClientRandom, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        lead = 1 if input.dim() == axes else 2
        shape = (*input.shape[:lead], *(1,) * (input.dim() - lead))
        return mode.masked(input, p, shape) if training and p > 0 else input

    return drawn


def _product_attention(
    mode: ClientRandom,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention; written out where it drops, or is mapped."""
    if enable_gqa or (dropout_p == 0 and not mode.many):
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if is_causal:
        shape = query.shape[-2], key.shape[-2]
        attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _additive(~attn_mask, query)
    return _attend(mode, query, key, value, attn_mask, dropout_p, scale)[0]


def _additive(hidden: Tensor, like: Tensor) -> Tensor:
    """-inf where hidden, else 0; a mask that is added already stays."""
    if hidden.dtype != torch.bool:
        return hidden
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill(hidden, float("-inf"))


def _attend(
    mode: ClientRandom, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, p: float, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Values [..., L, d] of queries [..., L, d] on S keys and values, and the weights [..., L, S]."""
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    weights = (scores if added is None else scores + added).softmax(-1)
    weights = mode.masked(weights, p, weights.shape) if p > 0 else weights
    return weights @ v, weights


def _attention(mode: ClientRandom, func: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """multi_head_attention_forward; written out where it drops, or is mapped."""
    bound = ATTENTION.bind(*args, **kwargs)
    bound.apply_defaults()
    a = SimpleNamespace(**bound.arguments)
    p = a.dropout_p if a.training else 0.0
    if p == 0 and not mode.many:
        return func(*args, **kwargs)
    if a.bias_k is not None or a.add_zero_attn or a.static_k is not None or a.static_v is not None:
        raise ConfigError(
            "attention with add_bias_kv or add_zero_attn has no keyed dropout, and no form for several "
            "clients at once: leave them at False"
        )
    single = a.query.dim() == 2
    given = [t.unsqueeze(1) if single else t for t in (a.query, a.key, a.value)]  # [L or S, N, E]
    weights = (
        (a.q_proj_weight, a.k_proj_weight, a.v_proj_weight) if a.use_separate_proj_weight else a.in_proj_weight.chunk(3)
    )
    biases = (None,) * 3 if a.in_proj_bias is None else a.in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(t, w, b).unflatten(-1, (a.num_heads, -1)).permute(1, 2, 0, 3)  # [N, H, L or S, d]
        for t, w, b in zip(given, weights, biases)
    )
    out, shares = _attend(mode, q, k, v, _hidden(a, q), p)
    out = F.linear(out.permute(2, 0, 1, 3).flatten(2), a.out_proj_weight, a.out_proj_bias)  # [L, N, E]
    shares = (shares.mean(1) if a.average_attn_weights else shares) if a.need_weights else None
    return (out.squeeze(1), None if shares is None else shares.squeeze(0)) if single else (out, shares)


def _hidden(a: SimpleNamespace, q: Tensor) -> Tensor | None:
    """What is added to the scores [N, H, L, S]: the mask of pairs [L, S] or [N * H, L, S], and that of keys [N, S]."""
    added = None
    if a.attn_mask is not None:
        added = _additive(a.attn_mask, q)
        added = added.unflatten(0, q.shape[:2]) if added.dim() == 3 else added
    if a.key_padding_mask is not None:
        padding = _additive(a.key_padding_mask, q)
        padding = (padding if padding.dim() == 2 else padding[None])[:, None, None, :]
        added = padding if added is None else added + padding
    return added


# -- recurrent layers ------------------------------------------------------------------------------------------
def _recurrent(mode: ClientRandom, func: Any, *args: Any) -> tuple[Tensor, ...]:
    """torch.lstm, torch.gru, ...: (x, state, weights, biases?, layers, dropout, train, both ways?, batch first?); of a
    packed sequence (data, sizes, state, weights, biases?, layers, dropout, train, both ways?)."""
    packed = isinstance(args[3], list | tuple)
    at = 6 if packed else 5
    dropout, train = args[at : at + 2]
    if not mode.many and not (dropout and train):
        return func(*args[:at], 0.0, True, *args[at + 2 :])
    if packed:
        raise ConfigError(
            "a recurrent layer on packed sequences has no dropout between its layers here, and no form "
            "for several clients at once: pad the sequences, or set its dropout to 0"
        )
    x, state, weights, biases, layers, _, _, both, batch_first = args
    states = state if isinstance(state, tuple | list) else (state,)  # each [layers * D, ...]
    each, ways, lasts = len(weights) // layers, 1 + both, []
    for i in range(layers):
        start, parts = [s[i * ways : (i + 1) * ways] for s in states], weights[i * each : (i + 1) * each]
        x = mode.masked(x, dropout, x.shape) if i and dropout and train else x
        if mode.many:
            x, *last = _unrolled(CELLS[func], x, start, parts, biases, ways, batch_first)
        else:
            x, *last = func(
                x,
                tuple(start) if isinstance(state, tuple | list) else start[0],
                parts,
                biases,
                1,
                0.0,
                True,
                both,
                batch_first,
            )
        lasts.append(last)
    return x, *(torch.cat(parts) for parts in zip(*lasts))


def _unrolled(
    cell: Callable[..., tuple],
    x: Tensor,
    states: list[Tensor],
    weights: Any,
    biases: bool,
    ways: int,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """One layer in plain operations: outputs, and the last states, each [D, ...].  One product for all inputs."""
    axis, each, outputs, lasts = int(batch_first and x.dim() == 3), len(weights) // ways, [], []
    for way in range(ways):
        w_input, w_state, *others = weights[way * each : (way + 1) * each]
        b_input, b_state = others[:2] if biases else (None, None)
        projection = others[-1].t() if len(others) > 2 * biases else None  # of an LSTM
        inputs, state, hidden = F.linear(x, w_input, b_input).unbind(axis), tuple(s[way] for s in states), []
        for from_input in reversed(inputs) if way else inputs:
            state = cell(from_input, F.linear(state[0], w_state, b_state), *state)
            state = state if projection is None else (state[0] @ projection, *state[1:])
            hidden.append(state[0])
        outputs.append(torch.stack(hidden[::-1] if way else hidden, axis))
        lasts.append(state)
    return torch.cat(outputs, -1), *(torch.stack(parts) for parts in zip(*lasts))


def _lstm(from_input: Tensor, from_state: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    input_gate, forget_gate, new, output_gate = (from_input + from_state).chunk(4, -1)
    c = forget_gate.sigmoid() * c + input_gate.sigmoid() * new.tanh()
    return output_gate.sigmoid() * c.tanh(), c


def _gru(from_input: Tensor, from_state: Tensor, h: Tensor) -> tuple[Tensor]:
    (reset, update, new), (r, u, n) = from_input.chunk(3, -1), from_state.chunk(3, -1)
    new = (new + (reset + r).sigmoid() * n).tanh()
    return (new + (update + u).sigmoid() * (h - new),)


CELLS: dict[Any, Callable[..., tuple]] = {  # (from the input, from the state, *states) -> new states
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: lambda from_input, from_state, h: ((from_input + from_state).tanh(),),
    torch.rnn_relu: lambda from_input, from_state, h: ((from_input + from_state).relu(),),
}


# -- the rest --------------------------------------------------------------------------------------------------
def _embedding(
    mode: ClientRandom,
    func: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """embedding, its gradient dense; torch.vmap forgets that nothing is learned at padding_idx."""
    if not mode.many:
        return func(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, False)
    if max_norm is not None or scale_grad_by_freq:
        raise ConfigError("an embedding with max_norm or scale_grad_by_freq has no form for several clients at once")
    vectors = func(input, weight)
    if padding_idx is None:
        return vectors
    return torch.where((input == padding_idx % len(weight))[..., None], vectors.detach(), vectors)


def _bernoulli_(mode: ClientRandom, func: Any, x: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
    return x.copy_((mode.random(x).uniform(*x.shape)[0] < p).to(x.dtype))


def _bernoulli(mode: ClientRandom, func: Any, x: Tensor, p: Any = None, *, generator: Any = None) -> Tensor:
    return (mode.random(x).uniform(*x.shape)[0] < (x if p is None else p)).to(x.dtype)


def _uniform_(
    mode: ClientRandom, func: Any, x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None
) -> Tensor:
    return x.copy_(low + (high - low) * mode.random(x).uniform(*x.shape)[0])


def _normal_(
    mode: ClientRandom, func: Any, x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None
) -> Tensor:
    return x.copy_(mean + std * mode.random(x).normal(*x.shape)[0])


def _like(law: str) -> RandomFunction:
    """rand_like, randn_like."""

    def drawn(mode: ClientRandom, func: Any, x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return getattr(mode.random(x), law)(*x.shape)[0].to(dtype or x.dtype)

    return drawn


def _fresh(law: str) -> RandomFunction:
    """rand, randn: on the device of the client's key, if none is named."""

    def drawn(
        mode: ClientRandom, func: Any, *size: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any
    ) -> Tensor:
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        like = torch.empty(
            0, device=device if device is not None or mode.client_key is None else mode.client_key.device
        )
        return getattr(mode.random(like), law)(*shape)[0].to(dtype or torch.get_default_dtype())

    return drawn


RANDOM_FUNCTIONS: dict[Any, RandomFunction] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.dropout1d: _channels(2),
    F.dropout2d: _channels(0),
    F.dropout3d: _channels(4),
    F.scaled_dot_product_attention: _product_attention,
    F.multi_head_attention_forward: _attention,
    F.embedding: _embedding,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    torch.rand_like: _like("uniform"),
    torch.randn_like: _like("normal"),
    torch.rand: _fresh("uniform"),
    torch.randn: _fresh("normal"),
}
