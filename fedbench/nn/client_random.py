"""Replacements of torch functions in a forward pass: random numbers of one client, and fused layers for torch.vmap.

A module that is not traced calls torch's functions itself.  Its random numbers must depend on the client's key, not on
torch's global generator.  Otherwise results would depend on the executor.  `ClientRandom` is a mode that replaces torch
functions with random numbers during a forward pass: all kinds of dropout (in attention and recurrent layers too),
Bernoulli masks, uniform and normal noise.  `simulation/autotune.py` finds other random functions before round 1.

The mode also replaces fused functions that torch.vmap does not support.  Attention and recurrent layers of several
clients are computed by elementary operations.  Recurrent layers run in training mode without torch's dropout, because
cuDNN has gradients only in this mode.  While a mode is active, PyTorch's encoder layers do not use their fast path for
evaluation, which has neither a gradient nor a batching rule.

Letters: B batch size, C channels, N samples, H heads, L queries, S keys and values, E embedding size, d head size,
D directions of a recurrent layer.
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

Replacement = Callable[..., Any]  # (mode, torch function, *its arguments) -> its result
ATTENTION = inspect.signature(F.multi_head_attention_forward)


class ClientRandom(TorchFunctionMode):
    """A mode in which random numbers depend only on the client's key and on the number of earlier random calls.

    Args:
        client_key: Key of the client, or None in evaluation mode.  # [] int64
        vmapped: Whether torch.vmap computes several clients.
    """

    def __init__(self, client_key: Tensor | None, vmapped: bool):
        super().__init__()
        self.client_key, self.vmapped, self.num_calls = client_key, vmapped, 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        replacement = REPLACEMENTS.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(self, func, *args, **(kwargs or {}))

    def random(self, like: Tensor) -> RowRandom:
        """Return a new stream of random numbers for one client, whose tensors have shape [1, ...].

        It depends on the client's key and on the number of earlier calls.

        Args:
            like: A tensor, on whose device they are if there is no client key.
        """
        self.num_calls += 1
        default_key = torch.zeros((), dtype=torch.int64, device=like.device)  # for random calls in evaluation mode
        client_key = default_key if self.client_key is None else self.client_key
        # Keys are int64, so the unsigned 64-bit key of the call is shifted by one bit.
        return RowRandom(client_key[None] ^ (key("draw", self.num_calls) >> 1))

    def dropout(self, x: Tensor, p: float, mask_shape: tuple[int, ...] | torch.Size) -> Tensor:
        """Return x times a random mask, which is 0 with probability p and else 1 / (1 - p).

        Args:
            x: The values.
            p: Probability of 0.
            mask_shape: Shape of the mask, which is broadcast to that of x.
        """
        uniform = self.random(x).uniform(*mask_shape)  # in [0, 1)  [1, *mask_shape], for one client
        is_kept = uniform[0] >= p
        return x * is_kept / (1 - p) if p < 1 else x * 0  # p = 1 would divide by 0


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
    """Replace F.dropout and torch.dropout.

    Args:
        mode: Random numbers of the client.
        func: The replaced function, not used.
        input: The values.
        p: Probability that a value becomes 0.
        training: Whether F.dropout is in training mode.
        inplace: Not used; the result is always a new tensor.
        train: The name of `training` in torch.dropout.
    """
    return mode.dropout(input, p, input.shape) if training and train and p > 0 else input


def _channel_dropout(unbatched_axes: int) -> Replacement:
    """Return a function that replaces F.dropout1d, 2d or 3d, which drop whole channels, by dropout of the client.

    Args:
        unbatched_axes: Number of axes of an input [C, ...] without a batch axis.  0: inputs always are [B, C, ...].

    Returns:
        The function.  Its arguments `func`, the replaced function, and `inplace` are unused.
    """

    def channel_dropout(
        mode: ClientRandom, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Return input [C, ...] or [B, C, ...] with each channel set to 0 with probability p, else over 1 - p.

        mode has the random numbers of the client.  func, the replaced function, and inplace are unused.
        """
        num_leading = 1 if input.dim() == unbatched_axes else 2  # axes with masks of their own: C, or B and C
        mask_shape = (*input.shape[:num_leading], *(1,) * (input.dim() - num_leading))
        return mode.dropout(input, p, mask_shape) if training and p > 0 else input

    return channel_dropout


