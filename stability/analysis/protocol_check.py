"""What has been changed in a study since its protocol was sealed.

A verdict is confirmatory only if what it rests on was fixed before the first result: policy,
arms with their roles and ends, what the probe looks at in each, the rule for the judged step, the
looks, and all that decides the runs' bits. Whatever differs is told in a sentence, and the verdict
is then exploratory. More seeds are no change: the looks are made for them; but all seeds of an arm
must have been trained with one source of its attention, and in one environment.

A protocol of an older version does not hold the arms' probe settings, only the base's. It is judged
by what it sealed: that those settings are unchanged is then not known, and nothing is told of them.
Leaves out the file (`records.protocol`) and the judgement (`verdict`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from stability.analysis.environment_contract import other_entries
from stability.analysis.left_out import RULE
from stability.analysis.sequential import LOOKS
from stability.analysis.study_distances import window_problems
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.analysis.window import SETTLING
from stability.config.arms import probe_of_seed
from stability.config.commands import is_command
from stability.config.convert import ConfigError, from_dict, to_dict
from stability.config.diff import leaves
from stability.config.schema import BASELINE, ArmConfig, ProbeConfig
from stability.config.study import PolicyConfig
from stability.records.assay import sources_of
from stability.records.manifest import ENDED, Manifest
from stability.records.paths import StudyPaths, is_run, list_runs
from stability.records.protocol import (
    LEAVES_OUT,
    Protocol,
    SealedArm,
    has_begun,
    protocol_hash,
    read_protocol,
)

__all__ = [
    "UNSEALED",
    "changes_between",
    "make_protocol",
    "other_protocols",
    "protocol_changes",
    "protocol_of",
    "seeds_apart",
]

UNSEALED = "no protocol was sealed before the first run"
"""What is said of a study whose runs began without a protocol, and of one whose file is gone."""

_MOST_KEYS = 4
"""How many entries of an environment one sentence names."""


def make_protocol(
    config: Mapping[str, Any],
    arms: Sequence[Mapping[str, Any]],
    probes: Mapping[str, Mapping[str, Any]],
) -> Protocol:
    """Return the protocol of a study: its `config` and `arms` as `study.json` holds them.

    `probes` are the arms' probe settings by name, as the first seed is looked at; an arm of which
    they are not known is sealed without them.
    """
    policy, train = config["policy"], config["base"]["train"]
    ends = [arm["until"] for arm in arms if arm["role"] in ("reference", "nudge")]
    end = min(ends, default=train["steps"])
    steps = {*train.get("snapshot_steps", ()), train["steps"]}
    return Protocol(
        study=config["name"],
        policy=dict(policy),
        arms={arm["name"]: _sealed_arm(arm, probes.get(arm["name"])) for arm in arms},
        window={
            "step": policy.get("step", 0),
            "limit": policy.get("window_limit"),
            "settling": SETTLING,
            LEAVES_OUT: dict(RULE),
            "steps": sorted(step for step in steps if 0 < step <= end),
        },
        looks=list(LOOKS),
        seeds=list(config["seeds"]),
        base=dict(config["base"]),
    )


def _sealed_arm(arm: Mapping[str, Any], probe: Mapping[str, Any] | None) -> SealedArm:
    sealed = SealedArm(
        role=arm["role"],
        until=arm["until"],
        diff={path: list(values) for path, values in arm["diff"].items()},
    )
    return sealed if probe is None else {**sealed, "probe": dict(probe)}


def protocol_of(study: RecordedStudy, policy: PolicyConfig) -> Protocol:
    """Return the protocol that `study` and `policy` would be sealed with now.

    It has no probe settings: those that count are what the runs were trained with.
    """
    config = {
        "name": study.name,
        "policy": to_dict(policy),
        "seeds": list(study.seeds),
        "base": study.base,
    }
    arms = [
        {"name": arm.name, "role": arm.role, "until": arm.until, "diff": arm.diff}
        for arm in study.arms
    ]
    return make_protocol(config, arms, {})


def protocol_changes(study: RecordedStudy, policy: PolicyConfig) -> list[str]:
    """Return a sentence for each change since the protocol was sealed; empty if nothing is changed.

    A protocol that is missing, damaged, or not the one that the runs were trained under, is told in
    the same way: nothing can be proven by it.
    """
    path = StudyPaths(study.folder).protocol
    if not path.exists():
        return [UNSEALED] if has_begun(study.folder) else []
    try:
        sealed = read_protocol(path)
    except ValueError as error:
        return [f"the protocol can't be relied on: {error}"]
    changes = changes_between(sealed, protocol_of(study, policy))
    return [
        *other_protocols(study),
        *changes,
        *_other_probes(study, sealed),
        *_other_sources(study),
        *seeds_apart(study),
        *_left_out_seeds(study),
        *window_problems(study, policy),
    ]


def changes_between(sealed: Protocol, now: Protocol) -> list[str]:
    """Return a sentence for each thing that `now` asks otherwise than `sealed` did."""
    return [
        *_values("policy", _policy(sealed.policy), _policy(now.policy)),
        *_arms(sealed.arms, now.arms),
        *_values("window", _rule(sealed), _rule(now)),
        *_noise(sealed, now),
        *_values("", {"looks": sealed.looks}, {"looks": now.looks}),
        *_seeds(sealed.seeds, now.seeds),
        *_values("base", leaves(_base(sealed.base)), leaves(_base(now.base))),
    ]


def _policy(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's values, with the default of a limit that it does not know yet."""
    known = to_dict(PolicyConfig())
    return {field.name: values.get(field.name, known[field.name]) for field in fields(PolicyConfig)}


