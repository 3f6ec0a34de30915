"""What `stability init` learns of a command by recording a few of its updates, again and again.

Leaves out what is made of that: the study (`study_text`) and the lines beside it (`init`).
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stability.cli.output import print_line
from stability.config.command_study import expand_commands, load_command_study
from stability.config.commands import GRADIENT_NEEDS, command_training, probe_settings
from stability.config.masking import masked_words
from stability.records.atomic_files import make_folders, write_text
from stability.records.paths import RunPaths

if TYPE_CHECKING:
    from stability.records.manifest import Manifest

__all__ = ["SEEDED", "TRIAL", "Trials", "tried"]

TRIAL = 2
"""Updates of the trial."""
_NO_PROOF = (
    "It is written, but a run that stops so is no proof that harm is seen: give it a value with "
    "which the command trains to its end, only worse"
)
_REJECTED = "the command ended with exit code 2: "
"""How a trial ends whose script does not take a flag or its value, as argparse's."""
SEEDED = (
    "the command takes no seed that was found: Python, NumPy and torch are seeded before it, and "
    "another seed makes another run"
)
_NO_GRADIENT = (
    "the attention's calls are looked at, and the whole model's gradient is not: for that "
    f"{GRADIENT_NEEDS}; {{}}. No PASS without it: mend that, and write the study anew, to a new "
    "file"
)
_SEEDS_ITSELF = (
    "the command seeds itself: given another seed beforehand it is the same run. A verdict needs 3 "
    "seeds: give it the seed that it takes, as in `-- python train.py --seed 0`, to a new file"
)


def tried(trials: "Trials") -> "tuple[Trials, Manifest]":
    """Return what recorded the command, and the record: as asked, or without its gradient.

    RunFailedError if it is no training, or has no attention to replace.
    """
    from stability.study.foreign import RunFailedError  # heavy

    try:
        return trials, trials.record()
    except RunFailedError as error:
        _, _, rest = str(error).partition(f"{GRADIENT_NEEDS}; ")
        if not rest:
            raise
        unseen = rest.partition(";")[0]
    without = replace(trials, folder=trials.folder / "no_gradient", unseen=unseen)
    return without, without.record()


@dataclass(frozen=True, slots=True)
class Trials:
    """Records a few updates of a command, as often as is asked, into a temporary folder."""

    folder: Path
    words: Sequence[str]
    env: Mapping[str, str]
    attention: str
    unseen: str = ""
    """Why the gradient of the whole model can't be looked at, if it can't."""

    @property
    def has_gradient(self) -> bool:
        """Whether it can."""
        return not self.unseen

    def record(
        self,
        study: str = "trial",
        seed: int = 0,
        words: Sequence[str] = (),
        steps: int = TRIAL,
    ) -> "Manifest":
        """Record the command, or other `words`; RunFailedError if it is no training.

        What the command prints is shown of the first trial, below a line that says so; of others,
        which print the same again, that line alone.
        """
        from stability.recorder.launch import Asked  # heavy
        from stability.study.foreign import record_command
        from stability.study.foreign_plan import plan_run

        given = words or self.words
        is_first = self.has_gradient and not any(self.folder.iterdir())
        make_folders(self.folder)
        swapped = "" if words else self.attention
        print_line(_told_of_trial(study, seed, steps, swapped, is_first=is_first))
        probe = probe_settings(swapped, 1, int(bool(swapped) and self.has_gradient))
        run = plan_run(
            self.folder,
            study,
            "baseline",
            seed,
            command_training(given, self.env),
            asked=Asked(seed=seed, steps=steps, attention=swapped, probe=probe),
            words=given,
            env=self.env,
        )
        output = None if is_first else self.folder / "output.txt"
        return record_command(run, output=output)

    def of_gradient(self) -> str:
        """Return what is to be said of the looks at the model's gradient; empty if all is seen."""
        if not self.has_gradient:
            return _NO_GRADIENT.format(self.unseen)
        from stability.records.events import is_in_part, read_log_and_events  # heavy

        log = RunPaths.for_run(self.folder / "trial", "baseline", 0).metrics
        _, events = read_log_and_events(log)
        parts = [each.text for each in events if each.layer == "gradient"]
        return next((f"the whole model's gradient is {x}" for x in parts if is_in_part(x)), "")

    def of_seed(self) -> str:
        """Return what is to be said of the command, given another seed beforehand."""
        from stability.study.foreign import RunFailedError  # heavy
        from stability.study.foreign_checks import SAME_RUN

        try:
            self.record(seed=1)
        except RunFailedError as error:
            if SAME_RUN in str(error):
                return _SEEDS_ITSELF
            return f"whether another seed makes another run is not known: {error}"
        return SEEDED

    def of_reference(self, text: str, start: str) -> str:
        """Return why the reference that `text` has is none; empty if it is, or has none.

        `start` is the hash of the baseline's start weights, which must be the reference's too.
        """
        from stability.study.foreign import RunFailedError  # heavy

        words = self.words_of_arms(text).get("reference")
        if words is None:
            return ""
        try:
            # without the attention in question, which a reference has not
            found = self.record(study="reference", words=words)
        except RunFailedError as error:
            return str(error).partition(": ")[2]  # which begins with the run
        except ValueError as error:
            return str(error)
        same = found.hashes["init_weights"] == start
        return (
            ""
            if same
            else f"`{shlex.join(masked_words(words))}` starts from other weights, or another dtype"
        )

    def of_arms(self, text: str, arms: Iterable[str]) -> str:
        """Record an update of each of `arms` that `text` has; RunFailedError, naming the arm.

        Return what is to be said of a broken arm that stops in it, but for a flag that its script
        does not take: harm may stop a training, and a mistake in a name is no harm.
        """
        from stability.study.foreign import RunFailedError  # heavy

        stopped = ""
        for arm in arms:
            words = self.words_of_arms(text)[arm]
            try:
                self.record(study=arm, words=words, steps=1)
            except RunFailedError as error:
                why = str(error).partition(": ")[2]  # which begins with the run
                said = f"--{arm}: `{shlex.join(masked_words(words))}`: {why}"
                if arm != "broken" or why.startswith(_REJECTED):
                    raise RunFailedError(said) from error
                stopped = f"the broken arm stopped in its trial, {said}. {_NO_PROOF}"
        return stopped

    def words_of_arms(self, text: str) -> dict[str, list[str]]:
        """Return the command of each arm of the study `text`, with the first seed."""
        path = self.folder / "study.yaml"
        write_text(path, text)
        return {arm.name: arm.config.words() for arm in expand_commands(load_command_study(path))}


def _told_of_trial(study: str, seed: int, steps: int, attention: str, *, is_first: bool) -> str:
    """Return the line before a trial, whose `study` is named like its arm."""
    arm = "the command" if study == "trial" else f"the arm {study}"
    arm += f" with {attention} for its attention" if attention else ""
    updates = f"{steps} update{'s' if steps > 1 else ''}"
    said = f"trial of {arm}, seed {seed}, {updates}"
    return f"{said}; what it prints:" if is_first else said
