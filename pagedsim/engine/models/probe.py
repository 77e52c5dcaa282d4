"""How a model's layers attend, observed on a few tokens.

No list of architectures decides what can be served. `probe` runs the model with an attention
function that records its calls instead: module, shapes, settings and mask. transformers builds
masks from functions of two positions, so the mask of a layer at any length can be evaluated row by
row without being built: that gives its sliding window. And since no token sees another through this
attention, any other path between tokens shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import nn

from pagedsim.engine.models.transformers_io import quiet

PROBE = "pagedsim_probe"
"""The recording attention's name in transformers."""
TOKENS = 4
_ALONE = Lock()

HARMLESS = frozenset(
    {
        "scaling", "softcap",  # noted
        "sliding_window", "is_causal",  # the mask has the same, for certain
        "dropout",  # zero, since the model is in evaluation mode
        "position_ids", "cache_position", "use_cache", "output_attentions", "return_dict",
    }
)  # fmt: skip
"""What a model may pass to its attention besides queries, keys and values."""

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Whether a query sees a key: (sequence, head, position of the query, of the key)."""


class Refusal(Exception):
    """Why a model cannot be served: a clause without a subject's name or a full stop."""


class NeedsData(Exception):
    """The model does not run on a device without data."""


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention, as it was called."""

    module: nn.Module
    kv_heads: int
    head_dim: int
    """Of a query and a key."""
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None


def probe(model: Any, layers: int, max_model_len: int) -> list[AttentionSpec]:
    """How each of `layers` layers attends, in their order; raises Refusal.

    The model is a transformers model on any device; on `meta`, which has no data, not all models
    can run, and those raise NeedsData. Windows of `max_model_len` and more hide nothing and are
    left out.
    """
    recorded = AttentionProbe(max_model_len)
    with recorded.installed(), attention(model, PROBE):
        embedded, logits = _run(model)
    if not recorded.calls:
        raise Refusal("its attention does not go through transformers' AttentionInterface")
    if logits.device.type != "meta":
        _check_apart(embedded, logits)
    return recorded.specs(layers)


class AttentionProbe:
    """The recorded calls of the attention function and of the mask function."""

    def __init__(self, max_model_len: int) -> None:
        self._length = max_model_len
        self.calls: list[tuple[nn.Module, torch.Tensor, torch.Tensor, Any, dict[str, Any]]] = []
        self._masks: list[tuple[torch.Tensor, MaskFunction]] = []
        self._windows: dict[int, int | None] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, calls of models with the probe's attention are recorded; one model at a time."""
        from transformers import AttentionInterface, AttentionMaskInterface

        with _ALONE:
            AttentionInterface.register(PROBE, self._attend)
            AttentionMaskInterface.register(PROBE, self._mask)
            yield

    def _attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **settings: Any,
    ) -> tuple[torch.Tensor, None]:
        self.calls.append((module, key, value, attention_mask, settings))
        wide = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return wide.transpose(1, 2).contiguous(), None

    def _mask(self, *, mask_function: MaskFunction, device: Any, **about: Any) -> torch.Tensor:
        shape = about["batch_size"], 1, about["q_length"], about["kv_length"]
        mask = torch.ones(shape, dtype=torch.bool, device=device)
        self._masks.append((mask, mask_function))
        return mask

    def specs(self, layers: int) -> list[AttentionSpec]:
        """The layers in their order."""
        modules = [id(call[0]) for call in self.calls]
        if len(modules) != layers or len(set(modules)) != layers:
            raise Refusal(
                f"{len(set(modules))} of its {layers} layers attend, in {len(modules)} calls of "
                "transformers' AttentionInterface; each must, once"
            )
        specs = [self._spec(*call) for call in self.calls]
        shapes = sorted({(spec.kv_heads, spec.head_dim) for spec in specs})
        if len(shapes) > 1:
            listed = " and ".join(f"{heads}×{dim}" for heads, dim in shapes)
            raise Refusal(f"its layers have KV heads of different shapes ({listed})")
        return specs

    def _spec(
        self, module: nn.Module, key: torch.Tensor, value: torch.Tensor, mask: Any, settings: Any
    ) -> AttentionSpec:
        for name, given in settings.items():
            if name not in HARMLESS and given is not None and given is not False:
                raise Refusal(f"its attention takes {name}, which the kernels do not know")
        _, heads, _, head_dim = key.shape
        scale, softcap = settings.get("scaling"), settings.get("softcap")
        return AttentionSpec(
            module,
            heads,
            head_dim,
            value.shape[-1],
            head_dim**-0.5 if scale is None else float(scale),
            self._window(mask),
            None if softcap is None else float(softcap),
        )

    def _window(self, mask: Any) -> int | None:
        function = next((function for known, function in self._masks if known is mask), None)
        if function is None:
            raise Refusal("its attention's mask is not one of transformers' mask functions")
        if id(function) not in self._windows:
            self._windows[id(function)] = window_of(function, self._length)
        return self._windows[id(function)]


