"""Outcome evidence: is the result of training worse, on text that no arm trains on?

Judged is the held-out loss at the end, in nats a token, on the same batches for every run. The
difference from the baseline's is taken seed by seed, and two one-sided tests (TOST, as
`statsmodels` has it) hold its mean against the margin that the policy fixes: non-inferior if a
loss worse by the margin is excluded, harmed if the loss is surely worse by more. Better than the
baseline is no harm, however much; whether the arm is also equivalent stands in the figures. From 8
seeds on the p-values are also those of the studentised bootstrap, where it is the more cautious.

Some facts leave nothing to chance: a run that diverges, or whose weights, held-out loss or training
loss are no numbers at any recorded step at which the baseline of its seed is sound (`lost_runs`).
A seed whose baseline is lost itself can't be judged. Spikes of
the training loss that the baseline of the seed does not have are counted (`loss_spikes`); they fail
an arm if chance is improbable, and keep the answer open if a coin would give as many less than once
in four. n sound seeds do not show that there is no bad one: they exclude rates of bad seeds above
1 - alpha^(1/n), which is 57 % for 5 seeds at one look.

What it can't see: a harm that appears after the end, on text of another kind, or in fewer seeds
than that rate. In short runs the loss sees little: it is the other levels that look closely.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stability.analysis.advice import StudyKind, advice, kind_of
from stability.analysis.evidence import LevelEvidence, LevelState, silent_level
from stability.analysis.held_out_losses import (
    held_out_differences,
    held_out_losses,
    judged_step,
    of_other_data,
    of_unseen_data,
)
from stability.analysis.intervals import Interval, mean_interval, p_values
from stability.analysis.loss_spikes import WINDOW, SpikeTest, spike_test
from stability.analysis.lost_runs import lost_seeds, what_is_lost
from stability.analysis.number_text import bounds, nats
from stability.analysis.seed_values import SeedValues
from stability.analysis.sequential import LOOKS, look_alpha, look_at
from stability.analysis.study_records import RecordedArm, RecordedRun, RecordedStudy
from stability.config.arms import INIT_SEED
from stability.config.commands import is_command
from stability.config.schema import BASELINE
from stability.config.study import PolicyConfig
from stability.records.metric_names import EVAL_LOSS

__all__ = ["outcome_evidence"]

SUSPICIOUS = 0.25
"""Spikes in more seeds than a coin gives this often keep the answer open: 2 seeds against none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Findings:
    """What is on record of one arm beside its baseline, by seed."""

    arm: RecordedArm
    margin: float
    alpha: float
    """The one-sided error rate of this look."""
    end: int
    """The step at which the arm ends."""
    seeds: Sequence[int]
    """Those that the look judges."""
    lost: Mapping[int, str]
    """What is no number in the arm at a step at which the baseline of the seed is sound."""
    lost_baseline: Mapping[int, str]
    """The same of the baseline: these seeds can't be judged."""
    unfinished: Mapping[int, str]
    """Seeds that have no held-out loss at the end in one of the two runs, and why."""
    differences: Mapping[int, float]
    """Held-out loss at the end, less the baseline's."""
    through: Mapping[int, SeedValues]
    """The same by step."""
    spikes: SpikeTest
    scatter: float
    """Standard deviation of the held-out loss over the seeds of an arm with other initial weights,
    NaN without one."""

    @property
    def clean(self) -> int:
        """How many seeds are sound, and seen to have no spikes of their own."""
        spikes = self.spikes
        return sum(
            not spikes.candidate.get(seed) and seed not in spikes.blind for seed in self.differences
        )

    @property
    def blind(self) -> int:
        """How many of the seeds that are compared have too few losses to show a spike."""
        return sum(seed in self.spikes.blind for seed in self.differences)