def _dot_product_attention(
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
    """Compute scaled_dot_product_attention, by elementary operations if it has dropout or is vmapped.

    Queries are [..., L, d], keys and values [..., S, d].  A Boolean mask [..., L, S] is true where attention
    is allowed.  mode has the random numbers of the client, and func is the replaced function, which also computes
    calls with enable_gqa (fewer heads of keys than of queries) and without dropout.
    """
    if enable_gqa and dropout_p > 0:  # each head of the keys serves several heads of queries
        group = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(group, dim=-3) for tensor in (key, value))
    elif enable_gqa or (dropout_p == 0 and not mode.vmapped):
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if is_causal:
        shape = query.shape[-2], key.shape[-2]
        attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _additive_mask(~attn_mask, query)
    output, _ = _weighted_values(mode, query, key, value, attn_mask, dropout_p, scale)  # _: the attention weights
    return output


def _additive_mask(is_masked: Tensor, like: Tensor) -> Tensor:
    """Return a mask that can be added to scores: -inf where a Boolean mask is true, else 0.

    Args:
        is_masked: The mask.  One that is not Boolean is additive already, and is returned.
        like: A tensor with the type and device of the scores.
    """
    if is_masked.dtype != torch.bool:
        return is_masked
    return torch.zeros(is_masked.shape, dtype=like.dtype, device=like.device).masked_fill(is_masked, float("-inf"))


def _weighted_values(
    mode: ClientRandom, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output [..., L, d] and the weights [..., L, S] of attention.

    Args:
        mode: Random numbers of dropout.
        q: Queries.  # [..., L, d]
        k: Keys.  # [..., S, d]
        v: Values.  # [..., S, d]
        mask: Added to the scores, or None.  # [..., L, S]
        p: Probability of dropout of the weights.
        scale: Factor of the scores.  Default: 1 / sqrt(d).
    """
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = mode.dropout(weights, p, weights.shape) if p > 0 else weights
    return weights @ v, weights


def _attention(mode: ClientRandom, func: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Compute multi_head_attention_forward, by elementary operations if it has dropout or is vmapped.

    Args:
        mode: Random numbers of dropout.
        func: The torch function.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        The output [L, N, E], and the attention weights [N, L, S], or [N, H, L, S] if they are not averaged over heads;
        None if need_weights is false.  Without a batch of samples, there is no axis N.

    Raises:
        ConfigError: The attention has add_bias_kv, add_zero_attn or static keys.
    """
    bound = ATTENTION.bind(*args, **kwargs)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    p = given.dropout_p if given.training else 0.0
    if p == 0 and not mode.vmapped:
        return func(*args, **kwargs)
    if given.bias_k is not None or given.add_zero_attn or given.static_k is not None or given.static_v is not None:
        raise ConfigError(
            "attention with add_bias_kv, add_zero_attn or static keys supports neither dropout nor several clients at "
            "once: construct it without them"
        )
    is_unbatched = given.query.dim() == 2
    inputs = [t.unsqueeze(1) if is_unbatched else t for t in (given.query, given.key, given.value)]  # [L or S, N, E]
    if given.use_separate_proj_weight:
        weights = given.q_proj_weight, given.k_proj_weight, given.v_proj_weight
    else:
        weights = given.in_proj_weight.chunk(3)
    biases = (None,) * 3 if given.in_proj_bias is None else given.in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(t, w, b).unflatten(-1, (given.num_heads, -1)).permute(1, 2, 0, 3)  # [N, H, L or S, d]
        for t, w, b in zip(inputs, weights, biases)
    )
    out, attention_weights = _weighted_values(mode, q, k, v, _attention_mask(given, q), p)
    out = F.linear(out.permute(2, 0, 1, 3).flatten(2), given.out_proj_weight, given.out_proj_bias)  # [L, N, E]
    if is_unbatched:
        out = out.squeeze(1)
    if not given.need_weights:
        return out, None
    if given.average_attn_weights:
        attention_weights = attention_weights.mean(1)
    return out, attention_weights.squeeze(0) if is_unbatched else attention_weights


