"""The recompute policy: what a training step keeps for backward, and what it computes again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

RoutedMode = Literal["none", "act", "dispatch", "full"]
ROUTED_MODES: tuple[str, ...] = get_args(RoutedMode)
NAMES = ("norm", "attention", "moe_act", "shared_experts")


@dataclass(frozen=True)
class RecomputePolicy:
    """What to recompute in backward, in every decoder layer.

    Args:
        norm: The norms before attention and before the MLP. Their output is freed once it has been read.
        attention: The attention. Together with ``norm``, a layer keeps nothing of this half but its input.
        moe_act: The routed experts' activation: another way to write ``routed="act"``.
        shared_experts: The MLP that every token takes: the shared experts, or all of the MLP in a layer without experts.
        routed: The mode of the routed experts. What is kept, in elements per local token (H hidden size, F the experts'
            intermediate width, K experts per token), besides the layer's input, which the router keeps anyway:

            ========== =================== =====================================================================
            mode       kept                recomputed in backward
            ========== =================== =====================================================================
            none       K (H + 3 F)         nothing
            act        K (H + 2 F)         the activation
            dispatch   2 K F               the activation; the tokens are dispatched again
            full       the routing         everything that backward reads: dispatch, first grouped GEMM, activation
            ========== =================== =====================================================================

    Raises:
        ValueError: For an unknown mode, and for ``moe_act`` beside another mode than ``"act"``.

    """

    norm: bool = False
    attention: bool = False
    moe_act: bool = False
    shared_experts: bool = False
    routed: RoutedMode = "none"

    def __post_init__(self) -> None:
        if self.routed not in ROUTED_MODES:
            names = ", ".join(map(repr, ROUTED_MODES))
            raise ValueError(
                f"Expected argument `routed` of `RecomputePolicy` to be one of {names} but got {self.routed!r}."
            )
        if self.moe_act and self.routed not in ("none", "act"):
            raise ValueError(
                f"`RecomputePolicy(moe_act=True)` is `routed='act'`, but `routed={self.routed!r}` was asked for as well: it"
                " recomputes the activation too, and more. Leave `moe_act` out."
            )
        if self.moe_act:
            object.__setattr__(self, "routed", "act")
        object.__setattr__(self, "moe_act", self.routed == "act")  # so that equal policies compare equal

    @staticmethod
    def of(recompute: str | list[str] | RecomputePolicy) -> RecomputePolicy:
        """The policy itself, the preset of that name, or one that recomputes the parts of these names.

        >>> RecomputePolicy.of(["norm", "moe_act", "shared_experts"]) == RecomputePolicy.of("selective")
        True

        """
        if isinstance(recompute, RecomputePolicy):
            return recompute
        if isinstance(recompute, str) and recompute in PRESETS:
            return PRESETS[recompute]
        if isinstance(recompute, (list, tuple)) and set(recompute) <= set(NAMES):
            norm, attention, moe_act, shared_experts = (name in recompute for name in NAMES)
            return RecomputePolicy(norm, attention, moe_act, shared_experts)
        raise ValueError(
            f"Expected argument `recompute` to be one of {', '.join(map(repr, PRESETS))}, a list of names among"
            f" {', '.join(map(repr, NAMES))}, or a `RecomputePolicy`, but got {recompute!r}."
            " For a single mode of the routed experts, pass `recompute=RecomputePolicy(routed='act')`."
        )


PRESETS: dict[str, RecomputePolicy] = {
    "none": RecomputePolicy(),
    "selective": RecomputePolicy(norm=True, moe_act=True, shared_experts=True),
    "full": RecomputePolicy(norm=True, attention=True, shared_experts=True, routed="full"),
}