_NO_LOSS_SEEN = (
    "no run has a held-out loss: the script evaluates nothing that was seen to be held out"
)
_NO_LOSS: dict[StudyKind, str] = {
    "config": "no run has a loss on text that is held out",
    "commands": _NO_LOSS_SEEN,
    "recorded": _NO_LOSS_SEEN,
    "adopted": "no run has a held-out loss: checkpoints tell none",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _LossTest:
    """The two one-sided tests of the mean difference."""

    interval: Interval
    p_worse: float
    """How likely such differences are if the loss is worse by no more than the margin."""
    p_not_worse: float
    """How likely they are if it is worse by the margin or more."""
    p_not_better: float
    """How likely they are if it is better by the margin or more."""


def outcome_evidence(
    study: RecordedStudy, arm: RecordedArm, policy: PolicyConfig, alpha: float | None = None
) -> LevelEvidence:
    """Return what the end of training says of `arm`; it never raises.

    `alpha` is the one-sided error rate of this look, by default the look's share of the policy's.
    """
    if arm.name == BASELINE:
        return _silent("not applicable", "it is the baseline itself")
    found = _findings(study, arm, policy, alpha or look_alpha(policy.alpha))
    if found.lost:
        return _lost(found)
    if others := of_other_data(study, arm):
        return _silent(
            "not measured",
            f"the held-out losses of {arm.name} are of other data than the {BASELINE}'s, first in "
            f"seed {others[0]}",
            "evaluate the same samples in every arm",
        )
    if not found.differences and not found.lost_baseline:
        if any(run.series(EVAL_LOSS) for run in arm.runs.values()):
            return _silent("not measured", _why_unfinished(found), "let the study run to its end")
        return _silent("not measured", _NO_LOSS[kind_of(study)], advice(study, "held_out"))
    judged = _judged(found, _loss_test(found))
    if is_command(study.base) and of_unseen_data(study, arm):
        said = "That both runs were evaluated on the same data is unproven."
        return replace(judged, sentence=f"{judged.sentence} {said}")
    return judged


def _findings(
    study: RecordedStudy, arm: RecordedArm, policy: PolicyConfig, alpha: float
) -> _Findings:
    end = judged_step(study, arm)
    seeds = study.seeds[: look_at(len(study.seeds)) or None]
    baseline = study.arm(BASELINE)
    pairs = {
        seed: (run, baseline.runs[seed])
        for seed, run in arm.runs.items()
        if baseline and seed in baseline.runs
    }
    lost_baseline = {seed: said for seed, (_, run) in pairs.items() if (said := what_is_lost(run))}
    lost = lost_seeds(study, arm)
    through = held_out_differences(study, arm)
    at_end = through.get(end, SeedValues()).per_seed
    whole = [seed for seed in seeds if seed not in lost_baseline and seed not in lost]
    return _Findings(
        arm=arm,
        margin=policy.margin_nats,
        alpha=alpha,
        end=end,
        seeds=seeds,
        lost=lost,
        lost_baseline={seed: lost_baseline[seed] for seed in seeds if seed in lost_baseline},
        unfinished={
            seed: _unfinished(study, arm, seed, end) for seed in whole if seed not in at_end
        },
        differences={seed: at_end[seed] for seed in whole if seed in at_end},
        through=through,
        spikes=_spike_test({seed: pairs[seed] for seed in whole if seed in pairs}, end),
        scatter=_scatter(study),
    )


def _unfinished(study: RecordedStudy, arm: RecordedArm, seed: int, end: int) -> str:
    for one in (study.arm(BASELINE), arm):
        run = one.runs.get(seed) if one else None
        if run is None or end not in run.series(EVAL_LOSS):
            name, state = one.name if one else BASELINE, run.state if run else "missing"
            said = f": {run.message}" if run and run.message else ""
            return f"{name} has no held-out loss at step {end} with seed {seed} ({state}{said})"
    return ""


def _spike_test(pairs: Mapping[int, tuple[RecordedRun, RecordedRun]], end: int) -> SpikeTest:
    def losses(run: RecordedRun) -> dict[int, float]:
        return {step: loss for step, loss in run.loss().items() if step < end}

    return spike_test(
        {seed: losses(run) for seed, (run, _) in pairs.items()},
        {seed: losses(other) for seed, (_, other) in pairs.items()},
    )


def _scatter(study: RecordedStudy) -> float:
    """Return by how much the loss at the end differs between seeds that begin elsewhere."""
    for arm in study.arms:
        if arm.axis == INIT_SEED:
            values = list(held_out_losses(arm, study.steps).per_seed.values())
            if len(values) > 1:
                mean = math.fsum(values) / len(values)
                return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))
    return math.nan


