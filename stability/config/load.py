"""Reads a study's YAML file into a `StudyConfig`, and checks every name in it before anything runs.

Model presets are put in their place, overrides of the command line are laid over the base, and each
arm and its attention are checked. A mistake costs no more than reading the file: nothing heavy is
imported here. YAML is read strictly: a key that is given twice is an error, and `1e-3` is a float
as in YAML 1.2, where PyYAML's YAML 1.1 makes it a string. Leaves out how a mapping becomes a
dataclass (`convert`) and which differences between arms make a pair (`analysis.pair_contract`).
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from attention_kernels.testing.fault_names import FAULT_NAMES
from stability.config import shipped
from stability.config.arms import Arm, expand
from stability.config.attentions import HEAD_DIMS, IMPLEMENTATIONS, takes_head_dim
from stability.config.axes import CHANGES_WEIGHTS
from stability.config.convert import ConfigError, Place, from_mapping, merge, nearest, repeated
from stability.config.huggingface_folder import is_huggingface, model_of_folder
from stability.config.model import BUILDERS, HUGGINGFACE, ModelConfig
from stability.config.plugins import ATTENTIONS, MODELS, plugins
from stability.config.precision import parse_precision, with_precision_text
from stability.config.schema import (
    BASELINE,
    OPTIMIZERS,
    ArmConfig,
    AttentionConfig,
)
from stability.config.study import LEAST_ALPHA, StudyConfig

if TYPE_CHECKING:
    from stability.config.command_study import CommandStudy

__all__ = [
    "RESERVED",
    "arms_baseline_first",
    "check_name",
    "check_names",
    "load_study",
    "parse_value",
    "read_mapping",
    "with_overrides",
]

_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}")
RESERVED = (
    "assay",
    "distances",
    "drifts",
    "figures",
    "forks",
    "jobs",
    "ladder.json",
    "protocol.json",
    "report.html",
    "study.json",
    "wandb",
    "window.json",
)
"""What a study keeps in its folder beside its arms (`records.paths`), each in one of its own."""


def load_study(path: Path, overrides: Mapping[str, str] | None = None) -> StudyConfig:
    """Return the study that the YAML file `path` describes.

    `overrides` maps dotted paths below `base`, e.g. `train.steps`, to values written as YAML. When
    they end training before the study's early or judged step, or before an arm's `until`, the last
    step takes its place. A model preset is a file `<name>.yaml` in `model/` or `../model/` beside
    the study, or shipped with the repository; a model may be named by a folder of Hugging Face's
    as well. ConfigError, one line with file and key, for every mistake.
    """
    path = Path(path)
    changes = dict(overrides or {})
    root = Place(source=str(path), overridden=tuple(changes))
    content = read_mapping(path)
    base = content.get("base")
    if isinstance(base, dict):
        base = _with_preset(base, root.at("base"), path)
        changed = with_overrides(base, changes, root)
        below = base.get("precision")
        below = below if isinstance(below, str) and "precision" in changes else ""
        changed = with_precision_text(changed, below, root.at("base"))
        content["base"] = _with_preset(changed, root.at("base"), path)
    content["arms"] = arms_baseline_first(content.get("arms"), root.at("arms"))
    study = _with_held_out_size(from_mapping(StudyConfig, content, root))
    check_names(study, root)
    _check_builder(study.base.model, root.at("base.model.builder"))
    _check_attention(study.base.attention, root.at("base.attention"))
    if study.base.attention.is_partial:
        raise root.at("base.attention").error(
            "layers and direction belong to an arm, whose other part is as in base"
        )
    shadows = root.at("base.probe.shadows")
    for index, shadow in enumerate(study.base.probe.shadows):
        _check_attention(shadow, shadows.at(str(index)))
    study = _with_steps_in_reach(study, root)
    arms = expand(study, root)
    for arm in arms:
        _check_attention(arm.config.attention, root.at("arms").at(arm.name).at("attention"))
        _check_head_dim(arm.config, root.at("base.model"))
        _check_train(arm, study, root)
    _check_ends(study, arms, root)
    return study


def with_overrides(base: dict[str, Any], changes: Mapping[str, str], root: Place) -> Any:
    """Return a YAML file's base with the values of the command line laid over it."""
    for key, text in changes.items():
        place = root.at("base").at(key)
        try:
            value = parse_value(text)
        except ValueError as error:
            raise place.error(f"must be YAML, got {text!r}: {error}") from error
        for name in reversed(key.split(".")):
            value = {name: value}
        base = merge(base, value)
    return base


