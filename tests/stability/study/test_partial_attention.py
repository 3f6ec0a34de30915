"""An arm that changes attention in some layers, or in one direction: for bisecting."""

import pytest
import torch

from stability.config.arms import expand
from stability.config.convert import ConfigError
from stability.config.load import load_study
from stability.records.manifest import read_manifest
from stability.records.metric_log import read_metrics
from stability.records.paths import RunPaths
from stability.study.assemble import assemble

HARSH = {"implementation": "flash", "profile": "all_bf16"}


def _model(write_study, **attention):
    def edit(content):
        content["arms"] = {"baseline": {}, "part": {"attention": {**HARSH, **attention}}}
        content["yardstick"] = ""
        content["base"]["probe"]["every"] = 0
        content["base"]["precision"] = "32-true"

    arms = {arm.name: arm.config for arm in expand(load_study(write_study(edit), None))}
    torch.manual_seed(0)
    return [assemble(arms[name]).model for name in ("baseline", "part")]


def _step(model):
    tokens = torch.arange(32).view(1, 32)
    logits = model(tokens)
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_a_direction_changes_the_output_or_the_gradients(write_study, direction):
    own, part = (_step(model) for model in _model(write_study, direction=direction))
    assert torch.equal(own[0], part[0]) == (direction == "backward")
    name = "blocks.layer_0.query.weight"
    assert not torch.equal(own[1][name], part[1][name])


def test_only_the_named_layer_computes_otherwise(write_study):
    own, part = _model(write_study, layers=["layer_1"])
    seen = []
    for model in (own, part):
        streams = []
        for block in model.blocks.values():
            block.register_forward_hook(lambda m, i, out, to=streams: to.append(out.detach()))
        _step(model)
        seen.append(streams)
    (own_first, own_last), (part_first, part_last) = seen
    assert torch.equal(own_first, part_first)
    assert not torch.equal(own_last, part_last)


def test_a_study_of_parts_trains_and_probes_the_changed_layers_alone(
    write_study, run_tiny, tmp_path
):
    def edit(content):
        content["arms"] = {
            "baseline": {},
            "upper": {"attention": {**HARSH, "layers": ["layer_1"]}},
            "backward": {"attention": {**HARSH, "direction": "backward"}},
        }
        content.update(seeds=[0], yardstick="")

    run_tiny(load_study(write_study(edit), None), tmp_path)
    hashes = set()
    for arm, layers in (("upper", {"layer_1"}), ("backward", {"layer_0", "layer_1"})):
        run = RunPaths.for_run(tmp_path / "tiny", arm, 0)
        manifest = read_manifest(run.manifest)
        assert manifest.state == "finished"
        assert manifest.axis == "attention"
        hashes.add(manifest.hashes["final_weights"])
        names = [name for name in read_metrics(run.metrics) if name.startswith("deviation/")]
        assert {name.split("/")[1] for name in names} == layers
    assert len(hashes) == 2


def test_no_such_layer_and_a_partial_base_are_refused(write_study):
    with pytest.raises(
        ValueError, match=r"attention.layers must match one of layer_0, layer_1, go"
    ):
        _model(write_study, layers=["layer_7"])

    def partial_base(content):
        content["base"]["attention"]["layers"] = ["layer_0"]

    with pytest.raises(ConfigError, match="layers and direction belong to an arm"):
        load_study(write_study(partial_base), None)