def _rule(protocol: Protocol) -> dict[str, Any]:
    """Return the window less what the policy has told of it."""
    # one that was sealed before the updates of settling were is read by today's
    settling = protocol.window.get("settling", SETTLING)
    return {"settling": settling, "steps": protocol.window.get("steps")}


def _noise(sealed: Protocol, now: Protocol) -> Iterator[str]:
    # one that was sealed before values were left out leaves none out (`study.distances`)
    if LEAVES_OUT in sealed.window:
        group = f"window.{LEAVES_OUT}"
        yield from _values(group, sealed.window[LEAVES_OUT], now.window[LEAVES_OUT])


def _base(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a base with the defaults of the keys that it does not know yet."""
    try:
        return to_dict(from_dict(ArmConfig, values, "protocol.json"))
    except ConfigError:  # of another version: its values are compared as they stand
        return values


def _values(group: str, sealed: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*sealed, *now]):
        if sealed.get(name) != now.get(name):
            path = f"{group}.{name}" if group else name
            yield f"{path} is {_shown(now.get(name))}, was sealed as {_shown(sealed.get(name))}"


def _arms(sealed: Mapping[str, SealedArm], now: Mapping[str, SealedArm]) -> Iterator[str]:
    for name in dict.fromkeys([*sealed, *now]):
        if name not in sealed:
            yield f"arm {name} was added"
        elif name not in now:
            yield f"arm {name} was taken out"
        else:
            yield from _values(f"arm {name}", _flat(sealed[name]), _flat(now[name]))
            probes = [leaves(_probe(arm[name].get("probe", {}))) for arm in (sealed, now)]
            if "probe" in sealed[name] and "probe" in now[name]:
                yield from _values(f"arm {name}.probe", *probes)


def _flat(arm: SealedArm) -> dict[str, Any]:
    own = {path: values[-1] for path, values in arm["diff"].items()}
    return {"role": arm["role"], "until": arm["until"], **own}


def _probe(values: Mapping[str, Any], *, is_first: bool = True) -> Mapping[str, Any]:
    """Return probe settings as a seed is looked at, with the defaults of keys that they lack."""
    try:
        probe = from_dict(ProbeConfig, values, "protocol.json")
    except ConfigError:  # of another version: its values are compared as they stand
        return values
    return to_dict(probe_of_seed(probe, is_first=is_first))


def _seeds(sealed: list[int], now: list[int]) -> Iterator[str]:
    if now[: len(sealed)] != sealed:
        yield (
            f"seeds are {_shown(now)}, were sealed as {_shown(sealed)}; seeds may only be added "
            "after those"
        )


def other_protocols(study: RecordedStudy) -> Iterator[str]:
    """Tell of runs that were not trained under the protocol that is there."""
    here = protocol_hash(study.folder)
    for arm in study.arms:
        for seed, run in arm.runs.items():
            if run.manifest is not None and run.manifest.hashes.get("protocol", "") != here:
                known = run.manifest.hashes.get("protocol")
                yield f"{arm.name}, seed {seed}, was trained under " + (
                    "another protocol than protocol.json" if known else "no protocol"
                )
                return


def _other_probes(study: RecordedStudy, sealed: Protocol) -> Iterator[str]:
    """Tell of arms that were not looked at as was sealed, each in the first of such seeds."""
    for arm in study.arms:
        asked = sealed.arms.get(arm.name, {}).get("probe")
        if asked is None:
            continue
        for seed, run in arm.runs.items():
            done = run.manifest.config.get("probe") if run.manifest else None
            if done is None:
                continue
            planned = _probe(asked, is_first=[seed] == sealed.seeds[:1])
            group = f"in the run of {arm.name}, seed {seed}, probe"
            changes = list(_values(group, leaves(planned), leaves(_probe(done))))
            if changes:
                yield from changes
                break


def _other_sources(study: RecordedStudy) -> Iterator[str]:
    """Tell of arms whose seeds were trained with several attentions, or attention libraries."""
    libraries: dict[str, list[int]] = {}
    for arm in study.arms:
        attentions: dict[str, list[int]] = {}
        for seed, manifest in _on_record(arm).items():
            found = sources_of(manifest.resolved, manifest.environment)
            attentions.setdefault(found["attention"], []).append(seed)
            libraries.setdefault(found["kernel_source"], []).append(seed)
        if len(attentions) > 1:
            yield f"{arm.name} was trained with {_by_source(attentions, 'attention')}"
    if len(libraries) > 1:
        yield f"the study was trained with {_by_source(libraries, 'attention library')}"


def seeds_apart(study: RecordedStudy) -> Iterator[str]:
    """Tell of arms whose seeds were trained by other code, other libraries or on other machines.

    Every seed is held against the first one that has a record. The attention library is told of by
    `_other_sources`, for the study as a whole.
    """
    for arm in study.arms:
        known = _on_record(arm)
        apart: dict[tuple[str, ...], list[int]] = {}
        for seed, manifest in known.items():
            keys = tuple(other_entries(next(iter(known.values())), manifest, {}))
            keys = tuple(key for key in keys if key != "kernel_source")
            apart.setdefault(keys, []).append(seed)
        for keys, seeds in apart.items():
            if keys:
                were = f"{_seeds_text(seeds)}, {'were' if len(seeds) > 1 else 'was'}"
                first = next(iter(known))
                yield f"{arm.name}, {were} trained with another {_some(keys)} than seed {first}"


def _on_record(arm: RecordedArm) -> dict[int, Manifest]:
    """Return the manifests of an arm's seeds; of a command that has failed little is on record."""
    manifests = {seed: run.manifest for seed, run in arm.runs.items() if run.manifest}
    return {
        seed: manifest
        for seed, manifest in manifests.items()
        if manifest.state in ENDED or not is_command(manifest.config)
    }


def _some(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    return f"environment.{', environment.'.join(keys[:_MOST_KEYS])}{more}"


def _seeds_text(seeds: Sequence[int]) -> str:
    found = sorted(set(seeds))
    return f"{'seed' if len(found) == 1 else 'seeds'} {', '.join(map(str, found))}"


def _by_source(seeds: Mapping[str, Sequence[int]], what: str) -> str:
    groups = [_seeds_text(of) for of in seeds.values()]
    return f"several sources of its {what}: one with {', another with '.join(groups)}"


def _left_out_seeds(study: RecordedStudy) -> Iterator[str]:
    """Tell of seeds that were trained and that the study no longer asks for."""
    begun = {
        run.seed for run in list_runs(study.folder) if run.arm == BASELINE and is_run(run.root)
    }
    left = sorted(begun - set(study.seeds))
    if left:
        what = "seed" if len(left) == 1 else "seeds"
        are = ("was", "is") if len(left) == 1 else ("were", "are")
        named = ", ".join(map(str, left))
        yield f"{what} {named} {are[0]} trained and {are[1]} left out"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return "nothing" if value is None or value == "" else str(value)