def _with_preset(base: dict[str, Any], place: Place, study: Path) -> dict[str, Any]:
    model = base.get("model")
    values: dict[str, Any] = {}
    if isinstance(model, dict) and "hf" in model:
        found = model_of_folder(model["hf"], model, place.at("model.hf"))
        return {**base, "model": found}
    if isinstance(model, str):
        name, where = model, place.at("model")
        if name not in _presets(study) and is_huggingface(name):
            return {**base, "model": model_of_folder(name, {}, where)}
    elif isinstance(model, dict) and "preset" in model:
        values = {key: value for key, value in model.items() if key != "preset"}
        name, where = model["preset"], place.at("model.preset")
    else:
        return base
    presets = _presets(study)
    if name not in presets:
        raise where.error(
            f"must be a model preset, got {name!r}; nearest: {nearest(name, presets)}, or a folder "
            "with a config.json"
        )
    return {**base, "model": merge(read_mapping(presets[name]), values)}


def _presets(study: Path) -> dict[str, Path]:
    folders = (shipped.configs() / "model", study.parent.parent / "model", study.parent / "model")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def arms_baseline_first(arms: Any, place: Place) -> dict[str, dict[str, Any]]:
    """Return the arms of a YAML file, the baseline first; ConfigError for a name that can't be."""
    if arms is not None and not isinstance(arms, dict):
        raise place.error(f"must be a mapping from arm names to overrides, got {arms!r}")
    ordered = {BASELINE: {}, **(arms or {})}
    for name, mapping in ordered.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise place.error(
                f"a name must be 1 to 64 letters, digits, dots, '_' or '-', got {name!r}"
            )
        check_name(name, place)
        if mapping is not None and not isinstance(mapping, dict):
            raise place.at(name).error(f"must be a mapping of overrides, got {mapping!r}")
    alike = repeated(name.lower() for name in ordered)
    if alike is not None:
        # on a disk that does not tell cases apart they would share a folder
        twice = ", ".join(repr(name) for name in ordered if name.lower() == alike)
        raise place.error(f"names must differ in more than case, got {twice}")
    if ordered[BASELINE]:
        raise place.at(BASELINE).error(
            f"must override nothing, got {ordered[BASELINE]!r}; put it in base, or name another arm"
        )
    return {name: mapping or {} for name, mapping in ordered.items()}


def _with_held_out_size(study: StudyConfig) -> StudyConfig:
    """Return `study` with held-out batches of one size, whatever batches an arm trains on."""
    base = study.base
    size = base.held_out.batch_size or base.train.batch_size
    held_out = replace(base.held_out, batch_size=size)
    return replace(study, base=replace(base, held_out=held_out))


def check_name(name: str, place: Place, reserved: Collection[str] = RESERVED) -> None:
    """ConfigError unless `name` may be that of a folder, and is none of `reserved`."""
    if not _NAME.fullmatch(name):
        raise place.error(f"must be 1 to 64 letters, digits, dots, '_' or '-', got {name!r}")
    if name.lower() in reserved:
        raise place.error(
            f"{name!r} is reserved: the study's own folder has it beside those of its arms; "
            f"reserved are {', '.join(reserved)}"
        )


def check_names(study: "StudyConfig | CommandStudy", root: Place) -> None:
    """ConfigError for a name, seed, yardstick or candidate of `study` that can't be."""
    check_name(study.name, root.at("name"), ())
    if study.name == "forks":
        # a run below a folder of that name is taken for a fork (`study.fork`)
        raise root.at("name").error("'forks' is reserved, for the forks of a study's runs")
    if study.yardstick and study.yardstick not in study.arms:
        raise root.at("yardstick").error(
            f"must be an arm, got {study.yardstick!r}; nearest: "
            f"{nearest(study.yardstick, study.arms)}"
        )
    _check_policy(study, root)
    seeds = study.seeds
    again = repeated(seeds)
    if not seeds or again is not None or min(seeds) < 0 or max(seeds) >= 2**32:
        twice = "" if again is None else f"; seed {again} is listed twice"
        raise root.at("seeds").error(
            "must be different whole numbers from 0, at least one and all below 2**32, got "
            f"{list(seeds)}{twice}"
        )