def _attention_mask(given: SimpleNamespace, q: Tensor) -> Tensor | None:
    """Return the mask that is added to the scores of attention, or None if there is none.

    Args:
        given: Arguments of multi_head_attention_forward by name: the attention mask [L, S] or [N * H, L, S], and the
            key padding mask [N, S] or [S], for N samples and H heads.  The result is their sum.
        q: Queries, for the shape and the type.  # [N, H, L, d]

    Returns:
        A mask that can be broadcast to [N, H, L, S]; -inf where attention is not allowed.
    """
    mask = None
    if given.attn_mask is not None:
        mask = _additive_mask(given.attn_mask, q)
        mask = mask.unflatten(0, q.shape[:2]) if mask.dim() == 3 else mask
    if given.key_padding_mask is not None:
        padding = _additive_mask(given.key_padding_mask, q)
        padding = (padding if padding.dim() == 2 else padding[None])[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask


# -- recurrent layers ------------------------------------------------------------------------------------------
def _recurrent(mode: ClientRandom, func: Any, *args: Any) -> tuple[Tensor, ...]:
    """Compute torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu, with dropout by client.

    Args:
        mode: Random numbers of dropout.
        func: The torch function.
        *args: Its arguments: (input, state, weights, has_biases, num_layers, dropout, train, bidirectional,
            batch_first), or for packed sequences (data, batch_sizes, state, weights, has_biases, num_layers, dropout,
            train, bidirectional).

    Returns:
        The output, and the last states.

    Raises:
        ConfigError: Packed sequences are combined with dropout or torch.vmap.
    """
    is_packed = isinstance(args[3], list | tuple)
    dropout_position = 6 if is_packed else 5  # in args; train follows
    dropout, train = args[dropout_position : dropout_position + 2]
    if not mode.vmapped and not (dropout and train):
        return func(*args[:dropout_position], 0.0, True, *args[dropout_position + 2 :])
    if is_packed:
        raise ConfigError(
            "a recurrent layer on packed sequences supports neither dropout nor several clients at once: pad the "
            "sequences, or set its dropout to 0 and hardware.executor=loop"
        )
    x, state, weights, has_biases, num_layers, _, _, bidirectional, batch_first = args
    has_several_states = isinstance(state, tuple | list)
    states = state if has_several_states else (state,)  # [num_layers * D, ...] each
    weights_per_layer = len(weights) // num_layers
    num_directions = 2 if bidirectional else 1
    last_states = []
    for i in range(num_layers):
        layer_states = [s[i * num_directions : (i + 1) * num_directions] for s in states]
        layer_weights = weights[i * weights_per_layer : (i + 1) * weights_per_layer]
        if i and dropout and train:
            x = mode.dropout(x, dropout, x.shape)
        if mode.vmapped:
            x, *last = _unrolled_layer(
                CELLS[func], x, layer_states, layer_weights, has_biases, num_directions, batch_first
            )
        else:
            layer_state = tuple(layer_states) if has_several_states else layer_states[0]
            # 1, 0.0, True: num_layers, dropout and train
            x, *last = func(x, layer_state, layer_weights, has_biases, 1, 0.0, True, bidirectional, batch_first)
        last_states.append(last)
    return x, *(torch.cat(layers) for layers in zip(*last_states))


def _unrolled_layer(
    cell: Callable[..., tuple],
    x: Tensor,
    states: list[Tensor],
    weights: Any,
    has_biases: bool,
    num_directions: int,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Compute one recurrent layer by elementary operations.

    Args:
        cell: (input term, state term, *states) -> new states.
        x: The input sequence.  # [T, B, F], or [B, T, F] if batch_first; without a batch [T, F]
        states: The first states.  # [D, ...] each
        weights: For each direction, the weights of the input term and the state term, their two biases if there are
            any, and the projection of an LSTM if it has one.
        has_biases: Whether there are biases.
        num_directions: D.
        batch_first: Whether the batch axis of x is before the time axis.

    Returns:
        The output sequence, and the last states [D, ...].
    """
    time_axis = int(batch_first and x.dim() == 3)
    weights_per_direction = len(weights) // num_directions
    outputs, last_states = [], []
    for direction in range(num_directions):
        is_reverse = direction == 1
        first = direction * weights_per_direction
        w_input, w_state, *others = weights[first : first + weights_per_direction]
        b_input, b_state = others[:2] if has_biases else (None, None)
        projection = others[-1].t() if len(others) > 2 * has_biases else None  # after the biases
        input_terms = F.linear(x, w_input, b_input).unbind(time_axis)  # one product for all times
        state = tuple(s[direction] for s in states)
        hidden = []
        for input_term in reversed(input_terms) if is_reverse else input_terms:
            state = cell(input_term, F.linear(state[0], w_state, b_state), *state)
            state = state if projection is None else (state[0] @ projection, *state[1:])
            hidden.append(state[0])
        outputs.append(torch.stack(hidden[::-1] if is_reverse else hidden, time_axis))
        last_states.append(state)
    return torch.cat(outputs, -1), *(torch.stack(directions) for directions in zip(*last_states))


def _lstm(input_term: Tensor, state_term: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one time step of nn.LSTM.

    Args:
        input_term: Product of weights and input, with bias.  # [B, 4 hidden], of the gates i, f, g, o
        state_term: Product of weights and hidden state, with bias.  # [B, 4 hidden]
        h: Hidden state, not used.
        c: Cell state.  # [B, hidden]

    Returns:
        The new hidden state and cell state.
    """
    input_gate, forget_gate, new, output_gate = (input_term + state_term).chunk(4, -1)
    c = forget_gate.sigmoid() * c + input_gate.sigmoid() * new.tanh()
    return output_gate.sigmoid() * c.tanh(), c


def _gru(input_term: Tensor, state_term: Tensor, h: Tensor) -> tuple[Tensor]:
    """Compute one time step of nn.GRU.

    Args:
        input_term: Product of weights and input, with bias.  # [B, 3 hidden], of the gates r, z, n
        state_term: Product of weights and hidden state, with bias.  # [B, 3 hidden]
        h: Hidden state.  # [B, hidden]

    Returns:
        A tuple of the new hidden state only, because a GRU has no cell state.
    """
    reset_input, update_input, new_input = input_term.chunk(3, -1)
    reset_state, update_state, new_state = state_term.chunk(3, -1)
    new = (new_input + (reset_input + reset_state).sigmoid() * new_state).tanh()
    return (new + (update_input + update_state).sigmoid() * (h - new),)


CELLS: dict[Any, Callable[..., tuple]] = {  # (input term, state term, *states) -> new states
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: lambda input_term, state_term, h: ((input_term + state_term).tanh(),),
    torch.rnn_relu: lambda input_term, state_term, h: ((input_term + state_term).relu(),),
}


# -- embeddings and noise ----------------------------------------------------------------------------------------
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
    """Compute F.embedding with a dense gradient, also in torch.vmap.

    Args:
        mode: The client's random numbers; mode.vmapped: whether torch.vmap computes several clients.
        func: F.embedding.
        input: Tokens.  # [...] int64
        weight: Vectors of all tokens.  # [tokens, E]
        padding_idx: Token whose vector gets no gradient, or None.  torch.vmap ignores it, so it is implemented here.
        max_norm: Largest norm of vectors, or None: any.  In torch.vmap it raises ConfigError.
        norm_type: The p of this norm.
        scale_grad_by_freq: As in F.embedding.  In torch.vmap True raises ConfigError.
        sparse: Unused, as gradients are always dense.

    Returns:
        The vectors.  # [..., E]
    """
    if not mode.vmapped:
        return func(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse=False)
    if max_norm is not None or scale_grad_by_freq:
        raise ConfigError(
            "an embedding with max_norm or scale_grad_by_freq is not supported for several clients at once: construct "
            "nn.Embedding without them, or set hardware.executor=loop"
        )
    vectors = func(input, weight)
    if padding_idx is None:
        return vectors
    is_padding = input == padding_idx % len(weight)  # a negative padding_idx counts from the end
    return torch.where(is_padding[..., None], vectors.detach(), vectors)


def _bernoulli_(mode: ClientRandom, func: Any, x: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
    """Replace Tensor.bernoulli_: set each value of x to 1 with probability p, else to 0, in place; return x.

    The random numbers are those of the client (mode).  func, the replaced function, and generator are unused.
    """
    return x.copy_((mode.random(x).uniform(*x.shape)[0] < p).to(x.dtype))


def _bernoulli(mode: ClientRandom, func: Any, x: Tensor, p: Any = None, *, generator: Any = None) -> Tensor:
    """Replace torch.bernoulli: return values 1 with probability p (default: x itself), else 0, in the shape of x.

    The random numbers are those of the client (mode).  func, the replaced function, and generator are unused.
    """
    return (mode.random(x).uniform(*x.shape)[0] < (x if p is None else p)).to(x.dtype)


def _uniform_(
    mode: ClientRandom, func: Any, x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None
) -> Tensor:
    """Replace Tensor.uniform_: set the values of x to uniform numbers from low to high, in place; return x.

    The random numbers are those of the client (mode).  func, the replaced function, and generator are unused.
    """
    return x.copy_(low + (high - low) * mode.random(x).uniform(*x.shape)[0])


def _normal_(
    mode: ClientRandom, func: Any, x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None
) -> Tensor:
    """Replace Tensor.normal_: set the values of x to normal numbers of this mean and std, in place; return x.

    The random numbers are those of the client (mode).  func, the replaced function, and generator are unused.
    """
    return x.copy_(mean + std * mode.random(x).normal(*x.shape)[0])


def _random_like(distribution: str) -> Replacement:
    """Return a function that replaces torch.rand_like (distribution "uniform") or torch.randn_like ("normal").

    Its first arguments are the random numbers of the client, the replaced function, which is unused, and the tensor.
    It ignores the options of these functions except dtype.
    """

    def random_like(mode: ClientRandom, func: Any, x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        numbers = getattr(mode.random(x), distribution)(*x.shape)  # [1, *shape], for one client
        return numbers[0].to(dtype or x.dtype)

    return random_like


def _random_tensor(distribution: str) -> Replacement:
    """Return a function that replaces torch.rand (distribution "uniform") or torch.randn ("normal").

    The default device of its results is that of the client's key.  It ignores the options of these functions except
    dtype and device.
    """

    def random_tensor(
        mode: ClientRandom, func: Any, *size: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any
    ) -> Tensor:
        """Return random numbers of the client (mode), "uniform" or "normal" by `distribution`.

        size is the shape: several integers, or one tuple of them.  func and options other than dtype and device are
        unused.
        """
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        if device is None and mode.client_key is not None:
            device = mode.client_key.device
        random = mode.random(torch.empty(0, device=device))  # only the device of its argument is used
        numbers = getattr(random, distribution)(*shape)  # [1, *shape], for one client
        return numbers[0].to(dtype or torch.get_default_dtype())

    return random_tensor


REPLACEMENTS: dict[Any, Replacement] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.dropout1d: _channel_dropout(2),
    F.dropout2d: _channel_dropout(0),
    F.dropout3d: _channel_dropout(4),
    F.scaled_dot_product_attention: _dot_product_attention,
    F.multi_head_attention_forward: _attention,
    F.embedding: _embedding,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    torch.rand_like: _random_like("uniform"),
    torch.randn_like: _random_like("normal"),
    torch.rand: _random_tensor("uniform"),
    torch.randn: _random_tensor("normal"),
}
