"""The groups of an arm's config that only look: the probe and the training watch.

They change no bit of a run, so two arms may differ in them. Leaves out what decides the bits
(`groups`).
"""

from dataclasses import dataclass
from typing import Literal

from stability.config.groups import AttentionConfig, require

__all__ = ["ProbeConfig", "WatchConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeConfig:
    """The dual-attention hook: when and where it looks, and at what.

    Due are the multiples of `every`, those in `steps`, and `per_decade` log-spaced steps between
    powers of ten; with none of them the probe is off.
    """

    every: int = 10
    steps: tuple[int, ...] = ()
    per_decade: int = 0
    shadows: tuple[AttentionConfig, ...] = (AttentionConfig(implementation="flash"),)
    """Run beside the primary; in arms that change the attention it is the baseline's own."""
    shadows_are: Literal["candidates", "baseline"] = "candidates"
    """Set by the study: `baseline` in arms that change the attention."""
    golden: bool = True
    """Also FP64: error ratios of candidate over baseline."""
    backward: bool = True
    """Also the gradients of q, k and v under the run's own gradient of the output."""
    layers: tuple[str, ...] = ("*",)
    """Globs of layer names, e.g. `layer_*`."""
    heads: bool = False
    """Also for each head."""
    positions: int = 0
    """Also for so many ranges of positions in the sequence."""
    inside: bool = False
    """Also logits, entropy, repeated maxima, LSE, norms of W_Q and the running sum of delta."""
    inherited: bool = False
    """Run the forward pass a second time, in the shadow's own stream."""
    overhead: float | str = 0.0
    """Most of the run's time that the probe may take, e.g. `5%`: layers take turns. 0: no bound."""

    def __post_init__(self) -> None:
        for name in ("every", "per_decade", "positions"):
            require(getattr(self, name) >= 0, "probe", f"{name} must be >= 0", getattr(self, name))
        require(min(self.steps, default=0) >= 0, "probe", "steps must be >= 0", list(self.steps))
        share = self.overhead_share
        require(
            share is not None and 0 <= share < 1,
            "probe",
            "overhead must be in [0, 1) or below 100%",
            self.overhead,
        )
        require(bool(self.layers), "probe", "layers must name at least one", self.layers)
        if self.is_on:
            require(bool(self.shadows), "probe", "shadows must name at least one", self.shadows)

    @property
    def overhead_share(self) -> float | None:
        """`overhead` as a number; None if it is none."""
        text = str(self.overhead).strip()
        try:
            return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            return None

    @property
    def is_on(self) -> bool:
        """Whether any step is ever due."""
        return bool(self.every or self.steps or self.per_decade)


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchConfig:
    """What is watched of the run itself: gradients, Adam's RMS_t, log Z, loss spikes."""

    every: int = 10
    """0 switches it off."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "watch", "every must be >= 0", self.every)
