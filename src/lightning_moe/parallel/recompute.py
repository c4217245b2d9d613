"""From a recompute policy to the parts of a model's layers that run again in backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

from lightning_moe.layers import MoELayer
from lightning_moe.models.decoder import decoder_parts, train_without_cache
from lightning_moe.parallel.units import decoder_layers
from lightning_moe.recompute import Chain, Part, RecomputePolicy, recompute
from lightning_moe.recompute.policy import NAMES, PRESETS


def chains(roots: Iterable[nn.Module], policy: RecomputePolicy) -> list[Chain]:
    """What a policy has run again, in all decoder layers; the routed experts see to themselves.

    Args:
        roots: The modules that hold the layers. One without a list of decoder layers counts as a layer itself.
        policy: Names that a layer cannot serve are left out there.

    """
    layers = [layer for root in roots for layer in decoder_layers(root) or [root]]
    return [chain for layer in layers for chain in _chains_of(layer, policy) if chain.parts]


def recompute_in_backward(roots: Iterable[nn.Module], policy: RecomputePolicy) -> None:
    """Apply a policy. Modules get forward hooks, so what else wraps or replaces them comes first."""
    for chain in chains(roots, policy):
        for part in chain.parts:
            if part.name == "attention":
                train_without_cache(part.module)
        recompute(chain)


def refuse_recompute(roots: Iterable[nn.Module], policy: RecomputePolicy) -> None:
    """Raise a ``ValueError`` if the policy asks for what the model cannot do."""
    roots = list(roots)
    if policy == RecomputePolicy():
        return
    if any(getattr(module, "gradient_checkpointing", False) is True for root in roots for module in root.modules()):
        raise ValueError(
            "The model's own gradient checkpointing is on, which runs whole layers again, with their routers and communication."
            " Turn it off with `model.gradient_checkpointing_disable()`, or pass `recompute='none'`."
        )
    missing = [name for name, count in count_parts(roots, policy).items() if not count]
    if missing and policy not in PRESETS.values():  # a preset takes what there is
        raise ValueError(
            f"`recompute` names {', '.join(map(repr, missing))}, but no decoder layer has such a part. Its children are found"
            " by Hugging Face's names (`input_layernorm`, `self_attn`, `post_attention_layernorm`, `mlp`), or by those in its"
            " attribute `decoder_parts`, such as `{'post_attention_layernorm': 'norm', 'mlp': 'moe'}`. Add that attribute, or"
            " leave the name out."
        )


def count_parts(roots: Iterable[nn.Module], policy: RecomputePolicy) -> dict[str, int]:
    """For each name that the policy asks for and that is not the routed experts': the number of modules that serve it."""
    served = Counter(part.name for chain in chains(roots, policy) for part in chain.parts)
    return {name: served[name] for name in NAMES if name != "moe_act" and getattr(policy, name)}


def _chains_of(layer: nn.Module, policy: RecomputePolicy) -> list[Chain]:
    input_norm, attention, post_norm, mlp = decoder_parts(layer)
    found: list[Chain] = []
    if attention is not None:
        parts = _norm(input_norm, attention, policy)
        if policy.attention:
            parts.append(Part("attention", attention))
        found.append(Chain(parts, attention))
    if mlp is not None:
        parts = _norm(post_norm, mlp, policy) + _shared_experts(mlp, policy)
        if found and policy.norm and policy.attention:  # the attention runs again for the second norm's argument
            parts = [*found.pop().parts, *parts]
        exits = [(mlp, "route")] if parts and isinstance(mlp, MoELayer) else []  # the logits, to auxiliary losses
        found.append(Chain(parts, mlp, exits))
    others = (module for module in layer.modules() if isinstance(module, MoELayer) and module is not mlp)
    return found + [Chain(_shared_experts(moe, policy), moe) for moe in others]


def _norm(norm: nn.Module | None, reader: nn.Module, policy: RecomputePolicy) -> list[Part]:
    return [Part("norm", norm, reader=reader)] if policy.norm and norm is not None else []


def _shared_experts(mlp: nn.Module, policy: RecomputePolicy) -> list[Part]:
    if not policy.shared_experts:
        return []
    if isinstance(mlp, MoELayer):
        return [Part("shared_experts", mlp, "share", reader=mlp)] if mlp.has_shared_experts else []
    is_dense = not any(isinstance(module, MoELayer) for module in mlp.modules())
    return [Part("shared_experts", mlp)] if is_dense else []