def _check_policy(study: "StudyConfig | CommandStudy", root: Place) -> None:
    arms = [arm for arm in study.arms if arm != BASELINE]
    policy = root.at("policy")
    if study.policy.alpha < LEAST_ALPHA:
        too_small = f"must be >= {LEAST_ALPHA}, got {study.policy.alpha}: nothing could pass"
        raise policy.at("alpha").error(too_small)
    listed = policy.at("candidates")
    for index, name in enumerate(study.policy.candidates):
        if name not in arms:
            problem = f"must be an arm besides {BASELINE}, got {name!r}; nearest: "
            raise listed.at(str(index)).error(problem + nearest(name, arms))
    steps = study.base.train.planned_snapshots()
    if study.policy.step and study.policy.step not in steps and not root.overridden:
        raise policy.at("step").error(
            f"must be a step with a snapshot, got {study.policy.step}; "
            f"they are {', '.join(map(str, steps))}"
        )


def _check_ends(study: StudyConfig, arms: list[Arm], root: Place) -> None:
    """ConfigError if a control ends before the step at which others are measured by it."""
    ends = {arm.name: arm.until for arm in arms if arm.role in ("reference", "nudge")}
    first = min(ends, key=ends.__getitem__, default=BASELINE)
    if study.policy.step > ends.get(first, study.base.train.steps) and not root.overridden:
        raise root.at("policy.step").error(
            f"must not lie beyond the end of {first}, step {ends[first]}, got {study.policy.step}"
        )
    until = next((arm.until for arm in arms if arm.name == study.yardstick), study.early_step)
    if study.early_step > until:
        raise root.at("early_step").error(
            f"must not lie beyond the end of the yardstick {study.yardstick}, step {until}, got "
            f"{study.early_step}"
        )


def _check_builder(model: ModelConfig, place: Place) -> None:
    known = (*BUILDERS, HUGGINGFACE)
    name = model.builder
    if name not in known and ":" not in name and name not in plugins(MODELS):
        raise place.error(
            f"must be a known builder or MODULE:FUNCTION, got {name!r}; nearest: "
            f"{nearest(name, [*known, *plugins(MODELS)])}"
        )


def _check_attention(config: AttentionConfig, place: Place) -> None:
    name = config.implementation
    if config.fault and config.fault not in FAULT_NAMES:
        raise place.at("fault").error(
            f"must be a planted fault, got {config.fault!r}; nearest: "
            f"{nearest(config.fault, FAULT_NAMES)}"
        )
    own = ":" in name or name in plugins(ATTENTIONS)  # looked up when the arm is resolved
    if name not in IMPLEMENTATIONS and not own:
        known = [*IMPLEMENTATIONS, *plugins(ATTENTIONS)]
        raise place.at("implementation").error(
            f"must be a known attention or MODULE:FUNCTION, got {name!r}; "
            f"nearest: {nearest(name, known)}"
        )
    profiles = IMPLEMENTATIONS[name].profiles if name in IMPLEMENTATIONS else {}
    with_numerics = [profile for profile in profiles.values() if profile is not None]
    if config.profile and config.profile not in profiles:
        if not profiles:
            raise place.error(f"{name} takes no profile, got {config.profile!r}")
        raise place.at("profile").error(
            f"must be a profile of {name}, got {config.profile!r}; nearest: "
            f"{nearest(config.profile, profiles)}"
        )
    if config.numerics and not with_numerics:
        raise place.error(f"{name} takes no numerics: they are its own")
    for key, value in config.numerics.items():
        try:
            with_numerics[0].with_(**{key: value})
        except (TypeError, ValueError) as error:
            said = str(error).partition(": ")[2] or str(error)  # the class names itself first
            raise place.at("numerics").at(key).error(said) from error


def _check_head_dim(config: ArmConfig, place: Place) -> None:
    """ConfigError if the model's head_dim is none of an attention that the arm computes."""
    model, probe = config.model, config.probe
    called = [config.attention]
    if probe.is_on or probe.gradient_every or config.attention.is_partial:
        called += probe.shadows
    if (probe.is_on and probe.golden) or probe.gradient_every:
        called.append(AttentionConfig(implementation="golden"))
    head_dim = model.head_dim
    for attention in called:
        name = attention.implementation
        if not takes_head_dim(name, attention.profile, head_dim):
            raise place.error(
                f"width / heads must be from {HEAD_DIMS[0]} to {HEAD_DIMS[1]} for the attention "
                f"{name}, got {model.width} / {model.heads} = {head_dim}"
            )


_OF_DRAWN_WEIGHTS = ("model.init", "model.init_std", "seed.init_offset")
"""What decides weights that are drawn, and nothing of weights that are read."""