def _loss_test(found: _Findings) -> _LossTest:
    values, margin = found.differences, found.margin
    interval = mean_interval(values, 1 - 2 * found.alpha)
    p_worse, p_not_worse = p_values(values, margin)
    p_not_better, _ = p_values(values, -margin)
    # equal differences have no variance to divide by, and `p_values` knows what they say
    if interval.n > 1 and len(set(values.values())) > 1 and math.isfinite(interval.mean):
        from statsmodels.stats.weightstats import ttost_paired  # heavy: pandas, 1 s of CPU

        differences = np.array(list(values.values()))
        # of the differences and zeros, because the losses' own size would round them
        _, lower, upper = ttost_paired(differences, np.zeros_like(differences), -margin, margin)
        p_not_better = max(p_not_better, float(lower[1]))
        p_not_worse = max(p_not_worse, float(upper[1]))
        p_worse = max(p_worse, 1 - float(upper[1]))
    return _LossTest(
        interval=interval, p_worse=p_worse, p_not_worse=p_not_worse, p_not_better=p_not_better
    )


def _lost(found: _Findings) -> LevelEvidence:
    first = next(iter(found.lost))
    count, of = len(found.lost), len(found.arm.runs)
    return LevelEvidence(
        level="outcome",
        state="harmed",
        sentence=(
            f"In {count} of {of} seeds {found.arm.name} is lost where the baseline is sound (limit "
            f"0), first in seed {first}: {found.lost[first]}."
        ),
        cell=f"lost in {count}/{of}",
        p_harmed=0.0,
        p_holds=1.0,
        figures={"lost_seeds": count, "seeds": of, "margin": found.margin},
    )


def _judged(found: _Findings, test: _LossTest) -> LevelEvidence:
    spikes = found.spikes
    # two tests share the error rate, unless the spikes are too few to reach it at all
    tests = 2 if spikes.smallest_p <= found.alpha else 1
    p_harmed = min(1.0, tests * min(test.p_worse, spikes.p if tests == 2 else 1.0))
    state, decides = _state(found, test, p_harmed)
    return LevelEvidence(
        level="outcome",
        state=state,
        sentence=_sentence(found, test),
        cell=f"{nats(test.interval.mean)} nats" if found.differences else "no baseline",
        decides=decides,
        p_harmed=p_harmed,
        p_holds=test.p_not_worse,
        figures=_figures(found, test),
    )


def _state(found: _Findings, test: _LossTest, p_harmed: float) -> tuple[LevelState, str]:
    """Return the state, and what would decide it."""
    if p_harmed <= found.alpha:
        return "harmed", ""
    if found.unfinished:
        return "undecided", f"let the study run to its end: {_why_unfinished(found)}"
    if found.lost_baseline:
        seed, said = next(iter(found.lost_baseline.items()))
        return "undecided", f"a baseline that trains: with seed {seed} {said}"
    if len(found.differences) < LOOKS[0]:
        return "undecided", f"at least {LOOKS[0]} seeds (--seeds {LOOKS[0]})"
    spikes = found.spikes
    if spikes.more > spikes.fewer and spikes.p <= SUSPICIOUS:
        return "undecided", "more seeds, which tell whether its spikes are chance"
    if test.p_not_worse <= found.alpha:
        return "holds", ""
    look = _deciding_look(found, test.interval.mean)
    if look is None:
        return "undecided", f"more than {LOOKS[-1]} seeds, at this scatter"
    return "undecided", f"{look} seeds, at this scatter (--seeds {look})"


def _deciding_look(found: _Findings, mean: float) -> int | None:
    """Return the look that would decide if mean and scatter stayed as they are."""
    from scipy.stats import t  # heavy: 1.2 s of CPU

    values = list(found.differences.values())
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))
    for look in LOOKS:
        reach = float(t.isf(found.alpha, look - 1)) * spread / math.sqrt(look)
        if look > len(values) and abs(found.margin - mean) > reach:
            return look
    return None


