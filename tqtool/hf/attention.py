"""The attention function "tqtool" of transformers, which reads packed codes, and the tensors that stand for them.

A cache hands such a tensor to the model instead of keys: it has their shape and type, and no numbers. This function
alone knows what is behind it; any other computation with it is an error, so a model that changes keys after the cache
is refused and never answers wrongly. Importing this module registers the function.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from tqtool.attention.fused import fused_attention
from tqtool.attention.plain import AttentionConfig
from tqtool.attention.stored import Stored
from tqtool.dtypes import Float32Array
from tqtool.errors import InputError

NAME = "tqtool"
Answer = tuple[torch.Tensor, torch.Tensor | None]  # attention (batch, n, heads, dim), and its weights where they exist
EAGER_ONLY = ("softcap", "s_aux", "position_bias")  # what PyTorch's own attention does not know
# Options of a call that change nothing here: the mask says it already, or they are about other things.
WITHOUT_EFFECT = {"sliding_window", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions"}
WITHOUT_EFFECT |= {"output_hidden_states", "return_dict", "logits_to_keep", "num_items_in_batch"}


class PackedTensor(torch.Tensor):
    """Stands for keys or values (batch, kv_heads, length, dim) that exist as codes."""

    stored: Stored
    label: str

    @staticmethod
    def __new__(cls, stored: Stored, like: torch.Tensor, label: str) -> PackedTensor:
        """`like` gives type and device; `label` names the layer in errors."""
        batch, length, kv_heads, dim = stored.encoded.shape
        shape = (batch, kv_heads, length, dim)
        tensor: PackedTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        tensor.stored, tensor.label = stored, label
        return tensor

    def __init__(self, *_: Any) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        label = next((each.label for each in _flat([*args, kwargs or {}]) if isinstance(each, PackedTensor)), "a layer")
        raise InputError(
            f"{label}: the model computes {function} with keys or values that the cache holds as codes",
            code="model",
            hint="model.set_attn_implementation('sdpa') makes the cache restore them",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PackedTensor({self.label}, shape={tuple(self.shape)}, {self.stored.encoded.spec.bits} bits)"

    def restored(self) -> torch.Tensor:
        """Return the keys or values themselves."""
        return to_torch(self.stored.restored(), self)


def _flat(values: Any) -> list[Any]:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [each for value in values for each in _flat(value)]
    return [values]


def to_numpy(x: torch.Tensor) -> Float32Array:
    """Return a model's tensor (batch, heads, n, dim) as our array (batch, n, heads, dim)."""
    array: Float32Array = x.detach().transpose(1, 2).float().cpu().numpy()
    return array


def to_torch(x: Float32Array, like: torch.Tensor) -> torch.Tensor:
    """Return our array (batch, n, heads, dim) as a tensor (batch, heads, n, dim), of type and device of another."""
    return torch.from_numpy(x).to(like.device, like.dtype).transpose(1, 2)


@torch.compiler.disable
def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> Answer:
    """Return what the model's own attention would, (batch, n, heads, dim); the signature is transformers'."""
    if isinstance(key, PackedTensor) and isinstance(value, PackedTensor):
        rules = {name: given for name, given in options.items() if name not in WITHOUT_EFFECT and given is not None}
        softcap = rules.pop("softcap", None)
        if not rules and not dropout and (attention_mask is None or _readable(attention_mask)):
            call = _Call(to_numpy(query), key.stored, value.stored, attention_mask, scaling, softcap)
            return torch.from_numpy(call.answer()).to(query.device, query.dtype), None
        key, value = key.restored(), value.restored()
    options |= {"scaling": scaling, "dropout": dropout}
    if all(options.get(name) is None for name in EAGER_ONLY):
        from_torch: Answer = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return from_torch
    own = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]  # each modeling file has one
    mask = _additive(attention_mask, query, key)
    answer: Answer = own(module, query, key, value, mask, **options)
    return answer


def _readable(mask: torch.Tensor) -> bool:
    """Whether a mask says of each position whether it is seen, the same for all heads."""
    return bool(mask.dtype == torch.bool) and mask.ndim == 4 and mask.shape[1] == 1


def _additive(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return the mask in the form that eager attention adds to the scores; none means causal to PyTorch's."""
    new, total = query.shape[2], key.shape[2]
    if mask is None:
        if new == 1:
            return None
        mask = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)[None, None]
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """Attention of queries (batch, n, heads, dim), the newest tokens, over stored keys and values."""

    query: Float32Array
    keys: Stored
    values: Stored
    mask: torch.Tensor | None  # (batch or 1, 1, n, length) what is seen; None: all that came before
    scaling: float | None
    softcap: float | None

    def answer(self) -> Float32Array:
        batch, new, heads, dim = self.query.shape
        length, kv_heads = self.keys.row_of.shape
        rules = AttentionConfig(heads, dim, kv_heads, causal=new > 1, scale=self.scaling, softcap=self.softcap)
        if self.mask is None:
            return fused_attention(self.query, self.keys, self.values, rules)
        masks = np.broadcast_to(self.mask[:, 0, :, :length].cpu().numpy(), (batch, new, length))
        if new == 1 and masks.all():
            return fused_attention(self.query, self.keys, self.values, rules)
        out = np.empty_like(self.query)
        rules = replace(rules, causal=False)  # the mask has it
        for one in (slice(i, i + 1) for i in range(batch)):
            seen = masks[one][0]  # (new, length)
            # Left padding hides the same first tokens from all: they are not read at all.
            first = int(seen.any(axis=0).argmax())
            keys, values = (_sequence(side, one).part(slice(first, None)) for side in (self.keys, self.values))
            hidden = None if seen[:, first:].all() else seen[None, :, first:]
            out[one] = fused_attention(self.query[one], keys, values, rules, hidden)
        return out


def _sequence(side: Stored, one: slice) -> Stored:
    return Stored(side.encoded[one], side.exact[one], side.row_of)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