def window_of(sees: MaskFunction, length: int) -> int | None:
    """How many keys a query sees at most, among `length`; None if all that came before it.

    Looks at whole rows of the mask; raises Refusal unless each is causal with that window.
    """
    key = torch.arange(length + 1)
    zero = torch.zeros_like(key)
    window = length
    for query in dict.fromkeys((length - 1, length - 2, length * 2 // 3, length // 3, 1, 0)):
        if not 0 <= query < length:
            continue
        try:
            row = sees(zero, zero, torch.full_like(key, query), key).expand_as(key)
            if query == length - 1:
                window = int(row.sum())
            right = bool((row == ((key <= query) & (key > query - window))).all())
        except Exception as error:  # whatever it is, the mask is not a plain function
            raise Refusal("its attention's mask is no plain function of two positions") from error
        if not right:
            raise Refusal("its attention's mask is neither causal nor a sliding window")
    return window if window < length else None


def _run(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings and the last token's logits; raises NeedsData on `meta`, Refusal elsewhere."""
    device = model.device
    ids = torch.arange(TOKENS, device=device).unsqueeze(0)
    inputs = {"input_ids": ids, "position_ids": ids, "attention_mask": torch.ones_like(ids)}
    try:
        with _embedding(model) as embedded, torch.enable_grad():
            output = model(**inputs, use_cache=False, return_dict=True)
    except Exception as error:
        if device.type == "meta":
            raise NeedsData from error
        reason = str(error).split("\n")[0]
        raise Refusal(f"it fails on {TOKENS} tokens: {type(error).__name__}: {reason}") from error
    return embedded[0], output.logits[0, -1]


def _check_apart(embedded: torch.Tensor, logits: torch.Tensor) -> None:
    """Raise Refusal if the last token's logits depend on other tokens.

    Attention was left out, so nothing may: a derivative that is not exactly zero is a recurrence
    or a convolution, whose state the cache does not hold.
    """
    try:
        (slope,) = torch.autograd.grad(logits.float().square().sum(), embedded)
    except RuntimeError:  # an operation without a derivative; `try_out` may still find the path
        return
    if bool(slope[0, :-1].nan_to_num(0.0, 0.0, 0.0).any()):  # half precision may overflow here
        raise Refusal("its tokens reach each other outside of attention")


@contextmanager
def _embedding(model: Any) -> Iterator[list[torch.Tensor]]:
    """Within, what the model's token embedding returns is kept, and derivatives by it too."""
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[-1]

    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        yield kept
    finally:
        hook.remove()


@contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    """Within, the model attends by the function of that name."""
    before = model.config._attn_implementation
    set_attention(model, name)
    try:
        yield
    finally:
        set_attention(model, before)


def set_attention(model: Any, name: str) -> None:
    """Set the attention function of that name, if the model looks one up at all."""
    with quiet():  # a model that looks none up is found by the probe
        model.set_attn_implementation(name)
