"""The table of figures: what each number behind the sentence of a level of evidence is.

Reports, the verdict's JSON and W&B have the numbers under these names; evidence with another name
is refused (`analysis.evidence`). Leaves out how a number is computed, which is its level's.
"""

import re
from collections.abc import Mapping

__all__ = ["FIGURES", "figure_of"]

_OF_ONE = re.compile(r"_(seed|step)_\d+$")

FIGURES: Mapping[str, Mapping[str, str]] = {
    "operator": {
        "looks": "looks that the level is judged by",
        "figures": "figures that have to hold, over layers, heads and results",
        "nonfinite": "values that are no finite number where FP64's are",
        "error_ratio": "worst error against FP64, candidate over the baseline's attention",
        "gain": "worst gain against FP64",
        "golden_bias_ulp": "worst mean signed error against FP64 (ULP, or the baseline's "
        "attention's error where that is larger)",
        "error_ratio_excluded": "a larger error ratio would have been seen at any place",
        "gain_excluded": "a larger |gain| would have been seen in any layer",
        "golden_bias_ulp_excluded": "a larger |bias|, mean of all layers, would have been seen in "
        "any result (same unit)",
        "head_gain_excluded": "a larger |gain| would have been seen in any head",
    },
    "gradient": {
        "looks": "looks that the level is judged by",
        "failed_looks": "looks at which there was no gradient",
        "ratio": "error of the model's gradient, candidate over baseline: geometric mean of looks",
        "ratio_low": "lower end of its interval",
        "ratio_high": "upper end of its interval",
        "ratio_as_trained": "the same ratio in the run's own precision throughout",
        "share": "share of the error's power that is the same at every look",
        "share_low": "lower end of its interval",
        "share_high": "upper end of its interval",
        "share_as_trained": "the same share in the run's own precision throughout",
        "coherence": "coherence of the errors over looks: 1 for rounding noise",
    },
    "training": {
        "excess": "E: distance to the reference over the baseline's, geometric mean of seeds",
        "excess_low": "lower bound of E",
        "excess_high": "upper bound of E",
        "limit": "most that E may be",
        "step": "the step at which E is read",
        "warm_up": "updates of the warm-up, where that step lies in it",
        "seeds": "seeds that are judged",
        "lost": "seeds that are lost by that step where the baseline's are sound",
        "control_log_excess": "largest |log E| of a nudge, or of a rerun that differs, at the step",
        "excess_predictions": "E of the predictions on held-out text",
        "excess_left_out": "E of the weights that noise moves, which E leaves out",
        "excess_left_out_high": "its upper bound",
        "own_distance": "largest distance to the same arm trained again / the norm of the weights",
        "energy_p_weights": "energy test: chance of such weights if they are a nudge's",
        "energy_p_predictions": "energy test: chance of such predictions if they are a nudge's",
        "energy_smallest_p_weights": "the least chance that test could have found",
        "energy_smallest_p_predictions": "the least chance that test could have found",
    },
    "outcome": {
        "difference": "held-out loss less the baseline's at the end, mean of seeds (nats a token)",
        "difference_low": "lower end of its interval",
        "difference_high": "upper end of its interval",
        "margin": "a difference that matters (nats a token)",
        "p_not_better": "chance of such differences if the loss is lower by the margin or more",
        "step": "the step at which the arm ends",
        "seeds": "seeds that are compared; where one is lost, all on record",
        "lost_seeds": "seeds that are lost where the baseline's are sound",
        "lost_baselines": "seeds whose baseline is lost, which can't be judged",
        "init_seed_sd": "standard deviation of the loss over other initial weights (nats a token)",
        "spike_seeds": "seeds in which the candidate has more loss spikes of its own",
        "spike_seeds_baseline": "seeds in which the baseline has more of its own",
        "spike_p": "chance of as many such seeds if neither run is prone to spikes",
        "clean_seeds": "seeds that are sound and without spikes of their own",
        "spike_blind_seeds": "seeds with too few losses to show a spike",
        "spikes_seen_from": "the step from which on spikes are seen",
        "bad_seed_rate_excluded": "a larger rate of seeds with spikes or lost would have been seen",
        "lost_seed_rate_excluded": "a larger rate of lost seeds would have been seen",
        "worst_difference": "largest mean difference of the losses at a step (nats a token)",
        "worst_step": "the step of the largest difference",
    },
}
"""By level. A name that ends in `_seed_3` or `_step_20` is the same of one seed or step."""


def figure_of(name: str) -> str:
    """Return the name without its ending, where it is of one seed or step."""
    return _OF_ONE.sub("", name)