def _sentence(found: _Findings, test: _LossTest) -> str:
    interval, count = test.interval, len(found.differences)
    parts = []
    if count:
        worst = max(found.differences, key=lambda seed: found.differences[seed])
        said = (
            f"at step {found.end} the held-out loss of {found.arm.name} differs from the "
            f"baseline's by {nats(interval.mean)}{bounds(interval.low, interval.high, nats)} nats "
            f"a token (limit {nats(found.margin)}), over {count} seed{'s' if count > 1 else ''}"
        )
        if count > 1:
            said += f", by {nats(found.differences[worst])} in the worst, seed {worst}"
        parts.append(said)
        if interval.high < -found.margin:
            parts.append(
                "it is better by more than the limit: no harm at this level, but more than "
                "rounding does: see that no target reaches the model and that its data are the same"
            )
    if not math.isnan(found.scatter):
        parts.append(f"other initial weights scatter it by {found.scatter:.2g} nats")
    if count:
        parts.append(_said_of_seeds(found))
    if found.lost_baseline:
        seeds = ", ".join(map(str, found.lost_baseline))
        said = next(iter(found.lost_baseline.values()))
        parts.append(f"seed {seeds} is not judged, since the baseline is lost there ({said})")
    if found.unfinished:
        parts.append(f"a seed is unfinished: {_why_unfinished(found)}")
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts)


def _said_of_seeds(found: _Findings) -> str:
    """Return how many seeds were sound, and what that excludes."""
    spikes, count = found.spikes, len(found.differences)
    seeds = "seed" if count == 1 else "seeds"
    with_spikes = [seed for seed, steps in spikes.candidate.items() if steps]
    if with_spikes:
        seed = with_spikes[0]
        said = (
            f"its training loss spikes alone in {spikes.more} seed{'s' if spikes.more != 1 else ''}"
            f", the baseline's alone in {spikes.fewer} (p {spikes.p:.2g}; first at step "
            f"{spikes.candidate[seed][0]} of seed {seed})"
        )
    elif found.blind:
        said = "no seed is lost"
    else:
        said = f"no seed is lost or, from step {spikes.seen_from} on, has spikes of its own"
    if found.blind:
        # of seeds without spikes nothing is known, so only those that are not lost are counted
        rate = _excluded_rate(count, found.alpha)
        has = "has" if found.blind == 1 else "have"
        sound = (
            f"{seeds} that is not lost excludes"
            if count == 1
            else f"{seeds} that are not lost exclude"
        )
        return (
            f"{said}; spikes can't be seen before {WINDOW} losses, and {found.blind} of {count} "
            f"{seeds} {has} no more; {count} {sound} a rate of lost seeds above {rate:.0%}"
        )
    rate = _excluded_rate(found.clean, found.alpha)
    clean = f"{found.clean} of {count} {seeds}" if with_spikes else f"{count} {seeds}"
    exclude = "excludes" if (found.clean if with_spikes else count) == 1 else "exclude"
    return f"{said}; {clean} without fault {exclude} a rate of bad seeds above {rate:.0%}"


def _excluded_rate(sound: int, alpha: float) -> float:
    """Return the rate of unsound seeds above which so many sound ones are improbable; 1: none."""
    return 1 - alpha ** (1 / sound) if sound else 1.0


def _figures(found: _Findings, test: _LossTest) -> dict[str, float]:
    means = {step: values.mean for step, values in found.through.items() if step <= found.end}
    worst = max(means, key=lambda step: means[step], default=0)
    return {
        "difference": test.interval.mean,
        "difference_low": test.interval.low,
        "difference_high": test.interval.high,
        "margin": found.margin,
        "p_not_better": test.p_not_better,
        "step": found.end,
        "seeds": len(found.differences),
        "init_seed_sd": found.scatter,
        "spike_seeds": found.spikes.more,
        "spike_seeds_baseline": found.spikes.fewer,
        "spike_p": found.spikes.p,
        "clean_seeds": found.clean,
        "spike_blind_seeds": found.blind,
        "spikes_seen_from": found.spikes.seen_from,
        "bad_seed_rate_excluded": _excluded_rate(found.clean, found.alpha),
        "lost_seed_rate_excluded": _excluded_rate(len(found.differences), found.alpha),
        "lost_baselines": len(found.lost_baseline),
        "worst_difference": means.get(worst, math.nan),
        "worst_step": worst,
        **{f"difference_step_{step}": mean for step, mean in means.items()},
        **{f"difference_seed_{seed}": value for seed, value in found.differences.items()},
    }


def _why_unfinished(found: _Findings) -> str:
    return next(iter(found.unfinished.values()), "")


def _silent(state: LevelState, reason: str, decides: str = "") -> LevelEvidence:
    return silent_level("outcome", state, reason, decides, cell=state)