def _check_train(arm: Arm, study: StudyConfig, root: Place) -> None:
    """ConfigError for values of an arm that contradict one another.

    Here and not where a config is made: a record of a run from before must stay readable.
    """
    config, base = arm.config, study.base
    train, own = config.train, root.at("arms").at(arm.name)
    place = root.at("base.train") if train == base.train else own.at("train")
    again = repeated(train.snapshot_steps)
    if again is not None:
        raise place.at("snapshot_steps").error(
            f"must not hold a step twice, got {list(train.snapshot_steps)}; it is step {again}"
        )
    for path in _OF_DRAWN_WEIGHTS if config.start else ():
        if path in arm.diff:
            raise own.at(path).error(
                f"would change nothing, since weights begin as start says, {config.start!r}; leave "
                "it out"
            )
    for path in CHANGES_WEIGHTS if config.start else ():
        if path in arm.diff:
            raise own.at(path).error(
                f"must be as in the base where weights begin as start says, {config.start!r}: "
                "they are those of one model"
            )
    algorithm = train.trainer.get("gradient_clip_algorithm")
    if algorithm and not train.grad_clip:
        raise place.at("trainer.gradient_clip_algorithm").error(
            f"must not be given where train.grad_clip is 0 and nothing is clipped, got "
            f"{algorithm!r}"
        )
    name = config.optimizer.name
    for setting in dict.fromkeys(s for taken in OPTIMIZERS.values() for s in taken):
        # of an optimizer of one's own every setting but lr, weight_decay and options is its own
        is_taken = setting in OPTIMIZERS.get(name, ())
        if f"optimizer.{setting}" in arm.diff and not is_taken:
            raise (
                own.at("optimizer")
                .at(setting)
                .error(f"is no setting of {name}, and would change nothing; leave it out")
            )
    if train.compile and parse_precision(config.precision).emulates:
        place = own if config.precision != base.precision else root.at("base")
        raise place.at("precision").error(
            f"must not be emulated where train.compile is {train.compile!r}, got "
            f"{config.precision!r}; the compiled graph would not be rounded"
        )


def _with_steps_in_reach(study: StudyConfig, root: Place) -> StudyConfig:
    """Return `study` with no step past an end that the command line has brought forward."""
    train = study.base.train
    planned = train.planned_snapshots()
    early, arms, policy = study.early_step, study.arms, study.policy
    if root.overridden:
        policy = replace(policy, step=min(policy.step, train.steps))
        early = min(early, train.steps)
        arms = {name: _ending_by(entry, train.steps) for name, entry in arms.items()}
    if early not in planned:
        raise root.at("early_step").error(
            f"must be a step with a snapshot, got {early}; nearest: "
            f"{min(planned, key=lambda step: abs(step - early))}"
        )
    return replace(study, early_step=early, arms=arms, policy=policy)


def _ending_by(entry: dict[str, Any], last: int) -> dict[str, Any]:
    until = entry.get("until")
    return {**entry, "until": min(until, last)} if type(until) is int else entry


_MOST_VALUES = 100_000
"""Most values that a file may stand for, each alias counted as all that it repeats."""


_MOST_BYTES = 2**24
"""Most of a YAML file; the largest of ours has some kilobytes."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, refusing duplicate keys and aliases that multiply or never end."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _size(node, {}) > _MOST_VALUES:
            # nine lines of nine aliases are 4e8 values, which no message could print
            raise yaml.constructor.ConstructorError(
                problem=f"holds more than {_MOST_VALUES} values, or repeats itself within itself",
                problem_mark=node.start_mark,
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    problem="a key must be a single word", problem_mark=key_node.start_mark
                )
            key = key_node.value
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            # what PyYAML raises where a value is not what its form or tag says: 2020-13-41,
            # `!!int abc`, more digits than Python reads
            raise yaml.constructor.ConstructorError(
                problem=f"a value can't be read as {node.tag.rpartition(':')[2]}",
                problem_mark=node.start_mark,
            ) from error


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """Return how many values a node stands for, infinitely many if it is a part of itself."""
    if id(node) not in known:
        known[id(node)] = math.inf  # until all of its parts are counted
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in parts for part in pair]
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+"),
    list("-+.0123456789"),
)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping that the YAML file `path` holds.

    ConfigError, one line, for a file that is missing, unreadable, not YAML, or no mapping.
    """
    try:
        # a pipe is waited for, and a device may never end
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: cannot be read: must be a plain file")
        if path.exists() and path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path}: cannot be read: holds more than {_MOST_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    try:
        content = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: {_reason(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a mapping, got {content!r}"[:200])
    return content


def parse_value(text: str) -> Any:
    """Return what `text` means as a YAML value; the empty text is the empty string.

    ValueError, one line, if it is not YAML.
    """
    if not text:
        return ""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(_reason(error)) from error


def _reason(error: yaml.YAMLError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "is nested too deep to be read"
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}: {problem}" if mark else " ".join(problem.split())
