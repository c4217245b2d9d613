"""The recompute policy: what a training step keeps for backward, and what it computes again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

RoutedMode = Literal["none", "act", "dispatch", "full"]
ROUTED_MODES: tuple[str, ...] = get_args(RoutedMode)


@dataclass(frozen=True)
class RecomputePolicy:
    """What to recompute in backward.

    Args:
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

    """

    routed: RoutedMode = "none"

    def __post_init__(self) -> None:
        if self.routed not in ROUTED_MODES:
            names = ", ".join(map(repr, ROUTED_MODES))
            raise ValueError(
                f"Expected argument `routed` of `RecomputePolicy` to be one of {names} but got {self.routed!r}."
            )

    @staticmethod
    def of(recompute: str | RecomputePolicy) -> RecomputePolicy:
        """The policy itself, or the preset of that name.

        >>> RecomputePolicy.of("full")
        RecomputePolicy(routed='full')

        """
        if isinstance(recompute, RecomputePolicy):
            return recompute
        if not isinstance(recompute, str) or recompute not in PRESETS:
            names = ", ".join(map(repr, PRESETS))
            raise ValueError(
                f"Expected argument `recompute` to be one of {names} or a `RecomputePolicy` but got {recompute!r}."
                " For a single mode of the routed experts, pass `recompute=RecomputePolicy(routed='act')`."
            )
        return PRESETS[recompute]


PRESETS: dict[str, RecomputePolicy] = {"none": RecomputePolicy(), "full": RecomputePolicy(routed="full")}
